"""Which attempts are refused (CTL-5), and which executions of an attempt (HARD-11).

A checkpoint that is restored twice continues under the same attempt twice. What tells the two
executions apart is the epoch that each restore issues: (rollout, attempt, epoch) is the fence.

Invariant F1: the mark of a rollout only rises, until it is forgotten.
Invariant F2: a mark is raised before any stopping of what it refuses begins.
Invariant F3: the epoch of a replacement attempt is that of the last restore that made it; it is
recorded in the instant in which the mark below it is raised, and lasts as long.
Invariant F4: a replacement attempt that has ended and was answered does not run again: what it began
with is used, and from its input it would do what was done before (I5). A later restore brings it back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from gymtrio.errors import StaleAttempt
from gymtrio.ids import EpisodeId, RolloutId

# A tuple, since a restore makes thousands in one instant.
_Execution: TypeAlias = tuple[int | None, str | None, bool]
"""The replacement attempt, its epoch, and whether it has ended and was answered (F4)."""

_NONE: Final[_Execution] = (None, None, False)


class Fences:
    """The highest refused attempt of each rollout, and the execution of the one that replaced it."""

    def __init__(self) -> None:
        self._refused: dict[RolloutId, int] = {}
        self._executions: dict[RolloutId, _Execution] = {}
        """As the last restore made them."""

    def __len__(self) -> int:
        return len(self._refused)

    def refuse(self, episode_id: EpisodeId) -> None:
        """Refuse this attempt and the earlier ones from now on."""
        if episode_id.attempt > self._refused.get(episode_id.rollout_id, -1):
            self._refused[episode_id.rollout_id] = episode_id.attempt

    def supersede(self, episode_ids: Iterable[EpisodeId], epoch: str | None) -> None:
        """Refuse restored attempts; their next ones are executions of this epoch from now on.

        Args:
            epoch: None: the restore named none. Then no execution that names one is the current one.
        """
        refused, executions = self._refused, self._executions
        for episode_id in episode_ids:
            rollout_id, attempt = episode_id.rollout_id, episode_id.attempt
            # Attempts that stand below the mark are refused whatever their epoch: the highest counts.
            if attempt >= refused.get(rollout_id, -1):
                refused[rollout_id] = attempt
                executions[rollout_id] = (attempt + 1, epoch, False)

    def end(self, episode_id: EpisodeId) -> None:
        """An attempt has ended and was answered (F4); of one that no restore made nothing is noted."""
        attempt, epoch, _ = self._executions.get(episode_id.rollout_id, _NONE)
        if attempt == episode_id.attempt:
            self._executions[episode_id.rollout_id] = (attempt, epoch, True)

    def epoch_of(self, episode_id: EpisodeId, otherwise: str | None = None) -> str | None:
        """The epoch of this attempt's current execution; None: the restore that made it gave none.

        Args:
            otherwise: that of an attempt which no restore made here.
        """
        attempt, epoch, _ = self._executions.get(episode_id.rollout_id, _NONE)
        return epoch if attempt == episode_id.attempt else otherwise

    def is_stale(self, episode_id: EpisodeId) -> bool:
        return episode_id.attempt <= self._refused.get(episode_id.rollout_id, -1)

    def next_stale(self, episode_ids: Iterable[EpisodeId]) -> list[EpisodeId]:
        """Those of which the attempt after this one is refused already."""
        if not self._refused:
            return []
        return [e for e in episode_ids if e.attempt < self._refused.get(e.rollout_id, -1)]

    def check(self, episode_id: EpisodeId, epoch: str | None = None) -> None:
        """
        Args:
            epoch: the execution that the caller says it belongs to; None: it does not know.

        Raises:
            StaleAttempt: the attempt is refused, its execution was superseded, or it is over.
        """
        if self.is_stale(episode_id):
            mark = self._refused[episode_id.rollout_id]
            raise StaleAttempt(
                f"{episode_id} was retired or superseded: attempts up to {mark} are refused"
            )
        self.check_execution(episode_id, epoch)
        attempt, _, over = self._executions.get(episode_id.rollout_id, _NONE)
        if over and attempt == episode_id.attempt:
            raise StaleAttempt(f"{episode_id} has ended, and was answered")

    def check_execution(self, episode_id: EpisodeId, epoch: str | None) -> None:
        """As `check`, of the epoch alone.

        An attempt that no restore made here has no epoch to compare with: it passes.
        """
        attempt, current, _ = self._executions.get(episode_id.rollout_id, _NONE)
        if epoch is not None and attempt == episode_id.attempt and epoch != current:
            raise StaleAttempt(
                f"{episode_id}: this execution (epoch {epoch}) was superseded by a later restore"
            )

    def forget(self, rollout_ids: Iterable[RolloutId]) -> None:
        """Drop the marks and epochs of rollouts of which nothing can arrive any more."""
        for rollout_id in rollout_ids:
            self._refused.pop(rollout_id, None)
            self._executions.pop(rollout_id, None)
