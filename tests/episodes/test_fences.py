"""Which attempts are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.episodes.fences import Fences
from gymtrio.errors import StaleAttempt
from gymtrio.ids import EpisodeId, RolloutId


def episode(name: str, attempt: int = 0) -> EpisodeId:
    return EpisodeId(RolloutId(name), attempt)


def test_an_attempt_and_the_earlier_ones_are_refused_and_later_ones_are_not() -> None:
    """CTL-5, I11."""
    fences = Fences()
    fences.refuse(episode("r", 2))
    for attempt in (0, 1, 2):
        with pytest.raises(StaleAttempt, match="attempts up to 2"):
            fences.check(episode("r", attempt))
    fences.check(episode("r", 3))
    fences.check(episode("r2"))


def test_forgetting_lifts_the_refusal_of_that_rollout_only() -> None:
    """CTL-12."""
    fences = Fences()
    fences.refuse(episode("a", 5))
    fences.refuse(episode("b", 5))
    fences.forget([RolloutId("a"), RolloutId("never")])
    fences.check(episode("a", 0))
    assert fences.is_stale(episode("b", 5))
    assert len(fences) == 1


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5))))
def test_a_mark_is_the_highest_that_was_ever_set(marks: list[tuple[str, int]]) -> None:
    """CTL-5: it is never lowered (F1)."""
    fences = Fences()
    highest: dict[str, int] = {}
    for name, attempt in marks:
        fences.refuse(episode(name, attempt))
        highest[name] = max(highest.get(name, -1), attempt)
        for known, mark in highest.items():
            assert fences.is_stale(episode(known, mark))
            assert not fences.is_stale(episode(known, mark + 1))
    assert len(fences) == len(highest)
