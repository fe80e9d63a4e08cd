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
    """The n-th file operation of the run, and those that follow it, do not do what they should."""

    at_operation: int
    error: str = "EIO"
    """Name of an errno, or `POWER`: the power fails just before."""
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
        self.failed = 0
        """File operations that were told to fail."""
        first = PageCacheFiles()
        for directory in (ROOT, STATE):
            first.replace(f"{directory}/here", b"")
        self.files = self._hooked(first)

    def lose_power(self) -> None:
        """What is not durable is kept, lost or torn; every process must be dead."""
        self.files = self._hooked(self.files.after(Loss.SOME, seed=self._rng.randrange(2**32)))

    def wait_s(self) -> float:
        return self._rng.choice(self.waits_s)

    def _hooked(self, files: PageCacheFiles) -> PageCacheFiles:
        files.hook = self._before
        return files

    def _before(self, operation: Operation) -> None:
        self.operations += 1
        fault = self._fault
        if fault is None or operation.name == "close":
            return
        if fault.at_operation <= self.operations < fault.at_operation + fault.operations:
            self.failed += 1
            if fault.error == "POWER":
                self._power_failed()
                raise ProcessDied("power")
            number: int = getattr(errno, fault.error)
            raise OSError(number, fault.error)


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
        self._process.check()
        step.finish(outcome.capture(call))
