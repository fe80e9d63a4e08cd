"""Ends the requests that are in work when a server stops, each with an answer (SRV-2)."""

from __future__ import annotations

from typing import Final

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


class InWork:
    """The requests that handlers work on; each in a scope of its own."""

    def __init__(self) -> None:
        self._scopes: dict[trio.CancelScope, None] = {}
        self._none = Signal()
        self.drained = False
        """What would begin now is refused."""

    def __len__(self) -> int:
        return len(self._scopes)

    def enter(self, scope: trio.CancelScope | None = None) -> trio.CancelScope:
        """Begin one request's work.

        Args:
            scope: what its task runs in already; None: one is made, which only a drain cancels.
        """
        scope = scope or trio.CancelScope()
        self._scopes[scope] = None
        if self.drained:
            scope.cancel()
        return scope

    def leave(self, scope: trio.CancelScope) -> None:
        del self._scopes[scope]
        note_end()
        if not self._scopes:
            self._none.notify()

    async def drain(self) -> None:
        """Cancel all of it, now and from now on; wait until it has ended, for `DRAIN_S` at most.

        In slices: a cancelled task runs before the loop looks at I/O again.

        Cancelled: all is cancelled that was so far.
        """
        self.drained = True
        due = list(self._scopes)
        for begin in range(0, len(due), WAKE_SLICE_TASKS):
            for scope in due[begin : begin + WAKE_SLICE_TASKS]:
                scope.cancel()
            await trio.lowlevel.checkpoint()
        with trio.move_on_after(DRAIN_S):
            while self._scopes:
                await self._none.wait()
