"""The disk of the simulated machine, and each process's port to it.

The file system is `tests.helpers.page_cache`: what was not synced is lost with the power, and with the
power only. A port runs each blocking call some virtual time later, in one step; a kill in between means
that the call never ran.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Any, Final, TypeVar

import attrs
import outcome
import trio

from gymtrio.storage.disk import Step
from gymtrio.storage.files import Files
from tests.helpers.page_cache import Loss, Operation, PageCacheFiles
from tests.simulation.processes import Process, ProcessDied

T = TypeVar("T")

ROOT: Final = "/c"
STATE: Final = "/state"
QUICK_S: Final = (0.0, 0.0, 0.01)


@attrs.frozen(kw_only=True)
class DiskFault:
    """The n-th file operation after an event, and those that follow it, do not do what they should."""

    at_operation: int
    after: str = "start"
    """The event, the first time that it happens."""
    error: str = "EIO"
    """Name of an errno; `POWER`: the power fails just before; `ROT`: a bit of a file of a checkpoint
    changes, as soon as there is one."""
    operations: int = 1
    """How many in a row fail."""


class Machine:
    """One disk for all processes.

    Args:
        slow_s: what a call may take at most, besides the usual.
        power_failed: called inside a file operation; kills every process.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        fault: DiskFault | None,
        slow_s: float,
        power_failed: Callable[[], None],
    ) -> None:
        self._rng = rng
        self._fault = fault
        self._power_failed = power_failed
        self.waits_s = QUICK_S if not slow_s else (*QUICK_S, slow_s / 2, slow_s)
        self.operations = 0
        """Since the event of the fault."""
        self.failed_syncs = 0
        self.rotten: dict[str, float] = {}
        """Paths of files in which a bit has changed, and when it did."""
        self.undamaged: dict[str, bytes] = {}
        """What was in them before."""
        self.after_operation: Callable[[Operation], None] | None = None
        """Called before the next one, or with the next event: what the last one did is seen."""
        self._last: Operation | None = None
        self._armed = fault is not None and fault.after == "start"
        first = PageCacheFiles()
        for directory in (ROOT, STATE):
            first.replace(f"{directory}/here", b"")
        self.files = self._hooked(first)

    def observe(self, event: str) -> None:
        """Something happened in the run."""
        self._settle()
        if self._fault is not None and event == self._fault.after:
            self._armed = True

    def _settle(self) -> None:
        last, self._last = self._last, None
        if last is not None and self.after_operation is not None:
            self.after_operation(last)

    def lose_power(self) -> None:
        """What is not durable is kept, lost or torn; every process must be dead."""
        self.files = self._hooked(self.files.after(Loss.SOME, seed=self._rng.randrange(2**32)))

    def wait_s(self) -> float:
        return self._rng.choice(self.waits_s)

    def _hooked(self, files: PageCacheFiles) -> PageCacheFiles:
        files.hook = self._before
        return files

    def _before(self, operation: Operation) -> None:
        self._settle()
        self._last = operation
        fault = self._fault
        if fault is None or not self._armed or operation.name == "close":
            return
        self.operations += 1
        if self.operations < fault.at_operation:
            return
        if fault.error == "ROT":
            if len(self.rotten) < fault.operations:
                self._rot()
        elif self.operations < fault.at_operation + fault.operations:
            self.failed_syncs += operation.name == "sync"
            if fault.error == "POWER":
                self._power_failed()
                raise ProcessDied("power")
            number: int = getattr(errno, fault.error)
            raise OSError(number, fault.error)

    def _rot(self) -> None:
        """Change a bit of a file of a checkpoint that is wholly on the disk."""
        found: dict[str, Any] = {}
        above: list[tuple[str, Any]] = [("", self.files._root)]
        while above:
            path, inode = above.pop()
            for name, child in inode.entries.items():
                if child.is_directory:
                    above.append((f"{path}/{name}", child))
                elif "/gym/" in path and child.durable and not (child.writes or ".tmp" in name):
                    found[f"{path}/{name}"] = child
        for path in self.rotten:
            found.pop(path, None)
        if found:
            path = self._rng.choice(sorted(found))
            changed = bytearray(found[path].durable)
            changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
            self.undamaged[path] = found[path].durable
            found[path].data = found[path].durable = bytes(changed)
            self.rotten[path] = trio.current_time()


OPENING: Final = frozenset({"open_root", "open_directory", "create", "open", "lock"})


class ProcessFiles:
    """The files of the machine as one process has them open; its death closes them."""

    def __init__(self, files: PageCacheFiles) -> None:
        self._files = files
        self._opened: dict[int, None] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._files, name)
        if name not in OPENING:
            return method

        def opening(*args: Any) -> int:
            descriptor: int = method(*args)
            self._opened[descriptor] = None
            return descriptor

        return opening

    def close(self, descriptor: int) -> None:
        self._opened.pop(descriptor, None)
        self._files.close(descriptor)

    def close_all(self) -> None:
        for descriptor in self._opened:
            # Not an operation that can fail: the kernel does it.
            self._files._open.pop(descriptor, None)
        self._opened.clear()


class DiskPort:
    """Implements `gymtrio.storage.disk.Disk` for one process."""

    def __init__(self, machine: Machine, process: Process) -> None:
        self.stop_grace_s = 1.0
        self._machine = machine
        self._process = process
        files = ProcessFiles(machine.files)
        process.on_death(files.close_all)
        self._files: Any = files

    @property
    def files(self) -> Files:
        files: Files = self._files
        return files

    def start(self, call: Callable[[], T], *, closing: bool = False) -> Step[T]:
        self._process.check()
        step: Step[T] = Step(lambda afterwards: afterwards())
        self._process.spawn(self._run, step, call, self._machine.wait_s(), name="disk")
        return step

    async def _run(self, step: Step[T], call: Callable[[], T], wait_s: float) -> None:
        await trio.sleep(wait_s)
        await self._process.running()
        step.finish(outcome.capture(call))
