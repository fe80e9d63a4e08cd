"""A wall clock that follows trio's, so that virtual time moves both, and that can jump."""

from __future__ import annotations

from typing import Final

import trio

EPOCH_S: Final = 1_800_000_000.0


class FollowingClock:
    """Implements `gymtrio.ports.WallClock`."""

    def __init__(self) -> None:
        self._start = trio.current_time()
        self._offset_s = 0.0

    def now_s(self) -> float:
        return EPOCH_S + trio.current_time() - self._start + self._offset_s

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back; monotonic time is not touched."""
        self._offset_s += seconds
