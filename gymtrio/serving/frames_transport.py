"""Calls between servers over frames: one connection per called process, for any number of calls.

Invariants:
  F1  A connection is made when the first call needs it, by one task, for all who wait for it; when it
      is lost, by the next call. It ends with the transport.
  F2  A request is sent twice only if it is repeatable and the connection ended before anything of its
      reply was given to the caller; the second time goes over another connection.
  F3  A reply belongs to the call that it names. A call that is left is cancelled at the callee.
  F4  Of a server with several processes a call goes to the one with the fewest calls of ours under way;
      one that cannot be connected to is left alone for a moment, as long as there are others. Control
      calls go to their common port instead: which of them stands still, the kernel knows first. So do
      all calls while none of them takes frames: they may have been started by other means.

Origins without an address here are called over HTTP.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import attrs
import trio

from gymtrio.background import open_background
from gymtrio.errors import HostError, TransportError
from gymtrio.json_text import dump_json
from gymtrio.serving.client import (
    JSON_ONLY,
    NO_REPLY,
    CallTimedOut,
    ClientSettings,
    Incoming,
    Lane,
    Origin,
    Outgoing,
    RefusedHere,
    WholeReply,
)
from gymtrio.serving.deployment import TCP_SCHEME, parse_bind
from gymtrio.serving.frames_head import (
    BROKEN_OFF,
    KIND,
    HeadersTooLarge,
    decode_reply,
    encode_request,
)
from gymtrio.serving.http import Headers
from gymtrio.serving.pool import Pool, PoolStatistics
from gymtrio.settings import Secret
from gymtrio.strict import MalformedValue
from gymtrio.wire.calls_out import OpenCall
from gymtrio.wire.channel import Channel, open_channel
from gymtrio.wire.errors import CallTimedOut as CallOverdue
from gymtrio.wire.errors import ChannelLost, ChannelRefused
from gymtrio.wire.messages import Hello
from gymtrio.wire.tcp import connect_tcp
from gymtrio.wire.unix import connect_unix

SHUNNED_S: Final = 1.0
"""A worker that died is replaced within about this."""


class _NobodyThere(TransportError):
    """There is no connection, so nothing was sent."""


class _Opening:
    """One connection, from the attempt to make it to its end."""

    def __init__(self) -> None:
        self.settled = trio.Event()
        self.channel: Channel | None = None
        self.failure = ""

    @property
    def is_over(self) -> bool:
        if self.channel is None:
            return self.settled.is_set()
        return self.channel.closed.is_set()

    def settle(self, channel: Channel | None, failure: str = "") -> None:
        if not self.settled.is_set():
            self.channel, self.failure = channel, failure
            self.settled.set()


class _Line:
    """The connection to one called server, now and again."""

    def __init__(
        self,
        origin: Origin,
        address: str,
        connect: Callable[[_Opening, Origin, str], Awaitable[None]],
        nursery: trio.Nursery,
    ) -> None:
        self._origin = origin
        self._address = address
        self._connect = connect
        self._nursery = nursery
        self.opening: _Opening | None = None
        self._shunned_until = -math.inf
        self.calls = 0
        """Under way."""

    @property
    def is_shunned(self) -> bool:
        return trio.current_time() < self._shunned_until

    @property
    def rank(self) -> tuple[bool, int]:
        """The lowest is called next (F4)."""
        return self.is_shunned, self.calls

    async def channel(self) -> Channel:
        """The connection; made if there is none.

        Raises:
            TransportError: it cannot be connected to.
        """
        opening = self.opening
        if opening is None or opening.is_over:
            opening = self.opening = _Opening()
            self._nursery.start_soon(self._connect, opening, self._origin, self._address)
        if opening.channel is None:
            await opening.settled.wait()
            if opening.channel is None:
                self._shunned_until = trio.current_time() + SHUNNED_S
                raise _NobodyThere(f"{self._origin}: cannot connect: {opening.failure}")
        return opening.channel


class _Lines:
    """The connections to the processes of one server."""

    def __init__(self, lines: Sequence[_Line]) -> None:
        self.each = lines
        self.several = len(lines) > 1

    @property
    def calls(self) -> int:
        """Under way."""
        return sum(line.calls for line in self.each)

    def carry(self, lane: Lane) -> bool:
        """Whether a call to one of several processes goes over frames now."""
        return lane is not Lane.CONTROL and not all(line.is_shunned for line in self.each)


class _Taken:
    """The line of one call, and the next one should it lead nowhere; to be given back."""

    __slots__ = ("_line", "_lines")

    def __init__(self, lines: Sequence[_Line]) -> None:
        self._lines = lines
        self._line = lines[0] if len(lines) == 1 else _next_of(lines)
        self._line.calls += 1

    def give_back(self) -> None:
        self._line.calls -= 1

    @property
    def open_channel(self) -> Channel | None:
        """The connection, if there is one already."""
        opening = self._line.opening
        if opening is None or opening.channel is None or opening.channel.closed.is_set():
            return None
        return opening.channel

    async def channel(self) -> Channel:
        """A connection to any of the processes.

        Raises:
            _NobodyThere: none can be connected to.
        """
        tried: set[_Line] = set()
        while True:
            try:
                return await self._line.channel()
            except _NobodyThere:
                tried.add(self._line)
                others = [line for line in self._lines if line not in tried]
                if not others:
                    raise
                self._line.calls -= 1
                self._line = _next_of(others)
                self._line.calls += 1


def _next_of(lines: Sequence[_Line]) -> _Line:
    return min(lines, key=lambda line: line.rank)


class FramesTransport:
    """Frames where there is an address, HTTP elsewhere; opened by `open_frames`."""

    def __init__(
        self,
        nursery: trio.Nursery,
        addresses: Mapping[Origin, Sequence[str]],
        http: Pool,
        me: Hello,
        token: Secret | None,
        settings: ClientSettings,
    ) -> None:
        self._http = http
        self._control_calls = 0
        self._me = me
        self._token = token
        self._settings = settings
        self._lines = {
            origin: _Lines(
                [_Line(origin, address, self._keep_connected, nursery) for address in several]
            )
            for origin, several in addresses.items()
        }

    async def _keep_connected(self, opening: _Opening, origin: Origin, address: str) -> None:
        try:
            with trio.fail_after(self._settings.connect_timeout_s):
                stream = await connect(address)
            # Between hosts it is asked for; on one, it is for those who control.
            token = self._token if address.startswith(TCP_SCHEME) else None
            async with open_channel(stream, role="opener", me=self._me, token=token) as channel:
                opening.settle(channel)
                await channel.closed.wait()
        except (OSError, HostError, ChannelLost) as error:
            opening.settle(None, str(error))
        except trio.TooSlowError:
            opening.settle(None, f"not within {self._settings.connect_timeout_s} s")
        finally:
            # Whoever waits for it still is told, should this task be cancelled.
            opening.settle(None, "the transport ended")

    def statistics(self, lane: Lane | None = None) -> PoolStatistics:
        """Count what is held, in one lane or in all; a call over frames never waits for a place."""
        http = self._http.statistics(lane)
        calls = sum(lines.calls for lines in self._lines.values())
        if lane is not None:
            in_control = self._control_calls
            calls = in_control if lane is Lane.CONTROL else calls - in_control
        return attrs.evolve(http, active=http.active + calls)

    def _lines_of(self, origin: Origin, lane: Lane) -> _Lines | None:
        """None: it is called over HTTP."""
        lines = self._lines.get(origin)
        if lines is not None and lines.several and not lines.carry(lane):
            return None
        return lines

    async def request(
        self, origin: Origin, outgoing: Outgoing, lane: Lane, deadline: float
    ) -> WholeReply | None:
        """See `gymtrio.serving.client.WholeTransport`."""
        lines = self._lines_of(origin, lane)
        if lines is None:
            return None
        is_control = lane is Lane.CONTROL
        line = _Taken(lines.each)
        self._control_calls += is_control
        try:
            return await _whole_reply(line, origin, outgoing, is_control, deadline)
        except _NobodyThere:
            if lines.several:
                return None
            raise
        finally:
            line.give_back()
            self._control_calls -= is_control

    @asynccontextmanager
    async def exchange(
        self, origin: Origin, outgoing: Outgoing, lane: Lane
    ) -> AsyncIterator[Incoming]:
        """See `gymtrio.serving.client.Transport`."""
        lines = self._lines_of(origin, lane)
        if lines is None:
            async with self._http.exchange(origin, outgoing, lane) as incoming:
                yield incoming
            return
        is_control = lane is Lane.CONTROL
        line = _Taken(lines.each)
        self._control_calls += is_control
        try:
            async with AsyncExitStack() as stack:
                entered: Incoming
                try:
                    entered = await _entered(stack, line, origin, outgoing, is_control)
                except _NobodyThere:
                    if not lines.several:
                        raise
                    over_http = self._http.exchange(origin, outgoing, lane)
                    entered = await stack.enter_async_context(over_http)
                yield entered
        finally:
            line.give_back()
            self._control_calls -= is_control


async def _whole_reply(
    line: _Taken, origin: Origin, outgoing: Outgoing, control: bool, deadline: float
) -> WholeReply:
    try:
        head = encode_request(outgoing.method, outgoing.target, outgoing.headers)
    except HeadersTooLarge as refusal:
        return WholeReply(refusal.status, JSON_ONLY, dump_json(refusal.body()))
    body = outgoing.body
    try:
        channel = line.open_channel or await _by(deadline, line.channel)
        try:
            reply = await channel.request(KIND, body, head=head, control=control, deadline=deadline)
        except ChannelLost:
            if not outgoing.repeatable:
                raise
            channel = await _by(deadline, line.channel)
            reply = await channel.request(KIND, body, head=head, control=control, deadline=deadline)
    except ChannelRefused as refused:
        if refused.code == BROKEN_OFF:
            raise _cut_short(refused) from refused
        return WholeReply(refused.status, JSON_ONLY, _error_body(refused))
    except CallOverdue:
        raise CallTimedOut(NO_REPLY) from None
    status, headers = _decoded(origin, reply.head)
    return WholeReply(status, headers, reply.body)


async def _entered(
    stack: AsyncExitStack, line: _Taken, origin: Origin, outgoing: Outgoing, control: bool
) -> _Reply | RefusedHere:
    try:
        head = encode_request(outgoing.method, outgoing.target, outgoing.headers)
    except HeadersTooLarge as refusal:
        return RefusedHere.by(refusal)

    async def enter(channel: Channel) -> OpenCall:
        call = channel.exchange(KIND, head, outgoing.body, control=control)
        return await stack.enter_async_context(call)

    try:
        try:
            call = await enter(await line.channel())
        except ChannelLost:
            if not outgoing.repeatable:
                raise
            call = await enter(await line.channel())
    except ChannelRefused as refused:
        return RefusedHere(refused.status, _error_body(refused))
    return _Reply(origin, call)


async def _by(deadline: float, connected: Callable[[], Awaitable[Channel]]) -> Channel:
    with trio.CancelScope(deadline=deadline):
        return await connected()
    raise CallTimedOut(NO_REPLY)


async def connect(address: str) -> trio.SocketStream:
    """Connect to a socket's path, or to `tcp://host:port`.

    Raises:
        OSError: nobody listens there.
        HostError: see `gymtrio.wire.unix.connect_unix`.
    """
    if address.startswith(TCP_SCHEME):
        bind = parse_bind(address.removeprefix(TCP_SCHEME))
        return await connect_tcp(bind.host, bind.port)
    return await connect_unix(address)


def _decoded(origin: Origin, head: bytes) -> tuple[int, Headers]:
    try:
        return decode_reply(head)
    except MalformedValue as error:
        raise TransportError(f"{origin}: not a reply: {error}") from None


def _cut_short(refused: ChannelRefused) -> TransportError:
    return TransportError(f"reply cut short: {refused.detail}")


def _error_body(refused: ChannelRefused) -> bytes:
    return dump_json({"error": {"code": refused.code, "detail": refused.detail}})


class _Reply:
    """A reply that is read while it comes."""

    def __init__(self, origin: Origin, call: OpenCall) -> None:
        self._call = call
        self.status, self.headers = _decoded(origin, call.head)

    async def receive_some(self) -> bytes:
        try:
            return await self._call.receive_some()
        except ChannelRefused as refused:
            raise _cut_short(refused) from refused


@asynccontextmanager
async def open_frames(
    addresses: Mapping[Origin, Sequence[str]],
    http: Pool,
    *,
    me: Hello,
    token: Secret | None = None,
    settings: ClientSettings | None = None,
) -> AsyncIterator[FramesTransport]:
    """Open the transport; leaving the block closes its connections.

    Args:
        addresses: where an origin is called over frames, one for each of its processes: a socket's
            path, or `tcp://host:port`.
        http: for all other origins.
        token: presented to those who ask for it.
    """
    async with open_background() as nursery:
        yield FramesTransport(nursery, addresses, http, me, token, settings or ClientSettings())
