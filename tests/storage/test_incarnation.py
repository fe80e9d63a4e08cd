"""A second server on the same directory ends with a clear message."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from gymtrio.errors import HostError
from gymtrio.storage.disk import ThreadDisk
from gymtrio.storage.incarnation import only_incarnation

HOLDER = """
import sys, trio
from gymtrio.storage.disk import ThreadDisk
from gymtrio.storage.incarnation import only_incarnation

async def main():
    async with only_incarnation(ThreadDisk(), sys.argv[1]):
        print("held", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


async def test_a_second_incarnation_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    """HARD-10."""
    async with only_incarnation(ThreadDisk(), str(tmp_path)):
        with pytest.raises(HostError, match="belongs to a server that is running already"):
            async with only_incarnation(ThreadDisk(), str(tmp_path)):
                raise AssertionError
    async with only_incarnation(ThreadDisk(), str(tmp_path)):
        pass


async def test_a_killed_incarnation_lets_go(tmp_path: Path) -> None:
    """HARD-10."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert (await process.stdout.receive_some()).startswith(b"held")
        with pytest.raises(HostError, match="running already"):
            async with only_incarnation(ThreadDisk(), str(tmp_path)):
                raise AssertionError
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await process.stdout.aclose()
    async with only_incarnation(ThreadDisk(), str(tmp_path)):
        pass


async def test_a_directory_that_is_missing_is_made_with_the_way_to_it(tmp_path: Path) -> None:
    """HARD-10: a server's first start."""
    async with only_incarnation(ThreadDisk(), f"{tmp_path}/state/server"):
        assert (tmp_path / "state" / "server" / "incarnation.lock").exists()


async def test_a_directory_that_cannot_be_locked_is_named(tmp_path: Path) -> None:
    """HARD-10."""
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match=r"cannot lock .*/file/none/incarnation.lock: .*ENOTDIR"):
        async with only_incarnation(ThreadDisk(), f"{tmp_path}/file/none"):
            raise AssertionError
    (tmp_path / "incarnation.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostError, match=r"a symbolic link stands there"):
        async with only_incarnation(ThreadDisk(), str(tmp_path)):
            raise AssertionError
