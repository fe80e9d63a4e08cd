"""What a call between servers costs: over frames, over HTTP, and with what one would take instead.

    python -m bench.transport [--quick] [--json FILE] [--check]          needs the `bench` extra

A call sends 2 kB of JSON, the server parses it and answers it encoded anew, the client parses that. In
*bytes both ways* neither does, which leaves the transport alone; it is shown beside.
Server and client are a process each; a *round* measures every way once, one after the other, and what
is told are medians over rounds. Ratios are those of one round, so that the load of a moment is in both.

    way              client                  server
    frames           ours, one connection    ours
    http             ours, a pool            ours
    outside          aiohttp                 ours, over HTTP
    rival            aiohttp                 FastAPI, uvicorn (uvloop, httptools)

*calls/cpu s*: per second of processor time of client and server together. *parked*: so many calls wait
at the server at once; resident memory beyond what was there before, and the longest time that a loop
was held until all were parked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Final

import attrs
import trio

from bench.load import Job
from bench.report import add_arguments, conclude
from gymtrio.serving.deployment import RESOLVED_FILE, Deployment, ServerEntry
from gymtrio.serving.supervisor import open_deployment
from gymtrio.wire.control import Kind

FRAMES_PER_CPU: Final = 5.0
FRAMES_THROUGHPUT: Final = 3.0
"""Of frames to the rival, between servers."""
OUTSIDE_RATIO: Final = 1.0
"""Of our server to the rival's, under the same client, per processor second of the server."""
OUTSIDE_AT: Final = 64
PARKED_BYTES: Final = 25_000
"""SRV-4."""
HELD_S: Final = 0.1
"""SRV-4."""
CLIENT_S_MAX: Final = 120.0

WAYS: Final = ("frames", "http", "outside", "rival")
OURS: Final = ("frames", "http", "outside")


@attrs.frozen(kw_only=True)
class Servers:
    """Where the two servers run: ours by its deployment file, the rival by its URL."""

    deployment_file: Path
    url: str
    rival_url: str

    def command(self, way: str, job: Job) -> list[str]:
        """The client's process."""
        if way in {"outside", "rival"}:
            url = self.url if way == "outside" else self.rival_url
            return [sys.executable, "-m", "bench.rival", "drive", url, job.text()]
        return [sys.executable, "-m", "bench.ours", str(self.deployment_file), way, job.text()]


async def measure(servers: Servers, way: str, job: Job) -> dict[str, float]:
    """Run one client to its end."""
    with trio.fail_after(CLIENT_S_MAX):
        done = await trio.run_process(servers.command(way, job), capture_stdout=True)
    told: dict[str, float] = json.loads(done.stdout)
    return told


@asynccontextmanager
async def open_servers(directory: Path, *, heart: bool) -> AsyncIterator[Servers]:
    """Start both servers; they die with this process."""
    settings: dict[str, object] = {"heart": heart}
    entry = ServerEntry(app="bench.echo_server:app", kind=Kind.RESOURCES, settings=settings)
    deployment = Deployment(servers={"echo": entry})
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(open_deployment(deployment, run_dir=directory))
        url = await stack.enter_async_context(_open_rival(heart=heart))
        yield Servers(
            deployment_file=directory / RESOLVED_FILE, url=running.urls["echo"], rival_url=url
        )


@asynccontextmanager
async def _open_rival(*, heart: bool) -> AsyncIterator[str]:
    command = [sys.executable, "-m", "bench.rival", "serve", *(["--heart"] if heart else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise SystemExit("the rival did not start: pip install 'gymtrio[bench]'")
        yield url
    finally:
        process.kill()
        process.wait()


@attrs.define(kw_only=True)
class Section:
    """One number of calls in flight, every way, all rounds."""

    title: str
    job: Job
    rounds: dict[str, list[dict[str, float]]]
    lines: list[Line]

    def to_json(self) -> dict[str, object]:
        return {
            "title": self.title,
            **attrs.asdict(self.job),
            "ways": self.rounds,
            "compared": [attrs.asdict(line) for line in self.lines],
        }

    def missed(self) -> list[str]:
        return [f"{self.title}: {line.told}" for line in self.lines if line.missed]

    def print(self) -> None:
        print(f"\n{self.title}")
        print(_parked_table(self.rounds) if self.job.parks else _throughput_table(self.rounds))
        for line in self.lines:
            print(f"  {line.told}{'   MISSED' if line.missed else ''}")
        sys.stdout.flush()


@attrs.frozen
class Line:
    """One target, and what was measured."""

    what: str
    value: float
    target: float | None
    """None: shown beside."""
    at_least: bool
    unit: str = "x"

    @property
    def missed(self) -> bool:
        if self.target is None:
            return False
        return self.value < self.target if self.at_least else self.value > self.target

    @property
    def told(self) -> str:
        told = f"{self.what}: {self.value:.2f} {self.unit}".rstrip()
        if self.target is None:
            return told
        return f"{told}, target {'>=' if self.at_least else '<='} {self.target:g}"


Rounds = Mapping[str, Sequence[Mapping[str, float]]]


def _per_s(told: Mapping[str, float]) -> float:
    return told["calls"] / told["took_s"]


def _per_cpu_s(told: Mapping[str, float]) -> float:
    return told["calls"] / (told["client_cpu_s"] + told["server_cpu_s"])


def _per_server_cpu_s(told: Mapping[str, float]) -> float:
    return told["calls"] / told["server_cpu_s"]


def _ratio(
    rounds: Rounds, one: str, other: str, of: Callable[[Mapping[str, float]], float]
) -> float:
    return median(of(a) / of(b) for a, b in zip(rounds[one], rounds[other], strict=True))


def _throughput_table(rounds: Rounds) -> str:
    lines = [
        f"  {'':10}{'calls/s':>9}{'calls/cpu s':>13}{'client us':>11}{'server us':>11}{'errors':>8}"
    ]
    for way, told in rounds.items():
        lines.append(
            f"  {way:10}{median(map(_per_s, told)):9.0f}{median(map(_per_cpu_s, told)):13.0f}"
            f"{median(t['client_cpu_s'] / t['calls'] for t in told) * 1e6:11.0f}"
            f"{median(t['server_cpu_s'] / t['calls'] for t in told) * 1e6:11.0f}"
            f"{sum(t['errors'] for t in told):8.0f}"
        )
    return "\n".join(lines)


def _parked_table(rounds: Rounds) -> str:
    lines = [
        f"  {'':10}{'parked in':>10}{'released':>10}{'one more':>10}{'client kB':>11}{'server kB':>11}"
        f"{'held ms: client':>17}{'server':>8}{'cpu us each':>13}{'errors':>8}"
    ]
    for way, told in rounds.items():
        each = {
            name: median(t[name] / max(1, t["calls"]) for t in told)
            for name in ("client_bytes", "server_bytes", "client_cpu_s", "server_cpu_s")
        }
        lines.append(
            f"  {way:10}{median(t['parking_s'] for t in told):8.1f} s"
            f"{median(t['releasing_s'] for t in told):8.1f} s"
            f"{median(t['one_more_s'] for t in told) * 1e3:7.1f} ms"
            f"{each['client_bytes'] / 1e3:11.1f}{each['server_bytes'] / 1e3:11.1f}"
            f"{median(t['client_held_s'] for t in told) * 1e3:17.0f}"
            f"{median(t['server_held_s'] for t in told) * 1e3:8.0f}"
            f"{(each['client_cpu_s'] + each['server_cpu_s']) * 1e6:13.0f}"
            f"{sum(t['errors'] for t in told):8.0f}"
        )
    return "\n".join(lines)


def compare(rounds: Rounds, job: Job) -> list[Line]:
    """Hold what was measured to its targets."""
    lines = []
    for way in set(OURS) & set(rounds):
        errors = sum(told["errors"] for told in rounds[way])
        lines.append(Line(f"{way}: errors", errors, 0, at_least=False, unit=""))
    if job.parks:
        if "frames" in rounds:
            told = rounds["frames"]
            each = median(t["server_bytes"] / max(1, t["calls"]) for t in told)
            held = median(max(t["server_held_s"], t["client_held_s"]) for t in told)
            lines.append(Line("frames: server", each / 1e3, PARKED_BYTES / 1e3, False, "kB each"))
            lines.append(Line("frames: held", held * 1e3, HELD_S * 1e3, False, "ms"))
        return lines
    held = job.parses
    if {"frames", "rival"} <= set(rounds):
        per_cpu = _ratio(rounds, "frames", "rival", _per_cpu_s)
        per_s = _ratio(rounds, "frames", "rival", _per_s)
        cpu_target = FRAMES_PER_CPU if held else None
        lines.append(Line("frames to rival, calls per cpu s", per_cpu, cpu_target, True))
        s_target = FRAMES_THROUGHPUT if held else None
        lines.append(Line("frames to rival, calls per s", per_s, s_target, True))
    if {"outside", "rival"} <= set(rounds) and job.in_flight <= OUTSIDE_AT:
        per_cpu = _ratio(rounds, "outside", "rival", _per_server_cpu_s)
        per_s = _ratio(rounds, "outside", "rival", _per_s)
        target = OUTSIDE_RATIO if held else None
        lines.append(Line("outside to rival, calls per cpu s of the server", per_cpu, target, True))
        lines.append(Line("outside to rival, calls per s", per_s, target, True))
    return lines


async def run(jobs: Sequence[Job], ways: Sequence[str], rounds: int) -> list[Section]:
    """Measure every way in every round, and print."""
    sections = []
    for job in jobs:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for number in range(rounds):
            with tempfile.TemporaryDirectory() as made:
                async with open_servers(Path(made), heart=job.parks) as servers:
                    # Every second round in the opposite order: what is slowly changing hits all.
                    for way in ways if number % 2 == 0 else reversed(ways):
                        found[way].append(await measure(servers, way, job))
        how = "parked" if job.parks else "in flight" if job.parses else "in flight, bytes both ways"
        what = f"{job.in_flight} calls {how}"
        section = Section(title=what, job=job, rounds=found, lines=compare(found, job))
        section.print()
        sections.append(section)
    return sections


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short, and a smaller crowd")
    parser.add_argument("--rounds", type=int, help="default: 5; quick: 3")
    parser.add_argument("--seconds", type=float, help="of each stretch; default: 3; quick: 1")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--crowd", type=int, help="parked at once; default: 16000, quick: 1000")
    parser.add_argument("--only", choices=("flight", "parked"))
    add_arguments(parser)
    arguments = parser.parse_args(given)
    seconds = arguments.seconds or (1.0 if arguments.quick else 3.0)
    rounds = arguments.rounds or (3 if arguments.quick else 5)
    sections: list[Section] = []
    if arguments.only != "parked":
        jobs = [
            Job(in_flight=count, seconds=seconds, parses=parses)
            for parses in (True, False)
            for count in (64, 512)
        ]
        sections += trio.run(run, jobs, arguments.ways, rounds)
    if arguments.only != "flight":
        crowd = Job(in_flight=arguments.crowd or (1_000 if arguments.quick else 16_000), parks=True)
        sections += trio.run(run, [crowd], arguments.ways, 1 if arguments.quick else 3)
    return conclude(sections, arguments)


if __name__ == "__main__":
    sys.exit(main())
