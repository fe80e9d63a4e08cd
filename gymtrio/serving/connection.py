"""One HTTP/1.1 connection: whatever its peer sends, only this connection can end by it (SRV-1).

The protocol code is that of Hypercorn 0.18 (`H11Protocol`, `HTTPStream`); the connection around it is
ours, because Hypercorn's own lets an error of one connection end the process, never tells an
application of a peer that left behind pipelined bytes, and waits without limit for a peer that does
not read. What differs, by overriding the methods named here:

- `_check_protocol`, `_create_stream`: no upgrades. HTTP/2 and websockets are not spoken.
- `stream_send`: head and body of an answer with a length leave in one send.
- `_send_error_response`: errors have a JSON body.
- `can_read`: while a request is served, the connection is read on, so that leaving is noticed.

Timers are deadlines of the one receive that waits, not tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Any, Final, cast

import attrs
import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Response
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from gymtrio.context import AsgiApp, Message, Scope
from gymtrio.serving.http import ClientGone, dump_json

HEAD_BYTES_MAX: Final = 65536
RECEIVE_BYTES: Final = 65536
READ_AHEAD_BYTES_MAX: Final = 65536
"""What a peer may pipeline while its request is served; more ends the connection."""
REQUEST_QUEUE_MESSAGES: Final = 10
JOINED_BODY_BYTES_MAX: Final = 65536
LINGER_S: Final = 1.0
"""A peer that still sends when we close gets this long to read our answer before a reset."""
REQUESTS_PER_CONNECTION_MAX: Final = 1_000_000

_ERROR_CODES: Final = {400: "bad_request", 431: "headers_too_large", 501: "not_implemented"}

_log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class HttpLimits:
    """Times of a server's connections."""

    keep_alive_s: float = 75.0
    """How long a connection may be idle, and how long a request's head may take. Longer than the
    idle time of our clients (30 s), so that it is the client who closes."""
    send_timeout_s: float = 30.0
    """A peer that does not take bytes of an answer for this long is gone."""
    grace_s: float = 5.0
    """At shutdown, running requests get this long."""
    date_header: bool = True
    """It needs the machine's clock; a simulation does without."""


def hypercorn_config(limits: HttpLimits) -> Config:
    """The part of Hypercorn's configuration that its protocol code reads."""
    config = Config()
    config.errorlog = logging.getLogger("gymtrio.http")
    config.accesslog = None
    config.include_server_header = False
    config.include_date_header = limits.date_header
    config.h11_max_incomplete_size = HEAD_BYTES_MAX
    config.keep_alive_max_requests = REQUESTS_PER_CONNECTION_MAX
    return config


class _PeerLeft(Exception):
    """The peer closed while its request was being served, or sent too much meanwhile."""


class _Http1(H11Protocol):
    """Hypercorn's HTTP/1.1 protocol with the differences listed above."""

    def __init__(self, receive: Callable[[], Awaitable[bytes]], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._unsent = b""
        self.can_read = _ReadsOn(self._feed, receive)

    def _feed(self, data: bytes) -> None:
        self.connection.receive_data(data)

    def peer_still_sends(self) -> bool:
        """Whether a request has not been read whole, or more than it has come."""
        connection = cast(h11.Connection, self.connection)
        whole = connection.their_state in {h11.DONE, h11.MUST_CLOSE, h11.CLOSED}
        return not whole or bool(connection.trailing_data[0])

    async def _check_protocol(self, event: h11.Request) -> None:
        pass

    async def _create_stream(self, request: h11.Request) -> None:
        if any(name == b"upgrade" for name, _ in request.headers):
            request = h11.Request(
                method=request.method,
                target=request.target,
                headers=[(n, v) for n, v in request.headers if n != b"upgrade"],
                http_version=request.http_version,
            )
        await super()._create_stream(request)

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response) and event.status_code >= 200:
            headers = list(chain(event.headers, self.config.response_headers("h11")))
            if self._is_last():
                headers.append((b"connection", b"close"))
            head = h11.Response(status_code=event.status_code, headers=headers)
            self._unsent += self._encode(head)
            if any(name == b"content-length" for name, _ in event.headers):
                return
        elif isinstance(event, Body):
            if len(event.data) > JOINED_BODY_BYTES_MAX:
                await self._flush()
            self._unsent += self._encode(h11.Data(data=event.data))
        elif isinstance(event, EndBody):
            self._unsent += self._encode(h11.EndOfMessage())
        else:
            await super().stream_send(event)
            return
        await self._flush()

    def _is_last(self) -> bool:
        return (
            self.context.terminated.is_set()
            or self.keep_alive_requests >= self.config.keep_alive_max_requests
        )

    def _encode(self, event: h11.Event) -> bytes:
        try:
            return cast(h11.Connection, self.connection).send(event) or b""
        except h11.LocalProtocolError:
            # After an error of the peer nothing can be said any more, which is not our fault.
            if self.connection.their_state is not h11.ERROR:
                raise
            return b""

    async def _flush(self) -> None:
        data, self._unsent = self._unsent, b""
        if data:
            await self.send(RawData(data=data))

    async def _send_error_response(self, status_code: int) -> None:
        code = _ERROR_CODES.get(status_code, "bad_request")
        detail = "the request is not HTTP/1.1, or its head is over the limit"
        body = dump_json({"error": {"code": code, "detail": detail}})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *self.config.response_headers("h11"),
        ]
        self._unsent += self._encode(h11.Response(status_code=status_code, headers=headers))
        self._unsent += self._encode(h11.Data(data=body))
        self._unsent += self._encode(h11.EndOfMessage())
        await self._flush()


class _ReadsOn:
    """Stands where the protocol waits until the next request may be read.

    Hypercorn would leave the socket unread meanwhile, and not see that the peer has left.
    """

    def __init__(
        self, feed: Callable[[bytes], None], receive: Callable[[], Awaitable[bytes]]
    ) -> None:
        self._feed = feed
        self._receive = receive
        self._event = trio.Event()

    async def clear(self) -> None:
        self._event = trio.Event()

    async def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        """
        Raises:
            _PeerLeft: before it may read on.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_ahead)
            await self._event.wait()
            nursery.cancel_scope.cancel()

    async def _read_ahead(self) -> None:
        size = 0
        while size <= READ_AHEAD_BYTES_MAX:
            data = await self._receive()
            if not data:
                break
            size += len(data)
            self._feed(data)
        raise _PeerLeft


class _Tasks:
    """Runs the applications of one connection (Hypercorn's `TaskGroup`)."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    async def spawn_app(
        self,
        app: AsgiApp,
        config: Config,
        scope: Scope,
        send: Callable[[Message | None], Awaitable[None]],
    ) -> Callable[[Message], Awaitable[None]]:
        to_app, for_app = trio.open_memory_channel[Message](REQUEST_QUEUE_MESSAGES)

        async def put(message: Message) -> None:
            try:
                await to_app.send(message)
            except trio.BrokenResourceError:
                # The application answered without reading on.
                pass

        self._nursery.start_soon(_run_app, app, scope, for_app, send)
        return put


async def _run_app(
    app: AsgiApp,
    scope: Scope,
    for_app: trio.MemoryReceiveChannel[Message],
    send: Callable[[Message | None], Awaitable[None]],
) -> None:
    try:
        await app(scope, for_app.receive, send)
    except ClientGone:
        pass
    except Exception:  # noqa: BLE001 - the edge: an application's fault ends its own request
        _log.exception("error in the application, %s %s", scope["method"], scope["path"])
    for_app.close()
    await send(None)


class Connection:
    """Serves one stream until it ends."""

    def __init__(
        self,
        app: AsgiApp,
        stream: trio.abc.Stream,
        *,
        config: Config,
        context: WorkerContext,
        limits: HttpLimits,
    ) -> None:
        self._app = app
        self._stream = stream
        self._config = config
        self._context = context
        self._limits = limits
        self._sending = trio.Lock()
        self._receiving: trio.CancelScope | None = None
        self._idle = True
        self._deadline = trio.current_time() + limits.keep_alive_s
        self._ending = False
        self._protocol: _Http1

    async def run(self) -> None:
        """Serve the connection; its errors are logged, not raised.

        Cancelled: the connection is closed at once.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._protocol = self._make_protocol(_Tasks(nursery))
                await self._read()
        except* (OSError, _PeerLeft):
            pass
        except* Exception as errors:  # noqa: BLE001
            # The edge: anything that a peer provokes ends its own connection (SRV-1).
            _log.warning("connection ended by %r", errors.exceptions[0])
        finally:
            await trio.aclose_forcefully(self._stream)

    def stop_when_idle(self) -> None:
        """Close now if no request is being served, else after it."""
        if self._idle:
            self._set_deadline(-float("inf"))

    def _make_protocol(self, tasks: _Tasks) -> _Http1:
        client, server = _addresses(self._stream)
        return _Http1(
            self._receive,
            self._app,
            self._config,
            self._context,
            tasks,
            ConnectionState({}),
            False,
            client,
            server,
            self._send,
        )

    async def _read(self) -> None:
        there = True
        while there:
            data = b""
            with trio.CancelScope(deadline=self._deadline) as self._receiving:
                data = await self._receive()
            there = bool(data)
            # Once we are ending, what comes is dropped; it is read so that the peer gets to our last
            # answer before a reset.
            if not self._ending and not self._receiving.cancelled_caught:
                await self._protocol.handle(RawData(data))
        await self._protocol.handle(Closed())

    async def _receive(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some(RECEIVE_BYTES))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    async def _send(self, event: Event) -> None:
        """What the protocol calls to act on the connection."""
        if isinstance(event, RawData):
            await self._send_bytes(event.data)
        elif isinstance(event, Updated):
            self._idle = event.idle
            keep_alive_s = self._limits.keep_alive_s if event.idle else float("inf")
            self._set_deadline(trio.current_time() + keep_alive_s)
        elif isinstance(event, Closed):
            await self._end()

    def _set_deadline(self, deadline: float) -> None:
        self._deadline = deadline
        if self._receiving is not None:
            self._receiving.deadline = deadline

    async def _send_bytes(self, data: bytes) -> None:
        sent = False
        async with self._sending:
            with trio.move_on_after(self._limits.send_timeout_s):
                try:
                    await self._stream.send_all(data)
                    sent = True
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
        if not sent:
            await trio.aclose_forcefully(self._stream)
            await self._protocol.handle(Closed())
            raise ClientGone

    async def _end(self) -> None:
        if self._ending:
            return
        self._ending = True
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            try:
                await self._stream.send_eof()
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
                pass
        linger_s = LINGER_S if self._protocol.peer_still_sends() else 0.0
        self._set_deadline(trio.current_time() + linger_s)
        await self._protocol.handle(Closed())


def _addresses(
    stream: trio.abc.Stream,
) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    if not isinstance(stream, trio.SocketStream):
        return None, None
    socket = stream.socket
    return (
        parse_socket_addr(socket.family, socket.getpeername()),
        parse_socket_addr(socket.family, socket.getsockname()),
    )
