"""Fails a test that hangs, and says where each of its trio tasks waits.

pytest-timeout alone raises into whatever runs when its alarm comes. While every task waits, that is
trio's own loop: it breaks, shows a stack of itself, and takes later tests along. Here the alarm
asks the loop to print its tasks and to end the run by an exception inside it, so that everything is
cleaned up as after any failure. Where even that does not end the run, the session stops.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final, Protocol

import pytest
import trio

CLEANUP_S: Final = float(os.environ.get("GYMTRIO_TEST_CLEANUP_S") or 15.0)
"""Longer than the longest shielded clean-up of the library."""


class Hung(BaseException):
    """Not an `Exception`: a property test that hangs is not to be shrunk by hanging again."""


class _Settings(Protocol):
    timeout: float
    method: str


def _lines(task: trio.lowlevel.Task, depth: int) -> Iterator[str]:
    margin = "    " * depth
    yield f"{margin}task {task.name}"
    frames = traceback.StackSummary.extract(task.iter_await_frames())
    for frame in frames:
        if "/trio/_core/" not in frame.filename:
            yield f"{margin}  {frame.filename}:{frame.lineno} {frame.name}: {frame.line}"
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _lines(child, depth + 1)


def _end_run(timeout_s: float) -> None:
    """Print every task and fail the main task's nursery; runs inside trio, between two tasks."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    sys.stderr.writelines(f"{line}\n" for line in _lines(root, 0))
    nurseries = [
        inner
        for outer in root.child_nurseries
        for task in outer.child_tasks
        for inner in task.child_nurseries
    ]

    async def fail() -> None:
        raise Hung(f"the test had not ended after {timeout_s:g} s")

    if nurseries:
        nurseries[0].start_soon(fail)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: Any, settings: _Settings) -> bool | None:
    if settings.method != "signal":
        return None
    asked = False

    def on_alarm(_: int, __: FrameType | None) -> None:
        nonlocal asked
        if not trio.lowlevel.in_trio_run():
            pytest.fail(f"the test had not ended after {settings.timeout:g} s")
        if asked:
            pytest.exit(f"{item.nodeid} hung and could not be cancelled", returncode=1)
        asked = True
        trio.lowlevel.current_trio_token().run_sync_soon(_end_run, settings.timeout)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, CLEANUP_S)
    return True
