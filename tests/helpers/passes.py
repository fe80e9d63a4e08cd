"""Whether others run while something is done in slices."""

from __future__ import annotations

import trio


class Passes:
    """How often the loop has turned while `run` was there; a task that is always ready."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self) -> None:
        """Count until cancelled."""
        while True:
            await trio.lowlevel.checkpoint()
            self.count += 1
