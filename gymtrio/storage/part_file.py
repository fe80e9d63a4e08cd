"""One part being written; plain blocking code, called in threads.

The order, which is the order of STO-1: create under a temporary name, write, sync, close, rename to the
digest, sync the directory and every directory above it.
"""

from __future__ import annotations

import hashlib
from typing import Final

from gymtrio.errors import InvalidCheckpointState
from gymtrio.storage.failures import refusing
from gymtrio.storage.files import Files
from gymtrio.storage.folder import Folder, close_quietly
from gymtrio.storage.held import Resource
from gymtrio.storage.manifest import Part, part_name
from gymtrio.storage.root import Place

_STEM: Final = "records"


class PartFile(Resource):
    """Holds at most one file; unless it was sealed and is kept, `release` removes it."""

    def __init__(self, files: Files, place: Place) -> None:
        self._folder = Folder(files, place)
        self._files = files
        self._file: int | None = None
        self._name: str | None = None
        """Under which the file lies and would be removed."""
        self._sha256 = hashlib.sha256()
        self._bytes = 0

    def append(self, data: bytes) -> None:
        """Write and hash; the first call makes directory and file.

        Raises:
            InvalidCheckpointState: the disk refused; the file is lost.
        """
        if self._file is None:
            self._folder.open(create=True)
            self._file, self._name = self._folder.create_temporary(_STEM)
        assert self._name is not None
        self._folder.write(self._file, data, self._name)
        self._sha256.update(data)
        self._bytes += len(data)

    def seal(self, end: bytes, record_count: int) -> Part:
        """Append the end and give the file its name. It is still to be removed.

        Raises:
            InvalidCheckpointState: the disk refused, or nobody waits any more; the file is lost.

        Durable: after return, its bytes, its name and the way to it.
        """
        content_sha256 = self._sha256.hexdigest()
        self.append(end)
        assert self._file is not None
        assert self._name is not None
        with refusing("sync", self._folder.path(self._name)):
            self._files.sync(self._file)
        self._close()
        if self.stopped:
            raise InvalidCheckpointState(f"{self._folder.path(self._name)}: stopped")
        sha256 = self._sha256.hexdigest()
        name = part_name(sha256)
        with refusing("rename", self._folder.path(self._name)):
            self._files.rename(self._folder.descriptor, self._name, name)
        self._name = name
        self._folder.sync_all()
        return Part(
            file=name,
            sha256=sha256,
            content_sha256=content_sha256,
            bytes=self._bytes,
            record_count=record_count,
        )

    def keep(self) -> None:
        """Hand the sealed file on. Does not block: called where the new owner is known, which a
        thread cannot know, because whoever waited for `seal` may have left meanwhile."""
        self._name = None

    def release(self) -> None:
        """Let go of everything; a file that is not kept is removed."""
        if self._name is not None:
            self._folder.remove(self._name)
            self._name = None
        self._close()
        self._folder.close()

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            close_quietly(self._files, file)
