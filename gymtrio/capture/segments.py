"""Segments of the embedded token store: append-only files of framed records. Blocking; no trio.

    segment   <incarnation>-<n>.tokens, written by one process, read by any
    batch     one BATCH frame that lists keys and sizes, then as many RECORD frames

Invariants:

- S1 A batch is appended only after the one before it was synced. So what is wrong before a later batch
  is damage, and what is wrong in the last one is a write that nobody was told of.
- S2 After a failed write or sync a segment is never written again: the system marks pages clean that it
  could not write, so a second sync of them proves nothing.
- S3 A reader follows batches by their lists and skips records, so that an index costs one small read
  per batch; a record's checksum is looked at when it is read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs

from gymtrio.capture.tokens import (
    StagingKey,
    TokenRecord,
    TokensDamaged,
    TokensMissing,
    TokenStoreFailed,
)
from gymtrio.ids import CaptureKey
from gymtrio.strict import MalformedValue
from gymtrio.wire.codec import pack, unpack
from gymtrio.wire.frames import HEADER_BYTES, MAGIC, VERSION, FrameDecoder, FrameError, encode_frame

SUFFIX: Final = ".tokens"
RECORD_FRAME: Final = 1
BATCH_FRAME: Final = 2

_BATCH_MARK: Final = MAGIC + bytes([VERSION, BATCH_FRAME])
_SEARCH_BYTES: Final = 2**20


@attrs.frozen(kw_only=True)
class Batch:
    """What a BATCH frame says about the records behind it."""

    keys: tuple[StagingKey, ...]
    sizes: tuple[int, ...]
    """Of the framed records, in bytes."""


@attrs.frozen(kw_only=True)
class StoredRecord:
    """A `TokenRecord` with its numbers as little-endian bytes: compact, and read without a loop."""

    staging_key: StagingKey
    capture_key: CaptureKey
    model_call_id: str
    prompt_token_ids: bytes
    """4 bytes each."""
    token_ids: bytes
    """4 bytes each."""
    log_probs: bytes
    """8 bytes each, IEEE 754."""
    mask: bytes
    """1 byte each."""
    policy_version: int


@attrs.frozen(kw_only=True)
class Location:
    """Where a record lies."""

    segment: Segment = attrs.field(eq=False)
    batch: int
    """Its batch's number within the segment, from 0."""
    offset_bytes: int
    size_bytes: int


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Create a directory with its parents. Durable: each of them."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)
    sync_directory(directory.parent)


def list_segments(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.endswith(SUFFIX))


class SegmentWriter:
    """Appends batches to a new segment.

    Raises:
        OSError: the file exists, or the disk failed.

    Durable: the file's name.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.segment = Segment(directory / name)
        self._descriptor = os.open(
            directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600
        )
        try:
            sync_directory(directory)
        except OSError:
            os.close(self._descriptor)
            raise
        self._size_bytes = 0
        self._batches = 0

    def append(self, frames: dict[StagingKey, bytes]) -> list[tuple[StagingKey, Location]]:
        """Append one batch and sync it.

        Raises:
            OSError: nothing of the batch is promised, and the writer must be given up (S2).

        Durable: the batch.
        """
        batch = Batch(keys=tuple(frames), sizes=tuple(map(len, frames.values())))
        head = encode_frame(BATCH_FRAME, pack(batch))
        _write_all(self._descriptor, b"".join([head, *frames.values()]))
        os.fdatasync(self._descriptor)
        placed = list(_places(self.segment, self._batches, self._size_bytes + len(head), batch))
        self._size_bytes += len(head) + sum(batch.sizes)
        self._batches += 1
        self.segment.batches = self._batches
        self.segment.synced = True
        return placed

    def close(self) -> None:
        os.close(self._descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _places(
    segment: Segment, number: int, offset_bytes: int, batch: Batch
) -> Iterator[tuple[StagingKey, Location]]:
    for key, size_bytes in zip(batch.keys, batch.sizes, strict=True):
        yield (
            key,
            Location(
                segment=segment, batch=number, offset_bytes=offset_bytes, size_bytes=size_bytes
            ),
        )
        offset_bytes += size_bytes


class Segment:
    """A segment as a reader sees it; it may grow meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.batches = 0
        """How many have been seen; the last may be torn unless `synced`."""
        self.synced = False
        """This process wrote it and synced every batch."""
        self.damaged_at_bytes: int | None = None
        """Where a batch's list cannot be read although a later one can."""
        self._next_bytes = 0
        self._seen_bytes = 0

    def read_new(self) -> list[tuple[StagingKey, Location]]:
        """Read the lists of batches that are whole now and were not seen before.

        Raises:
            OSError: the file cannot be read.
        """
        with self.path.open("rb", buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes == self._seen_bytes:
                return []
            self._seen_bytes = size_bytes
            found: list[tuple[StagingKey, Location]] = []
            while self._next_bytes < size_bytes:
                batch = self._read_batch(file.fileno(), size_bytes)
                if batch is None:
                    break
                found += batch
            return found

    def _read_batch(
        self, descriptor: int, size_bytes: int
    ) -> list[tuple[StagingKey, Location]] | None:
        """Read the list at `_next_bytes` and step over its batch; None: there is no whole one yet."""
        try:
            found = _batch_at(descriptor, self._next_bytes)
        except FrameError:
            found = None
        if found is None:
            # A list that seems to end beyond the file may have a damaged length: a later batch tells.
            later = _find_batch(descriptor, self._next_bytes + 1, size_bytes)
            if later is None:
                return None
            self.damaged_at_bytes = self._next_bytes
            self._next_bytes = later
            return []
        batch, head_bytes = found
        end_bytes = self._next_bytes + head_bytes + sum(batch.sizes)
        if end_bytes > size_bytes:
            return None
        places = list(_places(self, self.batches, self._next_bytes + head_bytes, batch))
        self._next_bytes = end_bytes
        self.batches += 1
        return places

    def read(self, key: StagingKey, location: Location) -> TokenRecord:
        """Read one record.

        Raises:
            TokensMissing: it is part of a last batch that was never acknowledged.
            TokensDamaged: it was durable once and cannot be read back whole.
            TokenStoreFailed: the file cannot be read.
        """
        try:
            with self.path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), location.size_bytes, location.offset_bytes)
        except OSError as error:
            raise TokenStoreFailed(f"{key}: {self.path.name}: {error.strerror}") from error
        try:
            record = _record_of(data)
        except (FrameError, MalformedValue, TokensDamaged, struct.error) as error:
            where = f"{self.path.name} at byte {location.offset_bytes}"
            if self.synced or location.batch < self.batches - 1:
                raise TokensDamaged(f"{key}: {where}: {error}") from error
            raise TokensMissing(f"{key}: {where}: its write was never finished") from error
        if record.staging_key != key:
            raise TokensDamaged(f"{key}: {self.path.name} has {record.staging_key} in its place")
        return record


def encode_record(record: TokenRecord) -> bytes:
    """
    Raises:
        TokenStoreFailed: it is over the limit of a frame, or has numbers that tokens do not have.
    """
    try:
        stored = StoredRecord(
            staging_key=record.staging_key,
            capture_key=record.capture_key,
            model_call_id=record.model_call_id,
            prompt_token_ids=_pack("I", record.prompt_token_ids),
            token_ids=_pack("I", record.token_ids),
            log_probs=_pack("d", record.log_probs),
            mask=bytes(record.mask),
            policy_version=record.policy_version,
        )
        return encode_frame(RECORD_FRAME, pack(stored))
    except (FrameError, MalformedValue, struct.error, ValueError) as error:
        raise TokenStoreFailed(f"{record.staging_key}: {error}") from error


def _record_of(data: bytes) -> TokenRecord:
    """
    Raises:
        FrameError, MalformedValue, TokensDamaged, struct.error: the bytes are not one whole record.
    """
    decoder = FrameDecoder()
    decoder.receive_data(data)
    frame = decoder.next_frame()
    if frame is None or frame.type != RECORD_FRAME or decoder.pending_bytes:
        raise FrameError("not one whole record")
    stored = unpack(StoredRecord, frame.payload)
    return TokenRecord(
        staging_key=stored.staging_key,
        capture_key=stored.capture_key,
        model_call_id=stored.model_call_id,
        prompt_token_ids=_unpack("I", stored.prompt_token_ids),
        token_ids=_unpack("I", stored.token_ids),
        log_probs=_unpack("d", stored.log_probs),
        mask=tuple(stored.mask),
        policy_version=stored.policy_version,
    )


def _pack(code: str, numbers: tuple[int, ...] | tuple[float, ...]) -> bytes:
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def _unpack(code: str, data: bytes) -> tuple[Any, ...]:
    return struct.unpack(f"<{len(data) // struct.calcsize('<' + code)}{code}", data)


def _batch_at(descriptor: int, offset_bytes: int) -> tuple[Batch, int] | None:
    """Read the BATCH frame at an offset.

    Returns:
        The list and the frame's size in bytes, or None: the file ends within it.

    Raises:
        FrameError: something else is there.
    """
    decoder = FrameDecoder()
    head = os.pread(descriptor, HEADER_BYTES, offset_bytes)
    decoder.receive_data(head)
    frame = decoder.next_frame()
    if frame is None and len(head) == HEADER_BYTES:
        length = int.from_bytes(head[4:8], "big")
        decoder.receive_data(os.pread(descriptor, length, offset_bytes + HEADER_BYTES))
        frame = decoder.next_frame()
    if frame is None:
        return None
    if frame.type != BATCH_FRAME:
        raise FrameError("not a batch")
    try:
        batch = unpack(Batch, frame.payload)
    except MalformedValue as error:
        raise FrameError(f"not a batch: {error}") from None
    if len(batch.keys) != len(batch.sizes) or any(size < HEADER_BYTES for size in batch.sizes):
        raise FrameError("a batch whose list does not hold together")
    return batch, HEADER_BYTES + len(frame.payload)


def _find_batch(descriptor: int, start_bytes: int, size_bytes: int) -> int | None:
    """Search for the next readable batch behind damage; None: there is none."""
    while start_bytes < size_bytes:
        data = os.pread(descriptor, _SEARCH_BYTES, start_bytes)
        place = data.find(_BATCH_MARK)
        if place < 0:
            # A mark may straddle two reads.
            start_bytes += max(1, len(data) - len(_BATCH_MARK) + 1)
            continue
        start_bytes += place
        try:
            if _batch_at(descriptor, start_bytes) is not None:
                return start_bytes
        except FrameError:
            pass
        start_bytes += 1
    return None
