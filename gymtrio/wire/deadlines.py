"""When calls end that nobody answers: many deadlines, of which hardly any ever comes.

A cancel scope for each would cost more than sending the call. No clock here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Sized
from typing import Final, Protocol

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
        self._heap: list[tuple[float, int]] = []

    @property
    def next(self) -> float:
        """The earliest, perhaps of a call that has ended; infinity: there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, deadline: float, call_id: int) -> None:
        heap = self._heap
        if len(heap) > KEPT_MIN + 2 * len(self._calls):
            heap[:] = [item for item in heap if item[1] in self._calls]
            heapq.heapify(heap)
        heapq.heappush(heap, (deadline, call_id))

    def due(self, now: float) -> list[int]:
        """Take those that have passed; of calls that are open."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            call_id = heapq.heappop(self._heap)[1]
            if call_id in self._calls:
                found.append(call_id)
        return found
