"""The gate of a server: what arrives while a checkpoint is open waits here (CTL-18).

Closing and opening are synchronous. Whoever comes out of `enter` or `wait_open` does so with the
gate open and without a suspension point after that decision, so the caller's next statements belong
to the same instant: there it enters its ticket or changes its state.

Waiting is not being in flight: a waiter holds nothing and blocks nothing. It is woken by opening,
or by a retirement or restore of its rollout. A woken waiter looks again, because another checkpoint
may have closed the gate before it ran (STEP-2).
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from functools import partial
from itertools import islice

import trio

from gymtrio.episodes.fences import Fences
from gymtrio.episodes.signal import Signal
from gymtrio.episodes.wakes import Wakes
from gymtrio.errors import AdmissionClosed, Unavailable
from gymtrio.ids import EpisodeId
from gymtrio.limits import WAKE_SLICE_TASKS


class Admission:
    """Open or closed, with the fences that hold in either state.

    Args:
        closed: start closed, as a server does that waits to be restored (HARD-3).
    """

    def __init__(self, *, closed: bool = False) -> None:
        self.fences = Fences()
        self._closed = closed
        # A dict for its order: first come, first served.
        self._waiters: dict[trio.lowlevel.Task, EpisodeId | None] = {}
        self._changed = Signal()
        self.wakes = Wakes(self._changed)
        """Of everything that is refused at once: waiters here, and what the server itself stops."""
        self._ended: str | None = None
        self._untold = 0
        """Waiters that were there when it ended, and have not been woken since."""

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
        self._changed.notify()

    def end(self, why: str) -> None:
        """From now on refuse who would have to wait, and wake who waits already: the server stops.

        Work that is inside and parks (`wait_open`) goes on waiting.
        """
        self._ended = why
        self._untold = len(self._waiters)
        self._changed.notify()

    def refuse(self, episode_ids: Collection[EpisodeId]) -> None:
        """Raise the fences, and have the waiters woken that they refuse."""
        for episode_id in episode_ids:
            self.fences.refuse(episode_id)
        self._wake_those_of(episode_ids)

    def supersede(self, episode_ids: Collection[EpisodeId], epoch: str | None) -> None:
        """As `refuse`, at a restore: the next attempts are executions of this epoch (HARD-11)."""
        self.fences.supersede(episode_ids, epoch)
        self._wake_those_of(episode_ids)

    def _wake_those_of(self, episode_ids: Collection[EpisodeId]) -> None:
        if not self._waiters:
            return
        rollout_ids = {episode_id.rollout_id for episode_id in episode_ids}
        for task, episode_id in list(self._waiters.items()):
            if episode_id is not None and episode_id.rollout_id in rollout_ids:
                self.wakes.add(partial(self._wake, task))

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
            Unavailable: the gate is closed and has ended.

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
            if self._ended is not None:
                raise Unavailable(self._ended)
            await self._park(episode_id)

    async def wait_open(self) -> None:
        """Wait until the gate is open; for work that is inside already and parks."""
        while self._closed:
            await self._park(None)

    async def run(self) -> None:
        """Wake in slices who is refused, and waiters when the gate is open or has ended.

        Belongs to the owner's nursery.
        """
        while True:
            while self.wakes or self._may_go_on():
                self.wakes.make_some()
                if self._may_go_on():
                    for task in list(islice(self._waiters, WAKE_SLICE_TASKS)):
                        self._wake(task)
                    # Who parks again stands at the end of the line.
                    self._untold -= WAKE_SLICE_TASKS
                await trio.lowlevel.checkpoint()
            await self._changed.wait()

    def _may_go_on(self) -> bool:
        return bool(self._waiters) and (self._untold > 0 or not self._closed)

    def _park(self, episode_id: EpisodeId | None) -> Awaitable[object]:
        task = trio.lowlevel.current_task()
        self._waiters[task] = episode_id
        # Thousands park here: neither a coroutine nor a function of its own for each of them.
        return trio.lowlevel.wait_task_rescheduled(partial(self._leave, task))  # noqa: ASYNC105

    def _leave(self, task: trio.lowlevel.Task, _: object) -> trio.lowlevel.Abort:
        self._waiters.pop(task, None)
        return trio.lowlevel.Abort.SUCCEEDED

    def _wake(self, task: trio.lowlevel.Task) -> None:
        """It looks again; whether it still waits is for this to see."""
        if task in self._waiters:
            del self._waiters[task]
            trio.lowlevel.reschedule(task)
