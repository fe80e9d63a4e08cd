"""What a client of `bench.transport` is told to do, and what it tells: plain values for both loops."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Final

import attrs

HEART_BEAT_S: Final = 0.001
WARM_S: Final = 0.5
"""Before anything is counted: connections are made, caches are filled."""

FAILED_S: Final = 0.01
"""After an error a caller waits so long: it should be counted, not multiplied."""

SLICE_CALLS: Final = 20
"""Of a crowd, so many calls start in one turn of the client's loop: its own doing is not measured."""

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
