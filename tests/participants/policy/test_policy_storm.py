"""Many rollouts, clients that leave, and a controller at random moments: what must always hold."""

from __future__ import annotations

import random

import pytest
import trio

from gymtrio.errors import GymtrioError
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.records import PolicyRecord
from tests.helpers.plane import episode
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
