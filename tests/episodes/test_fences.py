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


def test_only_the_execution_of_the_last_restore_passes() -> None:
    """HARD-11: who names none passes, as an outside client does not know it."""
    fences = Fences()
    fences.supersede([episode("r")], "e1")
    fences.check(episode("r", 1), "e1")
    fences.supersede([episode("r")], "e2")
    with pytest.raises(StaleAttempt, match="epoch e1.*superseded"):
        fences.check(episode("r", 1), "e1")
    fences.check(episode("r", 1), "e2")
    fences.check(episode("r", 1))
    assert fences.epoch_of(episode("r", 1)) == "e2"


def test_an_attempt_that_no_restore_made_has_no_epoch_to_compare_with() -> None:
    """HARD-11: its own mark decides, as before."""
    fences = Fences()
    fences.supersede([episode("r")], "e1")
    with pytest.raises(StaleAttempt, match="attempts up to 0"):
        fences.check(episode("r"), "e1")
    fences.check(episode("r", 2), "another")
    fences.check(episode("s", 1), "another")
    assert fences.epoch_of(episode("r")) is fences.epoch_of(episode("r", 2)) is None


def test_a_restore_without_an_epoch_supersedes_those_with_one() -> None:
    """HARD-11: an older controller restores again what a newer one had restored."""
    fences = Fences()
    fences.supersede([episode("r")], "e1")
    fences.supersede([episode("r")], None)
    with pytest.raises(StaleAttempt):
        fences.check(episode("r", 1), "e1")
    fences.check(episode("r", 1))


def test_forgetting_drops_the_epoch_and_retiring_keeps_it() -> None:
    """HARD-11, CTL-12."""
    fences = Fences()
    fences.supersede([episode("r")], "e2")
    fences.refuse(episode("s"))
    with pytest.raises(StaleAttempt):
        fences.check(episode("r", 1), "e1")
    fences.forget([RolloutId("r")])
    fences.check(episode("r", 1), "e1")
    assert fences.epoch_of(episode("r", 1)) is None


@given(st.permutations([0, 1, 2]), st.integers(0, 4))
def test_of_several_restored_attempts_the_latest_has_the_epoch(
    order: list[int], retired: int
) -> None:
    """HARD-11, F3: whatever the order of the scope, and whatever was retired before."""
    fences = Fences()
    fences.refuse(episode("r", retired))
    fences.supersede([episode("r", attempt) for attempt in order], "e1")
    current = [attempt for attempt in range(6) if fences.epoch_of(episode("r", attempt))]
    assert current == ([3] if retired <= 2 else [])
    assert all(not fences.is_stale(episode("r", attempt)) for attempt in current)
