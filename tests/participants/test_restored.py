"""Restored entries against an obvious model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.participants.restored import Restored

EPISODES = st.builds(EpisodeId, st.sampled_from(["a", "b", "c"]).map(RolloutId), st.integers(0, 3))
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put_all", "claim", "give_back", "drop", "drop_up_to"]), EPISODES
    ),
    max_size=30,
)


@given(STEPS)
def test_restored_entries_are_a_mapping_by_attempt(steps: list[tuple[str, EpisodeId]]) -> None:
    """ENV-4, AGT-5: whatever is put in and not claimed is there, in order, once."""
    restored: Restored[int] = Restored()
    model: dict[EpisodeId, int] = {}
    for number, (step, episode_id) in enumerate(steps):
        if step in ("put", "put_all", "give_back"):
            if step == "put":
                restored.put([(episode_id, number)])
            elif step == "put_all":
                others: Restored[int] = Restored()
                others.put([(episode_id, number)])
                restored.put_all(others)
            else:
                restored.give_back(episode_id, number)
            model[episode_id] = number
        elif step == "claim":
            assert restored.claim(episode_id) == model.pop(episode_id, None)
        elif step == "drop":
            expected = [model.pop(episode_id)] if episode_id in model else []
            assert restored.drop([episode_id]) == expected
        else:
            gone = [
                e
                for e in model
                if e.rollout_id == episode_id.rollout_id and e.attempt <= episode_id.attempt
            ]
            assert sorted(restored.drop_up_to(episode_id)) == sorted(model.pop(e) for e in gone)
        assert list(restored) == sorted(model.items())
        assert len(restored) == len(model)
        assert restored.waiting() == sorted(e.capture_key for e in model)
        assert restored.waiting(2) == restored.waiting()[:2]
        assert (episode_id in restored) == (episode_id in model)
        assert restored.peek(episode_id) == model.get(episode_id)
        scope = frozenset(e.capture_key for e in model if e.attempt == 0)
        assert restored.outside(scope) == sorted(e for e in model if e.attempt)
        assert restored.outside(None) == []
