"""The retirements under way at one participant; who asks again joins (CTL-12)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

import trio

from gymtrio.checkpoint.jobs import Job
from gymtrio.checkpoint.opened import OpenCheckpoint
from gymtrio.checkpoint.participant import Participant
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import WAKE_SLICE_TASKS


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
        self._starting: list[Sequence[EpisodeId]] = []
        """What calls have named that are still being started."""

    def start(self, episode_ids: Sequence[EpisodeId]) -> Job[list[Job[None]]]:
        """Begin to retire attempts that are refused already, or join what is under way.

        Returns:
            The job that starts a job for each, thousands in slices of the loop (CTL-15).
        """
        self._starting.append(episode_ids)
        name = f"begin to retire {len(episode_ids)} attempts"
        opened = self._opened()
        # What is being installed in this instant may be there when an attempt's turn comes.
        meets = opened if opened is not None and opened.installing else None
        return Job.start(self._nursery, name, partial(self._start_all, episode_ids, meets))

    async def _start_all(
        self, episode_ids: Sequence[EpisodeId], meets: OpenCheckpoint | None
    ) -> list[Job[None]]:
        jobs: list[Job[None]] = []
        try:
            for begin in range(0, len(episode_ids), WAKE_SLICE_TASKS):
                for episode_id in episode_ids[begin : begin + WAKE_SLICE_TASKS]:
                    jobs.append(self._start(episode_id, meets))
                await trio.lowlevel.checkpoint()
        finally:
            self._starting.remove(episode_ids)
        return jobs

    def _start(self, episode_id: EpisodeId, meets: OpenCheckpoint | None) -> Job[None]:
        job = self._jobs.get(episode_id)
        if job is None:
            name = f"retire {episode_id}"
            job = Job.start(self._nursery, name, partial(self._retire, episode_id, meets))
            self._jobs[episode_id] = job
        return job

    def of(self, rollout_ids: Iterable[RolloutId]) -> list[EpisodeId]:
        """The attempts of these rollouts that are being retired."""
        named = frozenset(rollout_ids)
        retiring = chain(self._jobs, *self._starting)
        return [episode_id for episode_id in retiring if episode_id.rollout_id in named]

    async def _retire(self, episode_id: EpisodeId, meets: OpenCheckpoint | None) -> None:
        """
        Args:
            meets: whose install was under way in the instant of the refusal. One that begins later
                refuses to make what is refused already.
        """
        try:
            if meets is not None:
                await meets.installed()
                # What it put in was not there to be refused.
                self._participant.refuse([episode_id])
            await self._participant.retire(episode_id)
        finally:
            del self._jobs[episode_id]
            self._participant.changed.notify()
