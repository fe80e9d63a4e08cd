"""One checkpoint being read; plain blocking code, called in threads."""

from __future__ import annotations

import hashlib

from gymtrio.errors import InvalidCheckpointState
from gymtrio.storage.bounds import READ_CHUNK_BYTES
from gymtrio.storage.failures import refusing
from gymtrio.storage.files import Files
from gymtrio.storage.folder import Folder, close_quietly
from gymtrio.storage.held import Resource
from gymtrio.storage.manifest import MANIFEST_NAME
from gymtrio.storage.manifest_file import read_small
from gymtrio.storage.root import Place


class StoredCheckpoint(Resource):
    """Holds the directory and at most one part."""

    def __init__(self, files: Files, place: Place) -> None:
        self._folder = Folder(files, place)
        self._files = files
        self._part: int | None = None
        self._path = ""
        self._sha256 = hashlib.sha256()

    def manifest(self) -> bytes:
        """Open the directory and read the manifest.

        Raises:
            InvalidCheckpointState: there is none, or the disk refused.
        """
        self._folder.open(create=False)
        return read_small(self._files, self._folder, MANIFEST_NAME)

    def open_part(self, name: str, size: int) -> None:
        """Begin with a part.

        Raises:
            InvalidCheckpointState: it is missing, not a file of this size, or the disk refused.
        """
        assert self._part is None
        self._path = self._folder.path(name)
        with refusing("read", self._path):
            self._part = self._files.open(self._folder.descriptor, name)
            found = self._files.size(self._part)
        if found != size:
            raise InvalidCheckpointState(f"{self._path}: {found} bytes where {size} were written")
        self._sha256 = hashlib.sha256()

    def read(self) -> bytes:
        """Read and hash the next chunk; empty at the end.

        Raises:
            InvalidCheckpointState: the disk refused.
        """
        assert self._part is not None
        with refusing("read", self._path):
            chunk = self._files.read(self._part, READ_CHUNK_BYTES)
        self._sha256.update(chunk)
        return chunk

    def close_part(self) -> str:
        """End with a part; give the SHA-256 of what was read."""
        self._close()
        return self._sha256.hexdigest()

    def release(self) -> None:
        self._close()
        self._folder.close()

    def _close(self) -> None:
        if self._part is not None:
            part, self._part = self._part, None
            close_quietly(self._files, part)
