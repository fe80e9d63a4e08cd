"""Directories of sockets that nobody uses any more.

A process that is killed leaves its sockets and locks. Its next life uses them again, but what has no
next life, such as a run in a directory that was deleted, would stay until the machine starts anew. So
whoever listens in a lasting directory removes those beside it that are dead.

The rules of this file:

- L1 Dead is a directory of this user, closed to others, of which every lock is free and at whose
  sockets nobody listens. Nobody lives without a lock (U2), also who stands still.
- L2 Nothing is removed before all of its locks are held, and a lock file only while it is: who opened
  it before sees that its name has gone, and begins again (`take_lock`).
- L3 What holds anything but sockets with their locks is none of ours, and stays as it is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

LOCK_SUFFIX: Final = ".lock"
LOOKED_AT_MAX: Final = 1000
"""Directories at a time: some 20 ms, once in the life of a listener."""
REMOVED_MAX: Final = 100
"""Of them: some 40 ms. The next listener goes on."""

_DIRECTORY_MODE: Final = 0o700
_NAME: Final = re.compile(r"gymtrio-([0-9]+)-[0-9a-f]{16}")


def name_of(digest: str) -> str:
    """What a lasting directory of this user is called."""
    return f"gymtrio-{os.geteuid()}-{digest}"


def remove_leftovers(directory: Path, is_deaf: Callable[[str], bool]) -> None:
    """Remove what dead processes of this user left beside a lasting directory; of another one, nothing.

    What cannot be removed stays: nobody fails to start for it.

    Args:
        is_deaf: whether nobody listens at a path.
    """
    if not _is_ours(directory.name):
        return
    with suppress(OSError), os.scandir(directory.parent) as entries:
        looked_at = removed = 0
        for entry in entries:
            if entry.name == directory.name or not _is_ours(entry.name):
                continue
            if looked_at == LOOKED_AT_MAX or removed == REMOVED_MAX:
                return
            looked_at += 1
            with suppress(OSError):
                removed += _remove_if_dead(entry.path, is_deaf)


def take_lock(name: str | Path, *, directory: int | None = None) -> int | None:
    """Lock a file, made if it is missing, and give its descriptor: its end is that of the lock.

    None: somebody has it, or has just removed it, or its directory.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, 0o600, dir_fd=directory)
    except FileNotFoundError:
        return None
    is_ours = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        named = os.stat(name, dir_fd=directory, follow_symlinks=False)
        is_ours = os.path.samestat(named, os.fstat(descriptor))
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.ENOENT):
            raise
    finally:
        if not is_ours:
            os.close(descriptor)
    return descriptor if is_ours else None


def _is_ours(name: str) -> bool:
    found = _NAME.fullmatch(name)
    return found is not None and found[1] == str(os.geteuid())


def _remove_if_dead(path: str, is_deaf: Callable[[str], bool]) -> bool:
    with ExitStack() as held:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        held.callback(os.close, directory)
        found = os.fstat(directory)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != _DIRECTORY_MODE:
            return False
        names = os.listdir(directory)
        there = {name for name in names if name.endswith(LOCK_SUFFIX)}
        sockets = [name for name in names if name not in there]

        def hold(locks: Iterable[str]) -> bool:
            for name in locks:
                lock = take_lock(name, directory=directory)
                if lock is None:
                    return False
                held.callback(os.close, lock)
            return True

        def is_dead(name: str) -> bool:
            # One with a dot is about to get its name.
            mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
            return name[0] != "." and stat.S_ISSOCK(mode) and is_deaf(f"{path}/{name}")

        # Locks that are missing are made last: one beside a socket that is heard would outlast this.
        missing = {name + LOCK_SUFFIX for name in sockets} - there
        if not (hold(there) and all(map(is_dead, sockets)) and hold(missing)):
            return False
        for name in (*sockets, *there, *missing):
            os.unlink(name, dir_fd=directory)
        # Not empty, if somebody begins to live in it: then it stays.
        os.rmdir(path)
        return True
