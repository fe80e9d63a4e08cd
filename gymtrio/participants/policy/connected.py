"""A connected worker, as the coordinator sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import attrs
import trio

from gymtrio.errors import CheckpointError, CoordinatorUnavailable, GymtrioError
from gymtrio.participants.policy.link import GateState, Settled, WorkerReport, ask
from gymtrio.wire.channel import Channel

K = TypeVar("K")
V = TypeVar("V")
M = TypeVar("M")


@attrs.define(eq=False)
class Worker:
    """One connected worker."""

    name: str
    channel: Channel
    scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    """Cancelled when it is lost: its channel ends."""
    told: GateState | None = None
    report: WorkerReport | None = None
    """Its latest of this generation."""
    settled: Settled | None = None
    """What came of its round in this generation."""

    @property
    def blocking(self) -> int:
        return 0 if self.report is None else self.report.blocking

    async def ask(
        self, kind: str, message: object, reply: type[M], *, deadline: float | None = None
    ) -> M:
        """Call it.

        Raises:
            CheckpointError: it does not answer. Refusal: what it refused with.
        """
        try:
            return await ask(self.channel, kind, message, reply, deadline=deadline)
        except CoordinatorUnavailable as error:
            raise CheckpointError(f"worker {error.detail}") from error


async def for_each(work: Callable[[K, V], Awaitable[None]], items: Iterable[tuple[K, V]]) -> None:
    """Do it for each at once; the first failure stops the others and is raised as it is.

    Raises:
        GymtrioError: what one of them raised.
    """
    failures: list[GymtrioError] = []

    async def one(key: K, value: V) -> None:
        try:
            await work(key, value)
        except GymtrioError as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for key, value in items:
            nursery.start_soon(one, key, value)
    if failures:
        raise failures[0]
