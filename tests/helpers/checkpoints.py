"""Small checkpoints, and the two calls that most storage tests make."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Final

from gymtrio.ids import CaptureKey, CheckpointId, EpisodeId, RolloutId
from gymtrio.storage.disk import Disk
from gymtrio.storage.publication import Publication
from gymtrio.storage.reader import LoadedCheckpoint, read_checkpoint
from gymtrio.storage.records import Identity, Record
from gymtrio.storage.root import Place
from gymtrio.storage.writer import WrittenCheckpoint, write_checkpoint

IDENTITY: Final = Identity(
    kind="resources", instance="counter", checkpoint_id=CheckpointId("step-7")
)
OTHER_ID: Final = Identity(
    kind="resources", instance="counter", checkpoint_id=CheckpointId("step-8")
)
FIELDS: Final[dict[str, object]] = {"fingerprint": "abc", "limits": [1, 2.5, None]}

NONCE: Final = "0" * 32


def place(root: str = "/root", directory: str = "step-7") -> Place:
    return Place(root, (directory,))


def episode(text: str, attempt: int = 0) -> EpisodeId:
    return EpisodeId(RolloutId(text), attempt)


def some_records(count: int = 3, payload_bytes: int = 40) -> list[Record]:
    """Records that differ from each other in every byte position but the length."""
    return [
        Record(episode(f"r{number}", number % 2), bytes([number % 251]) * payload_bytes)
        for number in range(count)
    ]


async def commit(
    disk: Disk,
    where: Place,
    records: Iterable[Record],
    *,
    identity: Identity = IDENTITY,
    fields: dict[str, object] | None = None,
    nonce: str = NONCE,
    publication: Publication | None = None,
) -> WrittenCheckpoint:
    return await write_checkpoint(
        disk,
        where,
        identity,
        records,
        FIELDS if fields is None else fields,
        nonce=nonce,
        publication=Publication() if publication is None else publication,
    )


async def load(
    disk: Disk, where: Place, *, scope: Set[CaptureKey] | None = None
) -> LoadedCheckpoint:
    return await read_checkpoint(
        disk, where, kind=IDENTITY.kind, instance=IDENTITY.instance, scope=scope
    )


def keyed(records: Iterable[Record]) -> dict[CaptureKey, Record]:
    return {record.episode_id.capture_key: record for record in records}
