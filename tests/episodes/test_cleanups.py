"""Clean-ups: last first, all of them, and never for ever."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock

from gymtrio.episodes.cleanups import Cleanups
from gymtrio.errors import PeerRefused, TransportError
from gymtrio.limits import CLEANUP_S_MAX


async def test_they_run_in_reverse_order_past_failures(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """STEP-7: what was made last is taken back first; a failure is logged and holds up nothing."""
    ran: list[str] = []

    async def failing() -> None:
        ran.append("failing")
        raise PeerRefused("tools", 404, "not_found", "no such session")

    async def note(name: str) -> None:
        ran.append(name)

    cleanups = Cleanups("r")
    cleanups.register("first", lambda: note("first"))
    cleanups.register("failing", failing)
    cleanups.register("last", lambda: note("last"))
    with caplog.at_level(logging.WARNING):
        await cleanups.run()
    assert ran == ["last", "failing", "first"]
    assert "r: clean-up of failing failed" in caplog.text
    await cleanups.run()
    assert ran == ["last", "failing", "first", "failing"]


@pytest.mark.parametrize("lost_for_s", [5.0, 60.0])
@pytest.mark.parametrize("how", ["refused", "silent", "unavailable"])
async def test_what_was_lost_is_tried_again_until_the_deadline(
    how: str, lost_for_s: float, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """STEP-7, I34: a session would stay behind; the others do not wait for it, and one line tells."""
    ran: list[str] = []
    began = trio.current_time()

    async def close() -> None:
        if trio.current_time() >= began + lost_for_s:
            ran.append("closed")
        elif how == "refused":
            raise TransportError("connection refused")
        elif how == "unavailable":
            raise PeerRefused("tools", 503, "unavailable", "shutting down")
        else:
            await trio.sleep_forever()

    async def note() -> None:
        ran.append("other")

    cleanups = Cleanups("r")
    cleanups.register("other", note)
    cleanups.register("session", close)
    with caplog.at_level(logging.WARNING):
        await cleanups.run()
    assert ran == (["other", "closed"] if lost_for_s < CLEANUP_S_MAX else ["other"])
    assert trio.current_time() - began <= CLEANUP_S_MAX
    assert len(cleanups) == 2 - len(ran)
    assert caplog.text.count("clean-up of session failed") == 1


async def test_what_was_settled_is_not_taken_back(autojump_clock: MockClock) -> None:
    """STEP-7."""
    ran: list[str] = []

    async def note() -> None:
        ran.append("closed")

    cleanups = Cleanups("r")
    cleanups.register("session", note).settle()
    assert len(cleanups) == 0
    await cleanups.run()
    assert ran == []


async def test_they_are_shielded_from_the_episode_and_have_a_deadline(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """STEP-7: a cancelled episode cleans up; a peer that hangs holds it for CLEANUP_S_MAX in all, and
    the others for one try."""
    ran: list[str] = []

    async def slow() -> None:
        await trio.sleep(1)
        ran.append("slow")

    cleanups = Cleanups("r")
    cleanups.register("behind it", slow)
    cleanups.register("hangs", trio.sleep_forever)
    cleanups.register("slow", slow)
    with trio.CancelScope() as scope, caplog.at_level(logging.WARNING):
        scope.cancel()
        await cleanups.run()
    assert ran == ["slow", "slow"]
    assert trio.current_time() == pytest.approx(CLEANUP_S_MAX)
    assert "gave up" in caplog.text
