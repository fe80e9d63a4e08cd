"""Many rollouts, clients that leave, and a controller at random moments: what must always hold."""

from __future__ import annotations

import random

import pytest
import trio

from gymtrio.errors import GymtrioError
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.records import PolicyRecord
from tests.helpers.plane import episode
from tests.helpers.scripted_backend import LiveCall
from tests.participants.policy.harness import Policy, World, chat, is_readable, open_policy
from tests.participants.policy.storm import ROLLOUTS, TURNS, Storm, engine, one_rollout


async def controller(policy: Policy, storm: Storm, scope: list[EpisodeId]) -> None:
    """Prepare, look, sometimes commit, resume; over and over."""
    for number in range(6):
        await trio.sleep(storm.pause() + 1)
        name = f"c{number}"
        policy.backend.cut_mode = storm.chance.choice(["honest", "honest", "unreachable", "never"])
        prepared = await policy.prepare(name, timeout_s=storm.chance.choice([0.5, 4]))
        storm.prepared = prepared.phase == "prepared"
        await trio.sleep(storm.pause())
        if storm.prepared and storm.chance.random() < 0.8:
            counts = {e: len(storm.delivered[e]) for e in scope}
            extra = (await policy.commit(name, tuple(scope), directory=name)).extra
            assert await is_readable(policy.world, extra["staging_keys"])
            storm.committed[name] = (counts, policy.records(name))
        await trio.sleep(storm.pause())
        storm.prepared = False
        await policy.resume(name)


def check_committed(storm: Storm, scope: list[EpisodeId]) -> None:
    for counts, records in storm.committed.values():
        for e in scope:
            record = records.get(e.capture_key, PolicyRecord())
            assert len(record.rows) == counts[e], "exactly what was delivered (I16)"
            for before, row in zip((None, *record.rows), record.rows, strict=False):
                expected = None if before is None else before.model_call_id
                assert row.parent_call_id == expected


@pytest.mark.parametrize("seed", range(12))
async def test_a_storm_of_checkpoints(seed: int, autojump_clock: trio.testing.MockClock) -> None:
    """POL-2, POL-3, CUT-3, CUT-5, I2, I14, I16, I17, I25, I28, I34."""
    world = World()
    storm = Storm(random.Random(seed))
    scope = [episode(f"e{number}") for number in range(ROLLOUTS)]
    async with open_policy(world) as policy:
        policy.nursery.start_soon(engine, policy.backend, storm)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(controller, policy, storm, scope)
            for e in scope:
                nursery.start_soon(one_rollout, policy, storm, e, [])
        assert storm.answered_while_prepared == 0
        assert [len(storm.delivered[e]) for e in scope] == [TURNS] * ROLLOUTS
        assert policy.counts["inflight"] == policy.counts["held"] == 0
        assert policy.policy.ready()
    check_committed(storm, scope)
    for directory, (counts, _) in storm.committed.items():
        await replay(world, Storm(random.Random(seed)), storm, scope, directory, counts)


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_slips_in(seed: int, autojump_clock: trio.testing.MockClock) -> None:
    """Trial T1, POL-2, POL-3, POL-4, I1, I2: a thousand calls begin within 50 ms of a prepare, and are
    answered after 0 to 200 ms. From ready to resume nobody gets a reply and the backend no call; each
    call was delivered before, or is undelivered in the checkpoint."""
    chance = random.Random(seed)
    pauses = {f"e{number}": chance.uniform(0, 0.2) for number in range(1000)}
    world = World()
    scope = tuple(episode(name) for name in sorted(pauses))
    delivered: dict[EpisodeId, float] = {}

    async def one(policy: Policy, e: EpisodeId) -> None:
        await trio.sleep(chance.uniform(0, 0.1))
        reply = await policy.policy.call(e, chat("hello"))
        delivered[e] = trio.current_time()
        reply.done(True)

    async def answer(policy: Policy) -> None:
        seen = 0
        async with trio.open_nursery() as nursery:
            while True:
                await policy.backend.arrived.wait()
                for live in policy.backend.calls[seen:]:
                    assert live.extension is not None
                    live.emit(chance.randrange(3))
                    nursery.start_soon(finish, live, pauses[live.extension.rollout_id])
                seen = len(policy.backend.calls)

    async def finish(live: LiveCall, pause_s: float) -> None:
        await trio.sleep(pause_s)
        live.finish.set()

    async with open_policy(world) as policy:
        policy.nursery.start_soon(answer, policy)
        async with trio.open_nursery() as nursery:
            for e in scope:
                nursery.start_soon(one, policy, e)
            await trio.sleep(0.05)
            assert (await policy.prepare()).phase == "prepared"
            heard, asked = set(delivered), len(policy.backend.calls)
            assert 0 < len(heard) < asked < len(scope)
            await trio.sleep(1)
            await policy.commit(episodes=scope)
            await trio.sleep(1)
            assert (set(delivered), len(policy.backend.calls)) == (heard, asked)
            assert policy.counts | {"inflight": asked - len(heard)} == policy.counts
            await policy.resume()
        assert delivered.keys() == set(scope)
        assert policy.counts["inflight"] == policy.counts["held"] == 0
    records = policy.records()
    for e in scope:
        record = records.get(e.capture_key, PolicyRecord())
        assert len(record.rows) == (e in heard)
    assert sum(record.cut is not None for record in records.values()) == asked - len(heard)


async def replay(
    world: World,
    again: Storm,
    storm: Storm,
    scope: list[EpisodeId],
    directory: str,
    counts: dict[EpisodeId, int],
) -> None:
    """Restore one of the checkpoints and play every rollout to its end (I9)."""
    world.backend.cut_mode = "honest"
    async with open_policy(world) as policy:
        await policy.restore(*scope, directory=directory)
        await policy.resume("x1")
        policy.nursery.start_soon(engine, policy.backend, again)
        async with trio.open_nursery() as nursery:
            for e in scope:
                texts: list[str] = []
                for text in storm.delivered[e][: counts[e]]:
                    texts += [f"{e.rollout_id} turn {len(texts)}", text]
                nursery.start_soon(one_rollout, policy, again, e.next_attempt(), texts)
        for e in scope:
            assert again.delivered[e.next_attempt()] == storm.delivered[e][counts[e] :]
            with pytest.raises(GymtrioError, match="refused"):
                await policy.ask(e, chat("late"))
