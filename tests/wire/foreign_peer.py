"""A peer that shares no code with ours, written from `gymtrio/wire/DESIGN.md` alone (WIRE-1)."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgpack
import trio

HELLO, WELCOME, GOODBYE, PING, PONG = range(1, 6)
CALL, REPLY, ERROR, DATA, CREDIT, CANCEL, POST, CONTROL_POST = range(16, 24)

WINDOW_BYTES: Final = 1000
CAPACITY: Final = {
    "frame_bytes_max": 131_072,
    "head_bytes_max": 65_536,
    "window_bytes": WINDOW_BYTES,
    "calls_open_max": 10,
}
INTRODUCTION: Final = {"role": "foreigner", "name": "f", "instance": "1"}


class Refused(Exception):
    """The answer to a call was an error: status, code, detail."""


class Foreigner:
    """Frames to and from a stream, and one call at a time over them."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._buffer = b""
        self._ids = {False: itertools.count(0, 4), True: itertools.count(2, 4)}

    async def say(self, frame_type: int, value: object) -> None:
        payload = msgpack.packb(value)
        head = struct.pack(">BBI", 1, frame_type, len(payload))
        checksum = zlib.crc32(head + payload)
        await self._stream.send_all(b"gy" + head + struct.pack(">I", checksum) + payload)

    async def hear(self) -> tuple[int, Any]:
        head = await self._take(12)
        assert head[:3] == b"gy\x01"
        frame_type, length, checksum = struct.unpack(">BII", head[3:])
        payload = await self._take(length)
        assert zlib.crc32(head[2:8] + payload) == checksum
        return frame_type, msgpack.unpackb(payload)

    async def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            more = await self._stream.receive_some()
            assert more
            self._buffer += more
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    async def shake_hands(self, token: str | None = None) -> Any:
        """Say hello as whoever connected, and give the welcome."""
        hello = {"versions": [1], "hello": INTRODUCTION, "capacity": CAPACITY, "token": token}
        await self.say(HELLO, hello)
        frame_type, welcome = await self.hear()
        assert frame_type == WELCOME, welcome
        return welcome

    async def call(
        self, kind: str, head: bytes = b"", body: bytes = b"", *, control: bool = False
    ) -> tuple[bytes, bytes]:
        """Have a call answered; gives the answer's head and body."""
        call_id = next(self._ids[control])
        await self.say(CALL, [call_id, kind, head, body, 30_000])
        answer, parts = b"", []
        while True:
            frame_type, items = await self.hear()
            if frame_type == PING:
                await self.say(PONG, items)
                continue
            assert items[0] == call_id, (frame_type, items)
            if frame_type == ERROR:
                raise Refused(*items[1:])
            if frame_type == REPLY:
                _, answer, whole = items
                if whole is not None:
                    return answer, whole
                continue
            assert frame_type == DATA
            _, is_last, chunk = items
            parts.append(chunk)
            if is_last:
                return answer, b"".join(parts)
            await self.say(CREDIT, [call_id, len(chunk)])

    async def http(
        self, method: str, target: str, body: bytes = b"", **headers: str
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """A call of kind `http`."""
        pairs = [
            [name.replace("_", "-").encode(), value.encode()] for name, value in headers.items()
        ]
        head, answer = await self.call("http", msgpack.packb([method, target, pairs]), body)
        status, told = msgpack.unpackb(head)
        return status, dict(told), answer

    async def control(self, operation: str, **request: object) -> Any:
        """A call of the control protocol, in the lane that overtakes data."""
        packed = msgpack.packb(request) if request else b""
        _, reply = await self.call(f"control/{operation}", body=packed, control=True)
        return msgpack.unpackb(reply)


@asynccontextmanager
async def open_foreigner(path: Path, token: str | None = None) -> AsyncIterator[Foreigner]:
    """Connect to the socket file of a server, and be welcome there."""
    async with await trio.open_unix_socket(str(path)) as stream:
        foreigner = Foreigner(stream)
        await foreigner.shake_hands(token)
        yield foreigner
