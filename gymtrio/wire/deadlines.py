"""When calls end that nobody answers: many deadlines, of which hardly any ever comes.

A cancel scope for each would cost more than sending the call.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container, Sized
from typing import Final, Protocol

import trio

KEPT_MIN: Final = 1024
"""So many of calls that ended may be kept before the heap is cleaned for the first time."""


class Calls(Container[int], Sized, Protocol):
    """The ids of the calls that are open."""


class Deadlines:
    """The deadlines of one channel's calls.

    Args:
        calls: those that are open; the deadlines of others are forgotten in time.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._alarm = trio.CancelScope()

    @property
    def next(self) -> float:
        """The earliest, perhaps of a call that has ended; infinity: there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, deadline: float, call_id: int, end: Callable[[], None]) -> None:
        """
        Args:
            call_id: never one that was here before.
            end: called when the deadline passes while the call is open.
        """
        heap = self._heap
        if len(heap) > KEPT_MIN + 2 * len(self._calls):
            heap[:] = [item for item in heap if item[1] in self._calls]
            heapq.heapify(heap)
        heapq.heappush(heap, (deadline, call_id, end))
        if deadline < self._alarm.deadline:
            self._alarm.deadline = deadline

    async def run(self) -> None:
        """End calls as their deadlines pass, until cancelled."""
        while True:
            with trio.CancelScope(deadline=self.next) as self._alarm:
                await trio.sleep_forever()
            self.end_due(trio.current_time())

    def end_due(self, now: float) -> None:
        while self.next <= now:
            _, call_id, end = heapq.heappop(self._heap)
            if call_id in self._calls:
                end()
