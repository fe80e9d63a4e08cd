"""A commit of a deployment that ends: what sessions hold outside the process (CTL-13)."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.limits import STOP_S_MAX
from tests.helpers.memory_archive import MemoryArchive
from tests.participants.resources.harness import Q0, R0, R1, Counters, Sandboxes, open_resources


async def test_what_was_exported_is_freed_outside_when_its_state_is_durable(
    autojump_clock: MockClock,
) -> None:
    """CTL-13: sessions of the scope, once; and a restore begins from their state."""
    archive, server = MemoryArchive(), Sandboxes()
    async with open_resources(archive, server=server) as plane:
        await plane.seed("s", R0, 2)
        await plane.seed("q", Q0, 7)
        await plane.prepare()
        archive.writing.shut()
        commit = plane.begin(plane.commit, "c1", (R0,), stop=True)
        await archive.writing.reached.wait()
        await wait_all_tasks_blocked()
        assert server.outside == []
        archive.writing.let_go()
        await commit.ended.wait()
        assert commit.result.episode_ids == ("r",)
        assert server.outside == ["s"]
        await plane.commit("c1", (R0,), stop=True)
        assert server.outside == ["s"]
    async with open_resources(archive, server=Sandboxes()) as plane:
        await plane.restore(R0)
        await plane.resume("x1")
        assert await plane.increment("s", R1) == 3


@pytest.mark.parametrize("server", [Sandboxes, Counters])
async def test_without_stop_or_without_the_hook_nothing_is_freed(
    server: type[Counters], autojump_clock: MockClock
) -> None:
    """CTL-13."""
    async with open_resources(server=server()) as plane:
        await plane.seed("s", R0, 2)
        await plane.prepare()
        await plane.commit(stop=server is Counters)
        assert plane.server.outside == []
        await plane.resume()
        assert await plane.increment("s", R0) == 3


@pytest.mark.parametrize("how", ["fails", "hangs", "disk"])
async def test_what_cannot_be_freed_costs_no_checkpoint(
    how: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """CTL-13: it is told, and the commit stands; a commit that failed frees nothing."""
    archive, server = MemoryArchive(), Sandboxes()
    async with open_resources(archive, server=server) as plane:
        await plane.seed("s", R0, 2)
        await plane.prepare()
        if how == "hangs":
            server.retiring.shut()
        before = trio.current_time()
        if how == "disk":
            archive.writing.shut()
            commit = plane.begin(plane.commit, stop=True)
            await archive.writing.reached.wait()
            await plane.resume()
            await commit.ended.wait()
            assert commit.error is not None
            assert server.outside == []
            return
        with caplog.at_level(logging.WARNING):
            if how == "fails":
                exporting = plane.begin(plane.commit, stop=True, timeout_s=2 * STOP_S_MAX)
                server.failure = None
                archive.writing.shut()
                await archive.writing.reached.wait()
                server.failure = ValueError("the sandbox service is away")
                archive.writing.let_go()
                await exporting.ended.wait()
                reply = exporting.result
            else:
                reply = await plane.commit(stop=True, timeout_s=2 * STOP_S_MAX)
        assert reply.phase == "committed"
        assert "may be left outside" in caplog.text
        assert trio.current_time() - before <= STOP_S_MAX
