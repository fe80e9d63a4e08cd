"""One HTTP/1.1 connection: whatever its peer sends, only this connection can end by it (SRV-1).

Two tasks for its whole life, none per request: one reads, the other serves one request after the other.
So leaving is noticed while a request is served, also behind pipelined bytes, and ends the handler by
cancelling the connection: what its peer cannot hear any more need not be said.

Upgrades are ignored: HTTP/2 and websockets are not spoken. All timers are one deadline, that of the
connection's cancel scope, moved by whoever waits.
"""

from __future__ import annotations

import logging
import math
from email.utils import formatdate
from typing import Final

import attrs
import trio

from gymtrio.context import AsgiApp, Scope, decode_path
from gymtrio.json_text import dump_json
from gymtrio.serving.asgi import BrokenOff, serve_exchange
from gymtrio.serving.draining import Cancellable
from gymtrio.serving.exchange import OnDone, send_answer
from gymtrio.serving.garbage import note_end
from gymtrio.serving.http import (
    BadRequest,
    ClientGone,
    Headers,
    first_header,
    internal_error,
)
from gymtrio.serving.http1 import (
    CONTINUE,
    LAST_CHUNK,
    BadAnswer,
    Framing,
    Head,
    Malformed,
    RequestReader,
    encode_chunk,
    encode_head,
    framing_of,
)

RECEIVE_BYTES: Final = 65536
READ_AHEAD_BYTES_MAX: Final = 65536
"""What may have come and not been read: of a body it is left to the kernel, and a peer that pipelines
more while its request is served is cut off."""
JOINED_BODY_BYTES_MAX: Final = 65536
"""A body up to this leaves in one send with its head; joining a longer one costs more than a send."""
SEND_SLICE_BYTES: Final = 65536
"""A peer that takes less of an answer than this within the time for a send counts as gone: 2 kB/s."""
LINGER_S: Final = 1.0
"""A peer that still sends when we close gets this long to read our answer before a reset."""

_ERROR_CODES: Final = {408: "request_timeout", 431: "headers_too_large", 501: "not_implemented"}

_log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class HttpLimits:
    """Times of a server's connections."""

    keep_alive_s: float = 75.0
    """How long a connection may be idle. Longer than the idle time of our clients (30 s), so that it
    is the client who closes."""
    head_timeout_s: float = 10.0
    """From the first byte of a request's head to its last."""
    send_timeout_s: float = 30.0
    """A peer that does not take `SEND_SLICE_BYTES` of an answer, or its rest, for this long is gone;
    one that reads slowly may take as long as it needs."""
    grace_s: float = 5.0
    """At shutdown, running requests get this long, before they are answered 503."""
    date_header: bool = True
    """It needs the machine's clock; a simulation does without."""


class Shared:
    """What the connections of one server have in common."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.stopping = False
        """Every answer from now on is the last of its connection."""
        self._date = b""
        self._date_until = -math.inf

    def date(self) -> bytes:
        """The header line; made once a second."""
        now = trio.current_time()
        if self.limits.date_header and now >= self._date_until:
            self._date = b"date: %s\r\n" % formatdate(usegmt=True).encode("ascii")
            self._date_until = now + 1.0
        return self._date


class Connection:
    """Serves one stream until it ends."""

    def __init__(self, app: AsgiApp, stream: trio.abc.Stream, shared: Shared) -> None:
        self._app = app
        self._stream = stream
        self.shared = shared
        self._life = trio.CancelScope(deadline=trio.current_time() + shared.limits.keep_alive_s)
        self._reader = RequestReader()
        self._arrived = b""
        self._eof = False
        self._serving = False
        """A request's head has come, and its answer has not left."""
        self._answering = False
        """The last of an answer leaves, and nothing had come behind its request until then."""
        self._dropping = False
        """Nothing is read any more; what comes is dropped, so that the peer gets to our answer."""
        self._news = trio.lowlevel.ParkingLot()
        """The serving task, waiting for bytes or the end."""
        self._room = trio.lowlevel.ParkingLot()
        """The reading task, waiting for what came to be taken."""
        self._addresses: Scope | None = None

    async def run(self) -> None:
        """Serve the connection; its errors are logged, not raised.

        Cancelled: the connection is closed at once.
        """
        try:
            with self._life:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read)
                    await self._serve()
                    await self._end()
                    nursery.cancel_scope.cancel()
        except* OSError:
            pass
        except* Exception as errors:  # noqa: BLE001
            # The edge: anything that a peer provokes ends its own connection (SRV-1).
            client = self.addresses()["client"]
            _log.warning("connection of %s ended by %r", client, errors.exceptions[0])
        finally:
            note_end()
            await trio.aclose_forcefully(self._stream)

    def stop_when_idle(self) -> None:
        """Close now if no request is being served, else after it."""
        if not self._serving:
            self._life.cancel()

    def allow(self, seconds: float) -> None:
        """From now on the connection has this long until somebody allows it more."""
        self._life.deadline = trio.current_time() + seconds

    async def _read(self) -> None:
        while True:
            try:
                data = bytes(await self._stream.receive_some(RECEIVE_BYTES))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                break
            if not data:
                break
            if self._dropping:
                continue
            self._arrived = self._arrived + data if self._arrived else data
            self._news.unpark()
            while len(self._arrived) > READ_AHEAD_BYTES_MAX and not self._dropping:
                if self._serving and self._reader.whole and not self._answering:
                    # It asks and asks, and does not wait for an answer.
                    self._life.cancel()
                await self._room.park()
        self._eof = True
        note_end()
        self._news.unpark()
        if self._serving:
            self._life.cancel()

    async def more(self) -> bool:
        """Feed the reader with what has come, or wait for it; False at the end."""
        while not self._arrived:
            if self._eof:
                return False
            await self._news.park()
        self.feed()
        return True

    def feed(self) -> None:
        """Feed the reader with what has come."""
        data, self._arrived = self._arrived, b""
        self._reader.feed(data)
        if len(data) > READ_AHEAD_BYTES_MAX:
            self._room.unpark()

    async def _serve(self) -> None:
        """Serve requests until this connection has had its last."""
        reader, keep_alive_s = self._reader, self.shared.limits.keep_alive_s
        while not self.shared.stopping:
            try:
                head = await self._head()
            except Malformed as error:
                await self._refuse(error)
                return
            if head is None or self._eof:
                # Who has half closed counts as gone.
                return
            self._serving, self._answering = True, False
            self._life.deadline = math.inf
            exchange = _HttpExchange(self, reader, head)
            await self._serve_one(exchange)
            if not exchange.keeps_alive:
                return
            self._serving = False
            self.allow(keep_alive_s)

    async def _head(self) -> Head | None:
        """The next request's head; None: the peer has ended.

        Raises:
            Malformed: what came is none, or its end does not come.
        """
        reader, timeout_s = self._reader, self.shared.limits.head_timeout_s
        while (head := reader.head()) is None:
            if not reader.begun:
                if not await self.more():
                    return None
                continue
            self._life.deadline = math.inf
            with trio.move_on_after(timeout_s):
                while (head := reader.head()) is None:
                    if not await self.more():
                        return None
                return head
            raise Malformed(408, f"head not received within {timeout_s:g} s")
        return head

    async def _serve_one(self, exchange: _HttpExchange) -> None:
        try:
            await serve_exchange(self._app, exchange)
        except ClientGone:
            exchange.keeps_alive = False
        except BrokenOff as error:
            _log.error("%s %s: %s", exchange.method, exchange.path, error)
            exchange.keeps_alive = False
        except Exception:  # noqa: BLE001 - the edge: an application's fault ends its own request
            _log.exception("error in the application, %s %s", exchange.method, exchange.path)
            exchange.keeps_alive = False
            if not exchange.begun:
                await send_answer(exchange, internal_error())

    async def _refuse(self, error: Malformed) -> None:
        code = _ERROR_CODES.get(error.status, "bad_request")
        body = dump_json({"error": {"code": code, "detail": error.detail}})
        framing = Framing(length=len(body), chunked=False, bodiless=False, closes=True)
        headers = ((b"content-type", b"application/json"),)
        self.drop()
        await self.send(encode_head(error.status, headers, framing, self.shared.date()) + body)

    def drop(self) -> None:
        """Read nothing of the peer any more."""
        self._dropping = True
        self._arrived = b""
        self._room.unpark()

    async def send(self, data: bytes) -> None:
        """
        Raises:
            ClientGone: the peer does not take it.

        Cancelled: part of it may have left; the connection is of no use any more. A peer that takes
        nothing for too long cancels the connection.
        """
        timeout_s = self.shared.limits.send_timeout_s
        try:
            if len(data) <= SEND_SLICE_BYTES:
                self.allow(timeout_s)
                await self._stream.send_all(data)
            else:
                for begin in range(0, len(data), SEND_SLICE_BYTES):
                    self.allow(timeout_s)
                    await self._stream.send_all(memoryview(data)[begin : begin + SEND_SLICE_BYTES])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ClientGone from None
        self._life.deadline = math.inf

    def answer_leaves(self) -> None:
        """The last of an answer leaves: a peer that waited for it may go on before we do."""
        self._answering = not self._arrived

    async def _end(self) -> None:
        """Close in such a way that the peer gets to what was sent last."""
        if self._eof or not isinstance(self._stream, trio.abc.HalfCloseableStream):
            return
        self._serving = False
        try:
            await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        if self._dropping or self._arrived or not self._reader.whole:
            self.drop()
            self.allow(LINGER_S)
            while not self._eof:
                await self._news.park()

    def addresses(self) -> Scope:
        """The two ends, as an ASGI scope has them."""
        if self._addresses is None:
            client = server = None
            if isinstance(self._stream, trio.SocketStream):
                try:
                    client = _pair(self._stream.socket.getpeername())
                    server = _pair(self._stream.socket.getsockname())
                except OSError:
                    # The peer has just left.
                    pass
            self._addresses = {"client": client, "server": server}
        return self._addresses


def _pair(address: object) -> tuple[str, int] | None:
    if isinstance(address, tuple):
        return str(address[0]), int(address[1])
    return None


class _HttpExchange:
    """One request of a connection (`gymtrio.serving.exchange.Exchange`)."""

    work: Cancellable | None = None

    def __init__(self, connection: Connection, reader: RequestReader, head: Head) -> None:
        self._connection = connection
        self._reader = reader
        self._head = head
        self._awaits_leave = head.expects_continue
        self._left: int | None = None
        self._framing: Framing | None = None
        self._unsent = b""
        """The head of an answer that leaves with the first piece of its body."""
        self.keeps_alive = head.keeps_alive
        """Another request may follow on the connection."""
        self.method = head.method
        self.raw_path, _, self.query = head.target.partition(b"?")
        self.path = decode_path(self.raw_path.decode("ascii"))
        self.headers = head.headers
        self.content_length = head.content_length

    @property
    def begun(self) -> bool:
        """The head of an answer was made."""
        return self._framing is not None

    def asgi(self) -> Scope:
        version = "1.0" if self._head.is_1_0 else "1.1"
        return {"http_version": version, "scheme": "http", **self._connection.addresses()}

    def body_at_hand(self) -> bytes | None:
        length = self.content_length
        if length is None or length > self._reader.at_hand:
            return None
        return self._reader.body() or b""

    async def receive_some(self) -> bytes:
        while (data := self._body()) is None:
            if self._reader.whole:
                return b""
            if self._awaits_leave:
                self._awaits_leave = False
                await self._connection.send(CONTINUE)
            if not await self._connection.more():
                raise ClientGone
        return data

    def _body(self) -> bytes | None:
        try:
            return self._reader.body()
        except Malformed as error:
            self.keeps_alive = False
            raise BadRequest(error.detail) from None

    async def answer(self, status: int, headers: Headers, body: bytes, on_done: OnDone) -> None:
        sent = False
        try:
            length = _told_length(headers, self.method, body)
            data = self._encoded_head(status, headers, length)
            assert self._framing is not None
            self._connection.answer_leaves()
            if self._framing.bodiless:
                await self._connection.send(data)
            elif len(body) <= JOINED_BODY_BYTES_MAX:
                await self._connection.send(data + body)
            else:
                await self._connection.send(data)
                await self._connection.send(body)
            sent = True
        finally:
            if on_done is not None:
                on_done(sent)

    async def begin(self, status: int, headers: Headers, content_length: int | None) -> None:
        self._left = content_length
        data = self._encoded_head(status, headers, content_length)
        if content_length is None:
            await self._connection.send(data)
        else:
            self._unsent = data

    def _skip_body(self) -> None:
        """Read past what has come of an unwanted body; if more is to come, nothing can follow."""
        self._connection.feed()
        try:
            while self._reader.body() is not None:
                pass
        except Malformed:
            pass
        if not self._reader.whole:
            self.keeps_alive = False
            self._connection.drop()

    def _encoded_head(self, status: int, headers: Headers, length: int | None) -> bytes:
        connection = self._connection
        if not self._reader.whole:
            self._skip_body()
        if connection.shared.stopping:
            self.keeps_alive = False
        framing = framing_of(self._head, status, length, closes=not self.keeps_alive)
        data = encode_head(status, headers, framing, connection.shared.date())
        self._framing = framing
        self.keeps_alive = not framing.closes
        return data

    async def send_some(self, data: bytes) -> None:
        framing = self._framing
        assert framing is not None
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise BadAnswer("more body than its content-length")
            if not self._left:
                self._connection.answer_leaves()
        if framing.bodiless:
            return
        if framing.chunked:
            data = encode_chunk(data)
        await self._flush(data)

    async def finish(self) -> None:
        framing = self._framing
        assert framing is not None
        if self._left and not framing.bodiless:
            raise BadAnswer("less body than its content-length")
        self._connection.answer_leaves()
        await self._flush(LAST_CHUNK if framing.chunked else b"")

    async def _flush(self, data: bytes) -> None:
        unsent, self._unsent = self._unsent, b""
        if unsent or data:
            await self._connection.send(unsent + data)


def _told_length(headers: Headers, method: str, body: bytes) -> int:
    """Of a whole answer's body; an answer to HEAD tells that of the body which GET would have got."""
    if method == "HEAD" and not body:
        told = first_header(headers, "content-length")
        if told is not None and told.isdigit():
            return int(told)
    return len(body)
