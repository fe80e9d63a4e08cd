"""The network between simulated processes: the in-process transport with delays and faults.

Fault model:

- A call belongs to the incarnation that was there when it began; when that dies, the call fails.
- Delays are multiples of a grid, so that events meet in one instant and the scheduler orders them.
- A request may be lost (never delivered) and a reply may be lost (delivered, served, unheard). The
  caller learns of both by a `TransportError`.
- A call that its caller may repeat arrives a second time, as from a retry whose first try was slow: at
  once, or much later, but never at a later incarnation.
- Nothing else is reordered within a call; calls overtake each other freely.

Everything that passes is shown to the `Tap`, which is how oracles see servers from outside.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

import attrs
import trio

from gymtrio.context import AsgiApp, Message, Receive, Scope, Send, split_rollout_path
from gymtrio.errors import TransportError
from gymtrio.serving.client import Incoming, Lane, Origin, Outgoing
from gymtrio.serving.http import Headers
from gymtrio.serving.inprocess import InProcessNetwork
from gymtrio.wire.control import CONTROL_PREFIX
from tests.simulation.processes import Process

GRID_S: Final = 0.01
DUPLICATES_LATER_S: Final = (0.0, 0.01, 0.3, 1.0, 5.0)


@attrs.define(eq=False, kw_only=True)
class Exchange:
    """One request as it was delivered, and what became of it."""

    number: int
    source: Process
    target: Process
    method: str
    path: str
    """Without the rollout prefix."""
    key: str | None
    """Capture key of the episode on whose behalf it is, as far as prefix or body tell."""
    body: bytes
    outgoing: Outgoing
    sent_at: float
    delivered_at: float = -1.0
    status: int = 0
    reply: bytes = b""
    replied_at: float | None = None
    """When the last byte was handed to the network."""
    received: bool = False
    """Its caller has the whole reply."""
    duplicate: bool = False

    @property
    def operation(self) -> str | None:
        """Of a control call to a participant."""
        prefix = CONTROL_PREFIX + "/"
        return self.path.removeprefix(prefix) if self.path.startswith(prefix) else None

    def json(self) -> Any:
        return json.loads(self.body or b"null")

    def reply_json(self) -> Any:
        return json.loads(self.reply or b"null")

    def __str__(self) -> str:
        return f"{self.number} {self.source}>{self.target} {self.method} {self.path} {self.key}"


class Tap(Protocol):
    """Sees every exchange at its four instants."""

    def sent(self, exchange: Exchange) -> None: ...

    def delivered(self, exchange: Exchange) -> None: ...

    def replied(self, exchange: Exchange) -> None: ...

    def received(self, exchange: Exchange) -> None: ...

    def lost(self, exchange: Exchange) -> None:
        """Its reply, or the request itself, will never be heard."""
        ...


@attrs.frozen(kw_only=True)
class NetworkFaults:
    """Chances per call, between `from_s` and `until_s`."""

    lost_request: float = 0.0
    lost_reply: float = 0.0
    duplicate: float = 0.0
    """Of calls that may be repeated."""
    slow: float = 0.0
    """A direction takes seconds."""
    data: bool = False
    """Calls of episodes are lost as well, not control calls only."""
    from_s: float = 0.0
    until_s: float = 30.0


@attrs.frozen
class _Fate:
    out_s: float
    back_s: float
    request_lost: bool
    reply_lost: bool
    again_after_s: float | None


@attrs.frozen
class _Server:
    process: Process
    network: InProcessNetwork


class SimulatedNetwork:
    def __init__(
        self, nursery: trio.Nursery, rng: random.Random, faults: NetworkFaults, tap: Tap
    ) -> None:
        self.exchanges: list[Exchange] = []
        self.fate_of: Callable[[Exchange, _Fate], _Fate] | None = None
        """For directed plans: replaces what chance decided."""
        self._nursery = nursery
        self._rng = rng
        self._faults = faults
        self._tap = tap
        self._servers: dict[str, _Server] = {}

    def listen(self, process: Process, network: InProcessNetwork) -> None:
        """Serve a process under its own name until it dies; it serves on its own network."""
        self._servers[process.name] = _Server(process, network)

    def port(self, process: Process) -> NetworkPort:
        return NetworkPort(self, process)

    def tapped(self, process: Process, app: AsgiApp) -> AsgiApp:
        """The application of a process behind its dead flag."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            async def checked(message: Message) -> None:
                process.check()
                await send(message)

            process.check()
            try:
                await app(scope, receive, checked)
            except Exception:
                # What a ghost raises is not answered.
                process.check()
                raise

        return serve

    def begin(self, source: Process, origin: Origin, outgoing: Outgoing) -> tuple[Exchange, _Fate]:
        server = self._servers.get(origin.host)
        if server is None or not server.process.alive:
            raise TransportError(f"{origin}: cannot connect")
        context, path = split_rollout_path(outgoing.target)
        key = None if context is None else context.episode_id.capture_key
        exchange = Exchange(
            number=len(self.exchanges),
            source=source,
            target=server.process,
            method=outgoing.method,
            path=path,
            key=key or _key_in(outgoing.body),
            body=outgoing.body,
            outgoing=outgoing,
            sent_at=trio.current_time(),
        )
        self.exchanges.append(exchange)
        fate = self._fate(exchange)
        if self.fate_of is not None:
            fate = self.fate_of(exchange, fate)
        self._tap.sent(exchange)
        return exchange, fate

    def _fate(self, exchange: Exchange) -> _Fate:
        rng, faults = self._rng, self._faults
        draws = [rng.random() for _ in range(5)]
        delays = [rng.randrange(3) * GRID_S for _ in range(2)]
        later_s = rng.choice(DUPLICATES_LATER_S)
        control = exchange.operation is not None
        now = trio.current_time()
        if not faults.from_s <= now <= faults.until_s or exchange.target.name == "engine":
            return _Fate(delays[0], delays[1], False, False, None)
        lossy = control or faults.data
        repeated = control or exchange.outgoing.repeatable
        if control and draws[3] < faults.slow:
            delays[0] += 2.0
        if control and draws[4] < faults.slow:
            delays[1] += 2.0
        return _Fate(
            out_s=delays[0],
            back_s=delays[1],
            request_lost=lossy and draws[0] < faults.lost_request,
            reply_lost=lossy and draws[1] < faults.lost_reply,
            again_after_s=later_s if repeated and draws[2] < faults.duplicate else None,
        )

    @asynccontextmanager
    async def deliver(self, exchange: Exchange, origin: Origin) -> AsyncIterator[Incoming]:
        """Hand a request to the server; the block has the head of its reply."""
        process = exchange.target
        server = self._servers[process.name]
        if not process.alive or server.process is not process:
            raise TransportError(f"{origin}: connection reset")
        exchange.delivered_at = trio.current_time()
        self._tap.delivered(exchange)
        async with server.network.exchange(origin, exchange.outgoing, Lane.DATA) as incoming:
            yield incoming

    async def whole_reply(self, exchange: Exchange, origin: Origin) -> Headers:
        """Deliver, and read the reply to its end."""
        async with self.deliver(exchange, origin) as incoming:
            parts = []
            while part := await incoming.receive_some():
                parts.append(part)
            exchange.status = incoming.status
            exchange.reply = b"".join(parts)
            exchange.replied_at = trio.current_time()
            self._tap.replied(exchange)
            return incoming.headers

    def send_again(self, exchange: Exchange, origin: Origin, after_s: float) -> None:
        again = attrs.evolve(exchange, number=len(self.exchanges), duplicate=True)
        self.exchanges.append(again)

        async def later() -> None:
            await trio.sleep(after_s)
            try:
                await self.whole_reply(again, origin)
            except TransportError:
                pass

        self._nursery.start_soon(later, name="network: again")

    def lost(self, exchange: Exchange) -> None:
        self._tap.lost(exchange)

    def received(self, exchange: Exchange) -> None:
        exchange.received = True
        self._tap.received(exchange)


@attrs.define
class _Received:
    """Implements `gymtrio.serving.client.Incoming`."""

    status: int
    headers: Headers
    body: bytes

    async def receive_some(self) -> bytes:
        await trio.lowlevel.checkpoint()
        body, self.body = self.body, b""
        return body


class NetworkPort:
    """Implements `gymtrio.serving.client.Transport` for one process."""

    def __init__(self, network: SimulatedNetwork, process: Process) -> None:
        self._network = network
        self._process = process

    @asynccontextmanager
    async def exchange(
        self, origin: Origin, outgoing: Outgoing, lane: Lane
    ) -> AsyncIterator[Incoming]:
        self._process.check()
        exchange: Exchange | None = None
        try:
            exchange, fate = self._network.begin(self._process, origin, outgoing)
            if fate.again_after_s is not None:
                self._network.send_again(exchange, origin, fate.out_s + fate.again_after_s)
            await trio.sleep(fate.out_s)
            await self._process.running()
            if fate.request_lost:
                raise TransportError(f"{origin}: connection refused")
            headers = await self._network.whole_reply(exchange, origin)
            self._process.check()
            await trio.sleep(fate.back_s)
            await self._process.running()
            if fate.reply_lost:
                raise TransportError(f"{origin}: connection lost before the reply")
            self._network.received(exchange)
        finally:
            if exchange is not None and not exchange.received:
                self._network.lost(exchange)
        yield _Received(exchange.status, headers, exchange.reply)


def _key_in(body: bytes) -> str | None:
    try:
        episode = json.loads(body)["episode_id"]
        attempt = episode["attempt"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(episode["rollout_id"]) + (f"-a{attempt}" if attempt else "")
