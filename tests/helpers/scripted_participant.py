"""A participant whose every answer a test decides: what the control plane is tested against.

Its work items are named attempts. An item blocks while it is in `running`, is exported when it is in
`parked`, and can be held in its clean-up while it is being retired.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import trio

from gymtrio.checkpoint.participant import Export, Settling
from gymtrio.errors import GymtrioError, InvalidPhase
from gymtrio.ids import CaptureKey, EpisodeId, RolloutId
from gymtrio.participants.base import ParticipantBase, make_record
from gymtrio.participants.restored import Restored
from gymtrio.storage.records import Record
from gymtrio.wire.codec import unpack
from gymtrio.wire.control import Kind, Report
from tests.helpers.memory_archive import Door


@attrs.frozen
class ScriptedRecord:
    note: str


class ScriptedParticipant(ParticipantBase):
    """Implements `gymtrio.checkpoint.participant.Participant`."""

    kind = Kind.ENVIRONMENT

    def __init__(self, instance: str = "scripted", *, kind: Kind = Kind.ENVIRONMENT) -> None:
        super().__init__(instance)
        self.kind = kind  # type: ignore[misc]
        self.running: set[EpisodeId] = set()
        self.parked: dict[EpisodeId, str] = {}
        self.restored: Restored[str] = Restored()
        self.stopping: set[EpisodeId] = set()
        self.closes = 0
        self.exports = 0
        self.reports = 0
        self.cancels: list[EpisodeId] = []
        self.failure: GymtrioError | None = None
        """Raised at `fail_at`: close, settle, export, install or release."""
        self.fail_at: str | None = None
        self.exporting = Door()
        self.settling = Door()
        self.installing = Door()
        self.cleaning_up = Door()

    def _maybe_fail(self, where: str) -> None:
        if self.failure is not None and self.fail_at == where:
            failure, self.failure = self.failure, None
            raise failure

    def finish(self, episode_id: EpisodeId, note: str) -> None:
        """Running work reaches its boundary and parks."""
        self.running.remove(episode_id)
        self.parked[episode_id] = note
        self.changed.notify()

    def ready(self) -> bool:
        return not self.running and not self.stopping

    def report(self) -> Report:
        self.reports += 1
        blocking = sorted(self.running | self.stopping)
        return Report(
            ready=not blocking,
            blockers=tuple(e.capture_key for e in blocking),
            blocker_count=len(blocking),
        )

    def status_fields(self) -> dict[str, object]:
        return {"restored_pending": self.restored.waiting()}

    def close(self) -> None:
        self.closes += 1
        super().close()
        self._maybe_fail("close")

    async def settle(self, settling: Settling) -> None:
        await self.settling.pass_through()
        self._maybe_fail("settle")

    async def _stand_at_export(self) -> None:
        await self.exporting.pass_through()

    async def export(self, scope: frozenset[CaptureKey] | None) -> Export:
        self.exports += 1
        await self._stand_at_export()
        self._maybe_fail("export")
        waiting = dict(self.restored)
        notes = {
            e: note
            for e, note in sorted((self.parked | waiting).items())
            if scope is None or e.capture_key in scope
        }
        return Export(
            records=[make_record(e, ScriptedRecord(note)) for e, note in notes.items()],
            episode_ids=tuple(e.capture_key for e in notes),
            reply_fields={"notes": len(notes)},
        )

    def unclaimed_outside(self, scope: frozenset[CaptureKey] | None) -> list[EpisodeId]:
        return self.restored.outside(scope)

    async def release(self, episode_ids: Sequence[EpisodeId]) -> None:
        self.restored.drop(episode_ids)
        await trio.lowlevel.checkpoint()

    def check_installable(self) -> None:
        if self.running or self.parked:
            raise InvalidPhase("work is live")

    async def install(
        self,
        records: Sequence[Record],
        scope: Sequence[EpisodeId],
        *,
        execution_epoch: str | None = None,
    ) -> None:
        read = [(record.episode_id, unpack(ScriptedRecord, record.payload)) for record in records]
        await self.installing.pass_through()
        self._maybe_fail("install")
        self.admission.supersede(scope, execution_epoch)
        self.restored.put((e.next_attempt(), record.note) for e, record in read)

    def refuse(self, episode_ids: Sequence[EpisodeId]) -> None:
        self.admission.refuse(episode_ids)
        for episode_id in episode_ids:
            if episode_id in self.running and episode_id not in self.stopping:
                self.stopping.add(episode_id)
                self.cancels.append(episode_id)

    async def retire(self, episode_id: EpisodeId) -> None:
        await self.cleaning_up.pass_through()
        self.running.discard(episode_id)
        self.stopping.discard(episode_id)
        self.parked.pop(episode_id, None)
        self.restored.drop_up_to(episode_id)

    def still_running(self, rollout_ids: Sequence[RolloutId]) -> list[EpisodeId]:
        return sorted(e for e in self.running | self.stopping if e.rollout_id in rollout_ids)
