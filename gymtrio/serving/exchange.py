"""One request and its answer, whatever carries them: sockets, frames, or a foreign ASGI server.

A carrier makes an `Exchange` and hands it to `gymtrio.serving.asgi.serve_exchange`. A handler runs as
long as its caller is there: the carrier cancels the task when the caller leaves (SRV-3). What must
complete regardless is owned by the service's nursery, not by the handler.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Protocol

import trio

from gymtrio.context import Scope
from gymtrio.errors import TooLarge
from gymtrio.serving.draining import Cancellable
from gymtrio.serving.http import (
    JSON_CONTENT_TYPE,
    Answer,
    ClientGone,
    Headers,
    RequestTimedOut,
    Response,
    StreamingResponse,
)
from gymtrio.storage.slices import LoopSlice

BODY_TIMEOUT_S: Final = 60.0
"""From the head of a request to the end of its body."""


class Exchange(Protocol):
    """What a carrier offers to whoever answers a request."""

    @property
    def method(self) -> str: ...

    @property
    def path(self) -> str:
        """Decoded; with the rollout prefix, if it came with one."""
        ...

    @property
    def raw_path(self) -> bytes: ...

    @property
    def query(self) -> bytes: ...

    @property
    def headers(self) -> Headers: ...

    @property
    def content_length(self) -> int | None:
        """What the head said of the body; None: nothing."""
        ...

    @property
    def work(self) -> Cancellable | None:
        """What cancels its task, where an answer leaves also when that is cancelled; else None."""
        ...

    def body_at_hand(self) -> bytes | None:
        """The whole body, if it has come already; then `receive_some` gives nothing more."""
        ...

    def asgi(self) -> Scope:
        """What an ASGI scope says of the carrier: `http_version`, `scheme`, `client`, `server`."""
        ...

    async def receive_some(self) -> bytes:
        """The next piece of the request's body; empty at its end.

        Raises:
            ClientGone: the rest of it will not come.
            Refusal: what comes is no body.
        """
        ...

    async def answer(self, status: int, headers: Headers, body: bytes, on_done: OnDone) -> None:
        """Send a whole answer.

        Args:
            on_done: called exactly once, also when this raises or is cancelled: see `Response`.

        Raises:
            ClientGone: the caller left before.
        """
        ...

    async def begin(self, status: int, headers: Headers, content_length: int | None) -> None:
        """Send the head of an answer whose body is not whole yet.

        Raises:
            ClientGone: the caller has left.
        """
        ...

    async def send_some(self, data: bytes) -> None:
        """Send a piece of the body, which is not empty; waits for a caller that is slow.

        Raises:
            ClientGone: the caller has left.
        """
        ...

    async def finish(self) -> None:
        """End the body; returns when the last byte was handed to the caller's connection.

        Raises:
            ClientGone: the caller had left before.
        """
        ...


OnDone = Callable[[bool], None] | None

_JSON_HEADER: Final = (b"content-type", JSON_CONTENT_TYPE.encode("ascii"))
_JSON_HEADERS: Final = (_JSON_HEADER,)
"""Made once: nearly all answers have them."""


async def send_answer(exchange: Exchange, answer: Answer) -> None:
    """Send what a handler answered; its `on_done` is called exactly once."""
    if answer.content_type == JSON_CONTENT_TYPE:
        headers = (_JSON_HEADER, *answer.headers) if answer.headers else _JSON_HEADERS
    else:
        headers = ((b"content-type", answer.content_type.encode("latin-1")), *answer.headers)
    try:
        if isinstance(answer, Response):
            await exchange.answer(answer.status, headers, answer.body, answer.on_done)
        else:
            await _stream(exchange, answer, headers)
    except ClientGone:
        pass


async def _stream(exchange: Exchange, answer: StreamingResponse, headers: Headers) -> None:
    delivered = False
    try:
        async with _closing(answer.chunks) as chunks:
            await exchange.begin(answer.status, headers, None)
            async for chunk in chunks:
                if chunk:
                    await exchange.send_some(chunk)
        await exchange.finish()
        delivered = True
    finally:
        if answer.on_done is not None:
            answer.on_done(delivered)


@asynccontextmanager
async def _closing(chunks: AsyncIterator[bytes]) -> AsyncIterator[AsyncIterator[bytes]]:
    try:
        yield chunks
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()


async def read_whole(exchange: Exchange, bytes_max: int) -> bytes:
    """Read the body of a request.

    Raises:
        TooLarge: it is over the limit; nothing beyond the limit was kept.
        RequestTimedOut: it did not arrive within `BODY_TIMEOUT_S`.
        ClientGone: the caller left.
    """
    declared = exchange.content_length
    if declared is not None and declared > bytes_max:
        raise TooLarge(f"body of {declared} bytes, limit {bytes_max}")
    at_hand = exchange.body_at_hand()
    if at_hand is not None:
        return at_hand
    with trio.move_on_after(BODY_TIMEOUT_S) as timer:
        whole = bytearray()
        slice_ = LoopSlice()
        while data := await exchange.receive_some():
            # Not a list of pieces: they may be of one byte each.
            whole += data
            if len(whole) > bytes_max:
                raise TooLarge(f"body over the limit of {bytes_max} bytes")
            await slice_.turn()
        return bytes(whole)
    assert timer.cancelled_caught
    raise RequestTimedOut(f"body not received within {BODY_TIMEOUT_S:g} s")
