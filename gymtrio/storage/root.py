"""Where checkpoints may be: a path of a control call to a place under the configured root (STO-7).

- L1 Links are resolved once, when the call is accepted; what is opened later is opened component by
  component from the root's descriptor without following any link. So nobody can swap in a way out
  between the check and the use.
- L2 `..` is refused, not resolved: what it means depends on links.
"""

from __future__ import annotations

import posixpath
from typing import Final

import attrs

from gymtrio.errors import DirectoryRefused, SettingsError
from gymtrio.ids import is_safe_id
from gymtrio.storage.bounds import DIRECTORY_DEPTH_MAX, NAME_BYTES_MAX, PATH_CHARACTERS_MAX
from gymtrio.storage.disk import Disk
from gymtrio.storage.failures import explain, refusing
from gymtrio.storage.files import Files

_SHOWN_CHARACTERS_MAX: Final = 200

_OURS: Final = "gym"
"""First component of everything that servers write below a checkpoint directory (STO-1)."""


@attrs.frozen
class Place:
    """A directory below the root. It may not exist yet."""

    root: str
    """Absolute, links resolved."""
    components: tuple[str, ...] = ()

    def __truediv__(self, name: str) -> Place:
        return Place(self.root, (*self.components, name))

    def __str__(self) -> str:
        """Relative to the root, which a peer need not know."""
        return "/".join(self.components) or "."

    def of_participant(self, kind: str, instance: str) -> Place:
        """The directory of one participant inside a checkpoint directory."""
        assert is_safe_id(kind)
        assert is_safe_id(instance)
        return self / _OURS / kind / instance


@attrs.frozen
class CheckpointRoot:
    """The one directory below which checkpoints are accepted.

    Args:
        path: absolute, as configured.
    """

    path: str = attrs.field()

    @path.validator
    def _is_absolute(self, attribute: object, value: str) -> None:
        if not value.startswith("/") or "\0" in value:
            raise SettingsError(f"checkpoint.root: {value!r} is not an absolute path")

    async def check(self, disk: Disk) -> None:
        """Find out at start whether the root is there, rather than at the first commit.

        Raises:
            SettingsError: it is missing, not a directory, or may not be entered.
        """

        def open_and_close() -> None:
            disk.files.close(disk.files.open_root(disk.files.resolve(self.path)))

        try:
            await disk.start(open_and_close).wait()
        except OSError as error:
            raise SettingsError(f"checkpoint.root: {self.path}: {explain(error)}") from None

    async def accept(
        self, disk: Disk, checkpoint_dir: str, *, field: str = "checkpoint_dir"
    ) -> Place:
        """Say which place a path means, if it is one below the root.

        Args:
            checkpoint_dir: absolute, or relative to the root.
            field: what names it in the call, for the error.

        Raises:
            DirectoryRefused: it leads out of the root or is not a plain path.
            InvalidCheckpointState: the disk refused to look.
        """
        # Also by `find`; but a disk that hangs shall keep nobody waiting whose path is wrong by itself.
        _refuse_odd(checkpoint_dir, field)
        with refusing("resolve", field):
            step = disk.start(lambda: self.find(disk.files, checkpoint_dir, field=field))
        return await step.wait()

    def find(self, files: Files, checkpoint_dir: str, *, field: str = "checkpoint_dir") -> Place:
        """As `accept`. Blocks: part of a call that is made in a thread."""
        _refuse_odd(checkpoint_dir, field)
        with refusing("resolve", field):
            root = files.resolve(self.path)
            path = files.resolve(posixpath.join(self.path, checkpoint_dir))
        inside = root if root.endswith("/") else root + "/"
        if path != root and not path.startswith(inside):
            raise DirectoryRefused(
                f"{field} {_shown(checkpoint_dir)}: it is not below checkpoint.root"
            )
        components = tuple(path[len(inside) :].split("/")) if path != root else ()
        if len(components) > DIRECTORY_DEPTH_MAX:
            raise DirectoryRefused(f"{field}: more than {DIRECTORY_DEPTH_MAX} levels deep")
        return Place(root, components)


def _refuse_odd(checkpoint_dir: str, field: str) -> None:
    why = _first_oddity(checkpoint_dir)
    if why is not None:
        raise DirectoryRefused(f"{field} {_shown(checkpoint_dir)}: {why}")


def _first_oddity(path: str) -> str | None:
    if not path:
        return "it is empty"
    if len(path) > PATH_CHARACTERS_MAX:
        return f"it is longer than {PATH_CHARACTERS_MAX} characters"
    if not path.isprintable():
        return "it has characters that cannot be printed"
    components = path.split("/")
    if ".." in components:
        return "'..' is not resolved"
    if components[0].startswith("~"):
        return "'~' is not expanded"
    if any(len(component.encode()) > NAME_BYTES_MAX for component in components):
        return f"a name in it is longer than {NAME_BYTES_MAX} bytes"
    return None


def _shown(path: str) -> str:
    """Escaped, because it comes from a peer and goes into logs (I36)."""
    return ascii(path)[:_SHOWN_CHARACTERS_MAX]
