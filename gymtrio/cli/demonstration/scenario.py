"""The demo's story: once undisturbed, once checkpointed, killed and continued.

    servers up ─ rollouts ───────────────────────────────────────── finish
    servers up ─ rollouts ─ prepare ─ commit ─ resume ─ work ─ SIGKILL
                                         │
                              servers up (closed) ─ restore ─ resume ─ finish

Everything here is what a training controller does, by the same library.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

import attrs
import trio

from gymtrio.background import open_background
from gymtrio.capture.log_store import open_log_store
from gymtrio.checkpoint.coordination import Controller
from gymtrio.cli.demonstration.evidence import Comparison, Evidence, Saved, compare, count_saved
from gymtrio.cli.demonstration.rollouts import Rollouts, gather_evidence, read_ledger
from gymtrio.cli.demonstration.servers_file import (
    CHECKPOINTS,
    POLICY,
    STATE,
    TOKEN_STORE,
    demo_deployment,
)
from gymtrio.cli.demonstration.tasks import make_tasks
from gymtrio.errors import GymtrioError, PeerRefused, TransportError
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId
from gymtrio.ports import HostRandomness
from gymtrio.serving.controller import open_controller
from gymtrio.serving.deployment import Deployment
from gymtrio.serving.supervisor import RunningDeployment, open_deployment
from gymtrio.settings import Secret

CHECKPOINT: Final = CheckpointId("demo")
TIMEOUT_S: Final = 60.0
CALLS_AFTER_RESUME: Final = 2
"""Model calls that are made after the checkpoint, lost in the crash, and made again."""
POLL_S: Final = 0.1


class DemoMistimed(GymtrioError):
    """Every rollout had finished before the moment of the kill came."""


@attrs.frozen
class Progress:
    """Where one rollout is."""

    attempt: int
    calls: int
    tokens: int
    finished: bool


class Watcher(Protocol):
    """Told of what happens, to show it."""

    def stage(self, text: str) -> None:
        """A new part of the story begins."""
        ...

    def progress(self, rollouts: dict[RolloutId, Progress]) -> None: ...


@attrs.frozen(kw_only=True)
class Times:
    """Seconds."""

    prepare: float
    commit: float
    resume: float
    start: float = 0.0
    """From the kill until every server is up again."""
    restore: float = 0.0
    """Including the resume that follows it."""


@attrs.frozen(kw_only=True)
class Held:
    """What the checkpoint held."""

    where: str
    episodes: tuple[EpisodeId, ...]
    cut: int
    times: Times


@attrs.frozen(kw_only=True)
class RolloutOutcome:
    """One rollout of the demo, both runs of it."""

    rollout_id: RolloutId
    killed: bool
    """False: its reply had come before the kill, so there was nothing to continue."""
    saved: Saved
    undisturbed: Evidence
    second: Evidence
    comparison: Comparison


@attrs.frozen(kw_only=True)
class Outcome:
    rollouts: tuple[RolloutOutcome, ...]
    times: Times
    cut: int
    """Generations that were in flight at the checkpoint and made durable."""

    @property
    def equal(self) -> bool:
        return all(rollout.comparison.equal for rollout in self.rollouts)


@attrs.frozen
class Life:
    """One life of the servers, from their start to their end."""

    running: RunningDeployment
    controller: Controller
    token: Secret
    token_directory: Path

    async def calls(self, rollouts: Rollouts) -> int:
        """How many model calls have been delivered in all."""
        return sum(progress.calls for progress in (await self.progress(rollouts)).values())

    async def progress(self, rollouts: Rollouts) -> dict[RolloutId, Progress]:
        """Ask where every rollout is."""
        found = {}
        for task in rollouts.tasks:
            episode_id = EpisodeId(task.rollout_id, rollouts.attempts[task.rollout_id])
            rows = await read_ledger(self.running.client, episode_id.capture_key, self.token)
            found[task.rollout_id] = Progress(
                attempt=episode_id.attempt,
                calls=len(rows),
                tokens=sum(row.generated_token_count for row in rows),
                finished=task.rollout_id in rollouts.finished,
            )
        return found

    async def evidence(self, rollouts: Rollouts) -> dict[RolloutId, Evidence]:
        """Read what every rollout left that has finished."""
        async with open_log_store(self.token_directory, randomness=HostRandomness()) as store:
            return await gather_evidence(self.running.client, store, rollouts, self.token)


Restore = Callable[[Life, str, list[EpisodeId]], Awaitable[None]]


async def restore_everything(life: Life, where: str, episodes: list[EpisodeId]) -> None:
    """Restore all participants, as a controller does after a crash."""
    await life.controller.restore(CHECKPOINT, where, episodes, timeout_s=TIMEOUT_S)


@attrs.frozen(kw_only=True)
class Scenario:
    """One run of the demo.

    Args:
        directory: for everything that it leaves; exists and is empty.
        rollouts: how many.
        seed: of the sampling.
        kill_at: model calls after which the checkpoint is taken; None: half of all.
        policy_workers: processes that serve the policy model.
        restore: what is restored after the crash; a negative control leaves something out.
    """

    directory: Path
    rollouts: int
    seed: int
    kill_at: int | None
    watcher: Watcher
    policy_workers: int = 2
    restore: Restore = restore_everything

    async def run(self) -> Outcome:
        """
        Raises:
            HostError: the servers do not start; with the log's tail.
            RolloutFailed: a rollout did not end with a result.
            DemoMistimed: nothing was left to kill at `kill_at`.
        """
        return await self.run_killed(await self.run_undisturbed())

    async def run_undisturbed(self) -> dict[RolloutId, Evidence]:
        """Run every rollout to its end, and read what each left."""
        tasks = make_tasks(self.rollouts)
        self.watcher.stage("undisturbed run: starting the servers")
        async with self._up("undisturbed") as life:
            self.watcher.stage(f"undisturbed run: {len(tasks)} rollouts")
            rollouts = Rollouts(life.running.client, tasks, {t.rollout_id: 0 for t in tasks})
            async with self._watched(life, rollouts):
                await rollouts.run()
            return await life.evidence(rollouts)

    async def run_killed(self, undisturbed: dict[RolloutId, Evidence]) -> Outcome:
        """Run them again, kill every server under them, go on, and compare."""
        tasks = make_tasks(self.rollouts)
        kill_at = self.kill_at or sum(len(e.calls) for e in undisturbed.values()) // 2
        self.watcher.stage("second run: starting the servers")
        async with self._up("killed") as life:
            self.watcher.stage(f"second run: {len(tasks)} rollouts")
            first = Rollouts(life.running.client, tasks, {t.rollout_id: 0 for t in tasks})
            async with self._watched(life, first), trio.open_nursery() as nursery:
                nursery.start_soon(first.run)
                await self._wait_for_calls(life, first, kill_at)
                held = await self._checkpoint(life, first)
                after = await life.calls(first) + CALLS_AFTER_RESUME
                await self._wait_for_calls(life, first, after)
                finished_early = await life.evidence(first)
                first.crashing = True
                self.watcher.stage("SIGKILL of every server's process group")
                await life.running.kill_groups()
        killed_at = trio.current_time()
        self.watcher.stage("new servers start, closed until they are restored")
        async with self._up("killed", recover=life.running.deployment) as life:
            start_s = trio.current_time() - killed_at
            scope = [e for e in held.episodes if e.rollout_id not in finished_early]
            if not scope:
                raise DemoMistimed("every rollout had finished before the kill: lower --kill-at")
            self.watcher.stage(f"restore of {len(scope)} rollouts")
            restore_s = await _timed(lambda: self.restore(life, held.where, scope))
            self.watcher.stage(f"restored: {len(scope)} rollouts go on as their next attempt")
            second = Rollouts(
                life.running.client,
                [task for task in tasks if task.rollout_id not in finished_early],
                {e.rollout_id: e.attempt + 1 for e in scope},
            )
            async with self._watched(life, second):
                await second.run()
            continued = await life.evidence(second)
        return Outcome(
            rollouts=tuple(
                _outcome(task.rollout_id, undisturbed, finished_early, continued) for task in tasks
            ),
            times=attrs.evolve(held.times, start=start_s, restore=restore_s),
            cut=held.cut,
        )

    async def _checkpoint(self, life: Life, rollouts: Rollouts) -> Held:
        """Take a checkpoint of what is in flight, as a training controller does."""
        where = str(self.directory / CHECKPOINTS / CHECKPOINT)
        controller = life.controller
        began = trio.current_time()
        async with controller.checkpoint(CHECKPOINT, where, timeout_s=TIMEOUT_S) as held:
            prepared_at = trio.current_time()
            # Replies that left before the close have been read by now or never will be missed: a
            # rollout without a reply here is in the checkpoint.
            episodes = rollouts.unfinished
            await held.commit(episodes)
            committed_at = trio.current_time()
            await held.prove_held()
            proven_at = trio.current_time()
        resumed_at = trio.current_time()
        cut = held.prepared.reports[POLICY].counts.get("cut", 0)
        self.watcher.stage(
            f"checkpoint of {len(episodes)} rollouts, {cut} generations cut in flight; work goes on"
        )
        return Held(
            where=where,
            episodes=tuple(episodes),
            cut=cut,
            times=Times(
                prepare=prepared_at - began,
                commit=committed_at - prepared_at,
                resume=resumed_at - proven_at,
            ),
        )

    async def _wait_for_calls(self, life: Life, rollouts: Rollouts, calls: int) -> None:
        """Wait until so many model calls were delivered, and others are in flight."""
        while await life.calls(rollouts) < calls:
            if not rollouts.unfinished:
                raise DemoMistimed(f"every rollout had finished before model call {calls}")
            await trio.sleep(POLL_S)

    @asynccontextmanager
    async def _up(self, name: str, recover: Deployment | None = None) -> AsyncIterator[Life]:
        directory = self.directory / name
        if recover is None:
            (self.directory / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            deployment = demo_deployment(
                directory,
                self.directory / CHECKPOINTS,
                seed=self.seed,
                policy_workers=self.policy_workers,
            )
        else:
            deployment = attrs.evolve(
                recover, checkpoint=attrs.evolve(recover.checkpoint, recover=True)
            )
        token = deployment.checkpoint.control_auth_token
        assert token is not None
        async with (
            open_deployment(deployment, run_dir=directory) as running,
            open_controller(running.deployment) as controller,
        ):
            yield Life(running, controller, token, directory / STATE / TOKEN_STORE)

    @asynccontextmanager
    async def _watched(self, life: Life, rollouts: Rollouts) -> AsyncIterator[None]:
        async def watch() -> None:
            while not rollouts.crashing:
                try:
                    self.watcher.progress(await life.progress(rollouts))
                except (TransportError, PeerRefused):
                    if not rollouts.crashing:
                        raise
                await trio.sleep(POLL_S)

        async with open_background() as nursery:
            nursery.start_soon(watch)
            yield


def _outcome(
    rollout_id: RolloutId,
    undisturbed: dict[RolloutId, Evidence],
    finished_early: dict[RolloutId, Evidence],
    continued: dict[RolloutId, Evidence],
) -> RolloutOutcome:
    killed = rollout_id in continued
    second = continued[rollout_id] if killed else finished_early[rollout_id]
    return RolloutOutcome(
        rollout_id=rollout_id,
        killed=killed,
        saved=count_saved(second.calls, EpisodeId(rollout_id, 1 if killed else 0).capture_key),
        undisturbed=undisturbed[rollout_id],
        second=second,
        comparison=compare(undisturbed[rollout_id], second),
    )


async def _timed(work: Callable[[], Awaitable[None]]) -> float:
    began = trio.current_time()
    await work()
    return trio.current_time() - began
