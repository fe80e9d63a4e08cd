"""The index from rollouts to their things."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gymtrio.episodes.by_rollout import ByRollout
from gymtrio.ids import EpisodeId, RolloutId

EPISODES = st.builds(EpisodeId, st.sampled_from(["a", "b"]).map(RolloutId), st.integers(0, 3))


@given(st.lists(st.tuples(st.booleans(), EPISODES, st.integers(0, 4))))
def test_it_is_a_set_of_pairs(events: list[tuple[bool, EpisodeId, int]]) -> None:
    """CTL-12: a retirement finds what belongs to its rollout, up to its attempt."""
    index: ByRollout[tuple[EpisodeId, int]] = ByRollout()
    obvious: set[tuple[EpisodeId, int]] = set()
    for add, episode_id, number in events:
        thing = (episode_id, number)
        if add:
            index.add(episode_id, thing)
            obvious.add(thing)
        else:
            index.remove(episode_id, thing)
            obvious.discard(thing)
        for name in ("a", "b"):
            rollout = RolloutId(name)
            assert {thing for _, thing in index.of([rollout])} == {
                thing for thing in obvious if thing[0].rollout_id == rollout
            }
            for attempt in range(4):
                assert set(index.up_to(EpisodeId(rollout, attempt))) == {
                    thing
                    for thing in obvious
                    if thing[0].rollout_id == rollout and thing[0].attempt <= attempt
                }
