"""The operating system's files, and a process that dies of the n-th change to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from gymtrio.storage.disk import HostFiles


class DeadlyFiles(HostFiles):
    """Kills its process group by SIGKILL right after a change, before anybody has learned of it.

    Args:
        changes_max: it dies of this one, counted from 1; None: of none.
        tell: called with the name of that operation.
    """

    def __init__(self, changes_max: int | None, tell: Callable[[str], None]) -> None:
        self._left = changes_max
        self._tell = tell

    def _changed(self, operation: str) -> None:
        if self._left is None:
            return
        # Calls run one after another within a write, in whatever thread.
        self._left -= 1
        if self._left == 0:
            self._tell(operation)
            os.killpg(0, signal.SIGKILL)

    def make_directory(self, directory: int, name: str) -> None:
        super().make_directory(directory, name)
        self._changed("make_directory")

    def create(self, directory: int, name: str) -> int:
        descriptor = super().create(directory, name)
        self._changed("create")
        return descriptor

    def write(self, file: int, data: memoryview) -> int:
        count = super().write(file, data)
        self._changed("write")
        return count

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self._changed("sync")

    def rename(self, directory: int, old: str, new: str) -> None:
        super().rename(directory, old, new)
        self._changed("rename")

    def link(self, directory: int, old: str, new: str) -> None:
        super().link(directory, old, new)
        self._changed("link")

    def unlink(self, directory: int, name: str) -> None:
        super().unlink(directory, name)
        self._changed("unlink")
