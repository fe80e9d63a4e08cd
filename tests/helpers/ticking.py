"""A clock that goes on whenever it is looked at: work in slices comes to the end of each one."""

from __future__ import annotations

import trio

from gymtrio.limits import LOOP_SLICE_S


class TickingClock(trio.abc.Clock):
    """Two looks are farther apart than a slice; a pause of the loop is over at once."""

    def __init__(self) -> None:
        self._now = 0.0

    def start_clock(self) -> None:
        """It has no beginning."""

    def current_time(self) -> float:
        self._now += 2 * LOOP_SLICE_S
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        # Whoever waits for a time is woken when it has come by looking.
        return 0.0 if deadline < float("inf") else float("inf")
