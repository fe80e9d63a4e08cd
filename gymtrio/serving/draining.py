"""Ends the requests that are in work when a server stops, each with an answer (SRV-2)."""

from __future__ import annotations

from typing import Final, Protocol

import trio

from gymtrio.episodes.signal import Signal
from gymtrio.limits import CLEANUP_S_MAX, WAKE_SLICE_TASKS
from gymtrio.serving.garbage import note_end

DRAIN_S: Final = CLEANUP_S_MAX + 1.0
"""What is cancelled at the end of the grace has this long to clean up."""

LAST_ANSWERS_S: Final = 1.0
"""After that, connections are left open as long as one of them at least has ended within this time,"""

LAST_ANSWERS_S_MAX: Final = 10.0
"""and no longer: 16,000 answers take some seconds, on a busy machine."""

DRAIN_S_MAX: Final = DRAIN_S + LAST_ANSWERS_S_MAX
"""From the end of the grace to the end of the last connection."""


class Cancellable(Protocol):
    """What ends the work on one request at its next suspension: a cancel scope, or a call."""

    def cancel(self) -> None: ...


class InWork:
    """The requests that handlers work on; each is cancelled on its own."""

    def __init__(self) -> None:
        self._works: dict[Cancellable, None] = {}
        self._none = Signal()
        self.drained = False
        """What would begin now is refused."""

    def __len__(self) -> int:
        return len(self._works)

    def enter(self, work: Cancellable) -> None:
        """Begin one request's work; a drain cancels it."""
        self._works[work] = None
        if self.drained:
            work.cancel()

    def leave(self, work: Cancellable) -> None:
        del self._works[work]
        note_end()
        if self.drained and not self._works:
            self._none.notify()

    async def drain(self) -> None:
        """Cancel all of it, now and from now on; wait until it has ended, for `DRAIN_S` at most.

        In slices: a cancelled task runs before the loop looks at I/O again.

        Cancelled: all is cancelled that was so far.
        """
        self.drained = True
        due = list(self._works)
        for begin in range(0, len(due), WAKE_SLICE_TASKS):
            for work in due[begin : begin + WAKE_SLICE_TASKS]:
                # One that has ended meanwhile is being answered.
                if work in self._works:
                    work.cancel()
            await trio.lowlevel.checkpoint()
        with trio.move_on_after(DRAIN_S):
            while self._works:
                await self._none.wait()
