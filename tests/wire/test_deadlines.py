"""Many deadlines, of which hardly any ever comes."""

from __future__ import annotations

import math
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from gymtrio.wire.deadlines import KEPT_MIN, Deadlines


@given(st.lists(st.tuples(st.floats(0, 9), st.booleans()), max_size=30), st.floats(0, 9))
def test_what_is_due_is_open_and_in_order(added: list[tuple[float, bool]], now: float) -> None:
    calls = {number for number, (_, is_open) in enumerate(added) if is_open}
    due: list[int] = []
    deadlines = Deadlines(calls)
    for number, (at, _) in enumerate(added):
        deadlines.add(at, number, partial(due.append, number))
    deadlines.end_due(now)
    assert sorted(due) == sorted(number for number in calls if added[number][0] <= now)
    assert [added[number][0] for number in due] == sorted(added[number][0] for number in due)
    assert deadlines.next > now


def test_nothing_is_due_when_there_is_nothing() -> None:
    deadlines = Deadlines(set())
    deadlines.end_due(9.0)
    assert deadlines.next == math.inf


def test_deadlines_of_calls_that_ended_are_forgotten() -> None:
    """I34: a call a millisecond, each allowed a day, leaves nothing."""
    calls: set[int] = set()
    deadlines = Deadlines(calls)
    for number in range(10 * KEPT_MIN):
        calls.add(number)
        deadlines.add(86_400.0 + number, number, print)
        calls.discard(number)
    calls.add(-1)
    deadlines.add(math.inf, -1, print)
    assert len(deadlines._heap) <= KEPT_MIN + 4
