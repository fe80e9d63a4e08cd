"""The retirements under way at one participant; who asks again joins (CTL-12)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from gymtrio.checkpoint.jobs import Job
from gymtrio.checkpoint.opened import OpenCheckpoint
from gymtrio.checkpoint.participant import Participant
from gymtrio.ids import EpisodeId, RolloutId


class Retirements:
    """
    Args:
        nursery: of the participant's owner.
        opened: gives the checkpoint that is open now, since its install may still put state in.
    """

    def __init__(
        self,
        participant: Participant,
        nursery: trio.Nursery,
        opened: Callable[[], OpenCheckpoint | None],
    ) -> None:
        self._participant = participant
        self._nursery = nursery
        self._opened = opened
        self._jobs: dict[EpisodeId, Job[None]] = {}

    def start(self, episode_id: EpisodeId) -> Job[None]:
        """Begin to retire an attempt that is refused already, or join what is under way."""
        job = self._jobs.get(episode_id)
        if job is None:
            job = Job.start(self._nursery, f"retire {episode_id}", lambda: self._retire(episode_id))
            self._jobs[episode_id] = job
        return job

    def of(self, rollout_ids: Iterable[RolloutId]) -> list[EpisodeId]:
        """The attempts of these rollouts that are being retired."""
        named = frozenset(rollout_ids)
        return [episode_id for episode_id in self._jobs if episode_id.rollout_id in named]

    async def _retire(self, episode_id: EpisodeId) -> None:
        try:
            while (opened := self._opened()) is not None and opened.installing:
                await opened.installed()
                # What it put in was not there to be refused.
                self._participant.refuse([episode_id])
            await self._participant.retire(episode_id)
        finally:
            del self._jobs[episode_id]
            self._participant.changed.notify()
