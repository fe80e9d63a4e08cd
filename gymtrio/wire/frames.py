"""Frames: typed, checksummed payloads in a byte stream or a file. Bytes in, frames out; no I/O.

    offset  size  field
    0       2     magic "gy"
    2       1     version, 1
    3       1     type, of the user's own table
    4       4     payload length in bytes, big-endian
    8       4     CRC-32 over bytes 2..7 and the payload, big-endian
    12      n     payload

The rules of this file: the result does not depend on how the bytes were cut; a length is checked
before its payload is buffered; a checksum is checked before its payload is handed out; after an
error a decoder refuses everything, because a stream that lied once has no boundaries left.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple
from zlib import crc32

from gymtrio.errors import GymtrioError
from gymtrio.limits import FRAME_BYTES_MAX

MAGIC: Final = b"gy"
VERSION: Final = 1
HEADER_BYTES: Final = 12

_HEADER: Final = struct.Struct(">2sBBII")
_CHECKED: Final = struct.Struct(">BBI")
_PIECES_MAX: Final = 4096
"""A frame that trickles in is joined after so many pieces, since each of them costs memory."""


class FrameError(GymtrioError):
    """The bytes are not frames of ours: wrong magic, version, length or checksum."""


class Frame(NamedTuple):
    # A tuple, since a busy channel makes a hundred thousand of them in a second.
    type: int
    """0..255, meaning given by the user's table."""
    payload: bytes


_new: Final = tuple.__new__
"""The class's own making takes longer than the checksum of a short payload."""


def encode_frame(
    frame_type: int, payload: bytes, *, payload_bytes_max: int = FRAME_BYTES_MAX
) -> bytes:
    """Frame one payload.

    Raises:
        FrameError: the payload is over the limit; nothing was made.
    """
    length = len(payload)
    if length > payload_bytes_max:
        raise FrameError(f"payload of {length} bytes, limit {payload_bytes_max}")
    assert 0 <= frame_type <= 255
    checksum = crc32(payload, crc32(_CHECKED.pack(VERSION, frame_type, length)))
    return _HEADER.pack(MAGIC, VERSION, frame_type, length, checksum) + payload


class FrameDecoder:
    """Turns chunks of any size into frames.

    Args:
        payload_bytes_max: a header that announces more is refused before anything is buffered; may
            be changed between two frames.
    """

    def __init__(self, *, payload_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.payload_bytes_max = payload_bytes_max
        self._buffer = b""
        self._start = 0
        self._pieces: list[bytes] = []
        """What came after the buffer. It is joined once per frame, not once per piece: a frame that
        comes in a thousand pieces would be copied a thousand times."""
        self._pieces_bytes = 0
        self._next: tuple[bytes, int] | None = None
        """Where the frames go on after the buffer: a piece, and a place in it."""
        self._needed = 1
        """Fewer pending bytes than this say nothing new."""
        self._broken: str | None = None

    def receive_data(self, data: bytes | bytearray) -> None:
        """Take what arrived; call `next_frame` until it answers None before the next chunk."""
        self._pieces.append(bytes(data))
        self._pieces_bytes += len(data)

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not whole yet: not zero at the end means truncation."""
        pending = len(self._buffer) - self._start + self._pieces_bytes
        if self._next is not None:
            piece, start = self._next
            pending += len(piece) - start
        return pending

    def next_frame(self) -> Frame | None:
        """Give the next whole frame, or None when more bytes are needed.

        Raises:
            FrameError: the stream is not ours or is damaged; every later call raises the same.
        """
        found = self._decode(1)
        return found[0] if found else None

    def whole_frames(self) -> list[Frame]:
        """Give all frames that are whole.

        Raises:
            FrameError: as `next_frame`, once the frames before the damage have been given.
        """
        return self._decode(None)

    def _decode(self, count_max: int | None) -> list[Frame]:
        if self._broken is not None:
            raise FrameError(self._broken)
        if self._pieces and (self.pending_bytes >= self._needed or len(self._pieces) > _PIECES_MAX):
            self._join()
        found = self._take_whole([], count_max)
        if self._next is not None and len(found) != count_max:
            (self._buffer, self._start), self._next = self._next, None
            self._take_whole(found, count_max)
        return found

    def _take_whole(self, found: list[Frame], count_max: int | None) -> list[Frame]:
        buffer, start = self._buffer, self._start
        whole = len(buffer)
        while whole - start >= HEADER_BYTES and len(found) != count_max:
            magic, version, frame_type, length, checksum = _HEADER.unpack_from(buffer, start)
            begin = start + HEADER_BYTES
            if magic != MAGIC or version != VERSION or length > self.payload_bytes_max:
                return self._fail(found, self._refused(magic, version, length))
            if whole < begin + length:
                self._start = start
                self._needed = HEADER_BYTES + length
                return found
            payload = buffer[begin : begin + length]
            if crc32(payload, crc32(buffer[start + 2 : start + 8])) != checksum:
                return self._fail(found, "checksum mismatch")
            start = begin + length
            found.append(_new(Frame, (frame_type, payload)))
        self._start = start
        rest = buffer[start : start + len(MAGIC)]
        if len(found) != count_max and not MAGIC.startswith(rest):
            return self._fail(found, "bad magic")
        self._needed = HEADER_BYTES if len(rest) == len(MAGIC) else 1
        return found

    def _refused(self, magic: bytes, version: int, length: int) -> str:
        if magic != MAGIC:
            return "bad magic"
        if version != VERSION:
            return f"version {version}, this side speaks {VERSION}"
        return f"payload of {length} bytes announced, limit {self.payload_bytes_max}"

    def _join(self) -> None:
        rest = self._buffer[self._start :]
        if self._next is not None:
            piece, start = self._next
            rest += piece[start:]
        self._start, self._next = 0, None
        missing = self._needed - len(rest)
        if len(rest) >= HEADER_BYTES and missing > 0 and len(self._pieces) == 1:
            # Only the frame that its border cuts is made whole; a file's piece is a megabyte.
            (piece,) = self._pieces
            self._buffer, self._next = rest + piece[:missing], (piece, missing)
        else:
            # A lone piece of `bytes` is taken as it is.
            self._buffer = b"".join((rest, *self._pieces)) if rest else b"".join(self._pieces)
        self._drop_pieces()

    def _drop_pieces(self) -> None:
        self._pieces.clear()
        self._pieces_bytes = 0

    def _fail(self, found: list[Frame], why: str) -> list[Frame]:
        self._broken = why
        self._buffer, self._next = b"", None
        self._start = 0
        self._drop_pieces()
        if not found:
            raise FrameError(why)
        return found
