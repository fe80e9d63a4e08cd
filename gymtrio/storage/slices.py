"""Work on the event loop in slices (STO-5)."""

from __future__ import annotations

from typing import Final

import trio

from gymtrio.limits import LOOP_SLICE_S

ITEMS_AT_ONCE: Final = 16
"""Between two looks at the clock, of items that take microseconds: a look takes a good part of one."""


class LoopSlice:
    """Keeps one task from holding the loop; it asks between two units of work."""

    def __init__(self) -> None:
        # Asked between any two of thousands of items: trio's own function looks the clock up each time.
        self._now = trio.lowlevel.current_clock().current_time
        self._ends = 0.0
        self.restart()

    @property
    def is_over(self) -> bool:
        return self._now() >= self._ends

    def restart(self) -> None:
        """The loop was let go of in some other way."""
        self._ends = self._now() + LOOP_SLICE_S

    async def turn(self) -> None:
        """Between two items: let the loop go on if the slice is over, and be cancelled only then."""
        if self.is_over:
            await self.pause()

    async def pause(self) -> None:
        """Let the loop go on, and begin the next slice."""
        await trio.lowlevel.checkpoint()
        self.restart()
