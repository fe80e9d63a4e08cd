"""What a client of `bench.transport` is told to do, what it tells, and how that is measured.

For both loops: nothing here knows which one it runs on.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from statistics import median
from typing import Any, Final

import attrs

from bench.measure import resident_bytes

WARM_S: Final = 0.5
"""Before anything is counted: connections are made, caches are filled."""

FAILED_S: Final = 0.01
"""After an error a caller waits so long: it should be counted, not multiplied."""

SLICE_CALLS: Final = 20
"""Of a crowd, so many calls start in one turn of the client's loop: its own doing is not measured."""

LOOK_S: Final = 0.1
"""Between two questions whether all are parked."""

MORE_CALLS: Final = 20
"""Made while all are parked, for a median."""

BODY: Final[dict[str, Any]] = {
    "model": "policy",
    "messages": [
        {"role": role, "content": f"{number}: " + "a turn of the conversation, " * 6}
        for number, role in enumerate(("system", "user", "assistant", "user", "assistant", "user"))
    ]
    + [{"role": "tool", "tool_call_id": "call-7", "content": "0123456789 " * 63}],
    "temperature": 1.0,
    "max_tokens": 512,
}
"""A small model or tool call: 2 kB of JSON."""


ENCODED: Final = json.dumps(BODY, separators=(",", ":")).encode()


@attrs.frozen(kw_only=True)
class Job:
    """What one client process does."""

    in_flight: int
    """Tasks that each make one call after the other; with `parks`, calls parked at once."""
    seconds: float = 0.0
    parks: bool = False
    parses: bool = True
    """Both ends parse and encode the JSON; else it goes as bytes both ways: the transport alone."""

    @staticmethod
    def of(text: str) -> Job:
        return Job(**json.loads(text))

    def text(self) -> str:
        return json.dumps(attrs.asdict(self))


@attrs.define(kw_only=True)
class Throughput:
    """One stretch of closed loops."""

    calls: int = 0
    errors: int = 0
    took_s: float = 0.0
    client_cpu_s: float = 0.0
    server_cpu_s: float = 0.0


@attrs.define(kw_only=True)
class Parked:
    """One crowd of calls that all waited at the server at once."""

    calls: int = 0
    errors: int = 0
    parking_s: float = 0.0
    releasing_s: float = 0.0
    client_bytes: float = 0.0
    server_bytes: float = 0.0
    """Resident, beyond what was before the crowd."""
    client_held_s: float = 0.0
    server_held_s: float = 0.0
    """The longest time that the loop did nothing else, until all were parked."""
    client_cpu_s: float = 0.0
    server_cpu_s: float = 0.0
    """From the first call sent to the last reply."""
    one_more_s: float = 0.0
    """Median time of another call while all are parked."""


class Caller(ABC):
    """A client of the server that is measured."""

    @abstractmethod
    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """JSON both ways; raises what this client raises."""

    @abstractmethod
    async def raw(self) -> bool:
        """Send `ENCODED` as bytes; whether that came back."""

    async def echo(self) -> bool:
        """Send `BODY` as JSON; whether that came back."""
        return bool(await self.call("POST", "/echo", BODY) == BODY)

    async def costs(self) -> dict[str, float]:
        """What the server has cost so far."""
        told: dict[str, float] = await self.call("GET", "/costs")
        return told


class Counting:
    """Counts the calls of the stretch between `begin` and `end`."""

    def __init__(self) -> None:
        self.told = Throughput()
        self.running = True
        self._counts = False
        self._began = self._began_cpu = self._server_cpu = 0.0

    def begin(self, server: Mapping[str, float]) -> None:
        self._counts = True
        self._began, self._began_cpu = time.perf_counter(), time.process_time()
        self._server_cpu = server["cpu_s"]

    def replied(self, is_right: bool) -> None:
        if self._counts:
            self.told.calls += 1
            self.told.errors += not is_right

    def failed(self) -> None:
        self.told.errors += 1

    def end(self, server: Mapping[str, float]) -> None:
        self._counts = self.running = False
        self.told.took_s = time.perf_counter() - self._began
        self.told.client_cpu_s = time.process_time() - self._began_cpu
        self.told.server_cpu_s = server["cpu_s"] - self._server_cpu


class Crowd:
    """Measures a crowd of calls that all wait at the server at once; the client's loop starts them.

    In this order: `begin`, tasks that `park`, `release`, the end of those tasks, `end`.

    Args:
        count: calls in the crowd.
        sleep: the loop's own.
        held_s: the longest time that the loop was held, since it was last asked.
        failures: what a call raises that came to nothing.
    """

    def __init__(
        self,
        caller: Caller,
        count: int,
        *,
        sleep: Callable[[float], Awaitable[object]],
        held_s: Callable[[], float],
        failures: tuple[type[Exception], ...],
    ) -> None:
        self.told = Parked()
        self._caller = caller
        self._count = count
        self._sleep = sleep
        self._held_s = held_s
        self._failures = failures
        self._server: dict[str, float] = {}
        self._own_bytes, self._own_cpu_s, self._began = 0, 0.0, 0.0

    async def begin(self) -> None:
        """Take down where things stand before the crowd comes."""
        await self._caller.echo()
        self._server = await self._caller.costs()
        self._own_bytes, self._own_cpu_s = resident_bytes(), time.process_time()
        self._held_s()
        self._began = time.perf_counter()

    async def park(self) -> None:
        """One call of the crowd."""
        told = self.told
        try:
            is_right = await self._caller.call("POST", "/park", BODY) == BODY
        except self._failures:
            told.errors += 1
        else:
            told.calls += 1
            told.errors += not is_right

    async def release(self) -> None:
        """Wait until all are parked, look at what that costs, and have all answered."""
        told = self.told
        server = await self._caller.costs()
        while server["parked"] + told.errors < self._count:
            await self._sleep(LOOK_S)
            seen = server["held_s"]
            server = await self._caller.costs()
            server["held_s"] = max(seen, server["held_s"])
        told.parking_s = time.perf_counter() - self._began
        told.client_held_s, told.server_held_s = self._held_s(), server["held_s"]
        told.client_bytes = resident_bytes() - self._own_bytes
        told.server_bytes = server["resident_bytes"] - self._server["resident_bytes"]
        more = []
        for _ in range(MORE_CALLS):
            began = time.perf_counter()
            await self._caller.echo()
            more.append(time.perf_counter() - began)
        told.one_more_s = median(more)
        self._began = time.perf_counter()
        await self._caller.call("POST", "/release", {})

    async def end(self) -> None:
        """Every call of the crowd has ended."""
        told = self.told
        told.releasing_s = time.perf_counter() - self._began
        told.client_cpu_s = time.process_time() - self._own_cpu_s
        told.server_cpu_s = (await self._caller.costs())["cpu_s"] - self._server["cpu_s"]
