"""Checkpoints as directories below the configured root: the archive that servers use."""

from __future__ import annotations

from collections.abc import Mapping

from gymtrio.checkpoint.archive import Loaded
from gymtrio.checkpoint.participant import Export
from gymtrio.ids import CaptureKey, CheckpointId
from gymtrio.ports import Randomness
from gymtrio.storage import manifest as manifests
from gymtrio.storage.disk import Disk
from gymtrio.storage.publication import Publication
from gymtrio.storage.reader import read_checkpoint
from gymtrio.storage.records import Identity
from gymtrio.storage.root import CheckpointRoot
from gymtrio.storage.writer import write_checkpoint
from gymtrio.wire.control import Kind

_NONCE_BYTES = 8


class DirectoryArchive:
    """Implements `gymtrio.checkpoint.archive.Archive` on a disk.

    Args:
        root: below which `checkpoint_dir` is accepted (STO-7).
    """

    def __init__(self, disk: Disk, root: CheckpointRoot, randomness: Randomness) -> None:
        self._disk = disk
        self._root = root
        self._randomness = randomness

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
        place = await self._root.accept(self._disk, checkpoint_dir)
        written = await write_checkpoint(
            self._disk,
            place,
            Identity(kind=kind.value, instance=instance, checkpoint_id=checkpoint_id),
            export.records,
            export.manifest_fields,
            nonce=self._randomness.hex(_NONCE_BYTES),
            publication=publication,
        )
        return manifests.to_json(written.manifest)

    async def read(
        self,
        checkpoint_dir: str,
        *,
        kind: Kind,
        instance: str,
        scope: frozenset[CaptureKey] | None,
    ) -> Loaded:
        place = await self._root.accept(self._disk, checkpoint_dir)
        stored = await read_checkpoint(
            self._disk, place, kind=kind.value, instance=instance, scope=scope
        )
        fields: Mapping[str, object] = stored.manifest.fields
        return Loaded(
            checkpoint_id=CheckpointId(stored.manifest.checkpoint_id),
            records=[stored.records[key] for key in sorted(stored.records)],
            manifest_fields=dict(fields),
        )
