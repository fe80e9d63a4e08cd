"""The gate of a server: what arrives while a checkpoint is open waits here (CTL-18).

Closing and opening are synchronous. Whoever comes out of `enter` or `wait_open` does so with the
gate open and without a suspension point after that decision, so the caller's next statements belong
to the same instant: there it enters its ticket or changes its state.

Waiting is not being in flight: a waiter holds nothing and blocks nothing. It is woken by opening,
or by a retirement or restore of its rollout. A woken waiter looks again, because another checkpoint
may have closed the gate before it ran (STEP-2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from itertools import islice

import attrs
import trio

from gymtrio.episodes.fences import Fences
from gymtrio.episodes.signal import Signal
from gymtrio.errors import AdmissionClosed
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import WAKE_SLICE_TASKS


@attrs.define(eq=False)
class _Waiter:
    episode_id: EpisodeId | None
    task: trio.lowlevel.Task


class Admission:
    """Open or closed, with the fences that hold in either state.

    Args:
        closed: start closed, as a server does that waits to be restored (HARD-3).
    """

    def __init__(self, *, closed: bool = False) -> None:
        self.fences = Fences()
        self._closed = closed
        # A dict for its order: first come, first served.
        self._waiters: dict[_Waiter, None] = {}
        self._opened = Signal()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def waiting(self) -> int:
        """How many stand at the gate."""
        return len(self._waiters)

    def close(self) -> None:
        self._closed = True

    def open(self) -> None:
        """Open; `run` wakes the waiters in slices."""
        self._closed = False
        self._opened.notify()

    def refuse(self, episode_ids: Iterable[EpisodeId]) -> None:
        """Raise the fences and wake the waiters that they refuse."""
        rollout_ids = set()
        for episode_id in episode_ids:
            self.fences.refuse(episode_id)
            rollout_ids.add(episode_id.rollout_id)
        self._wake_those_of(rollout_ids)

    def supersede(self, episode_ids: Collection[EpisodeId], epoch: str | None) -> None:
        """As `refuse`, at a restore: the next attempts are executions of this epoch (HARD-11)."""
        self.fences.supersede(episode_ids, epoch)
        self._wake_those_of({episode_id.rollout_id for episode_id in episode_ids})

    def _wake_those_of(self, rollout_ids: Set[RolloutId]) -> None:
        for waiter in list(self._waiters):
            if waiter.episode_id is not None and waiter.episode_id.rollout_id in rollout_ids:
                self._wake(waiter)

    async def enter(
        self, episode_id: EpisodeId | None, *, epoch: str | None = None, refuse: bool = False
    ) -> None:
        """Wait until work of this attempt may start; on return the gate is open.

        Args:
            epoch: the execution of the attempt that the caller belongs to, if it says so.
            refuse: the caller would rather be refused than wait.

        Raises:
            StaleAttempt: the attempt or its execution is refused, before the wait or since.
            AdmissionClosed: `refuse` was asked for and the gate is closed.

        Cancelled: nothing was entered.
        """
        await trio.lowlevel.checkpoint()
        while True:
            if episode_id is not None:
                self.fences.check(episode_id, epoch)
            if not self._closed:
                return
            if refuse:
                raise AdmissionClosed("a checkpoint is open and the caller asked not to wait")
            await self._park(episode_id)

    async def wait_open(self) -> None:
        """Wait until the gate is open; for work that is inside already and parks."""
        while self._closed:
            await self._park(None)

    async def run(self) -> None:
        """Wake waiters in slices while the gate is open; belongs into the owner's nursery.

        A batch of woken tasks runs whole before the loop looks at I/O again, so thousands at once
        would stall it.
        """
        while True:
            while self._waiters and not self._closed:
                for waiter in list(islice(self._waiters, WAKE_SLICE_TASKS)):
                    self._wake(waiter)
                await trio.lowlevel.checkpoint()
            await self._opened.wait()

    async def _park(self, episode_id: EpisodeId | None) -> None:
        waiter = _Waiter(episode_id, trio.lowlevel.current_task())
        self._waiters[waiter] = None

        def abort(_: object) -> trio.lowlevel.Abort:
            self._waiters.pop(waiter, None)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _wake(self, waiter: _Waiter) -> None:
        del self._waiters[waiter]
        trio.lowlevel.reschedule(waiter.task)
