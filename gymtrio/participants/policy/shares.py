"""The shares of a checkpoint that workers write themselves: the cuts of their calls (STO-6).

First every worker is asked which of the calls that count it has a cut of; then each writes those, and
reports the file. What they were asked is what they write, whoever leaves meanwhile. Staging keys pass
through here; tokens and prefixes do not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import trio

from gymtrio.capture.tokens import StagingKey
from gymtrio.errors import GymtrioError, InvalidCheckpointState
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.books import Books
from gymtrio.participants.policy.connected import Worker, for_each
from gymtrio.participants.policy.link import (
    Nothing,
    PartWritten,
    Survey,
    Surveyed,
    WriteOrder,
    in_slices,
)
from gymtrio.storage.bounds import STOP_GRACE_S
from gymtrio.storage.records import Identity
from gymtrio.storage.slices import LoopSlice
from gymtrio.storage.writer import WrittenPart

LOG = logging.getLogger(__name__)


class Shares:
    """Which cuts the workers have, of one commit; made by `survey`."""

    def __init__(self) -> None:
        self.staging_keys: dict[EpisodeId, tuple[StagingKey, ...]] = {}
        """What the cut of an episode refers to, of those that a worker writes."""
        self._of_worker: dict[Worker, list[EpisodeId]] = {}

    def __bool__(self) -> bool:
        """Any worker has something to write."""
        return bool(self._of_worker)

    def add(
        self, worker: Worker, episode_id: EpisodeId, staging_keys: tuple[StagingKey, ...]
    ) -> None:
        self.staging_keys[episode_id] = staging_keys
        self._of_worker.setdefault(worker, []).append(episode_id)

    async def write(self, checkpoint_dir: str, identity: Identity) -> list[WrittenPart]:
        """Have each worker write its own; see `gymtrio.checkpoint.participant.WriteElsewhere`."""
        order = WriteOrder(
            checkpoint_dir=checkpoint_dir,
            kind=identity.kind,
            instance=identity.instance,
            checkpoint_id=identity.checkpoint_id,
        )
        parts: list[WrittenPart] = []

        async def write(worker: Worker, episodes: list[EpisodeId]) -> None:
            part = (await worker.ask("write", order, PartWritten)).part
            if part.record_count != len(episodes):
                raise InvalidCheckpointState(
                    f"worker {worker.name} wrote {part.record_count} cuts where it had "
                    f"{len(episodes)}"
                )
            keys = tuple(sorted(episode_id.capture_key for episode_id in episodes))
            parts.append(WrittenPart(part, keys))

        try:
            await for_each(write, self._of_worker.items())
        except BaseException:
            await self._discard(order)
            raise
        return parts

    async def _discard(self, order: WriteOrder) -> None:
        """Nothing of a commit remains that came to no end; waits for it within a resume's time."""

        async def discard(worker: Worker, _: object) -> None:
            try:
                await worker.ask("discard", order, Nothing)
            except GymtrioError as error:
                LOG.warning("worker %s may leave a part behind: %s", worker.name, error)

        with trio.CancelScope(shield=True, deadline=trio.current_time() + STOP_GRACE_S):
            await for_each(discard, self._of_worker.items())


async def survey(books: Books, episodes: Iterable[EpisodeId]) -> Shares:
    """Ask the workers which of the latest undelivered calls have a cut (CUT-3).

    Raises:
        GymtrioError: one does not say; the commit must not go on without it (I18).
    """
    latest: dict[Worker, dict[str, EpisodeId]] = {}
    slices = LoopSlice()
    for episode_id in episodes:
        call = books.latest_undelivered(episode_id)
        if call is not None:
            assert isinstance(call.owner, Worker)
            latest.setdefault(call.owner, {})[call.call_id] = episode_id
        await slices.turn()
    shares = Shares()

    async def ask_one(worker: Worker, calls: dict[str, EpisodeId]) -> None:
        begins = True
        for some in in_slices(calls):
            named: dict[str, str] = {call_id: calls[call_id].capture_key for call_id in some}
            message = Survey(begins=begins, calls=named)
            for call_id, keys in (await worker.ask("survey", message, Surveyed)).cuts.items():
                shares.add(worker, calls[call_id], keys)
            begins = False

    await for_each(ask_one, latest.items())
    return shares
