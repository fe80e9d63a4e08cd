"""What the body of an episode works with: steps between boundaries (STEP-2, STEP-3)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Final, Protocol, TypeVar

import trio

T = TypeVar("T")


class StepMode(Enum):
    """Whether a checkpoint waits for a step, or a crash may repeat it (STEP-3)."""

    WAIT = "wait"
    REPLAY = "replay"


class OnClose(Enum):
    """What a close does to a replay step."""

    KEEP = "keep"
    """It goes on; its result is held until resume."""
    CANCEL = "cancel"
    """It is cancelled at once and runs again after resume: for short, safe calls."""


class Steps(Protocol):
    """How a body tells where it can continue and what may happen twice.

    Between two boundaries stands at most one replay step, or any number of wait steps. A lazy boundary
    reads state that must not change before the next boundary, except inside or after a wait step.
    """

    @property
    def continuation(self) -> object:
        """Where the body is to continue, as `boundary` was given it; None: from its input."""
        ...

    async def boundary(self, state: object | Callable[[], object]) -> None:
        """Record where the body can continue, and park here while a checkpoint is open (STEP-2).

        Args:
            state: opaque JSON, or a function that makes it, called at export only.

        Cancelled: the boundary is recorded.
        """
        ...

    async def step(
        self,
        work: Callable[[], Awaitable[T]],
        *,
        mode: StepMode,
        doing: str,
        on_close: OnClose = OnClose.KEEP,
    ) -> T:
        """Run work between two boundaries.

        Args:
            work: called once, or again after each close that cancelled it.
            mode: `WAIT` when a repetition would do harm, `REPLAY` when it would not.
            doing: for blocker lists, such as "verify".
            on_close: for a replay step only.

        Raises:
            whatever `work` raises; from a replay step during a checkpoint only after its resume.
        """
        ...


class Unrecorded:
    """Steps of a body that no checkpoint will ever see: nothing is kept (SET-1)."""

    continuation: Final[object] = None

    async def boundary(self, state: object | Callable[[], object]) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()

    async def step(
        self,
        work: Callable[[], Awaitable[T]],
        *,
        mode: StepMode,
        doing: str,
        on_close: OnClose = OnClose.KEEP,
    ) -> T:
        return await work()
