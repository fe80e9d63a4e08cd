"""Cuts of a policy server with two workers, and everything that may go wrong with them (CUT, WRK)."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from typing import Any, Final

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gymtrio.capture.memory_store import MemoryTokenStore
from gymtrio.capture.tokens import StagingKey, TokenRecord, TokensDamaged, TokenStoreFailed
from gymtrio.errors import TransportError
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.calls import PolicyCall
from tests.helpers.page_cache import PageCacheFiles
from tests.helpers.plane import episode
from tests.helpers.scripted_backend import OUTPUT_TOKENS, LiveCall
from tests.participants.policy.harness import Caller, World, chat, tokens_of, uncut_tokens
from tests.participants.policy.workers import OneWorker, Served, open_served

R, S = episode("r"), episode("s")
HELLO: Final = chat("hello")
EMITTED: Final = 7


async def cut_at_each(served: Served, *calls: tuple[EpisodeId, PolicyCall]) -> list[Caller]:
    """Calls under way, the workers by turns."""
    callers = []
    for number, (episode_id, call) in enumerate(calls):
        worker = served.workers[number % len(served.workers)]
        caller, live = await worker.begin_live(episode_id, call)
        live.emit(EMITTED)
        callers.append(caller)
    return callers


async def generated_for(worker: OneWorker, episode_id: EpisodeId, call: PolicyCall) -> int:
    """Make a call; gives how many tokens the backend had to make for its uncut reply."""
    reply = await worker.ask_at_once(episode_id, call)
    assert tokens_of(reply) == uncut_tokens(call.body)
    return worker.backend.calls[-1].generated


@pytest.mark.parametrize(
    "mode",
    [
        "never",
        "late",
        "unreachable",
        "refused",
        "incomplete",
        "twice",
        "other inventory",
        "other checkpoint",
        "other call",
        "no evidence",
        "failure with evidence",
        "each fails",
        "fault",
    ],
)
async def test_rounds_that_fail_cost_regeneration_only(
    mode: str, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """CUT-7, POL-5, I29: the counts are those of both workers; each says why."""
    world, files = World(), PageCacheFiles()
    async with open_served(world, files=files) as served:
        await served.workers[0].ask_at_once(R, chat("a"))
        await cut_at_each(served, (R, HELLO), (S, HELLO))
        world.backend.cut_mode = mode
        with caplog.at_level(logging.WARNING):
            prepared = await served.prepare(timeout_s=3)
        assert prepared.phase == "prepared"
        assert served.counts | {"cut": 0, "cut_failed": 2, "held": 2} == served.counts
        assert caplog.text.count("1 generations not cut: ") == 2
        extra = (await served.commit("c1", (R, S))).extra
        records = await served.records()
        assert sorted(records) == ["r"]
        assert (len(records["r"].rows), records["r"].cut) == (1, None)
        assert list(extra["staging_keys_by_episode"]) == ["r"]  # type: ignore[call-overload]
    world.backend.cut_mode = "honest"
    async with open_served(world, files=files) as served:
        await served.restore(R, S)
        await served.resume("x1")
        for worker, episode_id in zip(served.workers, (R, S), strict=True):
            assert await generated_for(worker, episode_id.next_attempt(), HELLO) == OUTPUT_TOKENS


async def test_deaf_engines_cost_their_cuts_and_nothing_else(autojump_clock: object) -> None:
    """Trial T5 with two workers, CTL-7: ready by the deadline of 2 s; what was not cut regenerates."""
    worlds = {mode: World() for mode in ("honest", "never", "late")}
    files = {mode: PageCacheFiles() for mode in worlds}
    for mode, world in worlds.items():
        world.backend.cut_mode = world.backend.describe_mode = mode
    async with AsyncExitStack() as stack:
        policies = {
            mode: await stack.enter_async_context(open_served(world, files=files[mode]))
            for mode, world in worlds.items()
        }
        for served in policies.values():
            await cut_at_each(served, (R, HELLO), (S, HELLO))
        phases: dict[str, str] = {}

        async def prepare(mode: str) -> None:
            phases[mode] = (await policies[mode].prepare(timeout_s=2)).phase

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for mode in policies:
                nursery.start_soon(prepare, mode)
        assert trio.current_time() - began <= 2
        assert phases == dict.fromkeys(worlds, "prepared")
        for mode, served in policies.items():
            cut = 2 if mode == "honest" else 0
            assert (served.counts["cut"], served.counts["cut_failed"]) == (cut, 2 - cut)
            await served.commit("c1", (R, S))
    for mode, world in worlds.items():
        world.backend.cut_mode = world.backend.describe_mode = "honest"
        async with open_served(world, files=files[mode]) as served:
            await served.restore(R, S)
            await served.resume("x1")
            spared = EMITTED if mode == "honest" else 0
            for worker, episode_id in zip(served.workers, (S, R), strict=True):
                generated = await generated_for(worker, episode_id.next_attempt(), HELLO)
                assert generated == OUTPUT_TOKENS - spared


CONSTRAINED: Final[dict[str, PolicyCall]] = {
    "plain": HELLO,
    "schema": chat("hello", response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
    "required": chat("hello", tool_choice="required"),
    "regex": chat("hello", guided_regex="[a-z]+"),
}


async def test_no_cut_goes_through_a_grammar(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Trial T7 with two workers, CUT-6, I27, POL-5: also where its reply is there and held."""
    world, files = World(), PageCacheFiles()
    episodes = {name: episode(name) for name in CONSTRAINED}
    calls = [(episodes[name], call) for name, call in CONSTRAINED.items()]
    async with open_served(world, files=files) as served:
        await cut_at_each(served, *calls)
        with caplog.at_level(logging.INFO):
            await served.prepare()
        assert served.counts | {"cut": 1, "cut_failed": 0, "cut_skipped": 3} == served.counts
        for reason in ("response_format:json_schema", "tool_choice:required", "guided_regex"):
            assert f"1 generations left to be generated anew: {reason}" in caplog.text
        for live in list(world.backend.live):
            if live.body != HELLO.body:
                live.finish.set()
        await wait_all_tasks_blocked()
        await served.commit("c1", tuple(episodes.values()))
        assert sorted(await served.records()) == ["plain"]
    async with open_served(world, files=files) as served:
        await served.restore(*episodes.values())
        await served.resume("x1")
        for worker, (episode_id, call) in zip(served.workers * 2, calls[::-1], strict=True):
            generated = await generated_for(worker, episode_id.next_attempt(), call)
            continued = EMITTED if episode_id == episodes["plain"] else 0
            assert generated == OUTPUT_TOKENS - continued
            extension = world.backend.calls[-1].extension
            assert extension is not None
            assert (extension.continuation is not None) == bool(continued)


class SpoiltStore(MemoryTokenStore):
    """Of which some records cannot be read any more."""

    def __init__(self, whole: MemoryTokenStore, error: Exception, spoilt: set[StagingKey]) -> None:
        super().__init__()
        self._whole = whole
        self._error = error
        self._spoilt = spoilt

    async def get(self, staging_key: StagingKey) -> TokenRecord:
        if staging_key in self._spoilt:
            await trio.lowlevel.checkpoint()
            raise self._error
        return await self._whole.get(staging_key)


@pytest.mark.parametrize(
    "error", [TokensDamaged("a bit flipped"), TokenStoreFailed("the disk is away")], ids=str
)
async def test_a_prefix_that_cannot_be_read_is_generated_anew(
    error: Exception, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """CUT-7: that one, at whatever worker; the other one is continued."""
    world, files = World(), PageCacheFiles()
    async with open_served(world, files=files) as served:
        await cut_at_each(served, (R, HELLO), (S, HELLO))
        extra: Any = await served.checkpoint(R, S)
        spoilt = set(extra["staging_keys_by_episode"]["r"])
    again = World()
    again.backend.store = again.store = SpoiltStore(world.store, error, spoilt)
    async with open_served(again, files=files) as served:
        await served.restore(R, S)
        await served.resume("x1")
        one, two = served.workers
        assert await generated_for(two, R.next_attempt(), HELLO) == OUTPUT_TOKENS
        assert await generated_for(one, S.next_attempt(), HELLO) == OUTPUT_TOKENS - EMITTED
        assert f"the call is generated anew: {error}" in caplog.text
        assert served.control.status().extra["restored_generation_cuts"] == []


async def test_a_backend_that_is_down_costs_calls_and_no_checkpoint(autojump_clock: object) -> None:
    """CUT-7, POL-2, I2: its callers are told when the checkpoint is over; the next ones are served."""
    world = World()
    async with open_served(world) as served:
        callers = await cut_at_each(served, (R, HELLO), (S, HELLO))
        world.backend.cut_mode = world.backend.describe_mode = "unreachable"
        assert (await served.prepare()).phase == "prepared"
        lost: list[LiveCall] = list(world.backend.live)
        for live in lost:
            live.fail(TransportError("engine: connection refused"))
        await wait_all_tasks_blocked()
        assert [caller.answered for caller in callers] == [False, False]
        await served.commit("c1", (R, S))
        await served.resume()
        for caller in callers:
            await caller.ended.wait()
            assert caller.error is not None
            assert str(caller.error) == "engine: connection refused"
        for worker, episode_id in zip(served.workers, (S, R), strict=True):
            assert await generated_for(worker, episode_id, HELLO) == OUTPUT_TOKENS


async def test_what_an_engine_says_of_itself_costs_no_checkpoint(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """CUT-7, POL-5: what cannot be kept is left out, and its cuts are as good."""
    world = World()
    describe = world.backend.describe

    async def boast(*, deadline: float) -> Any:
        described = await describe(deadline=deadline)
        assert described is not None
        return attrs.evolve(described, fingerprint={"build": 2**70})

    world.backend.describe = boast  # type: ignore[method-assign]
    async with open_served(world) as served:
        await cut_at_each(served, (R, HELLO), (S, HELLO))
        await served.prepare()
        assert served.counts["cut"] == 2
        reply = await served.commit("c1", (R, S))
        assert reply.manifest["fields"] == {"engine": None}
        assert "the backend does not say what it is" in caplog.text
        records = await served.records()
        assert all(record.cut is not None for record in records.values())
