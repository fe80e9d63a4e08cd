"""Things by the attempt they belong to, so that a retirement finds its own without a scan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from gymtrio.ids import EpisodeId, RolloutId

T = TypeVar("T")


class ByRollout(Generic[T]):
    """A multimap from attempts to hashable things; each thing is in it at most once."""

    def __init__(self) -> None:
        self._things: dict[RolloutId, dict[T, EpisodeId]] = {}

    def add(self, episode_id: EpisodeId, thing: T) -> None:
        self._things.setdefault(episode_id.rollout_id, {})[thing] = episode_id

    def remove(self, episode_id: EpisodeId, thing: T) -> None:
        """Take out what was added under this attempt; harmless when it is out already."""
        things = self._things.get(episode_id.rollout_id, {})
        if things.pop(thing, None) is not None and not things:
            del self._things[episode_id.rollout_id]

    def up_to(self, episode_id: EpisodeId) -> list[T]:
        """What belongs to this attempt and the earlier ones of its rollout."""
        things = self._things.get(episode_id.rollout_id, {})
        return [thing for thing, owner in things.items() if owner.attempt <= episode_id.attempt]

    def of(self, rollout_ids: Iterable[RolloutId]) -> Iterator[tuple[EpisodeId, T]]:
        """Everything of these rollouts, with its attempt."""
        for rollout_id in rollout_ids:
            for thing, owner in self._things.get(rollout_id, {}).items():
                yield owner, thing
