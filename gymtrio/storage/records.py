"""Records and the file of them, a part: bytes in and out, no I/O.

A part is a sequence of frames of the wire's codec:

    1 head    which participant and checkpoint (msgpack)
    2 record  key length (1 byte), payload length (4 bytes, big-endian), key, payload or its first chunk
    3 more    the next chunk of a payload longer than `RECORD_CHUNK_BYTES`
    4 end     count of records and the writer's nonce (msgpack); nothing follows

- P1 A record's payload is opaque here. Of a record outside the scope nothing but the key is looked at.
- P2 The nonce is of one write only, so the digest that names the file is too: no two writes ever share
  a name, and whoever failed may remove its file without asking who else may need it.
- P3 What is read does not depend on how the bytes were cut, and no frame needs more than a chunk.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, NoReturn, TypeVar

import attrs

from gymtrio.errors import InvalidCheckpointState, InvalidRolloutId
from gymtrio.ids import CaptureKey, CheckpointId, EpisodeId, parse_capture_key
from gymtrio.limits import ID_CHARACTERS_MAX
from gymtrio.storage.bounds import RECORD_BYTES_MAX, RECORD_CHUNK_BYTES
from gymtrio.storage.failures import printable
from gymtrio.strict import MalformedValue
from gymtrio.wire.codec import pack, unpack
from gymtrio.wire.frames import HEADER_BYTES, Frame, FrameDecoder, FrameError, encode_frame

_T = TypeVar("_T")

SCHEMA_VERSION: Final = 1
"""Of parts; the manifest has its own."""

_HEAD: Final = 1
_RECORD: Final = 2
_MORE: Final = 3
_END: Final = 4

_RECORD_HEAD: Final = struct.Struct(">BI")
_KEY_BYTES_MAX: Final = 255
_FRAME_BYTES_MAX: Final = _RECORD_HEAD.size + _KEY_BYTES_MAX + RECORD_CHUNK_BYTES

FRAMES_AT_ONCE: Final = 16
"""What is taken between two looks at the clock; a frame is looked at, not parsed."""


class Record(NamedTuple):
    """What one participant keeps of one episode."""

    # A tuple, since a checkpoint makes thousands in a row.

    episode_id: EpisodeId
    """The attempt that was checkpointed."""
    payload: bytes
    """Opaque here; whoever made it knows its form."""


@attrs.frozen(kw_only=True)
class Identity:
    """Whose checkpoint it is."""

    kind: str
    instance: str
    checkpoint_id: CheckpointId


@attrs.frozen(kw_only=True)
class PartHead:
    schema_version: int
    kind: str
    instance: str
    checkpoint_id: str


@attrs.frozen(kw_only=True)
class PartEnd:
    record_count: int
    nonce: str


def encode_head(identity: Identity) -> bytes:
    """Begin a part."""
    head = PartHead(
        schema_version=SCHEMA_VERSION,
        kind=identity.kind,
        instance=identity.instance,
        checkpoint_id=identity.checkpoint_id,
    )
    return encode_frame(_HEAD, pack(head))


def encode_record(record: Record) -> Sequence[bytes] | Iterator[bytes]:
    """Frame one record, in pieces of a bounded size; one that is not large is a single piece.

    Raises:
        InvalidCheckpointState: the payload is over the limit of a record.
    """
    key = record.episode_id.capture_key.encode("ascii")
    payload = record.payload
    if len(payload) > RECORD_BYTES_MAX:
        raise InvalidCheckpointState(
            f"episode {record.episode_id}: a record of {len(payload)} bytes, limit {RECORD_BYTES_MAX}"
        )
    head = _RECORD_HEAD.pack(len(key), len(payload))
    if len(payload) <= RECORD_CHUNK_BYTES:
        return (encode_frame(_RECORD, b"".join((head, key, payload))),)
    return _chunks(head + key, payload)


def _chunks(head: bytes, payload: bytes) -> Iterator[bytes]:
    yield encode_frame(_RECORD, head + payload[:RECORD_CHUNK_BYTES])
    for begin in range(RECORD_CHUNK_BYTES, len(payload), RECORD_CHUNK_BYTES):
        yield encode_frame(_MORE, payload[begin : begin + RECORD_CHUNK_BYTES])


def encode_end(record_count: int, nonce: str) -> bytes:
    """End a part."""
    return encode_frame(_END, pack(PartEnd(record_count=record_count, nonce=nonce)))


@attrs.define
class _Unfinished:
    """A record of which chunks are missing."""

    key: str
    missing_bytes: int
    chunks: list[bytes] | None
    """None: outside the scope, counted and dropped."""


class PartDecoder:
    """Turns the bytes of one part into the records of a scope.

    Feed a chunk, then call `advance` until it answers False; after the last chunk, `finish`. Nothing it
    gives may be used before `finish` returned and the digest of the file was compared.

    Args:
        identity: what the head must say.
        scope: capture keys whose records are wanted; None: all. A mapping has the ids of them, which
            then need not be read from the keys.
        where: the file, for errors.
        seen: keys of the parts before; those of this part are added.

    Raises (every method):
        InvalidCheckpointState: the bytes are not a part of this checkpoint, or are damaged.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        scope: Collection[CaptureKey] | None,
        where: str,
        seen: set[str] | None = None,
    ) -> None:
        self.records: list[Record] = []
        """Those of the scope that came in one piece."""
        self.large: dict[EpisodeId, list[bytes]] = {}
        """The others, in chunks: joining them is for a thread."""
        self.record_count = 0
        self._identity = identity
        self._scope = scope
        self._ids: Mapping[str, EpisodeId] = {}
        if isinstance(scope, Mapping):
            self._ids = scope
        self._where = where
        self._seen: set[str] = set() if seen is None else seen
        self._frames = FrameDecoder(payload_bytes_max=_FRAME_BYTES_MAX)
        self._waiting: deque[Frame] = deque()
        """Frames of the chunk that is there; found together, since there are thousands."""
        self._offset_bytes = 0
        self._head_seen = False
        self._unfinished: _Unfinished | None = None
        self._end: PartEnd | None = None

    def receive_data(self, data: bytes) -> None:
        self._frames.receive_data(data)

    def advance(self, frames_max: int = FRAMES_AT_ONCE) -> bool:
        """Take some frames, as far as they are whole; False: it needs more bytes."""
        if not self._waiting:
            try:
                self._waiting.extend(self._frames.whole_frames())
            except FrameError as error:
                self._refuse(str(error))
        count = min(frames_max, len(self._waiting))
        for _ in range(count):
            frame = self._waiting.popleft()
            self._take(frame)
            self._offset_bytes += HEADER_BYTES + len(frame.payload)
        return count > 0

    def _take(self, frame: Frame) -> None:
        if self._end is not None:
            self._refuse("something follows its end")
        elif not self._head_seen:
            self._take_head(frame)
        elif self._unfinished is not None:
            self._take_more(self._unfinished, frame)
        elif frame.type == _RECORD:
            self._take_record(frame.payload)
        elif frame.type == _END:
            self._take_end(frame)
        else:
            self._refuse(f"frame type {frame.type} where a record or the end was expected")

    def finish(self) -> None:
        """Say that there are no more bytes."""
        if self._end is None or self._waiting or self._frames.pending_bytes:
            self._refuse("it ends before its end: truncated")

    def _take_head(self, frame: Frame) -> None:
        if frame.type != _HEAD:
            self._refuse(f"frame type {frame.type} where the head was expected")
        head = self._unpack(PartHead, frame)
        if head.schema_version != SCHEMA_VERSION:
            self._refuse(f"schema version {head.schema_version}; this side reads {SCHEMA_VERSION}")
        expected = attrs.asdict(self._identity)
        for name, value in expected.items():
            found = getattr(head, name)
            if found != value:
                shown = found[:ID_CHARACTERS_MAX]
                self._refuse(f"{name} {shown!r} where the manifest has {value!r}")
        self._head_seen = True

    def _take_record(self, payload: bytes) -> None:
        if len(payload) < _RECORD_HEAD.size:
            self._refuse("a record shorter than its head")
        key_bytes, payload_bytes = _RECORD_HEAD.unpack_from(payload)
        begin = _RECORD_HEAD.size + key_bytes
        if len(payload) < begin:
            self._refuse("a record shorter than its key")
        key = payload[_RECORD_HEAD.size : begin].decode("ascii", "backslashreplace")
        if key in self._seen:
            self._refuse(f"episode {key} is in it twice")
        self._seen.add(key)
        self.record_count += 1
        if payload_bytes > RECORD_BYTES_MAX:
            self._refuse(
                f"episode {key}: {payload_bytes} bytes announced, limit {RECORD_BYTES_MAX}"
            )
        wanted = self._scope is None or key in self._scope
        missing_bytes = payload_bytes - (len(payload) - begin)
        if missing_bytes:
            self._continue(_Unfinished(key, missing_bytes, [payload[begin:]] if wanted else None))
        elif wanted:
            self.records.append(Record(self._id_of(key), payload[begin:]))

    def _take_more(self, unfinished: _Unfinished, frame: Frame) -> None:
        if frame.type != _MORE or not frame.payload:
            self._refuse(f"episode {unfinished.key}: {unfinished.missing_bytes} bytes missing")
        unfinished.missing_bytes -= len(frame.payload)
        if unfinished.chunks is not None:
            unfinished.chunks.append(frame.payload)
        self._continue(unfinished)

    def _continue(self, unfinished: _Unfinished) -> None:
        if unfinished.missing_bytes < 0:
            self._refuse(f"episode {unfinished.key}: longer than announced")
        if unfinished.missing_bytes:
            self._unfinished = unfinished
            return
        self._unfinished = None
        if unfinished.chunks is not None:
            self.large[self._id_of(unfinished.key)] = unfinished.chunks

    def _id_of(self, key: str) -> EpisodeId:
        try:
            return self._ids.get(key) or parse_capture_key(key)
        except InvalidRolloutId as error:
            self._refuse(error.detail)

    def _take_end(self, frame: Frame) -> None:
        end = self._unpack(PartEnd, frame)
        if end.record_count != self.record_count:
            self._refuse(f"{self.record_count} records where its end says {end.record_count}")
        self._end = end

    def _unpack(self, cls: type[_T], frame: Frame) -> _T:
        try:
            return unpack(cls, frame.payload)
        except MalformedValue as error:
            self._refuse(str(error))

    def _refuse(self, why: str) -> NoReturn:
        raise InvalidCheckpointState(
            f"{self._where}, frame at byte {self._offset_bytes}: {printable(why)}"
        )
