"""Connections between processes of one user on one host.

The rules of this file:

- U1 The socket's name appears in a directory that only this user can enter, and with its final mode:
  it is safe before anybody can see it.
- U2 Whoever listens holds a lock on a file beside the socket for as long as it lives; whoever has the
  lock may remove a socket that a dead process left, and the file, and nobody else may.
- U3 A peer of another user is refused before a byte of it is read; so is a directory that is not ours.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
import struct
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

import trio

from gymtrio.errors import HostError
from gymtrio.wire.leftovers import LOCK_SUFFIX, name_of, remove_leftovers, take_lock

PATH_BYTES_MAX: Final = 100
"""`sun_path` of Linux has 108 bytes, the last of them zero. Until a socket gets its name it has one
that may be longer by a process id."""
BACKLOG: Final = 4096
_DIGITS: Final = 16
_SOCKET_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700
_NAME_BYTES: Final = 16
_PEER: Final = struct.Struct("3i")
_LOCK_TRIES: Final = 20
_LOCK_RETRY_S: Final = 0.005
"""Who looks whether a lock is free has it for less than a millisecond."""


@contextmanager
def runtime_directory(parent: str | Path | None = None) -> Iterator[Path]:
    """Make a short, private directory for sockets, and remove it at the end.

    Args:
        parent: where; None: `XDG_RUNTIME_DIR`, else the system's directory for temporary files.

    Raises:
        HostError: it cannot be made, or its path leaves no room for names of 16 bytes.
    """
    below = parent or os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    try:
        with tempfile.TemporaryDirectory(prefix="gymtrio-", dir=below) as made:
            _check_length(Path(made) / ("x" * _NAME_BYTES))
            yield Path(made)
    except OSError as error:
        raise HostError(f"no directory for sockets below {below}: {error}") from None


def lasting_directory(owner: str | Path) -> Path:
    """A short directory for the sockets of what lives in `owner`, made by who listens there.

    It is the same one in every life, so that a crash leaves nothing that the next life does not use;
    what is left of those without a next life is removed by whoever listens in such a directory.
    """
    digest = hashlib.sha256(os.fsencode(Path(owner).absolute())).hexdigest()[:_DIGITS]
    below = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(below) / name_of(digest)


@asynccontextmanager
async def open_unix_listener(path: str | Path) -> AsyncIterator[UnixListener]:
    """Listen on a socket file. The directory is made if it is missing; the file is removed at the end.

    Raises:
        HostError: the path is too long, the directory is open to others, another process listens
            there, or the system refuses; says what to do.

    Cancelled: nothing of it is left.
    """
    path = Path(path)
    _check_length(path)
    remove_leftovers(path.parent, is_deaf)
    lock = await _lock(path)
    try:
        with _translated(path):
            bound = _bind(path)
        try:
            yield UnixListener(trio.SocketListener(trio.socket.from_stdlib_socket(bound)))
        finally:
            bound.close()
            path.unlink(missing_ok=True)
    finally:
        # Not unlinked: who looks at it meanwhile would have to begin again.
        os.close(lock)


class UnixListener(trio.abc.Listener[trio.SocketStream]):
    """Accepts peers of this user only."""

    def __init__(self, listener: trio.SocketListener) -> None:
        self._listener = listener
        self.refused = 0
        """Peers of other users so far."""

    async def accept(self) -> trio.SocketStream:
        while True:
            stream = await self._listener.accept()
            if peer_uid(stream) == os.geteuid():
                return stream
            self.refused += 1
            await trio.aclose_forcefully(stream)

    async def aclose(self) -> None:
        await self._listener.aclose()


async def connect_unix(path: str | Path) -> trio.SocketStream:
    """Connect to a socket file of this user.

    Raises:
        OSError: nobody listens there.
        HostError: the path is too long, or another user's process listens there.

    Cancelled: no stream is left open.
    """
    _check_length(Path(path))
    stream = await trio.open_unix_socket(str(path))
    if peer_uid(stream) != os.geteuid():
        await trio.aclose_forcefully(stream)
        raise HostError(f"{path}: the process that listens there belongs to another user")
    return stream


def is_deaf(path: str) -> bool:
    """Whether nobody listens at a socket file, nor stands still while it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def peer_uid(stream: trio.abc.Stream) -> int | None:
    """The user of the process at the other end, as it was when it connected or listened.

    None where the kernel does not tell: the other end may be on another host, or is no process.
    """
    if not isinstance(stream, trio.SocketStream) or stream.socket.family != socket.AF_UNIX:
        return None
    packed = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, uid, _ = _PEER.unpack(packed)
    return int(uid)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HostError(f"{path}: {error.strerror or error}") from None


def _check_length(path: Path) -> None:
    size = len(os.fsencode(path))
    if size > PATH_BYTES_MAX:
        raise HostError(
            f"{path}: the path of a socket has at most {PATH_BYTES_MAX} bytes, this one {size}; "
            "use a shorter directory (XDG_RUNTIME_DIR)"
        )


def _make_private(directory: Path) -> bool:
    """Make it, or make sure that it is private; False: somebody has just removed it."""
    with suppress(FileExistsError):
        directory.mkdir(mode=_DIRECTORY_MODE)
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        raise HostError(f"{directory}: not a directory")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise HostError(
            f"{directory}: must belong to this user and be closed to others (mode 0700), since "
            "it holds a socket"
        )
    return True


async def _lock(path: Path) -> int:
    """Make the directory of a socket, and lock its name there."""
    lock_path = path.with_name(path.name + LOCK_SUFFIX)
    for _ in range(_LOCK_TRIES):
        with _translated(path):
            is_there = _make_private(path.parent)
            lock = take_lock(lock_path) if is_there else None
        if lock is not None:
            return lock
        await trio.sleep(_LOCK_RETRY_S)
    raise HostError(f"{lock_path}: held by another process, which listens there")


def _bind(path: Path) -> socket.socket:
    """Bind under a name of our own, and give it its name when it is safe and listens."""
    hidden = path.with_name(f".{os.getpid()}")
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        hidden.unlink(missing_ok=True)
        bound.bind(os.fsencode(hidden))
        hidden.chmod(_SOCKET_MODE)
        bound.listen(BACKLOG)
        # Replaces what a dead process left: the lock says that it is dead.
        hidden.rename(path)
    except BaseException:
        bound.close()
        hidden.unlink(missing_ok=True)
        raise
    return bound
