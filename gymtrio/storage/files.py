"""The file operations that storage is made of, as a port.

Shaped as POSIX: descriptors, names relative to an open directory, `OSError`. Every method blocks and is
called in threads only. Nothing here follows a symbolic link below the root.

A simulation implements this class and `Disk`. What holds after a crash is what POSIX promises: bytes of
a file are durable once `sync` on it returned, an entry of a directory (created, renamed, linked,
removed) once `sync` on the directory returned; until then each may be there or not.
"""

from __future__ import annotations

from typing import Protocol


class Files(Protocol):
    """What a file system can do for us; each method raises `OSError`."""

    def resolve(self, path: str) -> str:
        """Give the absolute path with every link in it resolved; what does not exist is kept."""
        ...

    def open_root(self, path: str) -> int:
        """Open an existing directory by its absolute path."""
        ...

    def open_directory(self, directory: int, name: str) -> int:
        """Open an entry that is a directory and not a link."""
        ...

    def make_directory(self, directory: int, name: str) -> None:
        """Make a directory that only its owner may enter; FileExistsError: the name is taken."""
        ...

    def create(self, directory: int, name: str) -> int:
        """Create a file for writing that only its owner may read; FileExistsError: taken."""
        ...

    def open(self, directory: int, name: str) -> int:
        """Open an entry for reading that is a regular file and not a link."""
        ...

    def size(self, file: int) -> int:
        """Give the size in bytes."""
        ...

    def write(self, file: int, data: memoryview) -> int:
        """Append; give how many bytes were taken, which may be fewer than there are."""
        ...

    def read(self, file: int, bytes_max: int) -> bytes:
        """Read on; empty at the end."""
        ...

    def sync(self, descriptor: int) -> None:
        """Make a file's bytes, or a directory's entries, durable. After an error nobody knows."""
        ...

    def rename(self, directory: int, old: str, new: str) -> None:
        """Give an entry another name, in one instant; one that had the name is replaced."""
        ...

    def link(self, directory: int, old: str, new: str) -> None:
        """Give an entry a second name, in one instant; FileExistsError: the name is taken."""
        ...

    def unlink(self, directory: int, name: str) -> None:
        """Remove an entry that is not a directory."""
        ...

    def lock(self, directory: int, name: str) -> int:
        """Open a file, made if need be, that nobody else can lock while the descriptor is open.

        BlockingIOError: somebody else has it locked.
        """
        ...

    def close(self, descriptor: int) -> None:
        """Let go of a descriptor; also after an error it is gone."""
        ...
