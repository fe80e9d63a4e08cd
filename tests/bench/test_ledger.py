"""The bench runs, and tells what it says; no time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import ledger


async def test_commit_and_restore_are_measured_beside_their_floors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """POL-7"""
    (tmp_path / "checkpoints").mkdir()
    section = await ledger.measure(20, 1, tmp_path)
    section.print()
    told = capsys.readouterr().out
    for row in section.rows:
        assert row.name in told
        assert row.took_s > 0
        assert row.floor_s
