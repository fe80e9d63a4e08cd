"""The bench runs, and tells what it says; no time is asserted."""

from __future__ import annotations

import json

import attrs
import pytest

from bench import wire
from bench.wire import Trips, TripsRow


async def test_round_trips_are_measured_beside_their_floor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    section = await wire.measure_trips([1, 2], [1, 8], rounds=1, seconds=0.05)
    section.print()
    told = capsys.readouterr().out
    for row in section.rows:
        assert row.name in told
        assert all(value > 0 for value in attrs.astuple(row.rounds[0]))
    assert len(json.loads(json.dumps(section.to_json()))["rows"]) == 4


def test_a_report_is_measured_beside_its_floor() -> None:
    section = wire.measure_report(100, rounds=2)
    assert [row.name for row in section.rows] == ["encode", "decode", "both"]
    assert all(row.took_s > 0 and row.floor_s for row in section.rows)


@pytest.mark.parametrize(("per_cpu_s", "missed"), [(99_000.0, True), (101_000.0, False)])
def test_a_missed_target_is_told(per_cpu_s: float, missed: bool) -> None:
    trips = Trips(
        per_s=1.0,
        floor_per_s=2.0,
        p50_s=1.0,
        p99_s=1.0,
        messages_per_cpu_s=per_cpu_s,
        worker_messages_per_cpu_s=1.0,
        floor_messages_per_cpu_s=1.0,
    )
    row = TripsRow(workers=1, depth=64, rounds=[trips] * 3, messages_per_cpu_s_min=100_000)
    assert bool(row.missed()) is missed
    assert ("MISSED" in row.line()) is missed
