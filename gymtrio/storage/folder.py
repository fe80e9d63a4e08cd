"""An open directory and the way to it; plain blocking code, called in threads.

- F1 Every descriptor from the root down is kept open, so what was opened stays what is written and
  synced, whatever happens to the names meanwhile.
- F2 `sync_all` syncs each of them: an entry may have been made by another server that has not synced
  it yet, and it is our manifest that would be lost with it.
"""

from __future__ import annotations

import errno

from gymtrio.errors import InvalidCheckpointState
from gymtrio.storage.bounds import TEMPORARY_NAMES_MAX
from gymtrio.storage.failures import refusing
from gymtrio.storage.files import Files
from gymtrio.storage.root import Place


class Folder:
    """The directory of one participant in one checkpoint. Made closed; `open` opens it."""

    def __init__(self, files: Files, place: Place) -> None:
        self.files = files
        self.place = place
        self._descriptors: list[int] = []

    @property
    def is_open(self) -> bool:
        return len(self._descriptors) == len(self.place.components) + 1

    @property
    def descriptor(self) -> int:
        assert self.is_open
        return self._descriptors[-1]

    def path(self, name: str) -> str:
        return f"{self.place}/{name}"

    def open(self, *, create: bool) -> None:
        """Open every directory from the root down.

        Args:
            create: make those that are missing; nothing of it is durable yet.

        Raises:
            InvalidCheckpointState: one is missing, or is not a directory.
        """
        place = Place(self.place.root)
        with refusing("open", "checkpoint.root"):
            self._descriptors.append(self.files.open_root(place.root))
        for name in self.place.components:
            place /= name
            with refusing("open", place):
                self._descriptors.append(self._enter(name, create))

    def _enter(self, name: str, create: bool) -> int:
        above = self._descriptors[-1]
        if create:
            try:
                return self.files.open_directory(above, name)
            except FileNotFoundError:
                pass
            try:
                self.files.make_directory(above, name)
            except FileExistsError:
                # Another server of the same checkpoint was faster.
                pass
        return self.files.open_directory(above, name)

    def create_temporary(self, stem: str) -> tuple[int, str]:
        """Create a file under a name that nobody has.

        Raises:
            InvalidCheckpointState: the disk refused, or leftovers take every name.
        """
        for number in range(TEMPORARY_NAMES_MAX):
            name = f".{stem}-{number}.tmp"
            with refusing("create", self.path(name)):
                try:
                    return self.files.create(self.descriptor, name), name
                except FileExistsError:
                    pass
        raise InvalidCheckpointState(
            f"{self.place}: {TEMPORARY_NAMES_MAX} temporary files of killed processes lie there"
        )

    def write(self, file: int, data: bytes, name: str) -> None:
        """Write all of it, however little the system takes at a time.

        Raises:
            InvalidCheckpointState: the disk refused.
        """
        rest = memoryview(data)
        with refusing("write", self.path(name)):
            while rest:
                taken = self.files.write(file, rest)
                if not taken:
                    raise OSError(errno.EIO, "nothing was written")
                rest = rest[taken:]

    def sync_all(self) -> None:
        """Make the way here durable, and every entry made in it so far (F2)."""
        for depth in range(len(self._descriptors), 0, -1):
            place = Place(self.place.root, self.place.components[: depth - 1])
            with refusing("sync", place):
                self.files.sync(self._descriptors[depth - 1])

    def sync(self) -> None:
        """Make the entries of this directory durable; the way here must be already."""
        with refusing("sync", self.place):
            self.files.sync(self.descriptor)

    def remove(self, name: str) -> None:
        """Remove what is not to stay, as well as can be: there is already a result to report."""
        try:
            self.files.unlink(self.descriptor, name)
        except OSError:
            # Nothing refers to it; it takes space until the checkpoint directory is removed.
            pass

    def close(self) -> None:
        while self._descriptors:
            close_quietly(self.files, self._descriptors.pop())


def close_quietly(files: Files, descriptor: int) -> None:
    """Let go of a descriptor of which nothing is expected any more."""
    try:
        files.close(descriptor)
    except OSError:
        # What had to be durable was synced before; an error here says nothing about it.
        pass
