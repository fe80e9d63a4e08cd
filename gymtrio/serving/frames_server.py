"""An application served over frames: each call of kind `http` is one request.

The same application as over HTTP, by the same `serve_exchange`. A caller that leaves, or whose process
dies, has its handler cancelled by the channel (SRV-3); many calls share one connection, so that a
parked one costs neither a socket nor a place in a pool.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final, TypeAlias, TypeVar

import trio

from gymtrio.context import AsgiApp, Scope
from gymtrio.serving.asgi import serve_exchange
from gymtrio.serving.exchange import OnDone, send_answer
from gymtrio.serving.frames_head import BROKEN_OFF, KIND, encode_reply, read_request
from gymtrio.serving.http import ClientGone, Headers, internal_error
from gymtrio.serving.http1 import BadAnswer
from gymtrio.settings import Secret
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.channel import Channel, open_channel
from gymtrio.wire.errors import ChannelLost
from gymtrio.wire.listening import serve_channels
from gymtrio.wire.messages import Hello
from gymtrio.wire.unix import peer_uid

SERVER_ROLE: Final = "server"

CallHandler: TypeAlias = Callable[[IncomingCall], Awaitable[None]]
S = TypeVar("S", bound=trio.abc.Stream)

_log = logging.getLogger(__name__)


class FramesServer:
    """Serves an application to whoever connects to its listeners.

    Args:
        me: how it introduces itself.
        calls: handlers of calls that are no requests, by family: what their kinds begin with, up to a
            slash.
    """

    def __init__(
        self, app: AsgiApp, me: Hello, calls: Mapping[str, CallHandler] | None = None
    ) -> None:
        self._me = me
        self._handlers: dict[str, CallHandler] = {**(calls or {}), KIND: partial(serve_call, app)}
        self.calls_running = 0
        self._finishing = 0
        """Who waits for the last of them."""
        self._idle = trio.lowlevel.ParkingLot()
        self._channels: set[Channel] = set()

    async def serve(
        self,
        listener: trio.abc.Listener[S],
        token: Secret | None = None,
        *,
        token_required: bool = True,
        task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve those who connect to a listener, for ever.

        Args:
            listener: owned from now on; in a private directory, or `token` is given.
            token: what a peer has to present, and where it is not required, may.
            task_status: started when connections are accepted.

        Cancelled: every connection is closed, handlers are cancelled.
        """

        async def serve(stream: S) -> None:
            async with open_channel(
                stream,
                role="acceptor",
                me=self._me,
                handler=self._handle,
                token=token,
                token_required=token_required,
                uid=peer_uid(stream),
            ) as channel:
                self._channels.add(channel)
                try:
                    await channel.closed.wait()
                finally:
                    self._channels.discard(channel)

        await serve_channels(listener, serve, task_status=task_status)

    async def _handle(self, call: IncomingCall) -> None:
        handlers = self._handlers
        handler = handlers.get(call.kind) or handlers.get(call.kind.partition("/")[0])
        if handler is None:
            call.fail(404, "unknown_kind", f"no handler for {call.kind!r}")
            return
        self.calls_running += 1
        try:
            await handler(call)
        finally:
            self.calls_running -= 1
            if self._finishing and not self.calls_running:
                self._idle.unpark_all()

    async def finished(self) -> None:
        """Return when no call is being served."""
        self._finishing += 1
        try:
            while self.calls_running:
                await self._idle.park()
        finally:
            self._finishing -= 1

    async def flush(self) -> None:
        """Return when the answers that were given have left, or do not for too long (SRV-2)."""
        async with trio.open_nursery() as nursery:
            for channel in self._channels:
                nursery.start_soon(channel.flush)


async def serve_call(app: AsgiApp, call: IncomingCall) -> None:
    """Have one call of kind `http` answered; faults of the application are logged, not raised.

    Raises:
        Refusal: it is no request; see `read_request`.
    """
    # What has no head that HTTP would take is refused by it, and no fault of the application.
    exchange = _FramesExchange(call)
    try:
        await serve_exchange(app, exchange)
    except ClientGone:
        pass
    except Exception:  # noqa: BLE001 - the edge: an application's fault ends its own request
        _log.exception("error in the application, %s %s", exchange.method, exchange.path)
        if call.is_answered:
            return
        if exchange.begun:
            call.fail(500, BROKEN_OFF, "the answer ended early; see the server's log")
        else:
            await send_answer(exchange, internal_error())


class _FramesExchange:
    """One call as `gymtrio.serving.exchange.Exchange`."""

    __slots__ = (
        "_call",
        "_query",
        "_raw_path",
        "begun",
        "content_length",
        "headers",
        "method",
        "path",
        "work",
    )

    def __init__(self, call: IncomingCall) -> None:
        self._call = call
        self.method, self._raw_path, self._query, self.path, self.headers = read_request(call.head)
        self.work = call
        """An answer leaves also when that is cancelled."""
        self.begun = False
        """Some of an answer was queued, or an attempt was made."""
        body = call.body
        self.content_length = None if body is None else len(body)

    @property
    def raw_path(self) -> bytes:
        return self._raw_path.encode("ascii")

    @property
    def query(self) -> bytes:
        return self._query.encode("ascii")

    def asgi(self) -> Scope:
        return {"http_version": "1.1", "scheme": "http", "client": None, "server": None}

    def body_at_hand(self) -> bytes | None:
        return self._call.body

    async def receive_some(self) -> bytes:
        try:
            return await self._call.receive_some()
        except ChannelLost as error:
            raise ClientGone from error

    async def answer(self, status: int, headers: Headers, body: bytes, on_done: OnDone) -> None:
        shown = b"" if self.method == "HEAD" else body
        try:
            head = encode_reply(status, headers)
        except BadAnswer:
            if on_done is not None:
                on_done(False)
            raise
        self.begun = True
        self._call.reply(head, shown, on_done=on_done)

    async def begin(self, status: int, headers: Headers, content_length: int | None) -> None:
        head = encode_reply(status, headers)
        self.begun = True
        await self._call.begin(head)

    async def send_some(self, data: bytes) -> None:
        if self.method != "HEAD":
            await self._call.send(data)

    async def finish(self) -> None:
        done = trio.Event()
        sent = False

        def note(is_sent: bool) -> None:
            nonlocal sent
            sent = is_sent
            done.set()

        await self._call.finish(on_done=note)
        await done.wait()
        if not sent:
            raise ClientGone
