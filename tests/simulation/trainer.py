"""The training program: runs rollouts, takes checkpoints, recovers. The controller's side of a run.

Its memory dies with its process. What it keeps is in a `Journal`, of which every change is one durable
instant: attempts before they are used, results as they arrive, and *publications*, which are what a
recovery goes back to.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import attrs
import trio

from gymtrio.checkpoint.coordination import Controller, open_coordination
from gymtrio.checkpoint.members import CoordinationError, Failed, Replaced
from gymtrio.errors import GymtrioError, InvalidCheckpointState, TransportError
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId
from gymtrio.serving.client import ServerClient
from gymtrio.serving.controlchannel import HttpControlChannel
from gymtrio.serving.deployment import DeploymentDirectory
from gymtrio.settings import Secret
from gymtrio.strict import unstructure
from gymtrio.wire.control import CommitReply, StatusReply
from gymtrio.wire.native import RESULT_ACK_HEADER, RUN_ACK_ROUTE
from tests.simulation.history import History
from tests.simulation.plans import Plan
from tests.simulation.processes import Process
from tests.simulation.servers import CONTROL_TOKEN, PARTICIPANTS, Surroundings, make_deployment

CHECKPOINT_TIMEOUT_S: Final = 6.0
RESTORE_TIMEOUT_S: Final = 10.0
BACK_OFF_S: Final = 0.5
UNREADABLE_TRIES: Final = 2
"""A read that failed may succeed; damage stays, and then the checkpoint before it has to do."""


@attrs.frozen(kw_only=True)
class Publication:
    """A checkpoint that a recovery may go back to."""

    checkpoint_id: CheckpointId
    scope: tuple[EpisodeId, ...]
    attempts: dict[RolloutId, int]
    results: dict[RolloutId, Any]
    commits: dict[str, CommitReply]
    """By server, as the controller was told."""


@attrs.define
class Journal:
    """What the training program keeps over its own death."""

    attempts: dict[RolloutId, int] = attrs.field(factory=dict)
    results: dict[RolloutId, Any] = attrs.field(factory=dict)
    publications: list[Publication] = attrs.field(factory=list)
    not_acknowledged: dict[RolloutId, int] = attrs.field(factory=dict)
    """Attempts whose result is here and whose server has not been told so (HARD-9)."""
    unreadable: Counter[CheckpointId] = attrs.field(factory=Counter)
    """How often a restore found the files of a publication damaged."""
    checkpoints_begun: int = 0
    runs: int = 0
    """How often the program was started."""


def task_of(rollout: RolloutId) -> dict[str, Any]:
    """One to three increments, so that whatever is lost or repeated shows in the count."""
    number = int(rollout[1:])
    amounts = [number + 2, number + 5, number + 11][: 1 + number % 3]
    return {
        "responses_create_params": {
            "input": "add " + " ".join(map(str, amounts)),
            "tools": [
                {"type": "function", "name": name}
                for name in ("increment_counter", "get_counter_value")
            ],
        },
        "initial_count": number,
        "expected_count": number + sum(amounts),
    }


class RestartNeeded(Exception):
    """Only a restart of all servers can go on from here."""


class Trainer:
    """One incarnation of the program.

    Args:
        plan: which rollouts there are, when to take checkpoints, and how it goes about both.
    """

    def __init__(
        self,
        process: Process,
        around: Surroundings,
        journal: Journal,
        history: History,
        plan: Plan,
    ) -> None:
        self.controller: Controller | None = None
        self.on_publish: Any = None
        self.on_restore: Any = None
        self._process = process
        self._around = around
        self._journal = journal
        self._history = history
        self._plan = plan
        self._one_checkpoint = trio.Lock()
        self._rollouts = [RolloutId(f"r{n}") for n in range(plan.rollouts)]
        self._started: dict[RolloutId, None] = {}
        self._rng = random.Random(f"{around.seed} {process}")
        deployment = make_deployment(recover=False)
        port = around.network.port(process)
        self._client = ServerClient(DeploymentDirectory(deployment), port, deployment.client)
        self._channel = HttpControlChannel(self._client, Secret(CONTROL_TOKEN))

    async def run(self) -> None:
        """Until every rollout has a result.

        Raises:
            RestartNeeded: the servers are in a state that no call leads out of.
        """
        self._journal.runs += 1
        while True:
            try:
                async with open_coordination(
                    [*PARTICIPANTS, "engine"],
                    self._channel,
                    wall_clock=self._around.wall_clock,
                    randomness=self._around.randomness(self._process),
                ) as self.controller:
                    break
            except CoordinationError:
                await trio.sleep(BACK_OFF_S)
        await self._recover(self.controller)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_checkpoints, self.controller, name="checkpoints")
            async with trio.open_nursery() as rollouts:
                for rollout in sorted(self._journal.not_acknowledged):
                    rollouts.start_soon(self._acknowledge, rollout, name=f"acknowledge {rollout}")
                for rollout in self._rollouts:
                    rollouts.start_soon(self._run_rollout, self.controller, rollout, name=rollout)
            nursery.cancel_scope.cancel()

    # -- recovery -----------------------------------------------------------------------------

    async def _recover(self, controller: Controller) -> None:
        """Find out where the servers are, and bring them on (HARD-4)."""
        statuses = await self._statuses(controller)
        waiting = [name for name, status in statuses.items() if status.awaiting_restore]
        if waiting:
            if len(waiting) < len(statuses):
                raise RestartNeeded(f"only {', '.join(waiting)} wait to be restored")
            await self._restore(controller)
        elif self._journal.runs > 1:
            # The servers lived on; what a former incarnation ran is nobody's any more.
            await self._give_up_all(controller)

    @staticmethod
    async def _statuses(controller: Controller) -> dict[str, StatusReply]:
        while True:
            try:
                return await controller.status()
            except CoordinationError:
                await trio.sleep(BACK_OFF_S)

    async def _restore(self, controller: Controller) -> None:
        journal = self._journal
        if not journal.publications:
            journal.results.clear()
            journal.not_acknowledged.clear()
            journal.attempts = {r: a + 1 for r, a in journal.attempts.items()}
            former = self._former(())
            while True:
                try:
                    await controller.start_afresh(former, timeout_s=RESTORE_TIMEOUT_S)
                    self._history.note("started afresh")
                    return
                except CoordinationError:
                    await trio.sleep(BACK_OFF_S)
        last = journal.publications[-1]
        self._history.note("restoring", last.checkpoint_id)
        self._go_back_to(last)
        try:
            await controller.restore(
                last.checkpoint_id,
                last.checkpoint_id,
                last.scope,
                timeout_s=RESTORE_TIMEOUT_S,
            )
        except CoordinationError as error:
            self._history.note("restore failed", error)
            if _says_damaged(error):
                journal.unreadable[last.checkpoint_id] += 1
                if journal.unreadable[last.checkpoint_id] >= UNREADABLE_TRIES:
                    journal.publications.pop()
                    self._history.sometimes["an older checkpoint was gone back to"] += 1
            raise RestartNeeded(str(error)) from error
        # In every checkpoint from now on, also while nobody has asked for them (CTL-13).
        self._started.update({episode_id.rollout_id: None for episode_id in last.scope})
        self.on_restore(last)
        self._history.note("restored all", last.checkpoint_id)
        await self._retire_former(controller, [e.rollout_id for e in last.scope])

    def _go_back_to(self, last: Publication) -> None:
        journal = self._journal
        used = journal.attempts
        journal.results = dict(last.results)
        journal.attempts = {r: a for r, a in last.attempts.items() if r in last.results}
        journal.not_acknowledged.clear()
        for episode_id in last.scope:
            journal.attempts[episode_id.rollout_id] = episode_id.attempt + 1
        for rollout, attempt in used.items():
            # Not in the checkpoint: it runs from its input, under an attempt that nobody knows.
            journal.attempts.setdefault(rollout, attempt + 1)

    async def _retire_former(self, controller: Controller, fenced: Sequence[RolloutId]) -> None:
        former = self._former(fenced)
        if former:
            await self._retire(controller, former)

    def _former(self, fenced: Sequence[RolloutId]) -> list[EpisodeId]:
        return [
            EpisodeId(rollout, attempt - 1)
            for rollout, attempt in sorted(self._journal.attempts.items())
            if attempt > 0 and rollout not in fenced
        ]

    async def _give_up_all(self, controller: Controller) -> None:
        for rollout in sorted(self._journal.attempts):
            if rollout not in self._journal.results:
                await self._give_up(controller, rollout)

    # -- rollouts -----------------------------------------------------------------------------

    async def _run_rollout(self, controller: Controller, rollout: RolloutId) -> None:
        journal = self._journal
        await trio.sleep(self._rng.randrange(20) * 0.01)
        while rollout not in journal.results:
            attempt = journal.attempts.setdefault(rollout, 0)
            self._started[rollout] = None
            body = await self._ask(EpisodeId(rollout, attempt))
            self._process.check()
            if journal.attempts[rollout] == attempt and "result" in body:
                journal.results[rollout] = body["result"]
                self._history.note("result", EpisodeId(rollout, attempt))
                if self._plan.acks:
                    journal.not_acknowledged[rollout] = attempt
                    await self._acknowledge(rollout)
                return
            if self._plan.repeats_runs and not body:
                continue
            self._history.note("failed", f"{EpisodeId(rollout, attempt)} {_why(body)}")
            if journal.attempts[rollout] == attempt:
                await self._give_up(controller, rollout)

    async def _ask(self, episode_id: EpisodeId) -> Any:
        """Run an attempt; an empty answer: the connection was lost."""
        try:
            reply = await self._client.request(
                "env",
                "POST",
                "/run",
                json={
                    "episode_id": unstructure(episode_id),
                    "task": {
                        "task_id": {"taskset": "tasks", "task_id": episode_id.rollout_id},
                        "task_input": task_of(episode_id.rollout_id),
                    },
                },
                headers=[(RESULT_ACK_HEADER, "1")] if self._plan.acks else (),
                context=None,
            )
            return reply.json()
        except TransportError:
            return {}

    async def _acknowledge(self, rollout: RolloutId) -> None:
        """Tell the server that the result is ours; from here on nothing else keeps it (HARD-9)."""
        attempt = self._journal.not_acknowledged[rollout]
        while True:
            try:
                await self._client.request(
                    "env",
                    "POST",
                    RUN_ACK_ROUTE,
                    json={"episode_id": unstructure(EpisodeId(rollout, attempt))},
                    context=None,
                )
            except TransportError:
                await trio.sleep(BACK_OFF_S)
                continue
            self._process.check()
            self._journal.not_acknowledged.pop(rollout, None)
            return

    async def _give_up(self, controller: Controller, rollout: RolloutId) -> None:
        """Move on to the next attempt once this one is retired everywhere."""
        attempt = EpisodeId(rollout, self._journal.attempts[rollout])
        # In no checkpoint any more, whatever comes of the retirement.
        self._journal.attempts[rollout] = attempt.attempt + 1
        self._started.pop(rollout, None)
        await self._retire(controller, [attempt])

    async def _retire(self, controller: Controller, attempts: Sequence[EpisodeId]) -> None:
        while True:
            try:
                await controller.retire(CheckpointId("give-up"), attempts, timeout_s=15.0)
                return
            except CoordinationError as error:
                self._history.note("retire failed", error)
                await trio.sleep(BACK_OFF_S)

    # -- checkpoints --------------------------------------------------------------------------

    async def _take_checkpoints(self, controller: Controller) -> None:
        begun = trio.current_time()
        for at_s in self._plan.checkpoint_at_s:
            await trio.sleep_until(begun + at_s)
            await self._try_checkpoint(controller)

    def checkpoint_now(self) -> None:
        """Begin one in this instant, or when the one that is under way has ended."""
        if self.controller is not None:
            self._process.spawn(self._try_checkpoint, self.controller, name="checkpoint")

    async def _try_checkpoint(self, controller: Controller) -> None:
        async with self._one_checkpoint:
            try:
                await self.checkpoint(controller)
            except GymtrioError as error:
                self._history.note("checkpoint failed", error)
                await self._accept_replaced(controller, error)

    async def _accept_replaced(self, controller: Controller, error: GymtrioError) -> None:
        """A server lost its past: so have the rollouts that lived there (HARD-13)."""
        failures = error.failures.values() if isinstance(error, Failed) else ()
        replaced = [each for each in failures if isinstance(each, Replaced)]
        if replaced:
            self._history.sometimes["a server was replaced"] += 1
            await self._give_up_all(controller)
        for each in replaced:
            controller.accept_replaced(each)

    async def checkpoint(self, controller: Controller, name: str | None = None) -> bool:
        """Take one checkpoint.

        Returns:
            Whether it was published.
        """
        journal = self._journal
        journal.checkpoints_begun += 1
        checkpoint_id = CheckpointId(name or f"c{journal.checkpoints_begun}")
        self._history.note("checkpoint begun", checkpoint_id)
        published = False
        async with controller.checkpoint(
            checkpoint_id, checkpoint_id, timeout_s=CHECKPOINT_TIMEOUT_S
        ) as held:
            self._history.note("all prepared", checkpoint_id)
            scope = tuple(
                EpisodeId(r, journal.attempts[r])
                for r in self._rollouts
                if r in self._started
                and r not in journal.results
                and (journal.checkpoints_begun, int(r[1:])) not in self._plan.left_out
            )
            if scope:
                commits = await held.commit(scope)
                self._history.note("all committed", checkpoint_id)
                # A program does something between its calls, and may be stopped there.
                await trio.sleep(0.01)
                await self._process.running()
                until = await held.prove_held()
                self._history.note("hold proven", checkpoint_id)
                # A fault of that instant may stop the program here.
                await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint()
                await self._process.running()
                if trio.current_time() < until:
                    publication = Publication(
                        checkpoint_id=checkpoint_id,
                        scope=scope,
                        attempts=dict(journal.attempts),
                        results=dict(journal.results),
                        commits=commits,
                    )
                    journal.publications.append(publication)
                    published = True
                    self.on_publish(publication, controller.nonce)
                    self._history.note("published", checkpoint_id)
        return published


def _says_damaged(error: CoordinationError) -> bool:
    failures = error.failures.values() if isinstance(error, Failed) else ()
    return any(getattr(each, "code", None) == InvalidCheckpointState.code for each in failures)


def _why(body: dict[str, Any]) -> str:
    failure = body.get("failure") or body.get("error") or {}
    return str(failure)[:300]
