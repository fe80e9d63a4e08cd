"""Deadlines of control calls: absolute on the wire, monotonic inside (CTL-8)."""

from __future__ import annotations

import trio

from gymtrio.errors import DeadlineExceeded, InvalidRequest
from gymtrio.limits import DEADLINE_AHEAD_S_MAX
from gymtrio.ports import WallClock


def monotonic_deadline(deadline_ts: float, wall_clock: WallClock) -> float:
    """Translate a deadline once, on arrival; a later jump of the wall clock then changes nothing.

    Returns:
        The deadline on trio's clock.

    Raises:
        DeadlineExceeded: it is past.
        InvalidRequest: it is more than 24 h ahead.
    """
    ahead_s = deadline_ts - wall_clock.now_s()
    if ahead_s <= 0:
        raise DeadlineExceeded(f"deadline_ts is {-ahead_s:.3f} s past")
    if ahead_s > DEADLINE_AHEAD_S_MAX:
        raise InvalidRequest(
            f"deadline_ts is {ahead_s:.0f} s ahead, limit {DEADLINE_AHEAD_S_MAX:.0f}"
        )
    return trio.current_time() + ahead_s
