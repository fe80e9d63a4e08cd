"""A resource that blocking calls work on, and that is surely let go of.

- H1 One owner: while a call is under way, the call; otherwise the task in the block.
- H2 After the block, or after the call that was still under way then, `release` has run exactly once.
- H3 Leaving a cancelled block takes at most the grace of the disk, however long the call hangs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import trio

from gymtrio.storage.bounds import RELEASE_S_MAX
from gymtrio.storage.disk import Disk, Step
from gymtrio.storage.failures import refusing

T = TypeVar("T")


class Resource(ABC):
    """What blocking calls work on, one at a time."""

    stopped = False
    """Set on the loop when whoever wanted the call under way has left. A call of several operations
    looks at it between them, so that nothing it does appears later than it must (I31)."""

    @abstractmethod
    def release(self) -> None:
        """Close what is open and remove what is not to stay; blocks, and raises nothing."""


R = TypeVar("R", bound=Resource)


class Held(Generic[R]):
    """Made by `hold`."""

    def __init__(self, disk: Disk, resource: R) -> None:
        self.resource = resource
        """For what does not block, while no call is under way."""
        self._disk = disk
        self._step: Step[Any] | None = None

    async def run(self, call: Callable[[R], T]) -> T:
        """Run one blocking call on the resource; one at a time.

        Raises:
            InvalidCheckpointState: too many calls hang on this disk already.
            Exception: what the call raises.

        Cancelled: the call may still be under way; the block then deals with it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        return await self.start(call).wait()

    def start(self, call: Callable[[R], T]) -> Step[T]:
        """Begin a call and work on something else meanwhile. The step before has ended by then.

        Raises:
            InvalidCheckpointState: too many calls hang on this disk already.
        """
        assert self._step is None or self._step.done.is_set()
        with refusing("use", "the disk"):
            step = self._disk.start(lambda: call(self.resource))
        self._step = step
        return step

    async def let_go(self) -> None:
        """End the block (H2, H3)."""
        step, closing = self._step, None
        self.resource.stopped = True
        grace_s = self._disk.stop_grace_s
        if trio.current_effective_deadline() > -math.inf:
            grace_s = max(grace_s, RELEASE_S_MAX)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + grace_s):
            if step is not None:
                await step.done.wait()
            closing = self._disk.start(self.resource.release, closing=True)
            await closing.wait()
        if closing is not None:
            return
        assert step is not None
        if step.done.is_set():
            self._disk.start(self.resource.release, closing=True)
        else:
            step.abandon(self.resource.release)


@asynccontextmanager
async def hold(disk: Disk, resource: R) -> AsyncIterator[Held[R]]:
    """Own a resource for a block.

    Cancelled: left within the grace. Normally the resource is released by then; when a system call
    hangs, its thread releases it after that has ended.
    """
    held = Held(disk, resource)
    try:
        yield held
    finally:
        await held.let_go()
