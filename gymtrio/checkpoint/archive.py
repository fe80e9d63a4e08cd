"""Where checkpoints are kept, as the control plane sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from typing import Protocol

import attrs

from gymtrio.checkpoint.participant import Export
from gymtrio.ids import CaptureKey, CheckpointId, EpisodeId
from gymtrio.storage.publication import Publication
from gymtrio.storage.records import Identity, Record
from gymtrio.storage.writer import WrittenPart
from gymtrio.wire.control import Kind


@attrs.frozen(kw_only=True)
class Loaded:
    """A verified checkpoint of one participant, reduced to the scope."""

    checkpoint_id: CheckpointId
    """Under which it was committed."""
    records: MutableSequence[Record]
    """By capture key; whoever installs them takes them out."""
    manifest_fields: dict[str, object]


class PartWriter(Protocol):
    """Writes parts of a checkpoint that another process publishes (STO-6)."""

    async def write_part(
        self, checkpoint_dir: str, identity: Identity, records: Iterable[Record], section: str
    ) -> WrittenPart | None:
        """Write one part; None: there are no records, and no file.

        Raises, Cancelled: see `Archive.write`.

        Durable: after return, the part; whoever asked must publish it or have it removed.
        """
        ...

    async def remove_parts(
        self, checkpoint_dir: str, identity: Identity, names: Sequence[str]
    ) -> None:
        """Remove parts that nobody will publish; best effort.

        Raises:
            InvalidCheckpointState: the directory is none that checkpoints may be in.
        """
        ...


class Archive(Protocol):
    """Reads and writes one participant's part of checkpoints."""

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
        """Write an export manifest-last.

        Returns:
            The manifest as JSON.

        Raises:
            DirectoryRefused: before anything was begun.
            InvalidCheckpointState: the state is not JSON, or the disk failed; nothing of it can be
                read afterwards.

        Cancelled: before publication nothing remains; after it has begun it is finished.

        Durable: after return, the manifest and every byte it names.
        """
        ...

    async def read(
        self,
        checkpoint_dir: str,
        *,
        kind: Kind,
        instance: str,
        scope: Mapping[CaptureKey, EpisodeId],
    ) -> Loaded:
        """Verify the whole part and give the records of the scope.

        Raises:
            InvalidCheckpointState: it is missing, damaged, foreign or newer; the detail says which.
        """
        ...
