"""A deadline that stands still while its owner is parked (STEP-5)."""

from __future__ import annotations

import math

import trio


class PausableDeadline:
    """Counts down the deadline of a cancel scope only while it is not paused.

    Invariant: what remains when it is resumed is what remained when it was paused (I32).
    """

    def __init__(self, scope: trio.CancelScope, timeout_s: float) -> None:
        self._scope = scope
        self._remaining_s: float | None = None
        """Set while paused."""
        scope.deadline = trio.current_time() + timeout_s

    @property
    def paused(self) -> bool:
        return self._remaining_s is not None

    def remaining_s(self) -> float:
        if self._remaining_s is not None:
            return self._remaining_s
        return self._scope.deadline - trio.current_time()

    def pause(self) -> None:
        """Stop the count; harmless when it stands already."""
        if self._remaining_s is None:
            self._remaining_s = self._scope.deadline - trio.current_time()
            self._scope.deadline = math.inf

    def resume(self) -> None:
        """Count on; harmless when it counts already."""
        if self._remaining_s is not None:
            self._scope.deadline = trio.current_time() + self._remaining_s
            self._remaining_s = None
