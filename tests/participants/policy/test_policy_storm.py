"""Many rollouts, clients that leave, and a controller at random moments: what must always hold."""

from __future__ import annotations

import random
from collections import defaultdict

import attrs
import pytest
import trio

from gymtrio.errors import GymtrioError
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.records import PolicyRecord
from tests.helpers.plane import episode
from tests.participants.policy.harness import (
    Policy,
    World,
    chat,
    is_readable,
    open_policy,
    text_of,
    tokens_of,
    uncut_tokens,
)

TURNS = 4
ROLLOUTS = 8


@attrs.define
class Storm:
    """What the outside saw."""

    chance: random.Random
    prepared: bool = False
    delivered: dict[EpisodeId, list[str]] = attrs.Factory(lambda: defaultdict(list))
    """The texts that reached each episode, in order."""
    answered_while_prepared: int = 0
    committed: dict[str, tuple[dict[EpisodeId, int], dict[str, PolicyRecord]]] = attrs.Factory(dict)
    """Directory to how much had been delivered, and what was written."""

    def pause(self) -> float:
        return self.chance.choice([0, 0, 1, 1, 2, 5])


async def one_rollout(policy: Policy, storm: Storm, e: EpisodeId, texts: list[str]) -> None:
    """Play the turns that are left; a call that is lost or left is made again."""
    while len(texts) < 2 * TURNS:
        texts_sent = [*texts, f"{e.rollout_id} turn {len(texts)}"]
        caller = policy.begin(e, chat(*texts_sent), take=False)
        with trio.move_on_after(storm.chance.choice([3, 30, 30])):
            await caller.ended.wait()
        if caller.reply is None:
            caller.leave()
            await caller.ended.wait()
        if caller.reply is None:
            continue
        storm.answered_while_prepared += storm.prepared
        await trio.sleep(storm.chance.choice([0, 0, 1]))
        caller.reply.done(True)
        assert tokens_of(caller.reply) == uncut_tokens(chat(*texts_sent).body)
        texts[:] = [*texts_sent, text_of(caller.reply)]
        storm.delivered[e].append(text_of(caller.reply))


async def engine(policy: Policy, storm: Storm) -> None:
    """Give tokens to whoever is there, in an order of its own."""
    while True:
        await trio.sleep(1)
        for live in list(policy.backend.live):
            live.emit(min(storm.chance.randrange(6), 20 - len(live.token_ids)))
            if len(live.token_ids) == 20:
                live.finish.set()


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
        policy.nursery.start_soon(engine, policy, storm)
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
        policy.nursery.start_soon(engine, policy, again)
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
