"""Episodes and their steps under a checkpoint (STEP-1..7).

    state        at close             blocks prepare   exported at
    running      runs to a boundary   yes              -
    wait step    is waited for        yes              -
    replay step  goes on, or is       no               the boundary before the step
                 cancelled and run
                 again at resume
    parked       stays                no               the boundary where it parks
    finishing    is waited for        yes              -

- E1 `Episodes.blocking` counts the live episodes whose state blocks, and those are the ones that
  `Episodes.blockers` gives, at every instant.
- E2 Leaving `Episodes.run` proves that nothing of the episode runs any more.
- E3 Between a boundary and the next, everything that must not be lost or repeated happens inside a wait
  step; and no replay step follows a wait step without a boundary between them, because its export
  would be at the boundary before both.
- E4 While a checkpoint is open no work of a replay step begins; what began before may go on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from enum import Enum
from typing import Final, TypeVar

import outcome
import trio

from gymtrio.episodes.admission import Admission
from gymtrio.episodes.blockers import Blocker, report_of
from gymtrio.episodes.by_rollout import ByRollout
from gymtrio.episodes.deadline import PausableDeadline
from gymtrio.episodes.signal import Signal
from gymtrio.episodes.steps import OnClose, StepMode
from gymtrio.errors import (
    CheckpointConflict,
    GymtrioError,
    InvalidCheckpointState,
    Refusal,
    StaleAttempt,
)
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.wire.control import Report

__all__ = ["Episode", "EpisodeState", "EpisodeTimedOut", "Episodes", "OnClose", "StepMode"]

T = TypeVar("T")

LOG = logging.getLogger(__name__)


class EpisodeTimedOut(GymtrioError):
    """The episode used up its own time, parked time not counted."""


class EpisodeState(Enum):
    RUNNING = "running"
    WAIT_STEP = "in a wait step"
    REPLAY_STEP = "in a replay step"
    PARKED = "parked"
    FINISHING = "finishing"


# No set: hashing a member is a call, and it is asked at every change of thousands.
_BLOCKING: Final = (EpisodeState.RUNNING, EpisodeState.WAIT_STEP, EpisodeState.FINISHING)


class Episode:
    """One attempt while it runs here: `gymtrio.episodes.steps.Steps`. Made by `Episodes.run` only."""

    __slots__ = (
        "_boundary",
        "_close_cancels",
        "_deadline",
        "_owner",
        "_scope",
        "_unrecorded",
        "blocks",
        "conclusion",
        "continuation",
        "doing",
        "ended",
        "episode_id",
        "last_step",
        "nursery",
        "since",
        "state",
        "stopping",
    )

    def __init__(
        self,
        owner: Episodes,
        episode_id: EpisodeId,
        boundary: object,
        nursery: trio.Nursery,
        scope: trio.CancelScope,
        timeout_s: float | None,
    ) -> None:
        self.episode_id = episode_id
        self.nursery = nursery
        """For background work of the episode; cancelled when its body ends."""
        self.continuation = boundary
        """Where the body is to continue; None: from its input."""
        self.state = EpisodeState.RUNNING
        self.since = owner.now()
        """When it came to what it blocks with; not kept up while it does not block."""
        self.doing = "starting"
        self.last_step: str | None = None
        """What it came to last; None: nothing outside can have changed through it."""
        self.stopping: Refusal | None = None
        """What its caller is told once it has stopped; set by `stop`."""
        self.conclusion: outcome.Value[object] | None = None
        """What its body returns, since it has nothing to do any more; set by `conclude`."""
        self.ended = trio.Event()
        self.blocks = True
        """Told to stop but not stopped blocks in every state: it may still reach other servers."""
        self._owner = owner
        self._scope = scope
        # None without a limit: thousands park and go on, and touch as little as there is.
        self._deadline = None if timeout_s is None else PausableDeadline(scope, timeout_s)
        self._boundary = boundary
        self._unrecorded = False
        self._close_cancels: trio.CancelScope | None = None

    @property
    def abandoned(self) -> bool:
        """Its caller left: it is cancelled, and not by `stop` or its deadline. For its own task."""
        return trio.current_effective_deadline() == -math.inf and not self._scope.cancel_called

    @property
    def exportable(self) -> bool:
        return not self.blocks

    @property
    def last_boundary(self) -> object:
        """The last boundary as it was given, for `boundary_of`; also once the episode has ended."""
        return self._boundary

    async def boundary(self, state: object | Callable[[], object]) -> None:
        """See `Steps.boundary`."""
        if self.stopping is not None:
            await self._stop_here()
        gate = self._owner.admission
        self._boundary = state
        self._unrecorded = False
        if not gate.closed:
            await trio.lowlevel.checkpoint_if_cancelled()
            return
        self._enter(EpisodeState.PARKED, "at a boundary")
        self._pause()
        await gate.wait_open()
        self._resume()
        self._enter(EpisodeState.RUNNING, "past a boundary")

    async def conclude(self, answer: object, boundary: object) -> None:
        """Record the last boundary; the body cleans up and returns `answer`, whatever comes.

        Args:
            boundary: continuing from it gives the answer and does nothing else.

        Cancelled: it is recorded.
        """
        self.conclusion = outcome.Value(answer)
        await self.boundary(boundary)

    async def step(
        self,
        work: Callable[[], Awaitable[T]],
        *,
        mode: StepMode,
        doing: str,
        on_close: OnClose = OnClose.KEEP,
    ) -> T:
        """See `Steps.step`."""
        if self.stopping is not None:
            await self._stop_here()
        self.last_step = doing
        if mode is StepMode.WAIT:
            assert on_close is OnClose.KEEP
            self._enter(EpisodeState.WAIT_STEP, doing)
        else:
            assert not self._unrecorded, f"{doing}: no boundary since the last wait step (E3)"
            self._enter(EpisodeState.REPLAY_STEP, doing)
        try:
            if mode is StepMode.WAIT:
                self._unrecorded = True
                return await work()
            return await self._replay(work, on_close)
        finally:
            self._resume()
            self._enter(EpisodeState.RUNNING, f"after {doing}")

    async def _replay(self, work: Callable[[], Awaitable[T]], on_close: OnClose) -> T:
        gate = self._owner.admission
        while True:
            await gate.wait_open()
            scope = trio.CancelScope()
            held: outcome.Maybe[T] | None = None
            self._close_cancels = scope if on_close is OnClose.CANCEL else None
            try:
                with scope:
                    held = outcome.Value(await work())
            except Exception as error:  # noqa: BLE001 - raised below, once the gate is open
                held = outcome.Error(error)
            finally:
                self._close_cancels = None
            if held is None or (scope.cancel_called and isinstance(held, outcome.Error)):
                # The close cut it short; an error on the way out is the close's doing.
                continue
            if isinstance(held, outcome.Error) and gate.closed:
                # Failing during a checkpoint, it left effects nobody can vouch for (STEP-4).
                self._boundary = None
            await gate.wait_open()
            return held.unwrap()

    def finishing(self) -> None:
        """From here on a retire waits for the clean-up instead of cancelling it (STEP-7)."""
        self._enter(EpisodeState.FINISHING, "cleaning up")

    def stop(self, why: Refusal) -> None:
        """Begin to stop; twice does not cancel twice. `ended` tells when it has stopped.

        Args:
            why: what its caller is told, whatever its body still returns.
        """
        if self.refuse(why):
            self.cancel()

    def refuse(self, why: Refusal) -> bool:
        """Decide that it stops: it blocks and is not heard from now on; `cancel` is to follow.

        Returns:
            Whether that was undecided.
        """
        if self.stopping is not None:
            return False
        self.stopping = why
        if not self.blocks:
            self.blocks = True
            self.since = self._owner.now()
            self._owner.recount(self)
        return True

    def cancel(self) -> None:
        """Stop its body, but for a clean-up that has begun."""
        if self.state is not EpisodeState.FINISHING:
            self._scope.cancel()

    async def _stop_here(self) -> None:
        """It is refused, and its turn to be cancelled may still be to come: it begins nothing more."""
        self.cancel()
        await trio.lowlevel.checkpoint()

    def admission_closed(self) -> None:
        """Part of the instant of closing, see `Episodes.close`."""
        if self.state is EpisodeState.REPLAY_STEP:
            self._pause()
            if self._close_cancels is not None:
                self._close_cancels.cancel()

    def admission_opened(self) -> None:
        """Part of the instant of opening, see `Episodes.open`."""
        if self.state is EpisodeState.REPLAY_STEP:
            self._resume()

    def _pause(self) -> None:
        if self._deadline is not None:
            self._deadline.pause()

    def _resume(self) -> None:
        if self._deadline is not None:
            self._deadline.resume()

    def _enter(self, state: EpisodeState, doing: str) -> None:
        self.state = state
        blocks = state in _BLOCKING or self.stopping is not None
        if blocks is not self.blocks:
            self.blocks = blocks
            self._owner.recount(self)
        if blocks:
            self.since = self._owner.now()
        self.doing = doing
        if state is EpisodeState.REPLAY_STEP and self._owner.admission.closed:
            self._pause()

    def describe(self) -> str:
        """What it is doing, for a blocker list."""
        if self.stopping is not None:
            return f"stopping, {self.doing}"
        return f"{self.state.value}: {self.doing}"


def boundary_of(given: object, where: str) -> object:
    """Where an episode can continue, or None: from its input.

    Args:
        given: to `Episode.boundary`, a callable that gives it or itself.
        where: whose it is, for the error: `episode r-a1`.

    Raises:
        InvalidCheckpointState: the callable, which is the author's, raised.
    """
    if not callable(given):
        return given
    try:
        return given()
    except Exception as error:
        LOG.warning("%s: its boundary failed", where, exc_info=error)
        raise InvalidCheckpointState(
            f"{where}: its boundary: {type(error).__name__}: {error}"
        ) from error


def _is_cancellation(result: outcome.Maybe[object]) -> bool:
    return isinstance(result, outcome.Error) and not isinstance(result.error, Exception)


class Episodes:
    """The live episodes of one server.

    Args:
        admission: the server's gate.
        changed: rung when an episode stops blocking.
    """

    def __init__(self, admission: Admission, changed: Signal) -> None:
        self.admission = admission
        self.changed = changed
        # Each change of each of thousands asks: trio's own function looks the clock up every time.
        self.now = trio.lowlevel.current_clock().current_time
        self.live: dict[str, Episode] = {}
        """By name: the capture key, unless `run` was given another."""
        self._blocking: dict[Episode, None] = {}
        """Those that block, in order of when they began to: for a list no others are looked at."""
        self._by_rollout: ByRollout[Episode] = ByRollout()

    @property
    def blocking(self) -> int:
        """Readiness in O(1) (STEP-6)."""
        return len(self._blocking)

    def recount(self, episode: Episode) -> None:
        """Keep E1 across one change of whether an episode blocks."""
        if episode.blocks:
            self._blocking[episode] = None
            return
        self._blocking.pop(episode, None)
        # Thousands stop blocking in a row; nobody is ready before the last of them.
        if not self._blocking:
            self.changed.notify()

    async def run(
        self,
        episode_id: EpisodeId,
        body: Callable[[Episode], Awaitable[T]],
        *,
        name: str | None = None,
        boundary: object = None,
        timeout_s: float | None = None,
    ) -> T:
        """Run one episode in its own nursery and cancel scope; call it in the instant of admission.

        There is no suspension point between the call and the episode's entry into `live`, nor between
        its leaving `live` and the return.

        Args:
            name: tells several pieces of work of one attempt apart; None: there is only one.
            boundary: where it continues, counted as its boundary until it records another.
            timeout_s: time it may run, parked time not counted; None: no limit.

        Raises:
            CheckpointConflict: the same attempt runs already.
            StaleAttempt: it was retired, also when its body had ended well.
            Refusal: what `Episode.stop` was given.
            EpisodeTimedOut: its time is used up.
            whatever `body` raises.

        Cancelled: nothing of the episode runs any more.
        """
        name = episode_id.capture_key if name is None else name
        if name in self.live:
            raise CheckpointConflict(f"{name} runs already")
        scope = trio.CancelScope()
        episode: Episode | None = None
        result: outcome.Maybe[T] | None = None
        try:
            with scope:
                async with trio.open_nursery() as nursery:
                    # `open_nursery` does not suspend on entry: this is still the same instant.
                    episode = Episode(self, episode_id, boundary, nursery, scope, timeout_s)
                    self._begin(name, episode)
                    result = await outcome.acapture(body, episode)
                    nursery.cancel_scope.cancel()
                return self._returned(episode, result)
        finally:
            if episode is not None:
                self._end(name, episode)
        assert episode is not None
        if episode.stopping is not None:
            raise episode.stopping
        where = "before its first step" if episode.last_step is None else f"in {episode.last_step}"
        raise EpisodeTimedOut(f"{name} timed out after {timeout_s:g} s {where}")

    @staticmethod
    def _returned(episode: Episode, result: outcome.Maybe[T]) -> T:
        if episode.stopping is None or _is_cancellation(result):
            return result.unwrap()
        # Stopped while it finished: what it returns or raises must not be heard (I10). Whom it called
        # may have refused it for the same reason; anything else is a fault of whoever wrote it.
        if isinstance(result, outcome.Error) and not isinstance(result.error, GymtrioError):
            LOG.warning("%s raised after it was stopped", episode.episode_id, exc_info=result.error)
        raise episode.stopping

    def _begin(self, name: str, episode: Episode) -> None:
        self.live[name] = episode
        self._by_rollout.add(episode.episode_id, episode)
        self.recount(episode)

    def _end(self, name: str, episode: Episode) -> None:
        del self.live[name]
        self._by_rollout.remove(episode.episode_id, episode)
        self._blocking.pop(episode, None)
        episode.ended.set()
        self.changed.notify()

    def close(self) -> None:
        """Do to every step what a close does to it; part of the instant of closing."""
        for episode in self.live.values():
            episode.admission_closed()

    def open(self) -> None:
        """Let deadlines count again; part of the instant of opening."""
        for episode in self.live.values():
            episode.admission_opened()

    def up_to(self, episode_id: EpisodeId) -> list[Episode]:
        """The live attempts of this rollout up to and including this one."""
        return self._by_rollout.up_to(episode_id)

    def of(self, rollout_ids: Iterable[RolloutId]) -> list[EpisodeId]:
        """The live attempts of these rollouts."""
        return [episode_id for episode_id, _ in self._by_rollout.of(rollout_ids)]

    def retire_up_to(self, episode_id: EpisodeId) -> None:
        """Begin to stop this attempt and the earlier ones for good: from now on none is heard."""
        for episode in self.up_to(episode_id):
            if episode.refuse(StaleAttempt(f"{episode.episode_id} was retired")):
                self.admission.wakes.add(episode.cancel)

    async def wait_up_to(self, episode_id: EpisodeId) -> None:
        """Wait until this attempt and the earlier ones have ended. Cancelled: they go on."""
        while episodes := self.up_to(episode_id):
            await episodes[0].ended.wait()

    def blockers(self) -> Iterator[Blocker]:
        return (
            Blocker(episode.episode_id, episode.describe(), episode.since)
            for episode in self._blocking
        )

    def report(self) -> Report:
        """List the blockers, at most 100, by name."""
        return report_of(
            self.blocking,
            self.blockers(),
            {"live": len(self.live), "waiting": self.admission.waiting},
        )
