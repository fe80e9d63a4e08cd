"""A file system in memory with a page cache, faults and power losses.

Fault model, what may happen and what may not:

- A write, and a creation, renaming, linking or removal of an entry, is seen at once by everybody in
  the run. It is *durable* only after `sync`: of the file for its bytes, of the directory for its
  entries.
- At a power loss each pending write of a file is kept, lost or torn at a sector, and each pending
  change of a directory is kept or lost, independently of each other and of order (`Loss`). A renaming
  is one change: it is kept or lost as a whole. What is durable stays, byte for byte.
- A file that is reachable by no surviving name is gone.
- An operation that is told to fail has no effect, except `sync`: it loses what was pending, later
  reads still see it, and a later `sync` succeeds without writing it (as Linux does).
- A killed process loses nothing of the page cache (`Loss.NOTHING`).
- Space, links, permissions and descriptors are not modelled beyond what storage uses.

Every operation has a number, from 1. A hook is asked before each and may raise: an `OSError` that the
operation is to fail with, or `PowerLost`, after which every operation raises it.
"""

from __future__ import annotations

import errno
import posixpath
import random
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final, TypeVar

import attrs
import outcome
import trio

from gymtrio.storage.disk import Step

T = TypeVar("T")

SECTOR_BYTES: Final = 512


class PowerLost(BaseException):
    """Not an `Exception`: nothing of the code under test may handle its own death."""


class Loss(Enum):
    """What a crash takes of that which was not synced."""

    NOTHING = "nothing"
    EVERYTHING = "everything"
    BYTES = "bytes"
    ENTRIES = "entries"
    SOME = "some"


@attrs.define(eq=False)
class _Inode:
    is_directory: bool
    data: bytes = b""
    durable: bytes = b""
    writes: list[tuple[int, bytes]] = attrs.field(factory=list)
    entries: dict[str, _Inode] = attrs.field(factory=dict)
    durable_entries: dict[str, _Inode] = attrs.field(factory=dict)
    changes: list[_Change] = attrs.field(factory=list)


@attrs.frozen(eq=False)
class _Change:
    """One change of a directory: a name is removed, then a name is set."""

    removed: str | None = None
    name: str | None = None
    inode: _Inode | None = None

    def apply(self, entries: dict[str, _Inode]) -> None:
        if self.removed is not None:
            entries.pop(self.removed, None)
        if self.name is not None and self.inode is not None:
            entries[self.name] = self.inode


@attrs.define(eq=False)
class _Open:
    inode: _Inode
    position: int = 0
    locked: bool = False


@attrs.frozen
class Operation:
    """What a hook is asked about."""

    number: int
    name: str
    what: str


Hook = Callable[[Operation], None]


def no_fault(_: Operation) -> None:
    """Let everything succeed."""


class PageCacheFiles:
    """Implements `gymtrio.storage.files.Files`.

    Args:
        write_bytes_max: a write takes at most so many bytes, so that callers have to go on.
    """

    def __init__(self, *, hook: Hook = no_fault, write_bytes_max: int = 4096) -> None:
        self.hook = hook
        self.operations: list[Operation] = []
        self.write_bytes_max = write_bytes_max
        self._root = _Inode(is_directory=True)
        self._open: dict[int, _Open] = {}
        self._next_descriptor = 3
        self._dead = False

    # -- for tests --------------------------------------------------------------------------

    @property
    def open_descriptors(self) -> int:
        return len(self._open)

    def tree(self) -> dict[str, bytes]:
        """Every file by its path, as a running process sees it."""
        return dict(self._walk(self._root, ""))

    def replace(self, path: str, data: bytes) -> None:
        """Put a file there by other means than the port, durably; directories are made."""
        *above, name = path.strip("/").split("/")
        inode = self._root
        for part in above:
            child = inode.entries.setdefault(part, _Inode(is_directory=True))
            inode.durable_entries[part] = child
            inode = child
        inode.entries[name] = inode.durable_entries[name] = _Inode(
            is_directory=False, data=data, durable=data
        )

    def after(self, loss: Loss, *, seed: int = 0) -> PageCacheFiles:
        """What a machine that starts again finds; this one is not changed."""
        survivors = PageCacheFiles(write_bytes_max=self.write_bytes_max)
        survivors._root = _settled(self._root, loss, random.Random(seed), {})
        return survivors

    def _walk(self, inode: _Inode, path: str) -> Iterator[tuple[str, bytes]]:
        for name, child in sorted(inode.entries.items()):
            if child.is_directory:
                yield from self._walk(child, f"{path}/{name}")
            else:
                yield f"{path}/{name}", child.data

    # -- the port ---------------------------------------------------------------------------

    def resolve(self, path: str) -> str:
        self._begin("resolve", path)
        return posixpath.normpath(path)

    def open_root(self, path: str) -> int:
        self._begin("open_root", path)
        inode = self._root
        for name in path.split("/"):
            if name:
                inode = self._child(inode, name)
        return self._opened(inode, directory=True)

    def open_directory(self, directory: int, name: str) -> int:
        self._begin("open_directory", name)
        return self._opened(self._child(self._directory(directory), name), directory=True)

    def make_directory(self, directory: int, name: str) -> None:
        self._begin("make_directory", name)
        self._add(directory, name, _Inode(is_directory=True))

    def create(self, directory: int, name: str) -> int:
        self._begin("create", name)
        inode = _Inode(is_directory=False)
        self._add(directory, name, inode)
        return self._opened(inode, directory=False)

    def open(self, directory: int, name: str) -> int:
        self._begin("open", name)
        return self._opened(self._child(self._directory(directory), name), directory=False)

    def size(self, file: int) -> int:
        self._begin("size", str(file))
        return len(self._handle(file).inode.data)

    def write(self, file: int, data: memoryview) -> int:
        self._begin("write", str(file))
        inode = self._handle(file).inode
        taken = bytes(data[: self.write_bytes_max])
        inode.writes.append((len(inode.data), taken))
        inode.data += taken
        return len(taken)

    def read(self, file: int, bytes_max: int) -> bytes:
        self._begin("read", str(file))
        handle = self._handle(file)
        chunk = handle.inode.data[handle.position : handle.position + bytes_max]
        handle.position += len(chunk)
        return chunk

    def sync(self, descriptor: int) -> None:
        inode = self._handle(descriptor).inode
        try:
            self._begin("sync", "directory" if inode.is_directory else "file")
        except OSError:
            inode.writes.clear()
            inode.changes.clear()
            raise
        if inode.is_directory:
            for change in inode.changes:
                change.apply(inode.durable_entries)
            inode.changes.clear()
        else:
            inode.durable = _with_writes(inode.durable, inode.writes)
            inode.writes.clear()

    def rename(self, directory: int, old: str, new: str) -> None:
        self._begin("rename", f"{old} {new}")
        inode = self._directory(directory)
        self._change(inode, _Change(removed=old, name=new, inode=self._child(inode, old)))

    def link(self, directory: int, old: str, new: str) -> None:
        self._begin("link", f"{old} {new}")
        inode = self._child(self._directory(directory), old)
        self._add(directory, new, inode)

    def unlink(self, directory: int, name: str) -> None:
        self._begin("unlink", name)
        inode = self._directory(directory)
        if self._child(inode, name).is_directory:
            raise OSError(errno.EISDIR, "EISDIR", name)
        self._change(inode, _Change(removed=name))

    def lock(self, directory: int, name: str) -> int:
        self._begin("lock", name)
        above = self._directory(directory)
        if name not in above.entries:
            self._add(directory, name, _Inode(is_directory=False))
        inode = above.entries[name]
        if any(opened.inode is inode and opened.locked for opened in self._open.values()):
            raise BlockingIOError(errno.EAGAIN, "EAGAIN", name)
        descriptor = self._opened(inode, directory=False)
        self._open[descriptor].locked = True
        return descriptor

    def close(self, descriptor: int) -> None:
        # The descriptor is gone whatever the hook says.
        self._handle(descriptor)
        del self._open[descriptor]
        self._begin("close", str(descriptor))

    # -- inside -----------------------------------------------------------------------------

    def _begin(self, name: str, what: str) -> None:
        if self._dead:
            raise PowerLost
        operation = Operation(len(self.operations) + 1, name, what)
        self.operations.append(operation)
        try:
            self.hook(operation)
        except PowerLost:
            self._dead = True
            raise

    def _opened(self, inode: _Inode, *, directory: bool) -> int:
        if inode.is_directory is not directory:
            number = errno.ENOTDIR if directory else errno.EINVAL
            raise OSError(number, errno.errorcode[number])
        descriptor = self._next_descriptor
        self._next_descriptor += 1
        self._open[descriptor] = _Open(inode)
        return descriptor

    def _handle(self, descriptor: int) -> _Open:
        if self._dead:
            raise PowerLost
        if descriptor not in self._open:
            raise OSError(errno.EBADF, "EBADF")
        return self._open[descriptor]

    def _directory(self, descriptor: int) -> _Inode:
        inode = self._handle(descriptor).inode
        if not inode.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, "ENOTDIR")
        return inode

    def _child(self, inode: _Inode, name: str) -> _Inode:
        if not inode.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, "ENOTDIR", name)
        if name not in inode.entries:
            raise FileNotFoundError(errno.ENOENT, "ENOENT", name)
        return inode.entries[name]

    def _add(self, directory: int, name: str, inode: _Inode) -> None:
        above = self._directory(directory)
        if name in above.entries:
            raise FileExistsError(errno.EEXIST, "EEXIST", name)
        self._change(above, _Change(name=name, inode=inode))

    def _change(self, inode: _Inode, change: _Change) -> None:
        change.apply(inode.entries)
        inode.changes.append(change)


class InlineDisk:
    """Implements `gymtrio.storage.disk.Disk`: a call runs at once, in one step of the loop.

    Args:
        before_step: called with the number of each step, from 1, before it runs.
    """

    def __init__(
        self, files: PageCacheFiles, *, before_step: Callable[[int], None] | None = None
    ) -> None:
        self.files = files
        self.stop_grace_s = 1.0
        self.steps = 0
        self._before_step = before_step

    def start(self, call: Callable[[], T], *, closing: bool = False) -> Step[T]:
        self.steps += 1
        if self._before_step is not None:
            self._before_step(self.steps)
        step: Step[T] = Step(lambda afterwards: afterwards())
        step.finish(outcome.capture(call))
        return step


class SlowDisk:
    """Implements `Disk`: a call runs a random number of loop passes later.

    Several users of one disk are then interleaved in ways that the seed decides.
    """

    def __init__(self, files: PageCacheFiles, nursery: trio.Nursery, rng: random.Random) -> None:
        self.files = files
        self.stop_grace_s = 1.0
        self._nursery = nursery
        self._rng = rng

    def start(self, call: Callable[[], T], *, closing: bool = False) -> Step[T]:
        step: Step[T] = Step(lambda afterwards: afterwards())
        self._nursery.start_soon(self._run, step, call, self._rng.randrange(6))
        return step

    async def _run(self, step: Step[T], call: Callable[[], T], passes: int) -> None:
        for _ in range(passes):
            await trio.lowlevel.checkpoint()
        step.finish(outcome.capture(call))


def fail_at(number: int, error: BaseException) -> Hook:
    """Make the N-th operation fail."""

    def hook(operation: Operation) -> None:
        if operation.number == number:
            raise error

    return hook


def _with_writes(data: bytes, writes: list[tuple[int, bytes]]) -> bytes:
    made = bytearray(data)
    for offset, piece in writes:
        # What a lost write before it should have filled reads as zeros.
        made.extend(bytes(max(0, offset - len(made))))
        made[offset : offset + len(piece)] = piece
    return bytes(made)


def _kept(loss: Loss, of: Loss, rng: random.Random) -> bool:
    if loss is Loss.SOME:
        return rng.random() < 0.5
    return loss is not Loss.EVERYTHING and loss is not of


def _settled(inode: _Inode, loss: Loss, rng: random.Random, done: dict[int, _Inode]) -> _Inode:
    if id(inode) in done:
        return done[id(inode)]
    made = done[id(inode)] = _Inode(is_directory=inode.is_directory)
    if inode.is_directory:
        entries = dict(inode.durable_entries)
        for change in inode.changes:
            if _kept(loss, Loss.ENTRIES, rng):
                change.apply(entries)
        made.entries = {name: _settled(child, loss, rng, done) for name, child in entries.items()}
        made.durable_entries = dict(made.entries)
        return made
    writes: list[tuple[int, bytes]] = []
    for offset, piece in inode.writes:
        if not _kept(loss, Loss.BYTES, rng):
            continue
        if loss is Loss.SOME and rng.random() < 0.5:
            piece = piece[: rng.randrange(len(piece) + 1) // SECTOR_BYTES * SECTOR_BYTES]
        writes.append((offset, piece))
    made.data = made.durable = _with_writes(inode.durable, writes)
    return made
