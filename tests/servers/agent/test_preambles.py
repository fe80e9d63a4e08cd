"""Few-shot input from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymtrio.errors import SettingsError
from gymtrio.storage.disk import ThreadDisk
from servers.agent.preambles import PREAMBLE_BYTES_MAX, parse_preamble, read_preambles


async def test_each_taskset_has_its_file(tmp_path: Path) -> None:
    """AGT-8: one item per line, blank lines aside."""
    path = tmp_path / "few.jsonl"
    path.write_text('{"role": "system", "content": "é"}\n\n{"role": "user", "content": "x"}\n')
    read = await read_preambles({"t": str(path)}, ThreadDisk())
    assert read == {
        "t": ({"role": "system", "content": "é"}, {"role": "user", "content": "x"}),
    }


SHIPPED = sorted((Path(__file__).parents[3] / "servers/agent/data/preambles").glob("*.jsonl"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_is_shipped_can_be_read(path: Path) -> None:
    """AGT-8."""
    assert parse_preamble(path.read_bytes(), path.name)


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
async def test_a_file_that_cannot_be_read_is_told_at_start(tmp_path: Path, name: str) -> None:
    """AGT-8: with the taskset and the path."""
    path = tmp_path / name
    with pytest.raises(SettingsError, match=rf"preambles\.t: {path}"):
        await read_preambles({"t": str(path)}, ThreadDisk())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"a": 1}\n[1]', "line 2: an input item is a JSON object"),
        (b"{", "line 1: not JSON"),
        (b"\xff", "line 1: not JSON"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b" " * (PREAMBLE_BYTES_MAX + 1), "over 1048576 bytes"),
    ],
)
def test_a_line_that_is_no_item_is_told(data: bytes, why: str) -> None:
    """AGT-8."""
    with pytest.raises(SettingsError, match=why):
        parse_preamble(data, "preambles.t: x")
