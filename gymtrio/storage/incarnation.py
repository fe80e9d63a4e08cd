"""One incarnation per server: a lock on its directory, held for life (HARD-10)."""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from gymtrio.errors import HostError
from gymtrio.storage.disk import Disk
from gymtrio.storage.failures import explain
from gymtrio.storage.files import Files
from gymtrio.storage.folder import close_quietly
from gymtrio.storage.held import Resource, hold

LOCK_NAME: Final = "incarnation.lock"


class _Lock(Resource):
    """Holds the descriptor; the kernel lets go of the lock when the process ends, however it ends."""

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self._descriptors: list[int] = []

    def take(self) -> None:
        try:
            directory = self._enter(posixpath.abspath(self._path))
            self._descriptors.append(directory)
            self._descriptors.append(self._files.lock(directory, LOCK_NAME))
        except BlockingIOError:
            raise HostError(
                f"{self._path} belongs to a server that is running already; "
                "stop it, or give this one another directory"
            ) from None
        except OSError as error:
            raise HostError(f"cannot lock {self._path}/{LOCK_NAME}: {explain(error)}") from error

    def _enter(self, path: str) -> int:
        """Open a directory, made with the ways to it where they are missing."""
        try:
            return self._files.open_root(path)
        except FileNotFoundError:
            above, name = posixpath.split(path)
            parent = self._enter(above)
            try:
                with suppress(FileExistsError):
                    self._files.make_directory(parent, name)
            finally:
                close_quietly(self._files, parent)
            return self._files.open_root(path)

    def release(self) -> None:
        while self._descriptors:
            close_quietly(self._files, self._descriptors.pop())


@asynccontextmanager
async def only_incarnation(disk: Disk, directory: str) -> AsyncIterator[None]:
    """Own a server's directory for a block.

    Args:
        directory: made when it is missing; relative to the working directory.

    Raises:
        HostError: another process has it, or it cannot be locked.
    """
    async with hold(disk, _Lock(disk.files, directory)) as lock:
        await lock.run(lambda resource: resource.take())
        yield
