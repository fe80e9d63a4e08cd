"""The bench holds what it measured to its targets; the rival needs packages that tests have not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from bench import ours, transport
from bench.load import Caller, Crowd, Job, Parked, Throughput
from bench.transport import Line, compare
from gymtrio.errors import TransportError
from gymtrio.serving.deployment import Deployment, ServerEntry
from gymtrio.serving.supervisor import open_deployment
from gymtrio.wire.control import Kind


def told(calls: float, cpu_s: float, errors: float = 0) -> dict[str, float]:
    return {
        "calls": calls,
        "errors": errors,
        "took_s": 1.0,
        "client_cpu_s": cpu_s / 2,
        "server_cpu_s": cpu_s / 2,
    }


def missed(lines: list[Line]) -> set[str]:
    return {line.what for line in lines if line.missed}


def test_ratios_are_those_of_one_round() -> None:
    rounds = {
        "frames": [told(500, 1.0), told(5_000, 1.0), told(600, 1.0)],
        "outside": [told(100, 1.0, errors=1), told(1_000, 1.0), told(90, 1.0)],
        "rival": [told(100, 1.0), told(1_000, 1.0), told(100, 1.0)],
    }
    lines = compare(rounds, Job(in_flight=64))
    assert missed(lines) == {"outside: errors"}
    assert {line.value for line in lines if line.what.startswith("frames to rival")} == {5.0}
    rounds["frames"] = [told(400, 1.0)] * 3
    lines = compare(rounds, Job(in_flight=512))
    assert missed(lines) == {"outside: errors", "frames to rival, calls per cpu s"}


@pytest.mark.parametrize("parks", [False, True])
async def test_our_client_does_its_job(parks: bool, tmp_path: Path) -> None:
    """Over frames and over HTTP, against the server of the bench."""
    entry = ServerEntry(app="bench.echo_server:app", kind=Kind.RESOURCES, start_timeout_s=60)
    deployment = Deployment(servers={"echo": entry})
    job = Job.of(Job(in_flight=3, seconds=0.1, parks=parks).text())
    async with open_deployment(deployment, run_dir=tmp_path / "run") as running:
        for way in ("frames", "http"):
            with trio.fail_after(30):
                found = await ours.drive(running.deployment, way, job)
            assert isinstance(found, Parked if parks else Throughput)
            assert found.calls > 0
            assert found.errors == 0


class RefusesSome(Caller):
    """The client of a server that parks every second call and refuses the others."""

    def __init__(self) -> None:
        self._parked = trio.lowlevel.ParkingLot()
        self._came = 0

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        await trio.lowlevel.checkpoint()
        if path == "/costs":
            parked = float(len(self._parked))
            return {"parked": parked, "held_s": 0.0, "cpu_s": 0.0, "resident_bytes": 0.0}
        if path == "/release":
            self._parked.unpark_all()
        elif path == "/park":
            self._came += 1
            if self._came % 2:
                raise TransportError("refused")
            await self._parked.park()
        return body

    async def raw(self) -> bool:
        raise AssertionError


async def test_what_failed_of_a_crowd_stays_counted(autojump_clock: MockClock) -> None:
    """A reply that comes later takes no error back."""
    crowd = Crowd(
        RefusesSome(), 6, sleep=trio.sleep, held_s=lambda: 0.0, failures=(TransportError,)
    )
    await crowd.begin()
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(crowd.park)
        await crowd.release()
    await crowd.end()
    assert (crowd.told.calls, crowd.told.errors) == (3, 3)


def test_what_was_measured_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = {"frames": [told(10, 0.1)], "rival": [told(10, 0.2)]}
    job = Job(in_flight=64)
    section = transport.Section(
        title="64 calls", job=job, rounds=rounds, lines=compare(rounds, job)
    )
    section.print()
    assert "MISSED" in capsys.readouterr().out
    assert json.loads(json.dumps(section.to_json()))["ways"] == rounds
    assert len(section.missed()) == 2
