"""Running the demo's rollouts against a deployment, and reading what they left."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import trio

from gymtrio.capture.ledger import LedgerRow
from gymtrio.capture.log_store import LogTokenStore
from gymtrio.cli.demonstration.evidence import Evidence, read_evidence
from gymtrio.cli.demonstration.servers_file import ENVIRONMENT, POLICY
from gymtrio.cli.demonstration.tasks import DemoTask
from gymtrio.errors import GymtrioError, PeerRefused, TransportError
from gymtrio.ids import CaptureKey, EpisodeId, RolloutId
from gymtrio.serving.client import ServerClient
from gymtrio.serving.ledger_route import LEDGER_ROUTE
from gymtrio.settings import Secret
from gymtrio.strict import structure
from gymtrio.wire.native import RunReply


class RolloutFailed(GymtrioError):
    """A rollout ended otherwise than by its result; names it, with what its server said."""


@attrs.frozen
class Finished:
    """A rollout whose reply has come."""

    attempt: int
    result: dict[str, object]


class Rollouts:
    """The demo's rollouts in flight against one life of a deployment.

    Args:
        attempts: with which attempt each rollout runs in this life.
    """

    def __init__(
        self, client: ServerClient, tasks: Sequence[DemoTask], attempts: dict[RolloutId, int]
    ) -> None:
        self._client = client
        self.tasks = tasks
        self.attempts = attempts
        self.finished: dict[RolloutId, Finished] = {}
        self.crashing = False
        """From here on a connection that breaks is expected, between the servers as well."""

    @property
    def unfinished(self) -> list[EpisodeId]:
        """The episodes whose reply has not come: the scope of a checkpoint."""
        return [
            EpisodeId(task.rollout_id, self.attempts[task.rollout_id])
            for task in self.tasks
            if task.rollout_id not in self.finished
        ]

    async def run(self) -> None:
        """Run every rollout to its end, all at once.

        Raises:
            RolloutFailed: one failed, and it is not because the servers were killed.
        """
        async with trio.open_nursery() as nursery:
            for task in self.tasks:
                nursery.start_soon(self._run_one, task)

    async def _run_one(self, task: DemoTask) -> None:
        attempt = self.attempts[task.rollout_id]
        try:
            answer = await self._client.request(
                ENVIRONMENT, "POST", "/run", json=task.request(attempt), context=None
            )
            reply = structure(RunReply, answer.raise_for_status().json())
        except (TransportError, PeerRefused) as error:
            if self.crashing:
                return
            raise RolloutFailed(f"{task.rollout_id}: {error}") from error
        if reply.result is None:
            assert reply.failure is not None
            if self.crashing:
                # One server had died a moment before the one that says so.
                return
            raise RolloutFailed(f"{task.rollout_id}: {reply.failure.failure_reason}")
        self.finished[task.rollout_id] = Finished(attempt, reply.result)


async def read_ledger(
    client: ServerClient, key: CaptureKey, token: Secret
) -> tuple[LedgerRow, ...]:
    """Ask the policy server for the delivered calls of an episode."""
    answer = await client.request(
        POLICY,
        "GET",
        f"{LEDGER_ROUTE}/{key}",
        headers=[("authorization", f"Bearer {token.reveal()}")],
        context=None,
        control=True,
    )
    rows = answer.raise_for_status().json()
    assert isinstance(rows, dict)
    return structure(tuple[LedgerRow, ...], rows["rows"])


async def gather_evidence(
    client: ServerClient, store: LogTokenStore, rollouts: Rollouts, token: Secret
) -> dict[RolloutId, Evidence]:
    """Read what every rollout left that has finished by now: its result, its calls and their tokens."""
    gathered = {}
    # Others may finish meanwhile.
    for rollout_id, finished in list(rollouts.finished.items()):
        key = EpisodeId(rollout_id, finished.attempt).capture_key
        rows = await read_ledger(client, key, token)
        records = [await store.get(row.staging_key) for row in rows if row.staging_key is not None]
        gathered[rollout_id] = read_evidence(finished.result, rows, records)
    return gathered
