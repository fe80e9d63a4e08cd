from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gymtrio.errors import InvalidRolloutId
from gymtrio.ids import EpisodeId, RolloutId, is_safe_id, parse_capture_key, parse_rollout_id
from gymtrio.limits import ATTEMPT_MAX

ROLLOUT_IDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True).filter(is_safe_id)


@given(ROLLOUT_IDS, st.integers(0, 1_000_000))
@example("r-a0", 0)
@example("r-a01", 3)
@example("a-a", 1)
def test_capture_key_and_episode_are_inverses(rollout_id: str, attempt: int) -> None:
    """ID-1, ID-2: an id that is accepted has a key that names it and nothing else."""
    try:
        episode_id = EpisodeId(RolloutId(rollout_id), attempt)
    except InvalidRolloutId:
        with pytest.raises(InvalidRolloutId):
            parse_rollout_id(rollout_id)
        return
    assert parse_capture_key(episode_id.capture_key) == episode_id


@given(ROLLOUT_IDS)
@example("r-a1")
@example("r-a1-a2")
@example("r-a0")
def test_no_two_episodes_share_a_key(key: str) -> None:
    """ID-2: the parse is total on safe text and its result has just this key."""
    try:
        episode_id = parse_capture_key(key)
    except InvalidRolloutId:
        return
    assert episode_id.capture_key == key


@pytest.mark.parametrize(
    "text",
    ["", "-r", ".r", "_r", "r/../x", "r x", "r\n", "é", "r\x00", "x" * 129, "r-a1", "r-a10", "a:b"],
)
def test_other_rollout_ids_are_refused(text: str) -> None:
    """ID-1: with 400 `invalid_rollout_id`."""
    with pytest.raises(InvalidRolloutId) as caught:
        parse_rollout_id(text)
    assert caught.value.status == 400
    assert caught.value.code == "invalid_rollout_id"


@pytest.mark.parametrize("attempt", [-1, 1_000_001, True, 1.0, "1"])
def test_attempts_out_of_range_are_refused(attempt: object) -> None:
    """ID-1."""
    with pytest.raises(InvalidRolloutId):
        EpisodeId(RolloutId("r"), attempt)  # type: ignore[arg-type]


def test_leading_zeros_and_huge_attempts_name_no_attempt() -> None:
    """ID-2: `r-a01` is a rollout of its own; a number of many digits is refused at once."""
    assert parse_capture_key("r-a01") == EpisodeId(RolloutId("r-a01"))
    with pytest.raises(InvalidRolloutId):
        parse_capture_key("r-a" + "9" * 100)


def test_a_restored_episode_is_the_next_attempt() -> None:
    """ID-3."""
    episode_id = EpisodeId(RolloutId("r"), 2)
    following = episode_id.next_attempt()
    assert following == EpisodeId(RolloutId("r"), 3)
    assert following.capture_key == "r-a3"
    assert episode_id.next_attempt() is following


def test_the_last_attempt_has_no_next() -> None:
    """ID-1: attempts are bounded."""
    last = EpisodeId(RolloutId("r"), ATTEMPT_MAX)
    for _ in range(2):
        with pytest.raises(InvalidRolloutId, match=f"attempt {ATTEMPT_MAX + 1} of 'r': 0.."):
            last.next_attempt()


@given(
    st.lists(
        st.builds(EpisodeId, st.sampled_from(["a", "b", "B"]).map(RolloutId), st.integers(0, 20))
    )
)
def test_episodes_are_in_order_of_rollout_then_attempt(episode_ids: list[EpisodeId]) -> None:
    """CTL-7: lists of blockers name the smallest first."""
    assert sorted(episode_ids) == sorted(episode_ids, key=lambda e: (e.rollout_id, e.attempt))
    for one, other in zip(episode_ids, reversed(episode_ids), strict=True):
        assert (one <= other) == (not other < one) == (other >= one)
