"""Reading one participant's checkpoint: streamed, verified whole, installed nowhere.

- R1 Nothing is returned before every byte that the manifest names was read and its digest compared.
- R2 Reading changes nothing: the same checkpoint can be read any number of times (I9).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter

import attrs

from gymtrio.errors import InvalidCheckpointState
from gymtrio.ids import CaptureKey
from gymtrio.storage import manifest as manifests
from gymtrio.storage.disk import Disk
from gymtrio.storage.held import Held, hold
from gymtrio.storage.manifest import MANIFEST_NAME, Manifest, Part
from gymtrio.storage.records import PartDecoder, Record
from gymtrio.storage.root import Place
from gymtrio.storage.slices import LoopSlice
from gymtrio.storage.stored import StoredCheckpoint


@attrs.frozen
class LoadedCheckpoint:
    """A verified checkpoint of one participant, reduced to a scope."""

    manifest: Manifest
    sections: Mapping[str | None, Sequence[Record]]
    """The records of each section, of each episode at most one; of parts without one, under None."""

    @property
    def records(self) -> Mapping[CaptureKey, Record]:
        """Those of a checkpoint whose parts have no sections."""
        assert self.sections.keys() <= {None}
        return {record.episode_id.capture_key: record for record in self.sections.get(None, ())}

    def every_record(self) -> list[Record]:
        """Those of all sections, in order of capture key; one episode may have several."""
        return sorted(chain(*self.sections.values()), key=attrgetter("episode_id.capture_key"))


async def read_checkpoint(
    disk: Disk,
    place: Place,
    *,
    kind: str,
    instance: str,
    scope: Collection[CaptureKey] | None,
) -> LoadedCheckpoint:
    """Verify the whole of it and give the records of a scope (STO-4).

    Args:
        place: of the checkpoint, not of the participant.
        scope: whose records are wanted, by the attempts that were checkpointed; None: all. A key
            without a record is no error. Of other records nothing but the key is looked at.

    Raises:
        InvalidCheckpointState: it is missing, damaged, another participant's or newer; the detail says
            where and what.
    """
    where = place.of_participant(kind, instance)
    async with hold(disk, StoredCheckpoint(disk.files, where)) as stored:
        data = await stored.run(lambda s: s.manifest())
        manifest = manifests.decode(data, f"{where}/{MANIFEST_NAME}")
        for name, found, wanted in (
            ("kind", manifest.kind, kind),
            ("instance", manifest.instance, instance),
        ):
            if found != wanted:
                raise InvalidCheckpointState(
                    f"{where}/{MANIFEST_NAME}: {name} is {found!r} where {wanted!r} was asked for"
                )
        sections: dict[str | None, list[Record]] = {}
        seen: defaultdict[str | None, set[str]] = defaultdict(set)
        for part in manifest.parts:
            path = f"{where}/{part.file}"
            decoder = PartDecoder(
                manifest.identity, scope=scope, where=path, seen=seen[part.section]
            )
            await _verify_part(stored, part, decoder, path)
            await _collect(stored, decoder, sections.setdefault(part.section, []))
        return LoadedCheckpoint(manifest, sections)


async def _verify_part(
    stored: Held[StoredCheckpoint], part: Part, decoder: PartDecoder, where: str
) -> None:
    await stored.run(lambda s: s.open_part(part.file, part.bytes))
    reading = stored.start(lambda s: s.read())
    while chunk := await reading.wait():
        # The next chunk is read and hashed while this one is parsed.
        reading = stored.start(lambda s: s.read())
        decoder.receive_data(chunk)
        slice_ = LoopSlice()
        while decoder.advance():
            await slice_.turn()
    decoder.finish()
    digest = await stored.run(lambda s: s.close_part())
    if digest != part.sha256:
        raise InvalidCheckpointState(f"{where}: its bytes do not have the digest that names it")
    if decoder.record_count != part.record_count:
        raise InvalidCheckpointState(
            f"{where}: {decoder.record_count} records where the manifest says {part.record_count}"
        )


async def _collect(
    stored: Held[StoredCheckpoint], decoder: PartDecoder, records: list[Record]
) -> None:
    records += decoder.records
    for episode_id, chunks in decoder.large.items():
        # The interpreter lets go of its lock while it joins what is large.
        payload = await stored.run(partial(_join, chunks))
        chunks.clear()
        records.append(Record(episode_id, payload))


def _join(chunks: list[bytes], _: StoredCheckpoint) -> bytes:
    return b"".join(chunks)
