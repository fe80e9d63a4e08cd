"""Waking and stopping thousands without keeping the loop (CTL-10, CTL-15).

Tasks that are woken in one pass of the loop run whole before it looks at I/O again. Whoever has many to
wake decides about all of them in one instant, and has them woken from here, a slice in each pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gymtrio.episodes.signal import Signal
from gymtrio.limits import WAKE_SLICE_TASKS


class Wakes:
    """Calls that each make one task runnable, first come, first served.

    Args:
        added: rung when there is one to make.
    """

    def __init__(self, added: Signal) -> None:
        self._due: deque[Callable[[], object]] = deque()
        self._added = added

    def __bool__(self) -> bool:
        return bool(self._due)

    def add(self, wake: Callable[[], object]) -> None:
        """Have it called soon. It does not raise, and does nothing when it comes too late."""
        self._due.append(wake)
        self._added.notify()

    def make_some(self) -> None:
        """Make those of one pass; the owner lets the loop turn before the next ones."""
        for _ in range(min(len(self._due), WAKE_SLICE_TASKS)):
            self._due.popleft()()
