"""One manifest being published; plain blocking code, called in threads.

The order: everything that the manifest names is durable already; write it under a temporary name, sync,
make the way to it durable; then give it its real name by a create-only link and sync the directory.

Owns the parts it is to name: until the link is tried, `release` removes them. From then on a reader may
have seen the manifest, so nothing it names is ever removed, even when the directory could not be synced
(I22): the checkpoint is then whole, readable and not acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gymtrio.errors import InvalidCheckpointState
from gymtrio.storage.bounds import MANIFEST_BYTES_MAX
from gymtrio.storage.failures import refusing
from gymtrio.storage.files import Files
from gymtrio.storage.folder import Folder, close_quietly
from gymtrio.storage.held import Resource
from gymtrio.storage.manifest import MANIFEST_NAME, Manifest
from gymtrio.storage.root import Place

_STEM: Final = "manifest"


class ManifestFile(Resource):
    """Call `prepare`, then `publish`, then `adopt` when a manifest of the same meaning was there.

    Args:
        parts: names of the files that are removed unless a manifest may name them.
    """

    def __init__(self, files: Files, place: Place, parts: Iterable[str]) -> None:
        self._folder = Folder(files, place)
        self._files = files
        self._unwanted = list(parts)
        self._temporary: str | None = None
        self._data = b""

    def prepare(self, data: bytes) -> None:
        """Write everything but the name.

        Raises:
            InvalidCheckpointState: the disk refused; nothing is published.
        """
        self._data = data
        self._folder.open(create=True)
        file, self._temporary = self._folder.create_temporary(_STEM)
        try:
            self._folder.write(file, data, self._temporary)
            with refusing("sync", self._folder.path(self._temporary)):
                self._files.sync(file)
        finally:
            close_quietly(self._files, file)
        self._folder.sync_all()

    def publish(self) -> bytes | None:
        """Pass the commit point.

        Returns:
            None: it is published; or the bytes of the manifest that was there before.

        Raises:
            InvalidCheckpointState: the disk refused the link, or nobody waits any more, and nothing
                is published; or it refused the sync after it, as the detail then says.

        Durable: after None, the manifest and every byte it names.
        """
        assert self._temporary is not None
        if self.stopped:
            raise InvalidCheckpointState(f"{self._folder.path(MANIFEST_NAME)}: stopped")
        at_stake, self._unwanted = self._unwanted, []
        with refusing("link", self._folder.path(MANIFEST_NAME)):
            try:
                self._files.link(self._folder.descriptor, self._temporary, MANIFEST_NAME)
            except OSError as error:
                # A network file system repeats a link whose reply was lost, and reports the name as
                # taken by us. What lies there decides; where it cannot be read, the parts stay.
                found = self._what_is_there()
                if found != self._data:
                    self._unwanted = at_stake
                    if found is not None and isinstance(error, FileExistsError):
                        return found
                    raise
        self._remove_temporary()
        try:
            self._folder.sync()
        except InvalidCheckpointState as error:
            raise InvalidCheckpointState(
                f"{error.detail}; the manifest can be read, but a crash may lose it"
            ) from error
        return None

    def _what_is_there(self) -> bytes | None:
        try:
            return read_small(self._files, self._folder, MANIFEST_NAME)
        except InvalidCheckpointState as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def adopt(self, found: Manifest) -> None:
        """Take the manifest that was there for ours: make it durable again, whoever wrote it.

        Raises:
            InvalidCheckpointState: a part of it is missing, or the disk refused.

        Durable: after return, the manifest and every byte it names.
        """
        named = {part.file: part.bytes for part in found.parts}
        self._unwanted = [name for name in self._unwanted if name not in named]
        for name, size in {**named, MANIFEST_NAME: None}.items():
            self._sync_again(name, size)
        self._folder.sync_all()

    def release(self) -> None:
        """Let go of everything; remove the parts that no manifest can name."""
        self._remove_temporary()
        if self._unwanted and not self._folder.is_open:
            self._folder.close()
            try:
                self._folder.open(create=False)
            except InvalidCheckpointState:
                self._unwanted = []
        for name in self._unwanted:
            self._folder.remove(name)
        self._unwanted = []
        self._folder.close()

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            self._folder.remove(self._temporary)
            self._temporary = None

    def _sync_again(self, name: str, size: int | None) -> None:
        path = self._folder.path(name)
        with refusing("sync", path):
            file = self._files.open(self._folder.descriptor, name)
            try:
                found = self._files.size(file)
                if size is not None and found != size:
                    raise InvalidCheckpointState(f"{path}: {found} bytes where {size} were written")
                self._files.sync(file)
            finally:
                close_quietly(self._files, file)


def read_small(files: Files, folder: Folder, name: str) -> bytes:
    """Read a manifest, or one byte more than any can have.

    Raises:
        InvalidCheckpointState: it is missing, not a file, or cannot be read.
    """
    with refusing("read", folder.path(name)):
        file = files.open(folder.descriptor, name)
        try:
            chunks: list[bytes] = []
            wanted = MANIFEST_BYTES_MAX + 1
            while wanted > 0:
                chunk = files.read(file, wanted)
                if not chunk:
                    break
                chunks.append(chunk)
                wanted -= len(chunk)
        finally:
            close_quietly(files, file)
    return b"".join(chunks)
