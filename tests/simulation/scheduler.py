"""A trio run in which everything that trio decides follows from one seed.

Time is virtual and jumps when nothing is runnable. Ready tasks run in an order drawn from the seed; the
private names that this takes are guarded by `tests/test_schedule.py` and by the meta test here. A hook
is called before every task step, inside the loop and between two steps: what it does happens at an
instant that is an await point of every task.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio
import trio.testing
from trio._core import _run as _trio_run

T = TypeVar("T")

_internals: Any = _trio_run


class Steps(trio.abc.Instrument):
    """Counts task steps and keeps a checksum of the schedule: which task ran when."""

    def __init__(self) -> None:
        self.count = 0
        self.checksum = 0
        self.hook: Callable[[int], None] | None = None
        """Called with the number of the step that is about to run, from 1."""
        self.failure: BaseException | None = None
        """What the hook raised: trio only logs what instruments raise."""

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1
        step = f"{trio.current_time():.6f} {task.name}"
        self.checksum = zlib.crc32(step.encode(), self.checksum)
        if self.hook is not None and self.failure is None:
            try:
                self.hook(self.count)
            except BaseException as error:  # noqa: BLE001 - raised by `run_seeded`
                self.failure = error


def run_seeded(seed: int, main: Callable[[], Awaitable[T]], steps: Steps) -> T:
    """Run `main` under a virtual clock and a schedule that `seed` decides.

    Raises:
        whatever `main` or the hook of `steps` raised.
    """
    clock = trio.testing.MockClock(autojump_threshold=0)
    order = _internals._r
    saved = (_internals._ALLOW_DETERMINISTIC_SCHEDULING, order.getstate(), gc.isenabled())
    # Finalizers of cyclic garbage would run at points that depend on the memory of the process.
    gc.disable()
    try:
        _internals._ALLOW_DETERMINISTIC_SCHEDULING = True
        order.seed(seed)
        result = trio.run(main, clock=clock, instruments=[steps])
    finally:
        _internals._ALLOW_DETERMINISTIC_SCHEDULING = saved[0]
        order.setstate(saved[1])
        if saved[2]:
            gc.enable()
    if steps.failure is not None:
        raise steps.failure
    return result
