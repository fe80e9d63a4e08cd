"""What an episode leaves elsewhere and has to take back at its end (STEP-7)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import attrs
import trio

from gymtrio.errors import PeerRefused, TransportError
from gymtrio.limits import CLEANUP_RETRY_DELAY_S, CLEANUP_S_MAX, CLEANUP_TRY_S

LOG = logging.getLogger(__name__)


@attrs.define(eq=False)
class Cleanup:
    """One thing to take back. Its work is idempotent: it may have happened without our knowing."""

    name: str
    work: Callable[[], Awaitable[object]]
    settled: bool = False
    told: bool = False
    """Its failure stands in the log."""

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

        What was lost on its way is tried again, after all the others, until the deadline. What is left
        then stays where it is until a retirement of its attempt frees it; a `forget` names it.

        Cancelled: it goes on to its end, at most `CLEANUP_S_MAX`.
        """
        delay_s = CLEANUP_RETRY_DELAY_S
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLEANUP_S_MAX) as scope:
            while await self._try_each():
                await trio.sleep(delay_s)
                delay_s *= 2
        if scope.cancelled_caught:
            LOG.warning("%s: clean-up gave up after %g s", self._name, CLEANUP_S_MAX)

    async def _try_each(self) -> bool:
        """Try each once; says whether any was lost on its way."""
        lost = False
        for cleanup in reversed(self._registered):
            if not cleanup.settled:
                lost |= await self._lost(cleanup)
        return lost

    async def _lost(self, cleanup: Cleanup) -> bool:
        try:
            with trio.fail_after(CLEANUP_TRY_S):
                await cleanup.work()
        except Exception as error:  # noqa: BLE001 - the edge: the others are taken back all the same
            if not cleanup.told:
                LOG.warning("%s: clean-up of %s failed: %r", self._name, cleanup.name, error)
            cleanup.told = True
            return _may_succeed_later(error)
        cleanup.settle()
        return False


def _may_succeed_later(error: Exception) -> bool:
    if isinstance(error, PeerRefused):
        return error.status >= 500
    return isinstance(error, TransportError | trio.TooSlowError)
