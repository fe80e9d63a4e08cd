"""A deadline that stands still while its owner is parked."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from gymtrio.episodes.deadline import PausableDeadline


async def test_it_fires_when_its_time_is_used_up(autojump_clock: MockClock) -> None:
    """STEP-5."""
    with trio.CancelScope() as scope:
        PausableDeadline(scope, 5)
        await trio.sleep(100)
    assert scope.cancelled_caught
    assert trio.current_time() == pytest.approx(5)


async def test_paused_time_does_not_count(autojump_clock: MockClock) -> None:
    """STEP-5, I32: what remains is what remained."""
    with trio.CancelScope() as scope:
        deadline = PausableDeadline(scope, 5)
        await trio.sleep(2)
        deadline.pause()
        deadline.pause()
        await trio.sleep(1000)
        assert deadline.paused
        assert deadline.remaining_s() == pytest.approx(3)
        deadline.resume()
        deadline.resume()
        await trio.sleep(100)
    assert scope.cancelled_caught
    assert trio.current_time() == pytest.approx(1005)


async def test_a_scope_that_was_left_already_is_no_harm(autojump_clock: MockClock) -> None:
    """STEP-5: closing and opening reach episodes that have just ended."""
    with trio.CancelScope() as scope:
        deadline = PausableDeadline(scope, 5)
        await trio.sleep(1)
    deadline.pause()
    deadline.resume()
    assert deadline.remaining_s() == pytest.approx(4)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=12))
def test_it_counts_exactly_the_time_it_was_not_paused(spans: list[tuple[bool, int]]) -> None:
    """STEP-5, I32."""

    async def main() -> None:
        with trio.CancelScope() as scope:
            deadline = PausableDeadline(scope, 1000)
            used_s = 0
            for paused, span_s in spans:
                (deadline.pause if paused else deadline.resume)()
                await trio.sleep(span_s)
                used_s += 0 if paused else span_s
                assert deadline.remaining_s() == pytest.approx(1000 - used_s)
        assert not scope.cancelled_caught

    trio.run(main, clock=MockClock(autojump_threshold=0))
