"""The storm of checkpoints over several workers, some of which are killed."""

from __future__ import annotations

import random
from collections.abc import Iterable

import attrs
import pytest
import trio

from gymtrio.errors import CheckpointError, GymtrioError
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.calls import PolicyCall
from gymtrio.participants.policy.records import PolicyRecord
from tests.helpers.page_cache import PageCacheFiles
from tests.helpers.plane import episode
from tests.participants.policy.harness import Caller, World, chat, is_readable
from tests.participants.policy.storm import ROLLOUTS, TURNS, Storm, engine, one_rollout
from tests.participants.policy.workers import OneWorker, Served, open_served


@attrs.define
class AnyWorker:
    """Sends each call to some worker, as a shared port does."""

    served: Served
    chance: random.Random
    alive: list[OneWorker]

    def begin(self, episode_id: EpisodeId, call: PolicyCall, *, take: bool) -> Caller:
        return self.chance.choice(self.alive).begin(episode_id, call, take=take)


async def killer(any_worker: AnyWorker, storm: Storm, kills: int) -> None:
    """Kill a worker and start its replacement, some time later; one at least goes on."""
    for _ in range(kills):
        await trio.sleep(storm.chance.choice([2, 5, 9]))
        victim = storm.chance.choice(any_worker.alive)
        for _ in range(storm.chance.choice([0, 40])):
            # Better still with a reply on its way.
            if not victim.policy.gate.tickets.leaving:
                await trio.sleep(0.25)
        if len(any_worker.alive) > 1:
            any_worker.alive.remove(victim)
            victim.die()
            await trio.sleep(storm.pause())
            any_worker.alive.append(await any_worker.served.join(victim.name))


async def controller(served: Served, storm: Storm, scope: list[EpisodeId]) -> None:
    """Prepare, look, sometimes commit, resume; over and over."""
    for number in range(6):
        await trio.sleep(storm.pause() + 1)
        name = f"c{number}"
        served.world.backend.cut_mode = storm.chance.choice(["honest", "honest", "unreachable"])
        prepared = await served.prepare(name, timeout_s=storm.chance.choice([0.5, 4]))
        storm.prepared = prepared.phase == "prepared"
        await trio.sleep(storm.pause())
        if storm.prepared and storm.chance.random() < 0.8:
            await commit(served, storm, name, scope)
        await trio.sleep(storm.pause())
        storm.prepared = False
        await served.resume(name)


async def commit(served: Served, storm: Storm, name: str, scope: list[EpisodeId]) -> None:
    counts = {e: len(storm.delivered[e]) for e in scope}
    try:
        extra = (await served.commit(name, tuple(scope), directory=name)).extra
    except CheckpointError:
        # A worker was lost: refused, and nothing of it is there.
        assert not any(path.startswith(f"/{name}/") for path in served.files.tree())
        return
    assert await is_readable(served.world, extra["staging_keys"])
    storm.committed[name] = (counts, await served.records(name))


def check_committed(storm: Storm, scope: Iterable[EpisodeId]) -> int:
    """Exactly what was delivered is there, but for what nobody knows; gives how much that is."""
    unknown = 0
    for counts, records in storm.committed.values():
        for e in scope:
            record = records.get(e.capture_key, PolicyRecord())
            certain = len(record.rows) - len(record.uncertain)
            assert certain <= counts[e] <= len(record.rows), "I16"
            unknown += len(record.uncertain)
    return unknown


@pytest.mark.parametrize("kills", [0, 4])
@pytest.mark.parametrize("seed", range(8))
async def test_a_storm_over_workers(
    seed: int, kills: int, autojump_clock: trio.testing.MockClock
) -> None:
    """WRK-3, WRK-4, CUT-3, HARD-7, I2, I14, I16, I17, I18, I25, I28, I34."""
    world, files = World(), PageCacheFiles()
    storm = Storm(random.Random(seed))
    scope = [episode(f"e{number}") for number in range(ROLLOUTS)]
    async with open_served(world, files=files, workers=2 + seed % 2) as served:
        any_worker = AnyWorker(served, storm.chance, list(served.workers))
        served.nursery.start_soon(engine, world.backend, storm)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(controller, served, storm, scope)
            nursery.start_soon(killer, any_worker, storm, kills)
            for e in scope:
                nursery.start_soon(one_rollout, any_worker, storm, e, [])
        await trio.testing.wait_all_tasks_blocked()
        assert storm.answered_while_prepared == 0
        assert [len(storm.delivered[e]) for e in scope] == [TURNS] * ROLLOUTS
        assert len(served.policy.books) == 0
        assert served.policy.still_running([e.rollout_id for e in scope]) == []
        for worker in any_worker.alive:
            assert worker.policy.gate.report().counts["inflight"] == 0
    unknown = check_committed(storm, scope)
    assert kills or not unknown
    for directory, (counts, _) in storm.committed.items():
        await replay(world, files, Storm(random.Random(seed)), storm, scope, directory, counts)


async def replay(
    world: World,
    files: PageCacheFiles,
    again: Storm,
    storm: Storm,
    scope: list[EpisodeId],
    directory: str,
    counts: dict[EpisodeId, int],
) -> None:
    """Restore one of the checkpoints and play every rollout to its end (I9)."""
    world.backend.cut_mode = "honest"
    async with open_served(world, files=files) as served:
        await served.restore(*scope, directory=directory)
        await served.resume("x1")
        any_worker = AnyWorker(served, again.chance, served.workers)
        served.nursery.start_soon(engine, world.backend, again)
        async with trio.open_nursery() as nursery:
            for e in scope:
                texts: list[str] = []
                for text in storm.delivered[e][: counts[e]]:
                    texts += [f"{e.rollout_id} turn {len(texts)}", text]
                nursery.start_soon(one_rollout, any_worker, again, e.next_attempt(), texts)
        for e in scope:
            assert again.delivered[e.next_attempt()] == storm.delivered[e][counts[e] :]
            rows = served.policy.rows(e.next_attempt())
            assert len(rows) == TURNS, "what was uncertain has become clear"
            with pytest.raises(GymtrioError, match="refused"):
                await served.workers[0].ask(e, chat("late"))
