"""Between exchanges and ASGI, both ways.

`serve_exchange` is what our own carriers call. An application of ours takes hot requests directly; for
all others, and for foreign applications, the exchange is shown as ASGI (`_Shown`). Under a foreign
server, such as plain Hypercorn, it is the other way round: its messages become a `ForeignExchange`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import trio

from gymtrio.context import AsgiApp, Message, Receive, Scope, Send
from gymtrio.errors import Refusal
from gymtrio.limits import DATA_BODY_BYTES_MAX
from gymtrio.serving.draining import Cancellable
from gymtrio.serving.exchange import Exchange, OnDone, read_whole, send_answer
from gymtrio.serving.http import (
    Answer,
    ClientGone,
    Headers,
    first_header,
    internal_error,
    refusal_response,
)

JOINED_BODY_BYTES_MAX: Final = 65536
"""An application's answer up to this leaves with its head, in however many pieces it was made."""

_SEND_BYTES: Final = 65536
_SEND_S_MAX: Final = 30.0
"""A peer of a foreign server that takes less than `_SEND_BYTES` within this time counts as gone, as one
of ours does: such a server waits for it for ever, and what is sent last cannot be cancelled."""

_log = logging.getLogger(__name__)


class Taken(Protocol):
    """A request that a hot route takes; its body is still to be read."""

    async def answer(self, body: bytes, work: Cancellable | None) -> Answer:
        """Run the handler; refusals and faults are answers as well, and so is the end of a drain.

        Args:
            work: that of the exchange; where it has none, a scope is made, which ends with the handler.
        """
        ...


class DirectApp(Protocol):
    """An application that answers some requests without ASGI."""

    def take(self, exchange: Exchange) -> Taken | None:
        """Who answers; None: the application itself, as ASGI.

        Raises:
            Refusal: nobody.
        """
        ...


class BrokenOff(Exception):
    """An application ended in the middle of its answer."""


async def serve_exchange(app: AsgiApp, exchange: Exchange) -> None:
    """Have one request answered: by a handler directly where `app` is a `DirectApp`, else as ASGI.

    Raises:
        Exception: the answer broke off in the middle; what was sent is not a whole answer.

    Cancelled: the handler is; whatever was sent before stays sent.
    """
    take: Callable[[Exchange], Taken | None] | None = getattr(app, "take", None)
    answer: Answer
    try:
        taken = None if take is None else take(exchange)
        if taken is None:
            await _run_shown(app, exchange)
            return
        body = await read_whole(exchange, DATA_BODY_BYTES_MAX)
        answer = await taken.answer(body, exchange.work)
    except Refusal as refusal:
        answer = refusal_response(refusal)
    except ClientGone:
        return
    await send_answer(exchange, answer)


async def _run_shown(app: AsgiApp, exchange: Exchange) -> None:
    shown = _Shown(exchange)
    try:
        await app(shown.scope(), shown.receive, shown.send)
    except ClientGone:
        return
    except Exception:
        if shown.gone:
            return
        if shown.begun:
            raise
        if shown.refused is None:
            _log.exception("error in the application, %s %s", exchange.method, exchange.path)
    if not shown.begun:
        refused = shown.refused
        answer = internal_error() if refused is None else refusal_response(refused)
        await send_answer(exchange, answer)
    elif not shown.whole.is_set():
        raise BrokenOff("the application ended before its answer was whole")


class _Shown:
    """An exchange as an ASGI application sees it."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._body_read = False
        self._status = 0
        self._headers: Headers = ()
        self._length: int | None = None
        self._parts: list[bytes] = []
        """Of a short answer, until it is whole."""
        self.begun = False
        """Something of an answer was sent, or an attempt was made."""
        self.whole = trio.Event()
        self.refused: Refusal | None = None
        """What came was no body, which is not the application's fault."""
        self.gone = False
        """The caller left in the middle of its body, whatever the application makes of that."""

    def scope(self) -> Scope:
        exchange = self._exchange
        return {
            "type": "http",
            "asgi": {"spec_version": "2.3", "version": "3.0"},
            "method": exchange.method,
            "path": exchange.path,
            "raw_path": exchange.raw_path,
            "query_string": exchange.query,
            "root_path": "",
            "headers": list(exchange.headers),
            "state": {},
            "extensions": {},
            **exchange.asgi(),
        }

    async def receive(self) -> Message:
        if self._body_read:
            # A caller that leaves cancels this task, so that nobody need be told.
            await self.whole.wait()
            return {"type": "http.disconnect"}
        try:
            data = await self._exchange.receive_some()
        except Refusal as refusal:
            self.refused = refusal
            raise
        except ClientGone:
            self.gone = True
            raise
        self._body_read = not data
        return {"type": "http.request", "body": data, "more_body": bool(data)}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = tuple((bytes(n).lower(), bytes(v)) for n, v in message["headers"])
            length = first_header(headers, "content-length")
            self._status, self._headers = message["status"], headers
            self._length = int(length) if length is not None else None
        elif message["type"] == "http.response.body":
            await self._send_body(message.get("body", b""), message.get("more_body", False))

    async def _send_body(self, data: bytes, more: bool) -> None:
        exchange = self._exchange
        if not self.begun:
            self._parts.append(data)
            if more and self._length is not None and self._length <= JOINED_BODY_BYTES_MAX:
                await trio.lowlevel.checkpoint()
                return
            self.begun = True
            data = b"".join(self._parts)
            if not more:
                await exchange.answer(self._status, self._headers, data, None)
                self.whole.set()
                return
            await exchange.begin(self._status, self._headers, self._length)
        if data:
            await exchange.send_some(data)
        if not more:
            await exchange.finish()
            self.whole.set()


class ForeignExchange:
    """A request that a foreign ASGI server has received, as an exchange."""

    work: Cancellable | None = None

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body_read = False
        self._left = False
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.raw_path: bytes = scope.get("raw_path") or b""
        self.query: bytes = scope["query_string"]
        self.headers: Headers = tuple((bytes(n).lower(), bytes(v)) for n, v in scope["headers"])
        declared = first_header(self.headers, "content-length")
        self.content_length = int(declared) if declared is not None and declared.isdigit() else None

    def asgi(self) -> Scope:
        return self._scope

    def body_at_hand(self) -> bytes | None:
        return None

    async def receive_some(self) -> bytes:
        while not self._body_read:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            self._body_read = not message.get("more_body", False)
            data: bytes = message.get("body", b"")
            if data:
                return data
        return b""

    async def answer(self, status: int, headers: Headers, body: bytes, on_done: OnDone) -> None:
        sent = False
        try:
            shown = b"" if self.method == "HEAD" else body
            with self._last_words(len(shown)):
                await self.begin(status, headers, len(body))
                await self._send({"type": "http.response.body", "body": shown, "more_body": False})
            sent = True
        finally:
            if on_done is not None:
                on_done(sent)

    async def begin(self, status: int, headers: Headers, content_length: int | None) -> None:
        given = list(headers)
        if content_length is not None:
            given.append((b"content-length", b"%d" % content_length))
        await self._send({"type": "http.response.start", "status": status, "headers": given})

    async def send_some(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        with self._last_words(0):
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    @contextmanager
    def _last_words(self, size_bytes: int) -> Iterator[None]:
        # Hypercorn announces a disconnect while it finishes a request.
        if self._left:
            raise ClientGone
        with _bounded_shield(size_bytes) as scope:
            yield
        if scope.cancelled_caught:
            raise ClientGone

    async def watch(self, work: trio.CancelScope) -> None:
        """Cancel the work when the caller leaves; drops what it sends besides."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        work.cancel()


async def serve_foreign(taken: Taken, exchange: ForeignExchange) -> None:
    """Answer a request that a foreign server has received.

    Such a server tells an application that the caller left, and cancels nothing: the work is raced
    against that message.
    """
    try:
        body = await read_whole(exchange, DATA_BODY_BYTES_MAX)
    except ClientGone:
        return
    except Refusal as refusal:
        await refuse_foreign(refusal, exchange)
        return
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.watch, nursery.cancel_scope)
        await send_answer(exchange, await taken.answer(body, exchange.work))
        nursery.cancel_scope.cancel()


async def refuse_foreign(refusal: Refusal, exchange: ForeignExchange) -> None:
    """Answer before the body was read: what comes of it is dropped, so that nothing is held up."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.watch, nursery.cancel_scope)
        await send_answer(exchange, refusal_response(refusal))
        nursery.cancel_scope.cancel()


def uninterrupted(send: Send) -> Send:
    """A `send` for a framework that cancels itself on a disconnect.

    Hypercorn announces one in the middle of the last send; cutting that short would leave its idle
    timer unstarted.
    """

    async def shielded(message: Message) -> None:
        try:
            with _bounded_shield(len(message.get("body", b""))):
                await send(message)
        except ClientGone:
            pass

    return shielded


def _bounded_shield(size_bytes: int) -> trio.CancelScope:
    allowed_s = _SEND_S_MAX * (1 + size_bytes // _SEND_BYTES)
    return trio.CancelScope(shield=True, deadline=trio.current_time() + allowed_s)
