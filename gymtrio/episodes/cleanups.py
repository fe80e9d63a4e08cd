"""What an episode leaves elsewhere and has to take back at its end (STEP-7)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import attrs
import trio

from gymtrio.limits import CLEANUP_S_MAX

LOG = logging.getLogger(__name__)


@attrs.define(eq=False)
class Cleanup:
    """One thing to take back. Its work is idempotent: it may have happened without our knowing."""

    name: str
    work: Callable[[], Awaitable[object]]
    settled: bool = False

    def settle(self) -> None:
        """It was taken back already, or there is nothing to take back any more."""
        self.settled = True


class Cleanups:
    """The clean-ups of one episode, last registered first, under one deadline.

    Args:
        name: whose they are, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._registered: list[Cleanup] = []

    def __len__(self) -> int:
        return sum(not cleanup.settled for cleanup in self._registered)

    def register(self, name: str, work: Callable[[], Awaitable[object]]) -> Cleanup:
        """Register before the thing is made: its reply may be lost."""
        cleanup = Cleanup(name, work)
        self._registered.append(cleanup)
        return cleanup

    async def run(self) -> None:
        """Take back what is not settled. Failures are logged and hold up nothing.

        Cancelled: it goes on to its end, at most `CLEANUP_S_MAX`.
        """
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLEANUP_S_MAX) as scope:
            for cleanup in reversed(self._registered):
                if not cleanup.settled:
                    await self._run(cleanup)
        if scope.cancelled_caught:
            LOG.warning("%s: clean-up gave up after %g s", self._name, CLEANUP_S_MAX)

    async def _run(self, cleanup: Cleanup) -> None:
        try:
            await cleanup.work()
        except Exception as error:  # noqa: BLE001 - the edge: the others are taken back all the same
            LOG.warning("%s: clean-up of %s failed: %r", self._name, cleanup.name, error)
        else:
            cleanup.settle()
