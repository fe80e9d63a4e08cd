"""A process that is one of several workers of a policy server: its link to the coordinator.

Control calls that reach it, since the port is shared, are passed on and answered from there (WRK-1).
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from gymtrio.background import open_background
from gymtrio.checkpoint.directory_archive import DirectoryArchive
from gymtrio.errors import HostError, TransportError
from gymtrio.json_text import load_json
from gymtrio.limits import DEADLINE_AHEAD_S_MAX
from gymtrio.participants.policy.link import CONTROL_KIND, METRICS_KIND, WORKER_ROLE, request
from gymtrio.participants.policy.worker import PolicyWorker
from gymtrio.ports import WallClock
from gymtrio.serving.host import S, ServiceHost
from gymtrio.serving.workers import COORDINATOR_VARIABLE, WORKER_VARIABLE, instance_of
from gymtrio.storage.root import CheckpointRoot
from gymtrio.wire.control import STATUS
from gymtrio.wire.messages import Hello
from gymtrio.wire.unix import connect_unix

_log = logging.getLogger(__name__)


_DEADLINE_TS_MAX: Final = 1e12
"""Far beyond what any clock says, and within what a float holds."""

FORWARDED_STATUS_S: Final = 5.0
"""A coordinator answers at once; one that stands still is known to do so only much later."""


class CoordinatorLost(HostError):
    """The connection to the coordinator has ended: this process is of no use any more (WRK-5)."""


@attrs.frozen
class WorkerPlace:
    """Which worker of whom a process is."""

    coordinator: str
    """Path of its socket."""
    name: str
    instance: str
    """Which incarnation of it."""

    @classmethod
    def of_environment(cls) -> WorkerPlace | None:
        """As the variables say; None: it has no coordinator."""
        coordinator = os.environ.get(COORDINATOR_VARIABLE)
        if coordinator is None:
            return None
        instance = instance_of(os.getpid())
        return cls(coordinator, os.environ.get(WORKER_VARIABLE, instance), instance)


def part_writer(host: ServiceHost[S]) -> DirectoryArchive:
    """What writes a worker's share of a checkpoint (STO-6)."""
    assert host.checkpoint.root is not None, "checked when the deployment was read"
    return DirectoryArchive(host.disk, CheckpointRoot(host.checkpoint.root), host.randomness)


async def reach(place: WorkerPlace) -> trio.SocketStream:
    """Connect to the coordinator.

    Raises:
        HostError: nobody listens there, or not of this user.
    """
    try:
        return await connect_unix(place.coordinator)
    except OSError as error:
        raise HostError(
            f"the coordinator at {place.coordinator} cannot be reached: {error.strerror or error}"
        ) from None


@asynccontextmanager
async def linked(
    worker: PolicyWorker, stream: trio.abc.Stream, *, name: str, instance: str
) -> AsyncIterator[None]:
    """Be a worker of whoever is at the other end, for the time of the block.

    Args:
        name: which worker of the server it is; `instance`: which incarnation of it.

    Raises:
        ExceptionGroup: of `CoordinatorLost`; the block was cancelled for it.
    """
    me = Hello(role=WORKER_ROLE, name=name, instance=instance)
    async with open_background() as nursery:
        await nursery.start(_serve, worker, stream, me)
        yield


async def _serve(
    worker: PolicyWorker,
    stream: trio.abc.Stream,
    me: Hello,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """
    Raises:
        CoordinatorLost: it has ended.
    """
    try:
        why = await worker.serve(stream, me=me, task_status=task_status)
    except TransportError as error:
        why = str(error)
    raise CoordinatorLost(f"the coordinator is gone ({why}); this worker ends")


async def forward_control(
    worker: PolicyWorker, wall_clock: WallClock, operation: str, body: bytes
) -> bytes:
    """Have a control call served by the coordinator.

    Raises:
        CoordinatorUnavailable: it cannot be reached, or did not answer when it should have.
        Refusal: what it answered.
    """
    deadline = trio.current_time() + FORWARDED_STATUS_S
    if operation != STATUS:
        # The answer of one that waits until its deadline still has to come.
        deadline += max(0.0, _ahead_s(body, wall_clock))
    return await request(
        worker.link.channel, CONTROL_KIND, body, head=operation.encode(), deadline=deadline
    )


def _ahead_s(body: bytes, wall_clock: WallClock) -> float:
    """How far the deadline of a control body is ahead; 0: it has none, as its refusal will say."""
    try:
        plain = load_json(body)
    except (ValueError, RecursionError):
        return 0.0
    deadline_ts = plain.get("deadline_ts") if isinstance(plain, dict) else None
    if not isinstance(deadline_ts, int | float) or abs(deadline_ts) > _DEADLINE_TS_MAX:
        return 0.0
    return min(deadline_ts - wall_clock.now_s(), DEADLINE_AHEAD_S_MAX)


async def metrics_of_coordinator(worker: PolicyWorker) -> bytes:
    """What the control plane of the server tells of itself.

    Raises:
        CoordinatorUnavailable: it cannot be reached.
    """
    return await request(worker.link.channel, METRICS_KIND, b"")
