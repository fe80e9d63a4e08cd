"""A client that shares no code with ours, written from the design note alone (WIRE-1)."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import msgpack
import trio

from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.channel import open_channel
from gymtrio.wire.listening import serve_channels
from gymtrio.wire.unix import open_unix_listener
from tests.helpers.dialogues import ACCEPTOR

HELLO, WELCOME, GOODBYE, PING, PONG = range(1, 6)
CALL, REPLY, ERROR, DATA, CREDIT, CANCEL, POST, CONTROL_POST = range(16, 24)


class Foreigner:
    """Frames to and from a stream."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = b""

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


async def handler(call: IncomingCall) -> None:
    if call.kind == "park":
        await trio.sleep_forever()
    body = await call.read(2**20)
    call.reply(call.head, body * 3)


async def test_the_design_note_suffices(tmp_path: Path) -> None:
    posted: list[tuple[str, bytes]] = []

    async def serve(stream: trio.SocketStream) -> None:
        async with open_channel(
            stream,
            role="acceptor",
            me=ACCEPTOR,
            handler=handler,
            posted=lambda kind, body: posted.append((kind, body)),
        ) as channel:
            reply = await channel.request("greet", b"hi", control=True)
            posted.append(("answered", reply.body))
            await channel.closed.wait()

    path = tmp_path / "run" / "s"
    async with open_unix_listener(path) as listener, trio.open_nursery() as nursery:
        await nursery.start(serve_channels, listener, serve)
        peer = Foreigner(await trio.open_unix_socket(str(path)))
        mine = {"role": "foreigner", "name": "f", "instance": "1"}
        capacity = {
            "frame_bytes_max": 131_072,
            "head_bytes_max": 1024,
            "window_bytes": 1000,
            "calls_open_max": 10,
        }
        await peer.say(HELLO, {"versions": [1, 2], "hello": mine, "capacity": capacity})
        frame_type, welcome = await peer.hear()
        assert frame_type == WELCOME
        assert welcome["version"] == 1
        # A call of theirs, in the control lane, with an id of an acceptor.
        assert await peer.hear() == (CALL, [3, "greet", b"", b"hi", None])
        await peer.say(REPLY, [3, b"", b"hello"])
        await peer.say(CONTROL_POST, ["note", b"\x00"])
        # A call with a body in chunks; its reply waits for credit after a window.
        await peer.say(CALL, [0, "triple", b"h", None, 60_000])
        await peer.say(DATA, [0, False, b"x" * 60_000])
        await peer.say(DATA, [0, True, b"x" * 20_000])
        assert await peer.hear() == (REPLY, [0, b"h", None])
        size, window, is_last = 0, 1000, False
        while not is_last:
            frame_type, (call_id, is_last, chunk) = await peer.hear()
            assert (frame_type, call_id) == (DATA, 0)
            size += len(chunk)
            window -= len(chunk)
            assert window >= 0
            if not window and not is_last:
                window = 50_000
                await peer.say(CREDIT, [0, window])
        assert size == 240_000
        await peer.say(CALL, [4, "park", b"", b"", None])
        await peer.say(CANCEL, [4])
        assert await peer.hear() == (ERROR, [4, 499, "cancelled", "the caller waits no more"])
        await peer.say(PING, [9])
        assert await peer.hear() == (PONG, [9])
        await peer.say(REPLY, [7, b"", b""])
        frame_type, (code, _) = await peer.hear()
        assert (frame_type, code) == (GOODBYE, "unexpected_answer")
        await peer._stream.aclose()
        nursery.cancel_scope.cancel()
    assert sorted(posted) == [("answered", b"hello"), ("note", b"\x00")]
