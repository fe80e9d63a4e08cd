"""Crashes of real servers in the middle of a game, with one and with two policy workers.

Every process group is killed by SIGKILL. What is compared are the calls, their tokens, what the tools
said, and the state at the end, never the reward alone.

There are no legacy episodes among them: no server speaks the one-call protocol.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import trio

from gymtrio.checkpoint.members import Failed
from gymtrio.cli.demonstration.evidence import Evidence, compare
from gymtrio.ids import CheckpointId
from gymtrio.serving.deployment import parse_deployment
from gymtrio.serving.supervisor import RunningDeployment, open_deployment
from gymtrio.wire.control import StatusReply
from tests.helpers.crashing import (
    APPS,
    TIMEOUT_S,
    UNDISTURBED,
    WAITED_FOR,
    Life,
    describe,
    episode,
    open_life,
    open_outside,
    open_world,
)
from tests.helpers.forked_servers import Forks, open_forks
from tests.helpers.game import CALLS, MOVES, outputs_of
from tests.helpers.scripted_backend import OUTPUT_TOKENS, LiveCall

R: Final = episode("r")
S: Final = episode("s")
R1: Final = R.next_attempt()
R2: Final = R1.next_attempt()
S1: Final = S.next_attempt()

pytestmark = pytest.mark.timeout(120)
both = pytest.mark.parametrize("policy_workers", [1, 2])


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with open_forks(tmp_path_factory.mktemp("forks") / "log", APPS) as opened:
        yield opened


def rollout_of(call: LiveCall) -> str:
    assert call.extension is not None
    return call.extension.rollout_id


def is_preparing(status: StatusReply) -> bool:
    return status.phase == "preparing"


@both
async def test_generations_in_flight_are_cut_and_continued(
    forks: Forks, tmp_path: Path, policy_workers: int
) -> None:
    """E2E-1, CUT-4, I5, I16, I17, I25, I26: token for token what they would have been.

    One has just begun, one is nearly done, the reply of one is held, and of one there is nothing yet.
    """
    rollouts = [episode(name) for name in ("begun", "nearly", "held", "nothing")]
    emitted = {"begun": 7, "nearly": 19, "held": 3, "nothing": 0}
    continued_tokens = {"begun": 7, "nearly": 19, "held": 20, "nothing": 0}
    async with open_world(forks, tmp_path, policy_workers=policy_workers) as world:
        async with world.life() as life:
            undisturbed = await life.undisturbed()
            world.engine.stops_at = 2
            life.start(*rollouts)
            calls = {rollout_of(call): call for call in await world.engine.held(4)}
            for name, count in emitted.items():
                calls[name].emit(count)
            counts = await life.prepare("c1")
            outcomes = [counts[name] for name in ("cut", "cut_failed", "cut_skipped")]
            assert outcomes == [3, 0, 1]
            calls["held"].finish.set()
            await life.until_held(calls["held"])
            committed = await life.commit("c1", *rollouts)
            parts: Any = committed["policy"].manifest["parts"]
            shares = [part for part in parts if part.get("section") == "cuts"]
            assert len(shares) == (policy_workers if policy_workers > 1 else 0)
            assert life.replies.keys() == {UNDISTURBED}
        world.engine.stops_at = None
        before = len(world.engine.calls)
        async with world.life("c1", rollouts) as life:
            life.start(*(rollout.next_attempt() for rollout in rollouts))
            await life.until_replied(*(rollout.next_attempt() for rollout in rollouts))
            for rollout in rollouts:
                name = rollout.rollout_id
                continued = await life.evidence(rollout.next_attempt())
                assert compare(undisturbed, continued).equal, name
                assert continued.final_state["final_count"] == MOVES
                from_cuts = [row.continued_token_count for row in continued.calls]
                assert from_cuts == [0, 0, continued_tokens[name], 0, 0], name
                staged = [row.staged_under for row in continued.calls]
                assert staged == [name] * 2 + [f"{name}-a1"] * 3
                # Nothing before the boundary was asked again; of the call in flight only the rest.
                again = [c for c in world.engine.calls[before:] if rollout_of(c) == name]
                assert [len(outputs_of(call)) for call in again] == [2, 3, 4]
                rest = OUTPUT_TOKENS - continued_tokens[name]
                assert [c.generated for c in again] == [rest, OUTPUT_TOKENS, OUTPUT_TOKENS]
        assert len(world.judge.cases) == 1 + len(rollouts)


@both
async def test_a_checkpoint_without_a_crash_parks_and_releases(
    forks: Forks, tmp_path: Path, policy_workers: int
) -> None:
    """E2E-1, POL-2, ENV-2, I1, I2: what ends or begins while it is open is answered afterwards."""
    async with (
        open_world(forks, tmp_path, policy_workers=policy_workers) as world,
        world.life() as life,
    ):
        undisturbed = await life.undisturbed()
        world.engine.stops_at = 2
        life.start(R)
        (call,) = await world.engine.held()
        call.emit(7)
        await life.checkpoint("c1", R)
        world.engine.stops_at = None
        call.finish.set()
        life.start(S)
        await world.outside.until_staged(call)
        await life.until_count("environment", "waiting", 1)
        assert life.replies.keys() == {UNDISTURBED}
        assert len(await life.rows(R)) == 2
        assert len(world.engine.calls) == CALLS + 3
        await life.resume("c1")
        await life.until_replied(R, S)
        for rollout in (R, S):
            evidence = await life.evidence(rollout)
            assert compare(undisturbed, evidence).equal
            assert [row.continued_token_count for row in evidence.calls] == [0] * CALLS
        assert len(world.engine.calls) == 3 * CALLS
        assert len(world.judge.cases) == 3


@both
async def test_a_verification_in_flight_is_waited_for(
    forks: Forks, tmp_path: Path, policy_workers: int
) -> None:
    """E2E-1, RES-4, HARD-9, I5: it blocks by name, and its result is in the checkpoint."""
    async with open_world(
        forks, tmp_path, policy_workers=policy_workers, counter=WAITED_FOR
    ) as world:
        async with world.life() as life:
            undisturbed = await life.undisturbed()
            world.judge.door.shut()
            life.start(R)
            await world.judge.door.reached.wait()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(life.checkpoint, "c1", R)
                blocked = await life.until_status("environment", is_preparing)
                (detail,) = blocked.report.details
                assert (detail.blocker, detail.doing) == ("r", "in a wait step: verify")
                world.judge.door.let_go()
            assert life.replies.keys() == {UNDISTURBED}
        asked = len(world.engine.calls)
        async with world.life("c1", [R]) as life:
            await life.run(R1)
            assert compare(undisturbed, await life.evidence(R1)).equal
        assert len(world.engine.calls) == asked == 2 * CALLS
        assert [case["count"] for case in world.judge.cases] == [MOVES] * 2


@both
async def test_a_verification_in_flight_is_replayed(
    forks: Forks, tmp_path: Path, policy_workers: int
) -> None:
    """E2E-1, RES-4, RES-5, I6: nobody waits for it, and it alone is done again."""
    async with open_world(forks, tmp_path, policy_workers=policy_workers) as world:
        async with world.life() as life:
            undisturbed = await life.undisturbed()
            world.judge.door.shut()
            life.start(R)
            await world.judge.door.reached.wait()
            await life.checkpoint("c1", R)
            assert life.replies.keys() == {UNDISTURBED}
        world.judge.door.let_go()
        async with world.life("c1", [R]) as life:
            await life.run(R1)
            assert compare(undisturbed, await life.evidence(R1)).equal
        assert len(world.engine.calls) == 2 * CALLS
        _, cut_short, again = world.judge.cases
        assert again == cut_short


@both
@pytest.mark.parametrize("crashes", [False, True])
async def test_what_finishes_during_prepare_is_neither_lost_nor_redone(
    forks: Forks, tmp_path: Path, policy_workers: int, crashes: bool
) -> None:
    """E2E-1, ENV-5, I1, I3, I4: one by its verification, one by its last model call."""
    async with open_world(
        forks, tmp_path, policy_workers=policy_workers, counter=WAITED_FOR
    ) as world:
        async with world.life() as life:
            undisturbed = await life.undisturbed()
            world.judge.door.shut()
            life.start(R)
            await world.judge.door.reached.wait()
            world.engine.stops_at = CALLS - 1
            life.start(S)
            (last,) = await world.engine.held()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(life.checkpoint, "c1", R, S)
                await life.until_status("environment", is_preparing)
                last.finish.set()
                await life.until_rows(S, CALLS)
                world.judge.door.let_go()
            assert life.replies.keys() == {UNDISTURBED}
            ended: list[Evidence] = []
            if not crashes:
                await life.resume("c1")
                await life.until_replied(R, S)
                ended = [await life.evidence(R), await life.evidence(S)]
        if crashes:
            async with world.life("c1", [R, S]) as life:
                await life.run(R1)
                await life.run(S1)
                ended = [await life.evidence(R1), await life.evidence(S1)]
        assert [compare(undisturbed, evidence).equal for evidence in ended] == [True, True]
        assert len(world.engine.calls) == 3 * CALLS
        assert len(world.judge.cases) == 3


@both
async def test_a_second_crash_before_the_replacement_starts_still_continues(
    forks: Forks, tmp_path: Path, policy_workers: int
) -> None:
    """E2E-1, ENV-4, AGT-5, CUT-5, I8, I14: restored, not claimed, and in the next checkpoint again."""
    async with open_world(forks, tmp_path, policy_workers=policy_workers) as world:
        async with world.life() as life:
            undisturbed = await life.undisturbed()
            world.engine.stops_at = 2
            life.start(R)
            (call,) = await world.engine.held()
            call.emit(7)
            await life.checkpoint("c1", R)
        world.engine.stops_at = None
        asked = len(world.engine.calls)
        async with world.life("c1", [R]):
            pass
        async with world.life("c1", [R]) as life:
            await life.checkpoint("c2", R1)
        assert len(world.engine.calls) == asked
        async with world.life("c2", [R1]) as life:
            await life.run(R2)
            continued = await life.evidence(R2)
        assert compare(undisturbed, continued).equal
        assert [row.continued_token_count for row in continued.calls] == [0, 0, 7, 0, 0]
        assert world.engine.asked()[asked:] == [2, 3, 4]


@both
async def test_a_checkpoint_is_restored_again_after_its_replacement_has_made_calls(
    forks: Forks, tmp_path: Path, policy_workers: int
) -> None:
    """E2E-1, POL-7, I9: what a dead execution left is not there, and its cut is."""
    async with open_world(forks, tmp_path, policy_workers=policy_workers) as world:
        async with world.life() as life:
            undisturbed = await life.undisturbed()
            world.engine.stops_at = 2
            life.start(R)
            (call,) = await world.engine.held()
            call.emit(7)
            await life.checkpoint("c1", R)
        world.engine.stops_at = CALLS - 1
        async with world.life("c1", [R]) as life:
            life.start(R1)
            await world.engine.held()
            dead = await life.rows(R1)
            assert [row.continued_token_count for row in dead] == [0, 0, 7, 0]
        world.engine.stops_at = None
        asked = len(world.engine.calls)
        async with world.life("c1", [R]) as life:
            assert await life.rows(R1) == dead[:2]
            await life.run(R1)
            again = await life.evidence(R1)
        assert compare(undisturbed, again).equal
        assert [row.continued_token_count for row in again.calls] == [0, 0, 7, 0, 0]
        assert world.engine.asked()[asked:] == [2, 3, 4]
        # The store has the dead execution's tokens beside them: none of its calls is one of these.
        assert {row.model_call_id for row in again.calls[2:]}.isdisjoint(
            row.model_call_id for row in dead[2:]
        )


@both
async def test_a_policy_server_that_dies_alone_is_in_no_checkpoint(
    forks: Forks, tmp_path: Path, policy_workers: int
) -> None:
    """E2E-1, HARD-3, HARD-13, I16: what it knew is missing, so the last whole one is gone back to."""
    async with open_world(forks, tmp_path, policy_workers=policy_workers) as world:
        async with world.life() as life:
            undisturbed = await life.undisturbed()
            world.judge.door.shut()
            life.start(R)
            await world.judge.door.reached.wait()
            await life.checkpoint("c1", R)
            await life.resume("c1")
            async with world.replaced("policy"):
                c2 = life.controller.checkpoint(
                    CheckpointId("c2"), life.place("c2"), timeout_s=TIMEOUT_S
                )
                with pytest.raises(Failed) as refused:
                    async with c2:
                        pass
                assert refused.value.failures.keys() == {"policy"}
        world.judge.door.let_go()
        async with world.life("c1", [R]) as life:
            await life.run(R1)
            assert compare(undisturbed, await life.evidence(R1)).equal
        assert len(world.engine.calls) == 2 * CALLS


async def test_policy_workers_that_are_killed_take_nothing_with_them(tmp_path: Path) -> None:
    """E2E-1, WRK-3, WRK-5, I16, I18: one while idle, one while a checkpoint is open."""
    async with open_outside(tmp_path) as (outside, urls):
        deployment = parse_deployment(describe(tmp_path, urls, policy_workers=2))
        async with (
            open_deployment(deployment, run_dir=tmp_path / "run") as running,
            open_life(outside, running.deployment) as life,
        ):
            undisturbed = await life.undisturbed()
            outside.judge.door.shut()
            life.start(R)
            await outside.judge.door.reached.wait()
            rows = await life.rows(R)
            await kill_a_worker(running, life)
            assert await life.rows(R) == rows
            await life.checkpoint("c1", R)
            await life.resume("c1")

            c2 = CheckpointId("c2")
            assert (await life.controller.prepare(c2, timeout_s=TIMEOUT_S)).ready
            await kill_a_worker(running, life)
            again = await life.controller.prepare(c2, timeout_s=1)
            assert "policy-worker-lost" in again.blocking["policy"].blockers
            assert not again.ready
            with pytest.raises(Failed, match="policy-worker-lost"):
                await life.commit(c2, R)
            await life.resume(c2)

            await life.checkpoint("c3", R)
            await running.kill_groups()
            life.nursery.cancel_scope.cancel()
        outside.judge.door.let_go()
        asked = len(outside.engine.calls)
        recovering = attrs.evolve(
            running.deployment, checkpoint=attrs.evolve(running.deployment.checkpoint, recover=True)
        )
        async with (
            open_deployment(recovering, run_dir=tmp_path / "run") as running,
            open_life(outside, running.deployment) as life,
        ):
            await life.restore("c3", R)
            await life.run(R1)
            continued = await life.evidence(R1)
            assert compare(undisturbed, continued).equal
            assert continued.calls == rows
        assert len(outside.engine.calls) == asked == 2 * CALLS


async def kill_a_worker(running: RunningDeployment, life: Life) -> None:
    """SIGKILL one of the processes that serve, and wait until another is there instead."""
    pid = running.pid("policy")
    children = Path(f"/proc/{pid}/task/{pid}/children")
    victim = children.read_text().split()[0]
    os.kill(int(victim), signal.SIGKILL)
    # Replaced: it is none of the children any more, and two are joined.
    await life.until_status(
        "policy",
        lambda status: status.extra["workers"] == 2 and victim not in children.read_text().split(),
    )
