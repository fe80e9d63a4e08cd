from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from gymtrio.checkpoint.directory_archive import DirectoryArchive
from gymtrio.cli.main import main
from gymtrio.ports import HostRandomness
from gymtrio.storage.disk import ThreadDisk
from gymtrio.storage.root import CheckpointRoot
from tests.helpers.plane import Plane, episode, open_plane


async def commit(directory: Path) -> None:
    archive = DirectoryArchive(ThreadDisk(), CheckpointRoot(str(directory)), HostRandomness())
    async with open_plane(archive=archive) as plane:
        await prepare_and_commit(plane)


async def prepare_and_commit(plane: Plane) -> None:
    plane.participant.parked |= {episode("r0"): "one", episode("r1", 2): "two"}
    await plane.prepare()
    await plane.commit(directory="step-1")


def show(
    capsys: pytest.CaptureFixture[str], directory: Path, *options: str
) -> list[dict[str, object]]:
    assert main(["checkpoint", "show", str(directory / "step-1"), *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_manifest_and_records_are_json_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """STO-1, STO-4: nobody needs a special tool to read a checkpoint."""
    trio.run(commit, tmp_path)
    manifest, *records = show(capsys, tmp_path)
    assert manifest["manifest"]["checkpoint_id"] == "c1"  # type: ignore[index]
    assert [r["episode"] for r in records] == ["r0", "r1-a2"]
    assert [r["payload"] for r in records] == [{"note": "one"}, {"note": "two"}]
    assert {r["kind"] for r in records} == {"environment"}
    (_, only) = show(capsys, tmp_path, "--episode", "r1-a2")
    assert only["episode"] == "r1-a2"
    assert len(show(capsys, tmp_path, "--manifests")) == 1


def test_a_damaged_checkpoint_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """STO-4."""
    trio.run(commit, tmp_path)
    (part,) = (tmp_path / "step-1").glob("gym/*/*/records-*")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    assert main(["checkpoint", "show", str(tmp_path / "step-1")]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert part.name in told


def test_a_directory_without_checkpoint_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "show", str(tmp_path)]) == 1
    assert "no checkpoint" in capsys.readouterr().err
