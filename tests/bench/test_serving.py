"""What the bench of parked requests says of its figures; no time is asserted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench.parking_server import Pauses
from bench.report import conclude
from bench.serving import Figures


def test_figures_are_medians_and_held_to_their_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = Figures("3 requests")
    for value in (10.0, 40.0, 20.0):
        figures.add("each", "kB", value, 25.0)
        figures.add("pause", "ms", value, 15.0)
        figures.add("all", "ms", value)
    figures.print()
    assert figures.missed() == ["pause: 20.0 ms, target 15"]
    assert "10.0 .. 40.0" in capsys.readouterr().out
    file = tmp_path / "found.json"
    assert conclude([figures], argparse.Namespace(json=file, check=True)) == 1
    found = json.loads(file.read_text())
    assert found["sections"][0]["rows"][0]["values"] == [10.0, 40.0, 20.0]
    assert conclude([figures], argparse.Namespace(json=None, check=False)) == 0


def test_the_longest_collection_is_kept() -> None:
    pauses = Pauses()
    pauses("start", {})
    sum(range(100_000))
    pauses("stop", {})
    longest_s = pauses.longest_s
    assert longest_s > 0
    pauses("start", {})
    pauses("stop", {})
    assert pauses.longest_s == longest_s
