"""An archive in memory, with the promises of a real one and doors that a test can hold shut.

Fault model: everything that was written and published stays; nothing that was not published can be
read. What a test holds shut waits there until it is let go or cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import trio

from gymtrio.checkpoint.archive import Loaded
from gymtrio.checkpoint.participant import Export
from gymtrio.errors import CheckpointError, InvalidCheckpointState
from gymtrio.ids import CaptureKey, CheckpointId, EpisodeId
from gymtrio.storage.publication import Publication
from gymtrio.storage.records import Record
from gymtrio.wire.control import Kind


class Door:
    """Open unless a test shuts it; tells when somebody stands before it."""

    def __init__(self) -> None:
        self.reached = trio.Event()
        self._opened: trio.Event | None = None

    def shut(self) -> None:
        self.reached = trio.Event()
        self._opened = trio.Event()

    def let_go(self) -> None:
        assert self._opened is not None
        self._opened.set()
        self._opened = None

    async def pass_through(self) -> None:
        self.reached.set()
        if self._opened is not None:
            await self._opened.wait()


@attrs.frozen
class _Part:
    checkpoint_id: CheckpointId
    records: tuple[Record, ...]
    fields: dict[str, object]


class MemoryArchive:
    """Implements `gymtrio.checkpoint.archive.Archive`."""

    def __init__(self) -> None:
        self.parts: dict[tuple[str, str, str], _Part] = {}
        self.writes = 0
        """Writes that were begun."""
        self.failure: CheckpointError | None = None
        """Raised by the next writes and reads instead of doing them."""
        self.writing = Door()
        """Before publication."""
        self.publishing = Door()
        """After publication has begun."""
        self.reading = Door()

    async def write(
        self,
        checkpoint_dir: str,
        *,
        kind: Kind,
        instance: str,
        checkpoint_id: CheckpointId,
        export: Export,
        publication: Publication,
    ) -> dict[str, object]:
        self.writes += 1
        records = tuple(record for record in export.records if record is not None)
        part = _Part(checkpoint_id, records, export.manifest_fields)
        await self.writing.pass_through()
        if self.failure is not None:
            raise self.failure
        if not publication.begin():
            raise CheckpointError(f"{checkpoint_id}: the write was stopped by a resume")
        try:
            with trio.CancelScope(shield=True):
                await self.publishing.pass_through()
            where = (checkpoint_dir, kind.value, instance)
            if self.parts.setdefault(where, part) != part:
                raise InvalidCheckpointState(f"{checkpoint_dir} already holds a different commit")
        finally:
            publication.end()
        return {
            "kind": kind.value,
            "instance": instance,
            "checkpoint_id": checkpoint_id,
            "record_count": len(part.records),
            "fields": export.manifest_fields,
        }

    async def read(
        self,
        checkpoint_dir: str,
        *,
        kind: Kind,
        instance: str,
        scope: Mapping[CaptureKey, EpisodeId],
    ) -> Loaded:
        await self.reading.pass_through()
        if self.failure is not None:
            raise self.failure
        part = self.parts.get((checkpoint_dir, kind.value, instance))
        if part is None:
            raise InvalidCheckpointState(f"{checkpoint_dir}: no manifest for {instance}")
        return Loaded(
            checkpoint_id=part.checkpoint_id,
            records=[r for r in part.records if r.episode_id.capture_key in scope],
            manifest_fields=part.fields,
        )
