"""What the four kinds of participants share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gymtrio.checkpoint.participant import Settling
from gymtrio.episodes.admission import Admission
from gymtrio.episodes.signal import Signal
from gymtrio.ids import CaptureKey, EpisodeId, RolloutId
from gymtrio.storage.records import Record
from gymtrio.wire.codec import pack
from gymtrio.wire.control import Kind


class ParticipantBase:
    """Gate, bell and the defaults of `gymtrio.checkpoint.participant.Participant`.

    Args:
        instance: the server's configured name; names its directory in a checkpoint.
    """

    kind: ClassVar[Kind]

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.admission = Admission()
        self.changed = Signal()

    def close(self) -> None:
        self.admission.close()

    def open(self) -> None:
        self.admission.open()

    async def settle(self, settling: Settling) -> None:
        """Nothing to do on the way to readiness."""

    async def free_outside(self, episode_ids: Sequence[CaptureKey]) -> None:
        """Its state holds nothing outside the process."""

    def status_fields(self) -> dict[str, object]:
        return {}

    def forget(self, rollout_ids: Sequence[RolloutId]) -> None:
        self.admission.fences.forget(rollout_ids)

    async def run(self) -> None:
        await self.admission.run()


def make_record(episode_id: EpisodeId, content: object) -> Record:
    """Encode a participant's record (an attrs value whose opaque state is bytes)."""
    return Record(episode_id, pack(content))
