"""Directories of sockets that killed processes left: removed by whoever listens next, and no others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import trio

from gymtrio.wire.leftovers import remove_leftovers
from gymtrio.wire.unix import connect_unix, is_deaf, lasting_directory, open_unix_listener

LISTENER: Final = """
import sys, trio
from gymtrio.wire.unix import open_unix_listener

async def main():
    async with open_unix_listener(sys.argv[1]):
        print("listening", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""

CLEANER: Final = """
import sys
from pathlib import Path
from gymtrio.wire.leftovers import remove_leftovers
from gymtrio.wire.unix import is_deaf

print("cleaning", flush=True)
while True:
    remove_leftovers(Path(sys.argv[1]), is_deaf)
"""
TIMES: Final = 300


@pytest.fixture(autouse=True)
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where lasting directories are."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def start(script: str, *arguments: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def dead(owner: str) -> Path:
    """What a process leaves that is killed while it listens."""
    directory = lasting_directory(owner)
    directory.mkdir(mode=0o700)
    (directory / "s.lock").touch(0o600)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(directory / "s"))
    return directory


async def listen(owner: str) -> None:
    async with open_unix_listener(lasting_directory(owner) / "s"):
        pass


async def test_what_a_killed_process_left_is_removed_by_the_next_that_listens() -> None:
    left, lives = lasting_directory("killed"), lasting_directory("lives")
    killed, living = start(LISTENER, left / "s"), start(LISTENER, lives / "s")
    try:
        os.kill(living.pid, signal.SIGSTOP)
        kill(killed)
        assert (left / "s").exists()
        await listen("next")
        assert not left.exists()
        assert sorted(os.listdir(lives)) == ["s", "s.lock"], "it stands still, and lives"
        os.kill(living.pid, signal.SIGCONT)
        await (await connect_unix(lives / "s")).aclose()
    finally:
        kill(living)
    await listen("next")
    assert not lives.exists()


async def test_what_ended_well_is_removed_as_well_and_a_next_life_makes_it_again() -> None:
    for _ in range(2):
        await listen("first")
        assert os.listdir(lasting_directory("first")) == ["s.lock"]
        await listen("second")
        assert not lasting_directory("first").exists()


async def test_sockets_whose_locks_were_removed_go_too_if_nobody_listens() -> None:
    """So leaves its servers who killed them, and removes their locks."""
    left = dead("killed")
    (left / "s.lock").unlink()
    await listen("next")
    assert not left.exists()


async def test_what_is_not_surely_left_by_a_dead_one_of_ours_stays(below: Path) -> None:
    others = dead("open to others")
    others.chmod(0o755)
    with_more = dead("holds something else")
    (with_more / "note").touch()
    heard = dead("has a socket whose lock was removed, and is heard")
    for file in heard.iterdir():
        file.unlink()
    listens = socket.socket(socket.AF_UNIX)
    listens.bind(str(heard / "s"))
    listens.listen()
    begins = dead("has a socket that has no name yet")
    (begins / "s").rename(begins / ".123")
    no_socket = dead("has a file for a socket")
    (no_socket / "s").unlink()
    (no_socket / "s").touch()
    elsewhere = dead("elsewhere").rename(below / "elsewhere")
    link = lasting_directory("link")
    link.symlink_to(elsewhere)
    another_user = dead("x").rename(below / f"gymtrio-{os.geteuid() + 1}-0123456789abcdef")
    own_words = dead("y").rename(below / f"gymtrio-{os.geteuid()}-mine")
    file = lasting_directory("file")
    file.touch()
    kept = (others, with_more, heard, begins, no_socket, elsewhere, another_user, own_words)
    before = {path: sorted(os.listdir(path)) for path in kept}
    for _ in range(2):
        await listen("next")
        assert {path: sorted(os.listdir(path)) for path in kept} == before
    listens.close()
    assert link.is_symlink()
    assert file.is_file()


async def test_of_another_user_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    left = dead("mine")
    renamed = left.rename(left.with_name(f"gymtrio-{os.geteuid() + 1}-0123456789abcdef"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        # Its name says that it is that user's, its owner does not.
        remove_leftovers(lasting_directory("next"), is_deaf)
    assert renamed.exists()


async def test_who_listens_in_a_directory_of_its_own_cleans_nothing(tmp_path: Path) -> None:
    left = dead("killed")
    async with open_unix_listener(tmp_path / "own" / "s"):
        pass
    assert left.exists()


async def test_who_begins_while_somebody_cleans_listens_all_the_same() -> None:
    """Under one name again and again, with nothing but a lock left each time."""
    path = lasting_directory("here") / "s"
    cleaner = start(CLEANER, lasting_directory("cleaner"))
    try:
        with trio.fail_after(60):
            for _ in range(TIMES):
                async with open_unix_listener(path) as listener:
                    stream = await connect_unix(path)
                    await (await listener.accept()).aclose()
                    await stream.aclose()
        assert cleaner.poll() is None
    finally:
        kill(cleaner)
