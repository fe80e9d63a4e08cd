"""Checkpoints as directories below the configured root: the archive that servers use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import trio

from gymtrio.checkpoint.archive import Loaded
from gymtrio.checkpoint.participant import Export, WriteElsewhere
from gymtrio.ids import CaptureKey, CheckpointId, EpisodeId
from gymtrio.ports import Randomness
from gymtrio.storage import manifest as manifests
from gymtrio.storage.bounds import RELEASE_S_MAX
from gymtrio.storage.disk import Disk
from gymtrio.storage.publication import Publication
from gymtrio.storage.reader import read_checkpoint
from gymtrio.storage.records import Identity, Record
from gymtrio.storage.root import CheckpointRoot
from gymtrio.storage.writer import (
    WrittenPart,
    publish_manifest,
    remove_parts,
    write_checkpoint,
    write_part,
)
from gymtrio.wire.control import Kind

_NONCE_BYTES = 8


class DirectoryArchive:
    """Implements `Archive` and `PartWriter` of `gymtrio.checkpoint.archive` on a disk.

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
        identity = Identity(kind=kind.value, instance=instance, checkpoint_id=checkpoint_id)
        if export.write_elsewhere is not None:
            parts = await self._write_parts(
                checkpoint_dir, identity, export, export.write_elsewhere, publication
            )
            written = await publish_manifest(
                self._disk,
                place,
                identity,
                parts,
                export.manifest_fields,
                publication=publication,
            )
        else:
            written = await write_checkpoint(
                self._disk,
                place,
                identity,
                export.records,
                export.manifest_fields,
                nonce=self._randomness.hex(_NONCE_BYTES),
                publication=publication,
            )
        return manifests.to_json(written.manifest)

    async def _write_parts(
        self,
        checkpoint_dir: str,
        identity: Identity,
        export: Export,
        write_elsewhere: WriteElsewhere,
        publication: Publication,
    ) -> list[WrittenPart]:
        """Write the parts of several processes; all of them, or none remains."""
        parts: list[WrittenPart] = []
        try:
            parts += await write_elsewhere(checkpoint_dir, identity)
            assert export.section is not None
            own = await self.write_part(checkpoint_dir, identity, export.records, export.section)
        except BaseException:
            publication.end()
            if parts:
                names = [written.part.file for written in parts]
                await self.remove_parts(checkpoint_dir, identity, names)
            raise
        return parts if own is None else [*parts, own]

    async def write_part(
        self,
        checkpoint_dir: str,
        identity: Identity,
        records: Iterable[Record | None],
        section: str,
    ) -> WrittenPart | None:
        """See `gymtrio.checkpoint.archive.PartWriter`."""
        return await write_part(
            self._disk,
            await self._root.accept(self._disk, checkpoint_dir),
            identity,
            records,
            nonce=self._randomness.hex(_NONCE_BYTES),
            section=section,
        )

    async def remove_parts(
        self, checkpoint_dir: str, identity: Identity, names: Sequence[str]
    ) -> None:
        """See `gymtrio.checkpoint.archive.PartWriter`."""
        find = partial(self._root.find, self._disk.files, checkpoint_dir)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + RELEASE_S_MAX):
            await remove_parts(self._disk, find, identity, names)

    async def read(
        self,
        checkpoint_dir: str,
        *,
        kind: Kind,
        instance: str,
        scope: Mapping[CaptureKey, EpisodeId],
    ) -> Loaded:
        place = await self._root.accept(self._disk, checkpoint_dir)
        stored = await read_checkpoint(
            self._disk, place, kind=kind.value, instance=instance, scope=scope
        )
        fields: Mapping[str, object] = stored.manifest.fields
        return Loaded(
            checkpoint_id=CheckpointId(stored.manifest.checkpoint_id),
            records=stored.every_record(),
            manifest_fields=dict(fields),
        )
