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
import zlib
from typing import Final

import attrs

from gymtrio.errors import GymtrioError
from gymtrio.limits import FRAME_BYTES_MAX

MAGIC: Final = b"gy"
VERSION: Final = 1
HEADER_BYTES: Final = 12

_HEADER: Final = struct.Struct(">2sBBII")
_CHECKED: Final = struct.Struct(">BBI")


class FrameError(GymtrioError):
    """The bytes are not frames of ours: wrong magic, version, length or checksum."""


@attrs.frozen
class Frame:
    type: int
    """0..255, meaning given by the user's table."""
    payload: bytes


def _checksum(frame_type: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_CHECKED.pack(VERSION, frame_type, len(payload))))


def encode_frame(
    frame_type: int, payload: bytes, *, payload_bytes_max: int = FRAME_BYTES_MAX
) -> bytes:
    """Frame one payload.

    Raises:
        FrameError: the payload is over the limit; nothing was made.
    """
    if len(payload) > payload_bytes_max:
        raise FrameError(f"payload of {len(payload)} bytes, limit {payload_bytes_max}")
    assert 0 <= frame_type <= 255
    header = _HEADER.pack(MAGIC, VERSION, frame_type, len(payload), _checksum(frame_type, payload))
    return header + payload


class FrameDecoder:
    """Turns chunks of any size into frames.

    Args:
        payload_bytes_max: a header that announces more is refused before anything is buffered.
    """

    def __init__(self, *, payload_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._buffer = bytearray()
        self._start = 0
        self._broken: str | None = None

    def receive_data(self, data: bytes) -> None:
        """Take what arrived; call `next_frame` until it answers None before the next chunk."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not whole yet: not zero at the end means truncation."""
        return len(self._buffer) - self._start

    def next_frame(self) -> Frame | None:
        """Give the next whole frame, or None when more bytes are needed.

        Raises:
            FrameError: the stream is not ours or is damaged; every later call raises the same.
        """
        if self._broken is not None:
            raise FrameError(self._broken)
        if self.pending_bytes < HEADER_BYTES:
            if self.pending_bytes and not MAGIC.startswith(self._peek(len(MAGIC))):
                self._fail("bad magic")
            return None
        magic, version, frame_type, length, checksum = _HEADER.unpack_from(
            self._buffer, self._start
        )
        if magic != MAGIC:
            self._fail("bad magic")
        if version != VERSION:
            self._fail(f"version {version}, this side speaks {VERSION}")
        if length > self._payload_bytes_max:
            self._fail(f"payload of {length} bytes announced, limit {self._payload_bytes_max}")
        if self.pending_bytes < HEADER_BYTES + length:
            return None
        begin = self._start + HEADER_BYTES
        payload = bytes(memoryview(self._buffer)[begin : begin + length])
        if _checksum(frame_type, payload) != checksum:
            self._fail("checksum mismatch")
        self._start = begin + length
        return Frame(frame_type, payload)

    def _peek(self, count: int) -> bytes:
        return bytes(self._buffer[self._start : self._start + count])

    def _fail(self, why: str) -> None:
        self._broken = why
        self._buffer.clear()
        self._start = 0
        raise FrameError(why)
