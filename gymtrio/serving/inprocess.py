"""Calls between servers of one process, without sockets: the client's other transport.

Behaves as `gymtrio.serving.pool` over a perfect network: bodies stream with back-pressure, a caller
that leaves shows as `http.disconnect`, a server that is not there refuses. The same conformance suite
runs on both. Used by tests, by embedding programs and by the simulation.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final
from urllib.parse import unquote

import trio

from gymtrio.background import open_background
from gymtrio.context import AsgiApp, Message, Scope
from gymtrio.errors import TransportError
from gymtrio.serving.client import Incoming, Lane, Origin, Outgoing
from gymtrio.serving.http import ClientGone, Headers

CHUNKS_BUFFERED: Final = 8
"""Pieces of a body that a server may be ahead of its reader."""

_log = logging.getLogger(__name__)


class InProcessNetwork:
    """ASGI applications by host name; opened by `open_network`."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._apps: dict[str, AsgiApp] = {}

    @contextmanager
    def serving(self, host: str, app: AsgiApp) -> Iterator[None]:
        """Serve `app` under `http://<host>` for the time of the block.

        Raises:
            ValueError: something is served under that name already.
        """
        if host in self._apps:
            raise ValueError(f"{host!r} is served already")
        self._apps[host] = app
        try:
            yield
        finally:
            del self._apps[host]

    @asynccontextmanager
    async def exchange(
        self, origin: Origin, outgoing: Outgoing, lane: Lane
    ) -> AsyncIterator[Incoming]:
        """See `gymtrio.serving.client.Transport`."""
        app = self._apps.get(origin.host)
        if app is None:
            await trio.lowlevel.checkpoint()
            raise TransportError(f"{origin}: cannot connect: nothing is served under that name")
        call = _Call(outgoing)
        # An empty context: on a real network the server does not inherit the caller's variables.
        contextvars.Context().run(self._nursery.start_soon, call.run, app, origin)
        try:
            await call.read_head()
            yield call
        finally:
            call.leave()


class _Call:
    """Both ends of one exchange: the ASGI side, and the `Incoming` of the caller."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._body_taken = False
        self._gone = trio.Event()
        self._head_sent = False
        self._to_caller, self._from_app = trio.open_memory_channel[Message](CHUNKS_BUFFERED)
        self._more = True
        self.status = 0
        self.headers: Headers = ()

    async def run(self, app: AsgiApp, origin: Origin) -> None:
        """Run the application on this exchange, as a server's connection does."""
        try:
            await app(self._scope(origin), self._receive, self._send)
        except ClientGone:
            pass
        except Exception:  # noqa: BLE001 - the edge: an application's fault ends its own request
            _log.exception("error in the application behind %s", origin)
            if not self._head_sent:
                await self._send_failure()
        finally:
            # Closing tells a caller that still waits that nothing more will come.
            self._to_caller.close()

    async def _send_failure(self) -> None:
        try:
            await self._send({"type": "http.response.start", "status": 500, "headers": []})
            await self._send({"type": "http.response.body"})
        except ClientGone:
            pass

    def _scope(self, origin: Origin) -> Scope:
        path, _, query = self._outgoing.target.partition("?")
        host = (b"host", str(origin).encode())
        length = (b"content-length", b"%d" % len(self._outgoing.body))
        return {
            "type": "http",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "http_version": "1.1",
            "method": self._outgoing.method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode("ascii"),
            "query_string": query.encode("ascii"),
            "root_path": "",
            "headers": [host, *self._outgoing.headers, length],
            "client": None,
            "server": (origin.host, origin.port),
            "state": {},
            "extensions": {},
        }

    async def _receive(self) -> Message:
        if not self._body_taken:
            await trio.lowlevel.checkpoint()
            self._body_taken = True
            return {"type": "http.request", "body": self._outgoing.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head_sent = True
        elif not message.get("body") and message.get("more_body"):
            return
        try:
            await self._to_caller.send(message)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ClientGone from None
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._to_caller.close()
            self._gone.set()

    async def read_head(self) -> None:
        message = await self._next()
        self.status = message["status"]
        self.headers = tuple((bytes(name).lower(), bytes(v)) for name, v in message["headers"])

    async def receive_some(self) -> bytes:
        while self._more:
            message = await self._next()
            self._more = message.get("more_body", False)
            body: bytes = message.get("body", b"")
            if body:
                return body
        await trio.lowlevel.checkpoint()
        return b""

    async def _next(self) -> Message:
        try:
            return await self._from_app.receive()
        except trio.EndOfChannel:
            raise TransportError("the application ended the reply early") from None

    def leave(self) -> None:
        self._gone.set()
        self._from_app.close()


@asynccontextmanager
async def open_network() -> AsyncIterator[InProcessNetwork]:
    """Open a network without sockets; leaving the block cancels every call still served."""
    async with open_background() as nursery:
        yield InProcessNetwork(nursery)
