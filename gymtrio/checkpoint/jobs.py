"""Joinable jobs: work that may outlive the call that started it (CTL-9).

A job is started once, in the nursery of the participant's owner, and awaited by any number of
calls, each under its own deadline. A call that times out or is cancelled leaves the job alone; a
retry joins it; the owner cancels it or lets it end by its own rule. Nothing is orphaned, because
the nursery ends only after its jobs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import trio

from gymtrio.errors import CheckpointError, DeadlineExceeded, GymtrioError

T = TypeVar("T")


class Job(Generic[T]):
    """One piece of work with any number of waiters.

    A `GymtrioError` is the job's result and goes to its waiters. Anything else is a fault of ours:
    it goes through the nursery and ends the server.
    """

    def __init__(self, name: str, work: Callable[[], Awaitable[T]]) -> None:
        self.name = name
        self._work = work
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._value: list[T] = []
        self._error: GymtrioError | None = None

    @classmethod
    def start(cls, nursery: trio.Nursery, name: str, work: Callable[[], Awaitable[T]]) -> Job[T]:
        job = cls(name, work)
        nursery.start_soon(job._run, name=name)
        return job

    @property
    def ended(self) -> bool:
        """It has succeeded, failed or been cancelled, and nothing of it runs any more."""
        return self._ended.is_set()

    @property
    def error(self) -> GymtrioError | None:
        return self._error

    def cancel(self) -> None:
        """Ask it to stop; `wait_ended` tells when it has."""
        self._scope.cancel()

    async def wait_ended(self) -> None:
        """Wait until nothing of it runs. Cancelled: it goes on."""
        await self._ended.wait()

    async def wait(self, deadline: float) -> T:
        """Join it.

        Args:
            deadline: on trio's clock.

        Raises:
            DeadlineExceeded: the deadline came first; the job goes on.
            CheckpointError: the job was cancelled, by a resume.
            GymtrioError: what the job raised.

        Cancelled: the job goes on.
        """
        if not self.ended:
            # Without a turn of the loop for each of thousands that have ended.
            with trio.move_on_at(deadline):
                await self._ended.wait()
        if not self.ended:
            raise DeadlineExceeded(f"{self.name} did not end before the deadline; it goes on")
        if self._error is not None:
            raise self._error
        if not self._value:
            raise CheckpointError(f"{self.name} was stopped by a resume")
        return self._value[0]

    async def _run(self) -> None:
        try:
            with self._scope:
                self._value.append(await self._work())
        except GymtrioError as error:
            self._error = error
        finally:
            self._ended.set()


async def wait_all_ended(jobs: Sequence[Job[Any]], deadline: float) -> list[Job[Any]]:
    """Wait until nothing of these runs any more, or the deadline has come.

    Args:
        deadline: on trio's clock.

    Returns:
        Those that still run.

    Cancelled: they go on.
    """
    with trio.move_on_at(deadline):
        for job in jobs:
            await job.wait_ended()
    return [job for job in jobs if not job.ended]
