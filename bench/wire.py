"""What a message costs: round trips over frames beside raw sockets, and a report of 16,000 ids.

    python -m bench.wire [--quick] [--json FILE] [--check]

Worker processes call the coordinator, which is this process, over one Unix socket each; it answers
inline. *Depth*: calls that a worker has open at once. A round trip is two messages.

    what        from .. to                                  floor, measured in the same round
    round trip  call .. reply, seen from the worker         the same bytes over blocking sockets, as
                                                            many at a time, echoed by a process
    report      16,000 ids: encoded, framed, decoded        the same ids through msgpack alone

*msg/cpu-s*: messages that the coordinator takes and gives in a second of its processor time, to which
other processes add little. The report is in processor time as well.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import attrs
import msgpack
import trio

from bench.measure import Sample
from bench.report import Row, Section, Target, add_arguments, conclude
from gymtrio.wire.bounds import ChannelLimits
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.channel import Channel, open_channel
from gymtrio.wire.codec import pack, unpack
from gymtrio.wire.control import CommitReply
from gymtrio.wire.dialogue import Dialogue
from gymtrio.wire.events import Posted
from gymtrio.wire.listening import serve_channels
from gymtrio.wire.messages import Hello, Type, encode
from gymtrio.wire.tables import Role
from gymtrio.wire.unix import connect_unix, open_unix_listener, runtime_directory

BODY: Final = b"x" * 185
"""As long as a lease of an episode in the worker protocol."""
MESSAGES_PER_CPU_S: Final = 100_000
"""Held to at depth 64: what batching is for."""
REPORT_IDS: Final = 16_000
REPORT_S: Final = 0.010
WORKERS: Final = (1, 2, 8)
DEPTHS: Final = (1, 64)
ARRIVAL_S_MAX: Final = 60.0
"""From the start of the workers' processes to the last one's connection."""

_ECHO: Final = "echo"
_RUN: Final = "run"
_HEAD: Final = (
    f"{'':24}{'1000/s':>8}{'floor':>8}{'ratio':>7}{'p50 us':>9}{'p99 us':>9}"
    f"{'msg/cpu-s':>11}{'floor':>10}  target"
)


@attrs.frozen(kw_only=True)
class Trips:
    """One round of one case."""

    per_s: float
    floor_per_s: float
    p50_s: float
    p99_s: float
    messages_per_cpu_s: float
    """Of the coordinator."""
    worker_messages_per_cpu_s: float
    floor_messages_per_cpu_s: float


@attrs.frozen(kw_only=True)
class TripsRow:
    """Workers at one depth, over all rounds."""

    workers: int
    depth: int
    rounds: list[Trips]
    messages_per_cpu_s_min: float | None = None
    """None: not held to any."""

    @property
    def name(self) -> str:
        return f"{self.workers} workers, depth {self.depth}"

    def median(self, field: str) -> float:
        return float(median(getattr(trips, field) for trips in self.rounds))

    def missed(self) -> list[str]:
        found, least = self.median("messages_per_cpu_s"), self.messages_per_cpu_s_min
        if least is None or found >= least:
            return []
        return [f"{found:.0f} messages per cpu-s, target {least:.0f}"]

    def to_json(self) -> dict[str, object]:
        fields = [field.name for field in attrs.fields(Trips)]
        return {
            "name": self.name,
            "workers": self.workers,
            "depth": self.depth,
            **{field: self.median(field) for field in fields},
            "rounds": [attrs.asdict(trips) for trips in self.rounds],
            "missed": self.missed(),
        }

    def line(self) -> str:
        per_s, floor_per_s = self.median("per_s"), self.median("floor_per_s")
        told, least = "; ".join(self.missed()), self.messages_per_cpu_s_min
        aim = "" if least is None else f">= {least:.0f} msg/cpu-s"
        return (
            f"  {self.name:22}{per_s / 1e3:8.1f}{floor_per_s / 1e3:8.1f}{floor_per_s / per_s:7.1f}"
            f"{self.median('p50_s') * 1e6:9.0f}{self.median('p99_s') * 1e6:9.0f}"
            f"{self.median('messages_per_cpu_s'):11.0f}{self.median('floor_messages_per_cpu_s'):10.0f}"
            f"  {'MISSED: ' + told if told else aim}"
        ).rstrip()


@attrs.frozen(kw_only=True)
class TripsSection:
    """As `bench.report.Section`, of round trips."""

    title: str
    rows: list[TripsRow]

    def to_json(self) -> dict[str, object]:
        return {"title": self.title, "rows": [row.to_json() for row in self.rows]}

    def print(self) -> None:
        print(f"\n{self.title}\n{_HEAD}")
        for row in self.rows:
            print(row.line())
        sys.stdout.flush()

    def missed(self) -> list[str]:
        return [f"{self.title}: {row.name}: {why}" for row in self.rows for why in row.missed()]


# --- round trips --------------------------------------------------------------------------------


async def work(path: Path) -> None:
    """One worker: calls as it is told, until the coordinator is gone."""

    async def run(call: IncomingCall) -> None:
        depth, seconds = json.loads(call.body or b"")
        call.reply(body=json.dumps(await _call_for(call.channel, depth, seconds)).encode())

    me = Hello(role="worker", name=str(os.getpid()), instance="1")
    async with open_channel(await connect_unix(path), role="opener", me=me, handler=run) as channel:
        await channel.closed.wait()


async def _call_for(channel: Channel, depth: int, seconds: float) -> dict[str, float]:
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def call() -> None:
        while (began := time.perf_counter()) < end:
            await channel.request(_ECHO, BODY)
            latencies.append(time.perf_counter() - began)

    began, cpu = time.perf_counter(), time.process_time()
    async with trio.open_nursery() as nursery:
        for _ in range(depth):
            nursery.start_soon(call)
    latencies.sort()
    return {
        "count": len(latencies),
        "took_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        "p50_s": latencies[len(latencies) // 2],
        "p99_s": latencies[len(latencies) * 99 // 100],
    }


def echo(call: IncomingCall) -> bool:
    """Answer inline."""
    if call.kind != _ECHO:
        return False
    assert call.body is not None
    call.reply(b"", call.body)
    return True


class Coordinator:
    """Serves as many workers as there are processes, and has some of them call."""

    def __init__(self) -> None:
        self._channels: list[Channel] = []
        self._arrived = trio.Event()
        self._count = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        me = Hello(role="coordinator", name="bench", instance="1")
        async with open_channel(stream, role="acceptor", me=me, inline=echo) as channel:
            self._channels.append(channel)
            if len(self._channels) == self._count:
                self._arrived.set()
            await channel.closed.wait()

    async def expect(self, count: int) -> None:
        self._count = count
        if len(self._channels) >= count:
            return
        with trio.move_on_after(ARRIVAL_S_MAX):
            await self._arrived.wait()
            return
        raise SystemExit(f"{len(self._channels)} of {count} workers came in {ARRIVAL_S_MAX:g} s")

    async def measure(self, workers: int, depth: int, seconds: float) -> Trips:
        told: list[dict[str, float]] = []

        async def ask(channel: Channel) -> None:
            reply = await channel.request(_RUN, json.dumps([depth, seconds]).encode())
            told.append(json.loads(reply.body))

        floor = raw_round_trips(workers, depth, seconds)
        cpu = time.process_time()
        async with trio.open_nursery() as nursery:
            for channel in self._channels[:workers]:
                nursery.start_soon(ask, channel)
        cpu = time.process_time() - cpu
        count = sum(each["count"] for each in told)
        return Trips(
            per_s=sum(each["count"] / each["took_s"] for each in told),
            floor_per_s=floor["per_s"],
            p50_s=median(each["p50_s"] for each in told),
            p99_s=max(each["p99_s"] for each in told),
            messages_per_cpu_s=2 * count / cpu,
            worker_messages_per_cpu_s=2 * count / sum(each["cpu_s"] for each in told),
            floor_messages_per_cpu_s=floor["messages_per_cpu_s"],
        )


@contextmanager
def _echoing(count: int) -> Iterator[list[socket.socket]]:
    """Blocking sockets to as many processes that send back what they get."""
    source = (
        "import socket, sys\n"
        "sock = socket.socket(fileno=int(sys.argv[1]))\n"
        "while data := sock.recv(262144): sock.sendall(data)\n"
    )
    with ExitStack() as stack:
        ours: list[socket.socket] = []
        for _ in range(count):
            near, far = socket.socketpair()
            descriptor = far.fileno()
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", source, str(descriptor)], pass_fds=[descriptor]
            )
            far.close()
            stack.callback(child.wait)
            ours.append(stack.enter_context(near))
        yield ours


def raw_round_trips(workers: int, depth: int, seconds: float) -> dict[str, float]:
    """The same bytes, as many at a time, with nothing around them."""
    message = encode(Type.CALL, (4, _ECHO, b"", BODY, None)) * depth
    count = 0
    with _echoing(workers) as sockets:
        for sock in sockets:
            _exchange(sock, message)
        began, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds / 2:
            for sock in sockets:
                sock.sendall(message)
            for sock in sockets:
                _receive(sock, len(message))
            count += depth * workers
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {"per_s": count / took, "messages_per_cpu_s": 2 * count / max(cpu, 1e-9)}


def _exchange(sock: socket.socket, message: bytes) -> None:
    sock.sendall(message)
    _receive(sock, len(message))


def _receive(sock: socket.socket, size: int) -> None:
    while size:
        data = sock.recv(262144)
        assert data, "an echoing process has ended"
        size -= len(data)


async def measure_trips(
    workers: Sequence[int], depths: Sequence[int], rounds: int, seconds: float
) -> TripsSection:
    """Each case in each round, so that the load of a moment is in all of them."""
    found: dict[tuple[int, int], list[Trips]] = {(w, d): [] for w in workers for d in depths}
    coordinator = Coordinator()
    with runtime_directory() as directory, ExitStack() as stack:
        path = directory / "s"
        async with open_unix_listener(path) as listener, trio.open_nursery() as nursery:
            await nursery.start(serve_channels, listener, coordinator.serve)
            _start_workers(stack, path, max(workers))
            await coordinator.expect(max(workers))
            for _ in range(rounds):
                for (worker_count, depth), trips in found.items():
                    trips.append(await coordinator.measure(worker_count, depth, seconds))
            nursery.cancel_scope.cancel()
    rows = [
        TripsRow(
            workers=worker_count,
            depth=depth,
            rounds=trips,
            messages_per_cpu_s_min=MESSAGES_PER_CPU_S if depth >= 64 else None,
        )
        for (worker_count, depth), trips in found.items()
    ]
    return TripsSection(title=f"round trips of {len(BODY)} bytes", rows=rows)


def _start_workers(stack: ExitStack, path: Path, count: int) -> None:
    command = [sys.executable, "-m", "bench.wire", "--worker", str(path)]
    for _ in range(count):
        child = subprocess.Popen(command, cwd=Path(__file__).parents[1])
        stack.callback(child.wait)


# --- a report -----------------------------------------------------------------------------------


def measure_report(count: int, rounds: int) -> Section:
    """From the message to the bytes of its frame, and back; in processor time."""
    ids = [f"rollout-{number:024d}" for number in range(count)]
    reply = CommitReply(phase="committed", manifest={}, episode_ids=tuple(ids))
    sender, receiver = _connected()
    encoding: list[float] = []
    decoding: list[float] = []
    floors: list[tuple[float, float]] = []
    for _ in range(rounds):
        with _cpu_timed(encoding):
            sender.post("report", pack(reply), control=True)
            data = sender.data_to_send(2**30).data
        with _cpu_timed(decoding):
            (event,) = receiver.receive_data(data)
            assert isinstance(event, Posted)
            came = unpack(CommitReply, event.body)
        assert came == reply
        raw: list[float] = []
        with _cpu_timed(raw):
            packed = msgpack.packb(ids)
        with _cpu_timed(raw):
            msgpack.unpackb(packed)
        floors.append((raw[0], raw[1]))
    both = [a + b for a, b in zip(encoding, decoding, strict=True)]
    rows = [
        _row("encode", encoding, [floor[0] for floor in floors]),
        _row("decode", decoding, [floor[1] for floor in floors]),
        _row("both", both, [sum(floor) for floor in floors], Target(took_s=REPORT_S)),
    ]
    return Section(title=f"a report of {count} ids", facts={"ids": count}, rows=rows)


@contextmanager
def _cpu_timed(seconds: list[float]) -> Iterator[None]:
    # Nothing waits here, so whatever else takes time is another process.
    began = time.thread_time()
    yield
    seconds.append(time.thread_time() - began)


def _row(name: str, took_s: list[float], floors_s: list[float], aim: Target | None = None) -> Row:
    samples = [Sample(took_s=took) for took in took_s]
    return Row(name=name, samples=samples, floors_s=floors_s, target=aim or Target())


def _connected() -> tuple[Dialogue, Dialogue]:
    me = Hello(role="bench", name="bench", instance="1")
    opener = Dialogue(Role.OPENER, me, ChannelLimits())
    acceptor = Dialogue(Role.ACCEPTOR, me, ChannelLimits())
    acceptor.receive_data(opener.data_to_send().data)
    opener.receive_data(acceptor.data_to_send().data)
    return opener, acceptor


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.wire", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="fewer workers, shorter")
    parser.add_argument("--rounds", type=int, help="of each case")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    add_arguments(parser)
    arguments = parser.parse_args(given)
    if arguments.worker is not None:
        trio.run(work, arguments.worker)
        return 0
    rounds = arguments.rounds or (3 if arguments.quick else 5)
    workers = WORKERS[:2] if arguments.quick else WORKERS
    trips = trio.run(measure_trips, workers, DEPTHS, rounds, 0.5 if arguments.quick else 2.0)
    trips.print()
    report = measure_report(REPORT_IDS, max(rounds, 9))
    report.print()
    sections: list[Any] = [trips, report]
    return conclude(sections, arguments)


if __name__ == "__main__":
    sys.exit(main())
