"""What a peer reads that has a socket and no client."""

from __future__ import annotations

import trio


async def everything(stream: trio.abc.ReceiveStream) -> bytes:
    """What comes until the end, also where a reset is the end."""
    received = b""
    try:
        while data := await stream.receive_some():
            received += data
    except trio.BrokenResourceError:
        pass
    return received


async def one_answer(stream: trio.abc.ReceiveStream) -> bytes:
    """What comes until one answer is whole; it has to tell its length."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += await _some(stream, received)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if b"content-length" in line)
    whole_bytes = len(received) - len(body) + int(length.partition(b":")[2])
    while len(received) < whole_bytes:
        received += await _some(stream, received)
    return received


async def _some(stream: trio.abc.ReceiveStream, received: bytes) -> bytes:
    data = await stream.receive_some()
    assert data, received
    return data


async def one_reply(stream: trio.abc.ReceiveStream) -> tuple[int, dict[str, str], bytes]:
    """An answer's status, headers and body."""
    head, _, body = (await one_answer(stream)).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, body
