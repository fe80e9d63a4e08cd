"""A disk whose calls can be made to hang, one by one, on virtual time; and a meter of loop passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import outcome
import trio

from gymtrio.storage.bounds import STOP_GRACE_S
from gymtrio.storage.disk import Step
from tests.helpers.page_cache import PageCacheFiles

T = TypeVar("T")


class HaltingDisk:
    """Implements `gymtrio.storage.disk.Disk`: a call runs at once, but for one that hangs first.

    Args:
        halt_at: number of the call that hangs until `let_go`, from 1. Those that let go of something
            (`closing`) have no number.
        at_step: called before each numbered call.
    """

    def __init__(
        self,
        files: PageCacheFiles,
        *,
        halt_at: int | None = None,
        at_step: Callable[[int], None] | None = None,
    ) -> None:
        self.files = files
        self.stop_grace_s = STOP_GRACE_S
        self.steps = 0
        self.names: list[list[str]] = []
        """Of each numbered call, the operations it made."""
        self.halted = trio.Event()
        self._halt_at = halt_at
        self._at_step = at_step
        self._hanging: list[Callable[[], None]] = []

    def start(self, call: Callable[[], T], *, closing: bool = False) -> Step[T]:
        step: Step[T] = Step(lambda afterwards: afterwards())

        def run() -> None:
            first = len(self.files.operations)
            step.finish(outcome.capture(call))
            if not closing:
                self.names.append([o.name for o in self.files.operations[first:]])

        if closing:
            run()
            return step
        self.steps += 1
        if self._at_step is not None:
            self._at_step(self.steps)
        if self.steps == self._halt_at:
            self._hanging.append(run)
            self.halted.set()
        else:
            run()
        return step

    def let_go(self) -> None:
        """The call that hung goes on, whoever still waits for it."""
        while self._hanging:
            self._hanging.pop()()


class LoopMeter(trio.abc.Instrument):
    """Counts how often the loop has turned, and how many tasks ran in its fullest turn."""

    def __init__(self) -> None:
        self.passes = 0
        self.steps_most = 0
        self._steps = 0

    def before_io_wait(self, timeout: float) -> None:
        self.passes += 1
        self._steps = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._steps += 1
        self.steps_most = max(self.steps_most, self._steps)


@contextmanager
def loop_meter() -> Iterator[LoopMeter]:
    meter = LoopMeter()
    trio.lowlevel.add_instrument(meter)
    try:
        yield meter
    finally:
        trio.lowlevel.remove_instrument(meter)
