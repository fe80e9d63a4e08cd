"""The checkpoint ids that were resumed here: fenced, and what of them has not ended yet (CTL-4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymtrio.checkpoint.jobs import Job
from gymtrio.ids import CheckpointId
from gymtrio.limits import RESUMED_IDS_REMEMBERED_MAX


class ResumedIds:
    """Remembers the last 64, counted from the last time that each was resumed."""

    def __init__(self) -> None:
        self._stopped: dict[CheckpointId, tuple[Job[Any], ...]] = {}
        self._taken_back: set[CheckpointId] = set()

    def __contains__(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id in self._stopped

    def add(
        self,
        checkpoint_id: CheckpointId,
        stopped: Sequence[Job[Any]] = (),
        *,
        taken_back: bool = False,
    ) -> None:
        """Fence an id.

        Args:
            stopped: its jobs, which may take a while to end; a repeated resume waits for them too.
            taken_back: it was a restore, of which nothing stays.
        """
        self._stopped[checkpoint_id] = (*self._stopped.pop(checkpoint_id, ()), *stopped)
        if taken_back:
            self._taken_back.add(checkpoint_id)
        while len(self._stopped) > RESUMED_IDS_REMEMBERED_MAX:
            oldest = next(iter(self._stopped))
            del self._stopped[oldest]
            self._taken_back.discard(oldest)

    def taken_back(self, checkpoint_id: CheckpointId) -> bool:
        """Whether it was a restore whose state is gone: who resumes it counts on what is not there."""
        return checkpoint_id in self._taken_back

    def stopping(self, checkpoint_id: CheckpointId) -> tuple[Job[Any], ...]:
        """Its jobs that have not ended."""
        still = tuple(job for job in self._stopped.get(checkpoint_id, ()) if not job.ended)
        if checkpoint_id in self._stopped:
            self._stopped[checkpoint_id] = still
        return still
