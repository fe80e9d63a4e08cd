"""Which attempts are refused (CTL-5).

Invariant F1: the mark of a rollout only rises, until it is forgotten.
Invariant F2: a mark is raised before any stopping of what it refuses begins.
"""

from __future__ import annotations

from collections.abc import Iterable

from gymtrio.errors import StaleAttempt
from gymtrio.ids import EpisodeId, RolloutId


class Fences:
    """The highest refused attempt of each rollout."""

    def __init__(self) -> None:
        self._refused: dict[RolloutId, int] = {}

    def __len__(self) -> int:
        return len(self._refused)

    def refuse(self, episode_id: EpisodeId) -> None:
        """Refuse this attempt and the earlier ones from now on."""
        mark = self._refused.get(episode_id.rollout_id, -1)
        self._refused[episode_id.rollout_id] = max(mark, episode_id.attempt)

    def is_stale(self, episode_id: EpisodeId) -> bool:
        return episode_id.attempt <= self._refused.get(episode_id.rollout_id, -1)

    def check(self, episode_id: EpisodeId) -> None:
        """
        Raises:
            StaleAttempt: the attempt is refused.
        """
        if self.is_stale(episode_id):
            mark = self._refused[episode_id.rollout_id]
            raise StaleAttempt(
                f"{episode_id} was retired or superseded: attempts up to {mark} are refused"
            )

    def forget(self, rollout_ids: Iterable[RolloutId]) -> None:
        """Drop the marks of rollouts of which nothing can arrive any more."""
        for rollout_id in rollout_ids:
            self._refused.pop(rollout_id, None)
