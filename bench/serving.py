"""What parked requests cost a server: memory, pauses, and their end.

    python -m bench.serving [--quick] [--count N] [--json FILE] [--check]

16,000 requests of 2 kB wait over HTTP in one server process, started as `gymtrio serve` starts it; its
callers are other processes. The limits on files are those of the machine.

    parked      kB of resident memory for each request that waits, beyond what there was before
    ramp        the longest collection while they came; the longest time that the loop was held
    collect     a full collection provoked while all wait: the longest pause
    one more    a request beside them: from its head to its answer
    release     all are answered at once
    storm       all callers leave at once: processor time for each, until the last handler has ended
    drain       SIGTERM while all wait: all are answered 503, and the process ends

A pause is given in processor time of the loop's thread, which no other process can lengthen.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, Final

import attrs
import trio

from bench.report import add_arguments, conclude
from gymtrio.serving.client import ServerClient
from gymtrio.serving.connection import HttpLimits
from gymtrio.serving.deployment import Deployment, DeploymentDirectory
from gymtrio.serving.pool import open_pool

COUNT: Final = 16_000
QUICK_COUNT: Final = 2_000
ROUNDS: Final = 3
ROUND_S_MAX: Final = 900.0
"""A request that was lost would be waited for without end."""
CALLERS: Final = 2
CONNECTING_AT_ONCE: Final = 50
REQUEST_BYTES: Final = 2_048
KB_MAX: Final = 25.0
"""SRV-4."""
PAUSE_MS_MAX: Final = 100.0
"""SRV-4."""
ONE_MORE_MS_MAX: Final = 100.0


@attrs.define
class Figure:
    """One measured value of every round."""

    name: str
    unit: str
    values: list[float] = attrs.field(factory=list)
    limit: float | None = None

    @property
    def value(self) -> float:
        return median(self.values)

    def missed(self) -> list[str]:
        if self.limit is None or self.value <= self.limit:
            return []
        return [f"{self.name}: {self.value:.1f} {self.unit}, target {self.limit:g}"]


@attrs.define
class Figures:
    """What one size cost; a section of the report."""

    title: str
    figures: dict[str, Figure] = attrs.field(factory=dict)

    def add(self, name: str, unit: str, value: float, limit: float | None = None) -> None:
        self.figures.setdefault(name, Figure(name, unit, limit=limit)).values.append(value)

    def missed(self) -> list[str]:
        return [line for figure in self.figures.values() for line in figure.missed()]

    def to_json(self) -> dict[str, object]:
        rows = [attrs.asdict(figure) for figure in self.figures.values()]
        return {"title": self.title, "rows": rows}

    def print(self) -> None:
        print(f"\n{self.title}")
        for figure in self.figures.values():
            aim = "" if figure.limit is None else f"<= {figure.limit:g} {figure.unit}"
            told = "  MISSED" if figure.missed() else ""
            spread = f"{min(figure.values):.1f} .. {max(figure.values):.1f}"
            print(f"  {figure.name:34}{figure.value:9.1f} {figure.unit:3} {spread:20} {aim}{told}")
        sys.stdout.flush()


# -- callers: processes of their own ---------------------------------------------------------------


async def hold(host: str, port: int, count: int) -> None:
    """Park so many requests; then do what standard input says: `leave`, or `read`."""
    body = b"x" * REQUEST_BYTES
    head = b"POST /park HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    streams: list[trio.SocketStream] = []
    limiter = trio.CapacityLimiter(CONNECTING_AT_ONCE)

    async def park() -> None:
        async with limiter:
            stream = await trio.open_tcp_stream(host, port)
            await stream.send_all(head + body)
            streams.append(stream)

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(park)
    print("parked", flush=True)
    command = (await trio.to_thread.run_sync(sys.stdin.readline)).strip()
    statuses: dict[str, int] = {}

    async def read(stream: trio.SocketStream) -> None:
        try:
            status = (await stream.receive_some())[9:12].decode() or "cut"
        except trio.BrokenResourceError:
            status = "reset"
        statuses[status] = statuses.get(status, 0) + 1

    if command == "read":
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(read, stream)
    for stream in streams:
        stream.socket.close()
    print(" ".join(f"{status}={number}" for status, number in statuses.items()), flush=True)


class Callers:
    """Processes that hold requests."""

    def __init__(self, processes: Sequence[trio.Process]) -> None:
        self._processes = processes

    async def tell(self, command: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            await process.stdin.send_all(command.encode() + b"\n")

    async def say(self) -> list[str]:
        """One line of each."""
        said: list[str] = []
        for process in self._processes:
            assert process.stdout is not None
            line = b""
            while not line.endswith(b"\n"):
                data = await process.stdout.receive_some()
                assert data, "a caller has ended"
                line += data
            said.append(line.decode().strip())
        return said


@asynccontextmanager
async def open_callers(url: str, count: int) -> AsyncIterator[Callers]:
    """Have `count` requests parked."""
    command = [sys.executable, "-m", "bench.serving", "--hold", url, str(count // CALLERS)]
    processes = [
        await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(CALLERS)
    ]
    try:
        callers = Callers(processes)
        await callers.say()
        yield callers
    finally:
        for process in processes:
            process.kill()
            await process.wait()


# -- the server -----------------------------------------------------------------------------------


@attrs.frozen
class Parked:
    """The server's process, and a client of it."""

    process: trio.Process
    url: str
    client: ServerClient

    async def facts(self) -> Any:
        return (await self.client.request(self.url, "GET", "/facts", control=True)).json()

    async def post(self, path: str) -> None:
        (await self.client.request(self.url, "POST", path, control=True)).raise_for_status()

    async def until_parked(self, count: int) -> Any:
        """The facts, once so many wait."""
        return await self._until(lambda found: bool(found["parked"] == count))

    async def until_closed(self, descriptors: int) -> Any:
        """The facts, once no more than so many descriptors are open, or half a minute has passed."""
        longest_at = trio.current_time() + 30
        return await self._until(
            lambda found: found["descriptors"] <= descriptors or trio.current_time() > longest_at
        )

    async def _until(self, is_reached: Callable[[Any], bool]) -> Any:
        found = await self.facts()
        longest = {name: found[name] for name in found if name.endswith("_s")}
        while not is_reached(found):
            await trio.sleep(0.02)
            found = await self.facts()
            longest = {name: max(longest[name], found[name]) for name in longest}
        return {**found, **longest}


@asynccontextmanager
async def open_server() -> AsyncIterator[Parked]:
    command = [sys.executable, "-m", "gymtrio.cli", "serve", "bench.parking_server:app"]
    process = await trio.lowlevel.open_process(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        url = (await process.stdout.receive_some()).decode().split()[-1]
        async with open_pool() as pool:
            client = ServerClient(DeploymentDirectory(Deployment()), pool)
            server = Parked(process, url, client)
            while True:
                if (await client.request(url, "GET", "/ready", control=True)).status == 200:
                    break
            yield server
    finally:
        process.kill()
        await process.wait()


async def run_round(count: int, figures: Figures) -> None:
    async with open_server() as server:
        # What a first request allocates for ever is not counted to those that follow.
        async with open_callers(server.url, 500) as callers:
            await server.until_parked(500)
            await callers.tell("leave")
            await server.until_parked(0)
        # Our own client's connections, as many as it has later: an idle one stays for half a minute,
        # and would be taken for one of a caller that has not been closed.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.post, "/one-more")
            nursery.start_soon(server.post, "/one-more")
        before = await server.facts()
        async with open_callers(server.url, count) as callers:
            parked = await server.until_parked(count)
            await _while_parked(count, server, before, parked, figures)
            began = time.perf_counter()
            await server.post("/release")
            await callers.tell("read")
            assert await callers.say() == [f"200={count // CALLERS}"] * CALLERS
            figures.add("release: all answered", "ms", (time.perf_counter() - began) * 1e3)
        async with open_callers(server.url, count) as callers:
            began_at = (await server.until_parked(count))["cpu_s"]
            await callers.tell("leave")
            left = await server.until_closed(before["descriptors"])
            figures.add("storm: each", "us", (left["cpu_s"] - began_at) / count * 1e6)
            figures.add("storm: held", "ms", left["held_cpu_s"] * 1e3)
            figures.add("storm: collection", "ms", left["collected_cpu_s"] * 1e3, PAUSE_MS_MAX)
            figures.add("descriptors left over", "", left["descriptors"] - before["descriptors"], 0)
            await trio.sleep(3)
            left = await server.facts()
            kept = left["resident_bytes"] - before["resident_bytes"]
            figures.add("memory left over", "MiB", kept / 2**20)
        async with open_callers(server.url, count) as callers:
            await server.until_parked(count)
            began = time.perf_counter()
            server.process.send_signal(signal.SIGTERM)
            await callers.tell("read")
            said = " ".join(await callers.say()).split()
            answered = sum(int(part[4:]) for part in said if part.startswith("503="))
            await server.process.wait()
            figures.add("drain: not answered 503", "", count - answered, 0)
            took_s = time.perf_counter() - began - HttpLimits().grace_s
            figures.add("drain: after the grace", "ms", took_s * 1e3)


async def _while_parked(
    count: int, server: Parked, before: Any, parked: Any, figures: Figures
) -> None:
    size = (parked["resident_bytes"] - before["resident_bytes"]) / count / 1000
    figures.add("parked: each", "kB", size, KB_MAX)
    figures.add("ramp: collection", "ms", parked["collected_cpu_s"] * 1e3, PAUSE_MS_MAX)
    figures.add("ramp: held", "ms", parked["held_cpu_s"] * 1e3)
    figures.add("ramp: each", "us", (parked["cpu_s"] - before["cpu_s"]) / count * 1e6)
    # What came last is set aside within a second.
    await trio.sleep(1.5)
    await server.facts()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.post, "/collect")
        took_s: list[float] = []
        for _ in range(20):
            began = time.perf_counter()
            await server.post("/one-more")
            took_s.append(time.perf_counter() - began)
    figures.add("one more: median", "ms", median(took_s) * 1e3)
    figures.add("one more: worst", "ms", max(took_s) * 1e3, ONE_MORE_MS_MAX)
    facts = await server.facts()
    figures.add("collect: pause", "ms", facts["collected_cpu_s"] * 1e3, PAUSE_MS_MAX)
    figures.add("collect: held", "ms", facts["held_cpu_s"] * 1e3, PAUSE_MS_MAX)


async def run(count: int, rounds: int) -> Figures:
    figures = Figures(f"{count} requests parked over HTTP")
    for _ in range(rounds):
        with trio.fail_after(ROUND_S_MAX):
            await run_round(count, figures)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving")
    parser.add_argument("--quick", action="store_true", help=f"one round of {QUICK_COUNT}")
    parser.add_argument("--count", type=int, default=COUNT, help="requests that are parked")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of which medians are told")
    parser.add_argument("--hold", nargs=2, metavar=("URL", "COUNT"), help=argparse.SUPPRESS)
    add_arguments(parser)
    given = parser.parse_args()
    if given.hold is not None:
        host, _, port = given.hold[0].removeprefix("http://").partition(":")
        trio.run(hold, host, int(port), int(given.hold[1]))
        return 0
    count, rounds = (QUICK_COUNT, 1) if given.quick else (given.count, given.rounds)
    figures = trio.run(run, count, rounds)
    figures.print()
    return conclude([figures], given)


if __name__ == "__main__":
    sys.exit(main())
