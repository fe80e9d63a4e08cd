"""Blocking file work off the loop: the port, and the real disk behind it.

`Disk` starts blocking calls and hands out `Step`s; `gymtrio.storage.held` gives a resource that such
calls work on a single owner. Only this module touches the operating system's files and threads.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

import outcome
import trio

from gymtrio.storage.bounds import DISK_STEPS_MAX, STOP_GRACE_S
from gymtrio.storage.files import Files

LOG = logging.getLogger(__name__)

T = TypeVar("T")

_DIRECTORY_MODE: Final = 0o700
_FILE_MODE: Final = 0o600
_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# Without O_NONBLOCK, opening a FIFO that somebody put there would wait for a writer for ever.
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_CREATE_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_LOCK_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW


class Step(Generic[T]):
    """One blocking call under way.

    Its disk calls `finish` on the loop when the call has ended. Whoever waits may leave; whoever leaves
    for good says with `abandon` what is to follow, and that follows exactly once.
    """

    def __init__(self, run_unwatched: Callable[[Callable[[], None]], None]) -> None:
        self.done = trio.Event()
        self._run_unwatched = run_unwatched
        self._outcome: outcome.Outcome[T] | None = None
        self._afterwards: Callable[[], None] | None = None

    async def wait(self) -> T:
        """Give what the call returned, or raise what it raised. Cancelled: it goes on."""
        await self.done.wait()
        assert self._outcome is not None
        return self._outcome.unwrap()

    def abandon(self, afterwards: Callable[[], None]) -> None:
        """Run another blocking call when this one has ended, with nobody waiting for either."""
        assert not self.done.is_set()
        self._afterwards = afterwards

    def finish(self, result: outcome.Outcome[T]) -> None:
        """The call has ended; on the loop, in one instant with `abandon`."""
        self._outcome = result
        self.done.set()
        self.follow_up()

    def follow_up(self) -> None:
        """Run what was asked for by `abandon`; alone when the call has outlived trio's run."""
        if self._afterwards is not None:
            self._run_unwatched(self._afterwards)


class Disk(Protocol):
    """Where storage keeps its files and how it calls what blocks."""

    @property
    def files(self) -> Files: ...

    @property
    def stop_grace_s(self) -> float:
        """How long a cancelled owner waits for the call it is in, before leaving it behind."""
        ...

    def start(self, call: Callable[[], T], *, closing: bool = False) -> Step[T]:
        """Begin a blocking call and return at once; calls under way may overlap.

        Args:
            closing: it lets go of something, and is taken however much is under way.

        Raises:
            OSError: EAGAIN: too many calls hang already, or the system has no thread left for it.
        """
        ...


class HostFiles:
    """The operating system's."""

    def resolve(self, path: str) -> str:
        try:
            return os.path.realpath(path)
        except UnicodeEncodeError:
            raise OSError(errno.EILSEQ, "this locale has no such characters", path) from None

    def open_root(self, path: str) -> int:
        return os.open(path, _OPEN_DIRECTORY)

    def open_directory(self, directory: int, name: str) -> int:
        return os.open(name, _OPEN_DIRECTORY, dir_fd=directory)

    def make_directory(self, directory: int, name: str) -> None:
        os.mkdir(name, _DIRECTORY_MODE, dir_fd=directory)

    def create(self, directory: int, name: str) -> int:
        return os.open(name, _CREATE_FILE, _FILE_MODE, dir_fd=directory)

    def open(self, directory: int, name: str) -> int:
        descriptor = os.open(name, _OPEN_FILE, dir_fd=directory)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", name)
        return descriptor

    def size(self, file: int) -> int:
        return os.fstat(file).st_size

    def write(self, file: int, data: memoryview) -> int:
        return os.write(file, data)

    def read(self, file: int, bytes_max: int) -> bytes:
        return os.read(file, bytes_max)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def rename(self, directory: int, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)

    def link(self, directory: int, old: str, new: str) -> None:
        os.link(old, new, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)

    def unlink(self, directory: int, name: str) -> None:
        os.unlink(name, dir_fd=directory)

    def lock(self, directory: int, name: str) -> int:
        descriptor = os.open(name, _LOCK_FILE, _FILE_MODE, dir_fd=directory)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def close(self, descriptor: int) -> None:
        os.close(descriptor)


class ThreadDisk:
    """The operating system's files, each call in a thread of trio's cache.

    Not `trio.to_thread`: whoever leaves a call there cannot learn any more when it ends, and a stopped
    write has to know whether its thread still holds the file.
    """

    def __init__(
        self,
        files: Files | None = None,
        *,
        stop_grace_s: float = STOP_GRACE_S,
        steps_max: int = DISK_STEPS_MAX,
    ) -> None:
        self._files = HostFiles() if files is None else files
        self._stop_grace_s = stop_grace_s
        self._steps_max = steps_max
        self._steps_under_way = 0

    @property
    def files(self) -> Files:
        return self._files

    @property
    def stop_grace_s(self) -> float:
        return self._stop_grace_s

    @property
    def steps_under_way(self) -> int:
        """Calls that have begun and not ended, also those that nobody waits for any more."""
        return self._steps_under_way

    def start(self, call: Callable[[], T], *, closing: bool = False) -> Step[T]:
        if self._steps_under_way >= self._steps_max and not closing:
            raise OSError(errno.EAGAIN, f"{self._steps_under_way} earlier calls still hang")
        token = trio.lowlevel.current_trio_token()
        step: Step[T] = Step(_run_unwatched)

        def ended(result: outcome.Outcome[T]) -> None:
            self._steps_under_way -= 1
            step.finish(result)

        def deliver(result: outcome.Outcome[T]) -> None:
            try:
                token.run_sync_soon(ended, result)
            except trio.RunFinishedError:
                step.follow_up()

        self._steps_under_way += 1
        try:
            trio.lowlevel.start_thread_soon(call, deliver, name="gymtrio disk")
        except RuntimeError as error:
            # The system has no thread left.
            if not closing:
                self._steps_under_way -= 1
                raise OSError(errno.EAGAIN, str(error)) from error
            # It holds the loop up, but what it lets go of would be lost otherwise.
            deliver(outcome.capture(call))
        return step


def _run_unwatched(call: Callable[[], None]) -> None:
    trio.lowlevel.start_thread_soon(call, _log_failure, name="gymtrio disk")


def _log_failure(result: outcome.Outcome[Any]) -> None:
    if isinstance(result, outcome.Error):
        LOG.error("cleaning up after a call that hung failed: %r", result.error)
