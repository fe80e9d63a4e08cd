"""Writing one participant's checkpoint: streamed, manifest last.

- W1 Nothing is handed on before it is durable: a part after `write_part` returned, the manifest after
  `publish_manifest` returned (I20).
- W2 Until publication begins, every failure and every cancel removes what was written; no temporary
  file stays in any case (STO-2, I22).
- W3 From then on it is finished behind a shield with a deadline, and nothing it names is removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import attrs
import trio

from gymtrio.errors import InvalidCheckpointState, StaleCheckpoint
from gymtrio.ids import CaptureKey
from gymtrio.storage import manifest as manifests
from gymtrio.storage.bounds import PUBLISH_S_MAX, WRITE_BATCH_BYTES
from gymtrio.storage.disk import Disk, Step
from gymtrio.storage.failures import refusing
from gymtrio.storage.held import Held, hold
from gymtrio.storage.manifest import MANIFEST_NAME, Manifest, Part
from gymtrio.storage.manifest_file import ManifestFile
from gymtrio.storage.part_file import PartFile
from gymtrio.storage.publication import Publication
from gymtrio.storage.records import Identity, Record, encode_end, encode_head, encode_record
from gymtrio.storage.root import Place
from gymtrio.storage.slices import LoopSlice

Records = Iterable[Record | None] | AsyncIterable[Record]
"""None: the next one is not made yet, and the loop may turn."""


@attrs.frozen
class WrittenPart:
    """A durable part that no manifest names yet; whoever has this must publish or remove it."""

    part: Part
    episodes: tuple[CaptureKey, ...]
    """Sorted."""


@attrs.frozen
class WrittenCheckpoint:
    """A published checkpoint."""

    manifest: Manifest
    """The one that is on disk: an earlier writer's, where it means the same."""
    episodes: tuple[CaptureKey, ...]
    """Sorted; those of the records that were given."""


async def write_checkpoint(
    disk: Disk,
    place: Place,
    identity: Identity,
    records: Records,
    fields: dict[str, object],
    *,
    nonce: str,
    publication: Publication,
) -> WrittenCheckpoint:
    """Write and publish what one process has.

    Args:
        place: of the checkpoint, not of the participant.
        records: consumed once, as it is written; made lazily, it is asked on the loop in slices.
        fields: JSON for the manifest.
        nonce: unguessable text that no other write uses.
        publication: of this write alone.

    Raises:
        StaleCheckpoint: the publication was stopped; nothing remains.
        InvalidCheckpointState: a record is too large or twice there, the disk refused, or another
            checkpoint was published there. Nothing of it was published, unless the detail says so.
        Exception: what the iterable raises; nothing remains.

    Cancelled: before publication nothing remains, apart from what a system call that hangs still holds;
    after it has begun it is finished first.

    Durable: after return, the manifest and every byte it names.
    """
    try:
        written = await write_part(disk, place, identity, records, nonce=nonce)
    except BaseException:
        publication.end()
        raise
    parts = [] if written is None else [written]
    return await publish_manifest(disk, place, identity, parts, fields, publication=publication)


async def write_part(
    disk: Disk,
    place: Place,
    identity: Identity,
    records: Records,
    *,
    nonce: str,
    section: str | None = None,
) -> WrittenPart | None:
    """Write one file of records.

    Args, Raises: see `write_checkpoint`.
        section: of the part, where the checkpoint has sections.

    Returns:
        The part, which is the caller's to publish or remove; None: no records, no file.

    Cancelled: nothing remains, apart from what a system call that hangs still holds.

    Durable: after return, the file, its name and the way to it.
    """
    where = place.of_participant(identity.kind, identity.instance)
    async with hold(disk, PartFile(disk.files, where)) as file:
        stream = _PartStream(file, identity, section)
        if isinstance(records, AsyncIterable):
            async for record in records:
                if stream.add(record):
                    await stream.go_on()
        else:
            for made in records:
                if stream.is_due if made is None else stream.add(made):
                    await stream.go_on()
        return await stream.end(nonce)


async def publish_manifest(
    disk: Disk,
    place: Place,
    identity: Identity,
    parts: Sequence[WrittenPart],
    fields: dict[str, object],
    *,
    publication: Publication,
) -> WrittenCheckpoint:
    """Publish parts that one or several processes have written (STO-6).

    The parts are this call's from the start: it removes them when nothing of them is published.

    Args, Raises, Cancelled, Durable: see `write_checkpoint`.
    """
    where = place.of_participant(identity.kind, identity.instance)
    names = [written.part.file for written in parts]
    try:
        async with hold(disk, ManifestFile(disk.files, where, names)) as file:
            episodes = _each_once(parts)
            manifest = manifests.build(identity, [written.part for written in parts], fields)
            data = manifests.encode(manifest)
            await file.run(lambda f: f.prepare(data))
            if not publication.begin():
                raise StaleCheckpoint(
                    f"{identity.checkpoint_id} was resumed before it was published"
                )
            with trio.CancelScope(
                shield=True, deadline=trio.current_time() + PUBLISH_S_MAX
            ) as scope:
                manifest = await _publish(file, manifest, f"{where}/{MANIFEST_NAME}")
            if scope.cancelled_caught:
                raise InvalidCheckpointState(
                    f"{where}/{MANIFEST_NAME}: publishing did not end within {PUBLISH_S_MAX:g} s; "
                    "it may be published or not"
                )
            return WrittenCheckpoint(manifest, episodes)
    finally:
        publication.end()


async def remove_parts(
    disk: Disk, find: Callable[[], Place], identity: Identity, names: Sequence[str]
) -> None:
    """Remove parts that will not be published; best effort.

    Args:
        find: gives the place of the checkpoint; blocks, since nothing of this is left to a waiter.

    Raises:
        InvalidCheckpointState: see `find`; or the system has no thread left.

    Cancelled: removed nevertheless, if need be after this returned.
    """

    def remove() -> None:
        where = find().of_participant(identity.kind, identity.instance)
        ManifestFile(disk.files, where, names).release()

    with refusing("use", "the disk"):
        step = disk.start(remove, closing=True)
    await step.wait()


class _PartStream:
    """Gathers frames into batches and never keeps the loop for longer than a slice. Two batches exist
    at most: one that is gathered and one that is written."""

    def __init__(self, file: Held[PartFile], identity: Identity, section: str | None) -> None:
        self._file = file
        self._section = section
        self._batch = [encode_head(identity)]
        self._batch_bytes = 0
        self._frames: Iterator[bytes] = iter(())
        """Of the last record, those that are not taken yet."""
        self._keys: dict[CaptureKey, None] = {}
        """A set in the order in which they came, mostly sorted."""
        self._slice = LoopSlice()
        self._writing: Step[None] | None = None

    def add(self, record: Record) -> bool:
        """Begin with a record; whether `go_on` must follow before the next one."""
        key = record.episode_id.capture_key
        if key in self._keys:
            raise InvalidCheckpointState(f"episode {key}: exported twice")
        self._keys[key] = None
        self._frames = iter(encode_record(record))
        return self._gather() or self._slice.is_over

    @property
    def is_due(self) -> bool:
        """Whether the loop is to turn."""
        return self._slice.is_over

    def _gather(self) -> bool:
        """Take frames into the batch until it is full, and say whether it is."""
        for frame in self._frames:
            self._batch.append(frame)
            self._batch_bytes += len(frame)
            if self._batch_bytes >= WRITE_BATCH_BYTES:
                return True
        return False

    async def go_on(self) -> None:
        """Write full batches until all of the record is taken, and let the loop go on."""
        while self._batch_bytes >= WRITE_BATCH_BYTES:
            await self._write()
            self._gather()
        await self._slice.turn()

    async def end(self, nonce: str) -> WrittenPart | None:
        count = len(self._keys)
        if not count:
            return None
        await self._write()
        await self._written()
        part = await self._file.run(lambda f: f.seal(encode_end(count, nonce), count))
        self._file.resource.keep()
        return WrittenPart(attrs.evolve(part, section=self._section), tuple(sorted(self._keys)))

    async def _write(self) -> None:
        """Begin to write the batch; it is written and hashed while the next one is gathered."""
        await self._written()
        data = b"".join(self._batch)
        self._batch.clear()
        self._batch_bytes = 0
        self._writing = self._file.start(lambda f: f.append(data))

    async def _written(self) -> None:
        if self._writing is not None:
            await self._writing.wait()
            self._slice.restart()


async def _publish(file: Held[ManifestFile], manifest: Manifest, where: str) -> Manifest:
    """Pass the commit point, or find that it was passed before."""
    data = await file.run(lambda f: f.publish())
    if data is None:
        return manifest
    found = manifests.decode(data, where)
    if not manifests.same_meaning(found, manifest):
        raise InvalidCheckpointState(
            f"{where}: checkpoint {found.checkpoint_id} was committed there, "
            f"{'with other contents' if found.identity == manifest.identity else 'not this one'}"
        )
    await file.run(lambda f: f.adopt(found))
    return found


def _each_once(parts: Sequence[WrittenPart]) -> tuple[CaptureKey, ...]:
    """The episodes of all parts, each once in its section."""
    by_section: defaultdict[str | None, list[CaptureKey]] = defaultdict(list)
    for written in parts:
        by_section[written.part.section] += written.episodes
    for episodes in by_section.values():
        for one, other in pairwise(sorted(episodes)):
            if one == other:
                raise InvalidCheckpointState(f"episode {one}: exported by two workers")
    return tuple(sorted({key for episodes in by_section.values() for key in episodes}))
