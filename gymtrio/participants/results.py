"""Results whose caller is not known to have them (HARD-9).

A finished episode is past its boundaries and in no export of its own. Between its reply and what the
caller makes of it lies a crash that would lose it, so its outcome stays here:

    its caller                    until
    did not ask to acknowledge    a reply was handed over; when the caller had left before, that is to a
                                  repeated run, or until RESULTS_UNHEARD_MAX, RESULT_UNHEARD_S_MAX
    asked                         it acknowledges

and in either case until its attempt is retired, superseded or forgotten. What is here blocks nothing,
is in every checkpoint whose scope names it, and answers a repeated run of the same attempt.

- U1 A result enters in the instant in which its episode ends, and is exported as its last boundary: the
  next attempt answers it and runs nothing.
- U2 Nothing leaves for want of room or time that its caller asked to keep: over
  `RESULTS_UNACKNOWLEDGED_MAX`, new episodes that ask so are refused instead.
- U3 Nothing leaves by its time while the gate is closed: what a checkpoint saw, its commit finds.
- U4 A restored attempt whose result has left does not run again: it would begin at its input (I5).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

import attrs
import trio
from outcome import Value

from gymtrio.episodes.admission import Admission
from gymtrio.episodes.by_rollout import ByRollout
from gymtrio.episodes.signal import Signal
from gymtrio.errors import InvalidCheckpointState, Unavailable
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import (
    RESULT_UNHEARD_S_MAX,
    RESULTS_UNACKNOWLEDGED_MAX,
    RESULTS_UNHEARD_MAX,
)

_STAGE: Final = "stage"
_RETURN: Final = "return"
_OUTCOME: Final = "outcome"


def last_boundary(outcome: object) -> dict[str, object]:
    """The boundary of an episode that has ended: whoever continues from it only answers."""
    return {_STAGE: _RETURN, _OUTCOME: outcome}


def outcome_of(boundary: object) -> Value[object] | None:
    """Invert `last_boundary`; None: it is another boundary, the episode goes on from there."""
    if isinstance(boundary, dict) and boundary.keys() == {_STAGE, _OUTCOME}:
        return Value(boundary[_OUTCOME]) if boundary[_STAGE] == _RETURN else None
    return None


@attrs.define(eq=False, kw_only=True)
class Result:
    """What became of one episode."""

    episode_id: EpisodeId
    task_digest: str
    wants_ack: bool
    """Its caller asked to acknowledge it."""
    outcome: object = None
    """JSON, not changed any more once it is kept."""
    unheard_since: float | None = None
    """On trio's clock: its caller had left; None: its reply is on its way, or was handed over."""


class Results:
    """The results that one server keeps.

    Args:
        admission: the server's gate.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._kept: dict[EpisodeId, Result] = {}
        self._by_rollout: ByRollout[Result] = ByRollout()
        self._unheard: dict[Result, None] = {}
        """Those that have a time, oldest first."""
        self._unacknowledged = 0
        self._changed = Signal()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Result]:
        return iter(self._kept.values())

    def find(self, episode_id: EpisodeId, task_digest: str) -> Result | None:
        """The result of this attempt.

        Raises:
            InvalidCheckpointState: it is that of another task.
        """
        result = self._kept.get(episode_id)
        if result is not None and result.task_digest != task_digest:
            raise InvalidCheckpointState(
                f"{episode_id} has ended with a different task: digest {result.task_digest}, asked to "
                f"run {task_digest}"
            )
        return result

    def check_room(self) -> None:
        """
        Raises:
            Unavailable: too many results wait for their acknowledgement.
        """
        if self._unacknowledged >= RESULTS_UNACKNOWLEDGED_MAX:
            raise Unavailable(
                f"{self._unacknowledged} results wait to be acknowledged, limit "
                f"{RESULTS_UNACKNOWLEDGED_MAX}"
            )

    def keep(self, result: Result) -> Result:
        """Enter the result of an episode that ends in this instant."""
        assert result.episode_id not in self._kept
        self._kept[result.episode_id] = result
        self._by_rollout.add(result.episode_id, result)
        self._unacknowledged += result.wants_ack
        return result

    def ask_ack(self, result: Result) -> None:
        """The caller of a repeated run asks for what that of the first did not."""
        if not result.wants_ack and self._is_kept(result):
            result.wants_ack = True
            self._unacknowledged += 1
            self._heard(result)

    def sent(self, result: Result, delivered: bool) -> None:
        """Its reply was handed over, or its caller had left."""
        if not self._is_kept(result) or result.wants_ack:
            return
        if delivered:
            self._leave(result)
        elif result.unheard_since is None:
            result.unheard_since = trio.current_time()
            self._unheard[result] = None
            if len(self._unheard) > RESULTS_UNHEARD_MAX:
                self._leave(next(iter(self._unheard)))
            self._changed.notify()

    def drop(self, episode_id: EpisodeId) -> bool:
        """Drop that of this attempt.

        Returns:
            Whether there was one.
        """
        result = self._kept.get(episode_id)
        if result is not None:
            self._leave(result)
        return result is not None

    def drop_up_to(self, episode_id: EpisodeId) -> None:
        """Drop those of this attempt and the earlier ones of its rollout."""
        for result in self._by_rollout.up_to(episode_id):
            self._drop(result)

    def forget(self, rollout_ids: Iterable[RolloutId]) -> None:
        for _, result in list(self._by_rollout.of(rollout_ids)):
            self._drop(result)

    def opened(self) -> None:
        """Part of the instant of opening: times count again."""
        self._changed.notify()

    async def run(self) -> None:
        """Drop what has had its time; ends when cancelled."""
        while True:
            with trio.move_on_at(self._expire()):
                await self._changed.wait()

    def _expire(self) -> float:
        """Drop what has had its time, and say when to look again."""
        while self._unheard and not self._admission.closed:
            result = next(iter(self._unheard))
            assert result.unheard_since is not None
            until = result.unheard_since + RESULT_UNHEARD_S_MAX
            if until > trio.current_time():
                return until
            self._leave(result)
        # Opening the gate rings, and so does a new one.
        return math.inf

    def _is_kept(self, result: Result) -> bool:
        return self._kept.get(result.episode_id) is result

    def _heard(self, result: Result) -> None:
        self._unheard.pop(result, None)
        result.unheard_since = None

    def _leave(self, result: Result) -> None:
        """It has been heard, or nobody came for it (U4)."""
        self._drop(result)
        self._admission.fences.end(result.episode_id)

    def _drop(self, result: Result) -> None:
        del self._kept[result.episode_id]
        self._by_rollout.remove(result.episode_id, result)
        self._unacknowledged -= result.wants_ack
        self._heard(result)
