"""HTTP/1.1 connections to other servers: h11 on trio streams, kept and reused.

Invariants:
  P1  A place in a lane is taken exactly as long as the block of `exchange` lasts.
  P2  A connection is in one place: with one exchange, or idle. Whatever leaves an exchange before
      the reply was read whole closes it; so no reply is ever read by another call.
  P3  A request is sent twice only if it is repeatable, the first connection was a reused one, and not
      one byte of a reply had come. The second time it goes over a new connection.
  P4  Every operation on idle connections is O(1) in their number (closing what is over-age aside).

Not httpx, and no other library: measured, they lose places under cancellation and slow down with the
number of connections.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import attrs
import h11
import trio

from gymtrio.background import open_background
from gymtrio.errors import TransportError
from gymtrio.ports import Connector
from gymtrio.serving.client import ClientSettings, Incoming, Lane, Origin, Outgoing, RefusedHere
from gymtrio.serving.http import BadRequest, Headers

RECEIVE_BYTES: Final = 65536
HEAD_BYTES_MAX: Final = 65536
JOINED_BODY_BYTES_MAX: Final = 65536
"""A body up to this leaves in one send with its head; joining a longer one costs more than a send."""

_LATE_REPLY_S: Final = 1.0
"""How long to look for the reply of a peer that stopped reading: it may have refused early."""


class HostConnector:
    """TCP connections of this machine."""

    async def connect(self, host: str, port: int) -> trio.abc.Stream:
        return await trio.open_tcp_stream(host, port)


class _Ended(Exception):
    """The peer ended the connection; says whether any byte of a reply had come."""

    def __init__(self, why: str, reply_begun: bool) -> None:
        super().__init__(why)
        self.reply_begun = reply_begun


def _head(outgoing: Outgoing, origin: Origin) -> h11.Request:
    """
    Raises:
        h11.LocalProtocolError: it holds what no request may.
    """
    headers = [(b"host", str(origin).encode("ascii")), *outgoing.headers]
    if outgoing.body or outgoing.method not in {"GET", "HEAD", "DELETE", "OPTIONS"}:
        headers.append((b"content-length", b"%d" % len(outgoing.body)))
    return h11.Request(method=outgoing.method, target=outgoing.target, headers=headers)


class _Connection:
    """One stream with its protocol state; the `Incoming` of the exchange that holds it."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._reply_begun = False
        self._pending: h11.Event | None = None
        self._whole = False
        self.status = 0
        self.headers: Headers = ()
        self.idle_since = 0.0

    async def start(self, request: h11.Request, outgoing: Outgoing) -> None:
        """Send the request and receive the head of its reply.

        Raises:
            _Ended: the peer closed the connection, or does not speak HTTP.
        """
        self._reply_begun = self._whole = False
        head, body = self._http.send(request) or b"", b""
        if outgoing.body:
            body = self._http.send(h11.Data(data=outgoing.body)) or b""
        self._http.send(h11.EndOfMessage())
        try:
            if len(body) <= JOINED_BODY_BYTES_MAX:
                await self._stream.send_all(head + body)
            else:
                await self._stream.send_all(head)
                await self._stream.send_all(body)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            await self._late_reply(error)
        else:
            await self._read_head()

    async def _late_reply(self, error: Exception) -> None:
        with trio.move_on_after(_LATE_REPLY_S):
            try:
                await self._read_head()
                return
            except _Ended:
                # What went wrong first tells more.
                pass
        why = error.__cause__ or error
        raise _Ended(f"cannot send: {why}", self._reply_begun) from error

    async def _read_head(self) -> None:
        event = await self._next_event()
        while isinstance(event, h11.InformationalResponse):
            event = await self._next_event()
        if not isinstance(event, h11.Response):
            raise _Ended(f"the peer sent {type(event).__name__} before a reply", self._reply_begun)
        self.status = event.status_code
        self.headers = tuple((bytes(name), bytes(value)) for name, value in event.headers)
        # Read on while it costs nothing, so that a short reply is whole when the caller gets it.
        self._pending = self._event_at_hand()

    async def receive_some(self) -> bytes:
        if self._whole:
            return b""
        event, self._pending = self._pending, None
        if event is None:
            try:
                event = await self._next_event()
            except _Ended as ended:
                raise TransportError(f"reply cut short: {ended}") from ended
        if isinstance(event, h11.Data):
            return bytes(event.data)
        if isinstance(event, h11.EndOfMessage):
            self._whole = True
            return b""
        raise TransportError(f"reply cut short: {type(event).__name__}")

    def _event_at_hand(self) -> h11.Event | None:
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise _Ended(f"the peer does not speak HTTP/1.1: {error}", self._reply_begun) from error
        if isinstance(event, type):
            return None
        return event

    async def _next_event(self) -> h11.Event:
        while True:
            event = self._event_at_hand()
            if event is not None:
                return event
            try:
                data = await self._stream.receive_some(RECEIVE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise _Ended(
                    f"connection lost: {error.__cause__ or error}", self._reply_begun
                ) from error
            if not data:
                if self._http.their_state is h11.SEND_RESPONSE:
                    raise _Ended("the peer closed the connection", self._reply_begun)
            else:
                self._reply_begun = True
            self._http.receive_data(bytes(data))

    def recycle(self) -> bool:
        """Make ready for the next request; False when this connection has served its last."""
        if not self._whole and not isinstance(self._pending, h11.EndOfMessage):
            return False
        self._pending = None
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            return True
        return False

    def looks_dead(self) -> bool:
        """Whether the peer has closed, or has sent what nobody asked for, while this was idle."""
        if self._http.trailing_data[0]:
            return True
        if isinstance(self._stream, trio.SocketStream):
            return self._stream.socket.is_readable()
        return False

    async def close(self) -> None:
        await trio.aclose_forcefully(self._stream)


@attrs.define
class _Line:
    """The connections of one lane to one origin."""

    limiter: trio.CapacityLimiter
    idle: deque[_Connection] = attrs.field(factory=deque)
    """Oldest first; taken from the young end, so that the surplus ages and is closed."""

    @property
    def unused(self) -> bool:
        return not self.idle and not self.limiter.borrowed_tokens and not self.waiting

    @property
    def waiting(self) -> int:
        return self.limiter.statistics().tasks_waiting


@attrs.frozen
class PoolStatistics:
    """What a pool holds right now, over all origins."""

    active: int
    """Exchanges with a place in a lane."""
    waiting: int
    """Calls waiting for a place."""
    idle: int
    waits: int
    """Calls that had to wait for a place, since the pool was opened."""
    waited_s: float
    """How long they waited, those that still do apart."""


class Pool:
    """The HTTP transport; opened by `open_pool`."""

    def __init__(self, settings: ClientSettings, connector: Connector) -> None:
        self._settings = settings
        self._connector = connector
        self._lines: dict[tuple[Origin, Lane], _Line] = {}
        self._waits = dict.fromkeys(Lane, 0)
        self._waited_s = dict.fromkeys(Lane, 0.0)
        self._some_idle = trio.Event()
        self._tls: ssl.SSLContext | None = None

    def statistics(self, lane: Lane | None = None) -> PoolStatistics:
        """Count what is held, in one lane or in all."""
        lines = [line for (_, of), line in self._lines.items() if lane in (None, of)]
        lanes = list(Lane) if lane is None else [lane]
        return PoolStatistics(
            active=sum(line.limiter.borrowed_tokens for line in lines),
            waiting=sum(line.waiting for line in lines),
            idle=sum(len(line.idle) for line in lines),
            waits=sum(self._waits[of] for of in lanes),
            waited_s=sum(self._waited_s[of] for of in lanes),
        )

    @asynccontextmanager
    async def exchange(
        self, origin: Origin, outgoing: Outgoing, lane: Lane
    ) -> AsyncIterator[Incoming]:
        """See `gymtrio.serving.client.Transport`."""
        try:
            request = _head(outgoing, origin)
        except h11.LocalProtocolError as error:
            # As the server would answer it, if it could be sent.
            yield RefusedHere.by(BadRequest(f"head: {error}"))
            return
        line = self._line(origin, lane)
        # Not on behalf of the task: one task may hold two exchanges, such as a stream and a call.
        place = object()
        if line.limiter.available_tokens:
            await line.limiter.acquire_on_behalf_of(place)
        else:
            await self._wait_for_place(line, lane, place)
        connection: _Connection | None = None
        reusable = False
        try:
            connection = await self._started(line, origin, request, outgoing)
            yield connection
            reusable = connection.recycle()
        finally:
            line.limiter.release_on_behalf_of(place)
            if connection is not None:
                if reusable:
                    self._keep(line, connection)
                else:
                    await connection.close()
            if line.unused:
                self._lines.pop((origin, lane), None)

    async def _wait_for_place(self, line: _Line, lane: Lane, place: object) -> None:
        began = trio.current_time()
        self._waits[lane] += 1
        try:
            await line.limiter.acquire_on_behalf_of(place)
        finally:
            self._waited_s[lane] += trio.current_time() - began

    def _line(self, origin: Origin, lane: Lane) -> _Line:
        line = self._lines.get((origin, lane))
        if line is None:
            settings = self._settings
            places = (
                settings.control_connections_max
                if lane is Lane.CONTROL
                else settings.data_connections_max
            )
            line = _Line(trio.CapacityLimiter(places or float("inf")))
            self._lines[origin, lane] = line
        return line

    async def _started(
        self, line: _Line, origin: Origin, request: h11.Request, outgoing: Outgoing
    ) -> _Connection:
        reused = await self._take_idle(line)
        if reused is not None:
            try:
                return await self._start_on(reused, request, outgoing)
            except _Ended as ended:
                if ended.reply_begun or not outgoing.repeatable:
                    raise TransportError(f"{origin}: {ended}") from ended
        connection = await self._connect(origin)
        try:
            return await self._start_on(connection, request, outgoing)
        except _Ended as ended:
            raise TransportError(f"{origin}: {ended}") from ended

    @staticmethod
    async def _start_on(
        connection: _Connection, request: h11.Request, outgoing: Outgoing
    ) -> _Connection:
        started = False
        try:
            await connection.start(request, outgoing)
            started = True
        finally:
            if not started:
                await connection.close()
        return connection

    async def _connect(self, origin: Origin) -> _Connection:
        try:
            with trio.fail_after(self._settings.connect_timeout_s):
                stream = await self._connector.connect(origin.host, origin.port)
        except trio.TooSlowError:
            raise TransportError(
                f"{origin}: not connected within {self._settings.connect_timeout_s} s"
            ) from None
        except OSError as error:
            raise TransportError(f"{origin}: cannot connect: {error}") from error
        if not origin.tls:
            return _Connection(stream)
        if self._tls is None:
            self._tls = ssl.create_default_context()
        # The handshake happens with the first send, under the deadline of the call.
        return _Connection(
            trio.SSLStream(stream, self._tls, server_hostname=origin.host, https_compatible=True)
        )

    async def _take_idle(self, line: _Line) -> _Connection | None:
        while line.idle:
            connection = line.idle.pop()
            if not self._over_age(connection) and not connection.looks_dead():
                return connection
            await connection.close()
        return None

    def _keep(self, line: _Line, connection: _Connection) -> None:
        connection.idle_since = trio.current_time()
        line.idle.append(connection)
        self._some_idle.set()

    def _over_age(self, connection: _Connection) -> bool:
        return trio.current_time() - connection.idle_since >= self._settings.idle_s_max

    async def close_over_age(self) -> None:
        """Close idle connections as they come of age; runs until cancelled."""
        while True:
            await self._some_idle.wait()
            oldest = min(
                (line.idle[0].idle_since for line in self._lines.values() if line.idle),
                default=None,
            )
            if oldest is None:
                self._some_idle = trio.Event()
                continue
            await trio.sleep_until(oldest + self._settings.idle_s_max)
            for key, line in list(self._lines.items()):
                while line.idle and self._over_age(line.idle[0]):
                    await line.idle.popleft().close()
                if line.unused:
                    self._lines.pop(key, None)

    async def close_idle(self) -> None:
        for line in self._lines.values():
            while line.idle:
                await line.idle.pop().close()


@asynccontextmanager
async def open_pool(
    settings: ClientSettings | None = None, connector: Connector | None = None
) -> AsyncIterator[Pool]:
    """Open the HTTP transport; leaving the block closes what is idle.

    Exchanges still running then are their callers' to end.
    """
    pool = Pool(settings or ClientSettings(), connector or HostConnector())
    async with open_background() as nursery:
        nursery.start_soon(pool.close_over_age)
        try:
            yield pool
        finally:
            # Closing forcefully does not wait, so the shield needs no deadline.
            with trio.CancelScope(shield=True):
                await pool.close_idle()
