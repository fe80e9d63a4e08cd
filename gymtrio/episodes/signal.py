"""A bell: whoever waits is woken by the next ring, and looks for himself."""

from __future__ import annotations

import trio


class Signal:
    """Announces that something changed, not what.

    The condition is checked and `wait` entered without an await between them; since nothing else
    runs in that stretch, no change goes unnoticed.
    """

    def __init__(self) -> None:
        self._lot = trio.lowlevel.ParkingLot()

    def notify(self) -> None:
        """Wake everyone who waits now."""
        # Thousands ring it in a row, and mostly nobody waits.
        if self._lot:
            self._lot.unpark_all()

    async def wait(self) -> None:
        """Wait for the next `notify`. Cancelled: nothing is held."""
        await self._lot.park()
