"""The network between simulated processes: the in-process transport with delays and faults.

Fault model:

- A call belongs to the incarnation that was there when it began; when that dies, the call fails.
- Delays are multiples of a grid, so that events meet in one instant and the scheduler orders them.
- A request may be lost (never delivered) and a reply may be lost (delivered, served, unheard). The
  caller learns of both by a `TransportError`.
- A call that its caller may repeat arrives a second time, as from a retry whose first try was slow: at
  once, or much later, but never at a later incarnation.
- A peer may be slow to take a reply: a server's last send to it then takes a while.
- A connection may be cut while a call is under way: its caller learns it at once, its server a little
  later.
- A `Mishap` does one of these to chosen calls, whatever chance says.
- Nothing else is reordered within a call; calls overtake each other freely.

Everything that passes is shown to the `Tap`, which is how oracles see servers from outside.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

import attrs
import trio

from gymtrio.context import AsgiApp, Message, Receive, Scope, Send, split_rollout_path
from gymtrio.errors import TransportError
from gymtrio.ids import EpisodeId
from gymtrio.serving.client import Incoming, Lane, Origin, Outgoing
from gymtrio.serving.http import Headers
from gymtrio.serving.inprocess import InProcessNetwork
from gymtrio.wire.control import CONTROL_PREFIX
from gymtrio.wire.native import EPOCH_HEADER
from tests.simulation.processes import CURRENT, Process, ProcessDied

GRID_S: Final = 0.01
DUPLICATES_LATER_S: Final = (0.0, 0.01, 0.3, 1.0, 5.0)
DEAD: Final = (b"x-simulation-dead", b"1")
"""Marks what is sent again after a crash that its execution did not survive; no server reads it."""
SLOW_READ_S: Final = (0.1, 0.3)
ECHOES_MAX: Final = 8
"""Calls that come again in the instant of a control call."""
ECHO_TIMES: Final = 2
ECHO_PASSES_MAX: Final = 12
"""A control call takes about as many passes of the loop from its delivery to its effect."""


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
    refused: bool = False
    """Its attempt was refused by its server when it was delivered."""
    worker: Process | None = None
    """Which process of the target serves it, if it has several."""
    until: tuple[float, float] = (-math.inf, math.inf)
    """Of a control call: its deadline on trio's clock, as its server may have read the wall clock."""

    @property
    def epoch(self) -> str | None:
        """The execution that it says it belongs to (HARD-11)."""
        named = dict(self.outgoing.headers).get(EPOCH_HEADER.encode("ascii"))
        return None if named is None else named.decode("ascii")

    @property
    def dead(self) -> bool:
        """Sent again by somebody who outlived the execution that it belongs to."""
        return DEAD in self.outgoing.headers

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
    """Sees every exchange at its instants."""

    def sent(self, exchange: Exchange) -> None: ...

    def delivered(self, exchange: Exchange) -> None: ...

    def leaving(self, process: Process, path: str) -> None:
        """A reply begins to be sent to a slow reader."""
        ...

    def replied(self, exchange: Exchange) -> None: ...

    def received(self, exchange: Exchange) -> None: ...

    def lost(self, exchange: Exchange) -> None:
        """Its reply, or the request itself, will never be heard."""
        ...


@attrs.frozen(kw_only=True)
class Mishap:
    """What becomes of chosen calls, instead of what chance decides."""

    path: str
    """Of a control call its operation."""
    what: str
    """`request lost`, `reply lost`, `slow request`, `slow reply`, `twice`."""
    target: str | None = None
    """A server's name; None: whoever is called, each counted by itself."""
    first: int = 1
    """Which matching call is the first, from 1."""
    count: int = 1
    """How many in a row."""
    for_s: float = 2.0
    """How much slower, or how much later the second time."""

    def befalls(self, fate: _Fate) -> _Fate:
        match self.what:
            case "request lost":
                return attrs.evolve(fate, request_lost=True)
            case "reply lost":
                return attrs.evolve(fate, reply_lost=True)
            case "slow request":
                return attrs.evolve(fate, out_s=fate.out_s + self.for_s)
            case "slow reply":
                return attrs.evolve(fate, back_s=fate.back_s + self.for_s)
            case "twice":
                return attrs.evolve(fate, again_after_s=self.for_s)
        raise AssertionError(self.what)


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
    slow_reader: float = 0.0
    """A server's last send to an episode's caller takes a while."""
    echo: tuple[str, ...] = ()
    """Control operations in whose instant calls that their server had answered come again."""
    mishaps: tuple[Mishap, ...] = ()
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
    network: InProcessNetwork | None
    """None: its workers serve its port."""
    workers: dict[Process, InProcessNetwork] = attrs.field(factory=dict)


class SimulatedNetwork:
    def __init__(
        self, nursery: trio.Nursery, rng: random.Random, faults: NetworkFaults, tap: Tap
    ) -> None:
        self.exchanges: list[Exchange] = []
        self._nursery = nursery
        self._rng = rng
        self._faults = faults
        self._tap = tap
        self._servers: dict[str, _Server] = {}
        self._under_way: dict[int, tuple[Exchange, trio.CancelScope]] = {}
        self._matched: Counter[tuple[Mishap, str]] = Counter()

    def listen(self, process: Process, network: InProcessNetwork) -> None:
        """Serve a process under its own name until it dies; it serves on its own network."""
        self._servers[process.name] = _Server(process, network)

    def share(self, server: Process) -> None:
        """Let the workers of a server serve its port; whoever accepts a connection is not foreseen."""
        self._servers[server.name] = _Server(server, None)

    def join(self, server: Process, worker: Process, network: InProcessNetwork) -> None:
        """Be one of them, until its death."""
        workers = self._servers[server.name].workers
        workers[worker] = network

        def leave() -> None:
            del workers[worker]

        worker.on_death(leave)

    def port(self, process: Process, server: Process | None = None) -> NetworkPort:
        """
        Args:
            server: of which the process is a worker; None: it is a server itself.
        """
        return NetworkPort(self, process, server or process)

    def tapped(self, process: Process, app: AsgiApp, server: Process | None = None) -> AsgiApp:
        """The application of a process behind its dead flag; `server`: see `port`."""
        seen_as = server or process

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            async def checked(message: Message) -> None:
                reads_in_s = 0.0 if prompt else self._reads_in_s()
                if message["type"] == "http.response.body" and reads_in_s:
                    self._tap.leaving(seen_as, split_rollout_path(str(scope["path"]))[1])
                    await trio.sleep(reads_in_s)
                await process.running()
                await send(message)

            CURRENT.set(seen_as)
            control = str(scope.get("path")).startswith(CONTROL_PREFIX)
            prompt = control or process.name == "engine"
            await process.running()
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
        for mishap in self._faults.mishaps:
            if mishap.path == (exchange.operation or path) and mishap.target in (None, origin.host):
                self._matched[mishap, origin.host] += 1
                which = self._matched[mishap, origin.host] - mishap.first
                if 0 <= which < mishap.count:
                    fate = mishap.befalls(fate)
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

    def _reads_in_s(self) -> float:
        faults = self._faults
        if not faults.slow_reader or not faults.from_s <= trio.current_time() <= faults.until_s:
            return 0.0
        slow = self._rng.random() < faults.slow_reader
        return self._rng.choice(SLOW_READ_S) if slow else 0.0

    def cut(self, source: str, target: str) -> None:
        """Cut every connection from one to the other with a call under way."""
        for exchange, scope in self._under_way.values():
            if (exchange.source.name, exchange.target.name) == (source, target):
                scope.cancel()

    def _echo(self, exchange: Exchange, origin: Origin) -> None:
        """Let calls come again in the instant of a control call."""
        if exchange.operation not in self._faults.echo or exchange.duplicate:
            return
        retired = {
            EpisodeId(e["rollout_id"], e["attempt"]).capture_key
            for e in (exchange.json() or {}).get("episode_ids") or ()
        }
        again = [
            e
            for e in self.exchanges
            if e.target is exchange.target
            and e.operation is None
            and not e.duplicate
            and (e.key in retired or (exchange.operation != "retire" and e.outgoing.repeatable))
        ]
        for number, each in enumerate(again[-ECHOES_MAX:] * ECHO_TIMES):
            # In the same instant, but not all in the same pass of the loop.
            later_s = GRID_S if number % 4 == 3 else 0.0
            self.send_again(each, origin, later_s, passes=self._rng.randrange(ECHO_PASSES_MAX))

    @asynccontextmanager
    async def deliver(self, exchange: Exchange, origin: Origin) -> AsyncIterator[Incoming]:
        """Hand a request to the server; the block has the head of its reply."""
        process = exchange.target
        server = self._servers[process.name]
        network = server.network
        if network is None:
            if not server.workers:
                raise TransportError(f"{origin}: connection refused")
            process, network = self._rng.choice(list(server.workers.items()))
            exchange.worker = process
        try:
            await process.running()
        except ProcessDied:
            raise TransportError(f"{origin}: connection reset") from None
        if self._servers[exchange.target.name].process is not exchange.target:
            raise TransportError(f"{origin}: connection reset")
        exchange.delivered_at = trio.current_time()
        self._tap.delivered(exchange)
        self._echo(exchange, origin)
        async with network.exchange(origin, exchange.outgoing, Lane.DATA) as incoming:
            yield incoming

    async def whole_reply(self, exchange: Exchange, origin: Origin) -> Headers:
        """Deliver, and read the reply to its end.

        Raises:
            TransportError: the connection was lost.
        """
        scope = trio.CancelScope()
        self._under_way[exchange.number] = exchange, scope
        try:
            with scope:
                async with self.deliver(exchange, origin) as incoming:
                    parts = []
                    while part := await incoming.receive_some():
                        parts.append(part)
                    exchange.status = incoming.status
                    exchange.reply = b"".join(parts)
                    exchange.replied_at = trio.current_time()
                    self._tap.replied(exchange)
                    return incoming.headers
        finally:
            del self._under_way[exchange.number]
        raise TransportError(f"{origin}: connection lost")

    def send_again(
        self, exchange: Exchange, origin: Origin, after_s: float, *, passes: int = 0
    ) -> None:
        again = attrs.evolve(exchange, number=len(self.exchanges), duplicate=True)
        self.exchanges.append(again)

        async def later() -> None:
            await trio.sleep(after_s)
            for _ in range(passes):
                await trio.lowlevel.checkpoint()
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

    def __init__(self, network: SimulatedNetwork, process: Process, seen_as: Process) -> None:
        self._network = network
        self._process = process
        self._seen_as = seen_as

    @asynccontextmanager
    async def exchange(
        self, origin: Origin, outgoing: Outgoing, lane: Lane
    ) -> AsyncIterator[Incoming]:
        self._process.check()
        exchange: Exchange | None = None
        try:
            exchange, fate = self._network.begin(self._seen_as, origin, outgoing)
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
