"""The bench runs, and tells what it says; no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from bench import checkpoint, report
from bench.measure import Sample
from bench.report import Row, Section, Target


async def _never(_: object) -> None:
    """In place of what changes the collector of the whole process."""
    await trio.sleep_forever()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("way", ["direct", "in process", "sockets"])
def test_one_case_measures_everything(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each way to the control plane, in this process."""
    monkeypatch.setattr(checkpoint, "spare_long_lived_objects", lambda: None)
    monkeypatch.setattr(checkpoint, "spare_the_loop", _never)
    case = checkpoint.Case(way=way, count=20, state_bytes=1_000, rounds=2, directory=str(tmp_path))
    (section,) = checkpoint.run([case], in_process=True)
    found: Any = json.loads(json.dumps(section.to_json()))
    assert (found["way"], found["episodes"], found["rounds"]) == (way, 20, 2)
    assert 800 < found["state_bytes_per_episode"] < found["stored_bytes_per_episode"] < 1_500
    rows = {row["name"]: row for row in found["rows"]}
    assert [name for name in rows if not name.startswith(" ")] == [
        *("status", "given up", "prepare", "commit", "resume", "busy status", "abort"),
        *("restore", "claim", "retire"),
    ]
    for row in rows.values():
        assert row["took_s"] > 0
        assert len(row["samples"]) == 2
        assert all(sample["held_s"] >= 0 for sample in row["samples"])
    compared = {name for name, row in rows.items() if row["floor_s"] is not None}
    assert {"prepare", "commit", "restore", "claim"} < compared
    assert all(rows[name]["floor_s"] > 0 for name in compared)
    assert "20 episodes" in capsys.readouterr().out


def test_every_size_and_way_is_asked_for(tmp_path: Path) -> None:
    given = checkpoint.cases(quick=False, rounds=None, directory=str(tmp_path))
    asked = {(case.way, case.count, case.state_bytes) for case in given}
    assert {("direct", n, b) for n in (1_000, 4_000, 16_000) for b in (1_000, 10_000)} <= asked
    assert {"in process", "sockets"} <= {case.way for case in given}
    assert len(checkpoint.cases(quick=True, rounds=1, directory=str(tmp_path))) < len(given)


def section_of(count: int, took_s: float, target: Target | None = None) -> Section:
    row = Row(
        name="commit",
        samples=[Sample(took_s=took_s, held_s=0.03, peak_bytes=100)] * 3,
        floors_s=[1.0, 2.0, 4.0],
        kept_bytes=60,
        target=target or Target(),
    )
    return Section(title=f"{count}", facts={"way": "direct", "episodes": count}, rows=[row])


@pytest.mark.parametrize(
    ("target", "missed"),
    [
        (Target(), []),
        (Target(took_s=3.0), []),
        (Target(took_s=2.0), ["3000.0 ms, target 2000"]),
        (Target(over_floor_s=0.5), ["beyond its floor 1000.0 ms, target 500"]),
        (Target(ratio=1.5), []),
        (Target(ratio=1.4), ["of its floor 1.5 x, target 1.4"]),
        (Target(ratio=1.4, ratio_from_s=2.5), []),
        (Target(held_s=0.02), ["held 30.0 ms, target 20"]),
        (Target(peak_bytes=39.0), ["memory 0.0 MiB, target 3.71933e-05"]),
        (Target(peak_bytes=40.0), []),
    ],
)
def test_a_target_is_compared_with_medians(target: Target, missed: list[str]) -> None:
    (row,) = section_of(1, 3.0, target).rows
    assert row.missed() == missed
    assert ("MISSED" in row.line()) == bool(missed)


def test_growth_is_time_per_episode() -> None:
    """From one size to the next of the same way."""
    linear = [section_of(1_000, 1.0), section_of(4_000, 5.0)]
    assert checkpoint.growth_missed(linear) == []
    (line,) = checkpoint.growth_missed([section_of(1_000, 1.0), section_of(4_000, 8.0)])
    assert line == "4000: commit: 2.00 times the time per episode of 1000, target 1.5"
    other_way = attrs.evolve(section_of(4_000, 8.0), facts={"way": "x", "episodes": 4_000})
    assert checkpoint.growth_missed([section_of(1_000, 1.0), other_way]) == []


@pytest.mark.parametrize(
    ("limit_s", "check", "status"), [(1, True, 1), (1, False, 0), (9, True, 0)]
)
def test_a_missed_target_is_an_exit_status_only_when_asked(
    limit_s: float, check: bool, status: int, tmp_path: Path
) -> None:
    parser = checkpoint.argparse.ArgumentParser()
    report.add_arguments(parser)
    file = tmp_path / "found.json"
    given = ["--json", str(file), *(["--check"] if check else [])]
    section = section_of(1_000, 3.0, Target(took_s=limit_s))
    assert report.conclude([section], parser.parse_args(given)) == status
    found = json.loads(file.read_text())
    assert found["sections"][0]["rows"][0]["took_s"] == 3.0
    assert len(found["missed"]) == (limit_s < 3)
