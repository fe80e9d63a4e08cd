"""What a bench measures of one stretch of work: time, the longest hold of the loop, memory.

The machine is shared: every value is measured several times and told as a median, beside a floor from
the same round.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import attrs
import trio

BEAT_S: Final = 0.001
_STATM: Final = Path("/proc/self/statm")
_STATUS: Final = Path("/proc/self/status")
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"


@attrs.define
class Sample:
    """One measurement of one stretch."""

    took_s: float = 0.0
    held_s: float = 0.0
    """The longest time that a task which was ready had to wait, other processes included."""
    held_cpu_s: float = 0.0
    """The processor time of the loop's thread in the beat that used most: nobody else's load."""
    cpu_s: float = 0.0
    """Processor time of the whole process: beside that of a floor, it says what a loaded machine's
    clock cannot."""
    peak_bytes: int | None = None
    """Resident memory at its highest, beyond what was resident at the beginning."""


class Heart:
    """A task that wants to run every millisecond, and notices when it cannot."""

    def __init__(self) -> None:
        self._sample = Sample()
        self._last = self._last_cpu = 0.0

    async def beat(self) -> None:
        """Run beside what is measured, until cancelled."""
        self._start(self._sample)
        while True:
            await trio.sleep(BEAT_S)
            self._note()

    @contextmanager
    def measuring(self) -> Iterator[Sample]:
        """Measure a block; what it yields is filled when the block ends."""
        sample = Sample()
        began_bytes = _reset_peak()
        self._start(sample)
        began, began_cpu = time.perf_counter(), time.process_time()
        try:
            yield sample
        finally:
            sample.took_s = time.perf_counter() - began
            sample.cpu_s = time.process_time() - began_cpu
            self._note()
            self._start(Sample())
            peak_bytes = _memory("VmHWM")
            if began_bytes is not None and peak_bytes is not None:
                sample.peak_bytes = max(0, peak_bytes - began_bytes)

    def so_far(self) -> Sample:
        """What was noticed since the last time that this was asked."""
        sample = self._sample
        self._start(Sample())
        return sample

    def _start(self, sample: Sample) -> None:
        self._sample = sample
        self._last, self._last_cpu = time.perf_counter(), time.thread_time()

    def _note(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        sample = self._sample
        sample.held_s = max(sample.held_s, now - self._last - BEAT_S)
        sample.held_cpu_s = max(sample.held_cpu_s, cpu - self._last_cpu)
        self._last, self._last_cpu = now, cpu


@asynccontextmanager
async def open_heart() -> AsyncIterator[Heart]:
    """Run a heart beside the block."""
    heart = Heart()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(heart.beat)
        yield heart
        nursery.cancel_scope.cancel()


def resident_bytes() -> int:
    """Of this process, now."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(seconds: list[float], cpu_seconds: list[float] | None = None) -> _Timed:
    """Append how long a block took, and how much processor time."""
    return _Timed(seconds, [] if cpu_seconds is None else cpu_seconds)


class _Timed:
    def __init__(self, seconds: list[float], cpu_seconds: list[float]) -> None:
        self._seconds = seconds
        self._cpu_seconds = cpu_seconds

    def __enter__(self) -> None:
        self._began, self._began_cpu = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self._seconds.append(time.perf_counter() - self._began)
        self._cpu_seconds.append(time.process_time() - self._began_cpu)


def _reset_peak() -> int | None:
    """Begin to watch the peak; resident memory now, or None where the kernel does not tell."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return None
    return _memory("VmRSS")


def _memory(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
