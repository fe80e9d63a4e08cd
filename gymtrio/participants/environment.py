"""The participant of an environment server: whole episodes (ENV-1..4).

- V1 A restored boundary is claimed in the instant in which its replacement attempt is admitted, and
  given back when that attempt was cancelled, or failed, before it had done anything (I14).
- V2 What a finished episode answers counts as in flight until the connection has it (I2): an episode
  past its last boundary blocks until its reply is out or its caller has left.
- V3 While the gate is closed no clean-up begins: the gates of other servers may be closed as well, so
  it would only block. It is owed until resume, and then owned by the participant.
- V4 Once an episode has concluded, its result is in every checkpoint until its caller has it (HARD-9):
  as its last boundary while it is parked there, then as a kept result (`results.py`).
- V5 The execution of a replacement attempt is that of its last restore: `epoch_of` is asked in the
  instant of admission, and every call made on its behalf carries it (HARD-11).
- V6 An attempt that did something and ended without a result is refused from then on: run again, it
  would begin at its input, and do once more what was done (I5, I7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableSequence, Sequence
from functools import partial
from itertools import chain
from typing import Final, TypeAlias, TypeVar, cast

import attrs
import trio
from outcome import Value

from gymtrio.checkpoint.participant import Export
from gymtrio.episodes.blockers import Blocker, report_of
from gymtrio.episodes.cleanups import Cleanups
from gymtrio.episodes.episode import Episode, Episodes, EpisodeTimedOut, boundary_of
from gymtrio.episodes.signal import Signal
from gymtrio.episodes.tickets import Ticket, Tickets
from gymtrio.errors import CheckpointConflict, InvalidCheckpointState, InvalidPhase, StaleAttempt
from gymtrio.ids import CaptureKey, EpisodeId, RolloutId
from gymtrio.limits import BLOCKERS_LISTED_MAX
from gymtrio.participants.base import ParticipantBase, make_record
from gymtrio.participants.decoding import Boundaries, Boundary, decode_into
from gymtrio.participants.deliveries import Deliveries
from gymtrio.participants.restored import Restored
from gymtrio.participants.results import Result, Results, last_boundary, outcome_of
from gymtrio.storage.opaque_pieces import encode_steps
from gymtrio.storage.records import Record
from gymtrio.storage.slices import LoopSlice
from gymtrio.wire.codec import pack_fields
from gymtrio.wire.control import Kind, Report

T = TypeVar("T")

OWED_CLEANUPS_AT_ONCE_MAX: Final = 64
"""Episodes cleaned up in parallel after a resume: more would only queue at the other servers."""


@attrs.frozen(kw_only=True)
class EnvironmentRecord:
    """What a checkpoint keeps of one episode."""

    task_digest: str
    boundary: bytes | None
    """Where it continues, as opaque JSON; None: from its input."""


class EnvironmentParticipant(ParticipantBase):
    """Runs episodes and records their boundaries: `gymtrio.checkpoint.participant.Participant`."""

    kind = Kind.ENVIRONMENT

    def __init__(self, instance: str) -> None:
        super().__init__(instance)
        self.episodes = Episodes(self.admission, self.changed)
        self.restored: Restored[EnvironmentRecord] = Restored()
        self._boundaries = Boundaries()
        self.results = Results(self.admission)
        self._digests: dict[str, str] = {}
        """Of live episodes, by capture key."""
        self._deliveries = Deliveries(self.changed)
        self._late = Tickets(self.changed)
        """Clean-ups that were owed and run now."""
        self._owed: deque[tuple[EpisodeId, Cleanups]] = deque()
        self._opened = Signal()

    # -- episodes -----------------------------------------------------------------------------

    async def run_episode(
        self,
        episode_id: EpisodeId,
        digest: str,
        body: Callable[[Episode], Awaitable[T]],
        timeout_s: float | None = None,
        *,
        timed_out: Callable[[EpisodeTimedOut], T] | None = None,
        epoch: str | None = None,
        refuse: bool = False,
        wants_ack: bool = False,
    ) -> T:
        """Admit an episode and run it, from its restored boundary if there is one.

        One that has ended already, here or before its restore, is answered as it was and runs nothing.
        Whatever comes of it but a cancellation, the caller calls `deliver` in the same instant.

        Args:
            digest: `json_digest` of its task.
            body: returns JSON, which `conclude` was told before.
            timeout_s: time it may run, parked time not counted; None: no limit.
            timed_out: what is answered when that is used up; None: `EpisodeTimedOut` is raised.
            epoch: the execution that the caller means, if it says so (HARD-11).
            refuse: rather be refused than wait at the gate (CTL-18).
            wants_ack: keep the result until `acknowledge` (HARD-9).

        Raises:
            StaleAttempt: the attempt or execution is refused, or was retired while it ran.
            AdmissionClosed: `refuse`, and a checkpoint is open.
            CheckpointConflict: the same attempt runs already.
            InvalidCheckpointState: the attempt was restored, or has ended, with another task (ENV-3).
            Unavailable: `wants_ack`, and too many results wait for theirs.
            EpisodeTimedOut: its time is used up.
            whatever `body` raises.

        Cancelled: nothing of it runs any more; clean-ups may be owed. Its result is kept if it had one.
        """
        at = self._boundaries.at(f"boundary of {episode_id}")
        while True:
            await self.admission.enter(episode_id, epoch=epoch, refuse=refuse)
            waiting = self.restored.peek(episode_id)
            if not await at.read_ahead(None if waiting is None else waiting.boundary):
                break
        key = episode_id.capture_key
        if key in self.episodes.live:
            raise CheckpointConflict(f"{episode_id} runs already")
        result = self.results.find(episode_id, digest)
        if result is None:
            if wants_ack:
                self.results.check_room()
            claimed, boundary = self._claim(episode_id, digest, at)
            result = Result(episode_id=episode_id, task_digest=digest, wants_ack=wants_ack)
            concluded = outcome_of(boundary)
            if concluded is not None:
                result.outcome = concluded.value
            else:
                result.outcome = await self._run(
                    result, body, claimed, boundary, timeout_s, timed_out
                )
            self.results.keep(result)
        elif wants_ack:
            self.results.ask_ack(result)
        self._deliveries.ended(episode_id, key, partial(self.results.sent, result))
        return cast("T", result.outcome)

    async def _run(
        self,
        result: Result,
        body: Callable[[Episode], Awaitable[T]],
        claimed: EnvironmentRecord | None,
        boundary: object,
        timeout_s: float | None,
        timed_out: Callable[[EpisodeTimedOut], T] | None,
    ) -> T:
        """Run an episode to its end; called in the instant of admission."""
        episode_id = result.episode_id
        key = episode_id.capture_key
        self._digests[key] = result.task_digest
        unused = untouched = False
        concluded: Value[object] | None = None

        async def noticing(episode: Episode) -> T:
            nonlocal unused, untouched, concluded
            try:
                return await body(episode)
            finally:
                unused, concluded = _unused(episode), episode.conclusion
                untouched = episode.last_step is None and concluded is None

        try:
            return await self.episodes.run(
                episode_id, noticing, boundary=boundary, timeout_s=timeout_s
            )
        except trio.Cancelled:
            if self.admission.fences.is_stale(episode_id):
                pass
            elif claimed is not None and unused:
                self.restored.give_back(episode_id, claimed)
            elif concluded is not None:
                result.outcome = concluded.value
                self.results.sent(self.results.keep(result), False)
            elif not unused:
                self.admission.refuse([episode_id])
            raise
        except StaleAttempt:
            # Retired: nobody waits for what it answers.
            raise
        except Exception as error:
            if timed_out is not None and isinstance(error, EpisodeTimedOut):
                return timed_out(error)
            if not untouched:
                self.admission.refuse([episode_id])
            elif claimed is not None:
                # From its input it would do again what was done before (I5).
                self.restored.give_back(episode_id, claimed)
            self._deliveries.ended(episode_id, key)
            raise
        finally:
            del self._digests[key]

    def epoch_of(self, episode_id: EpisodeId, otherwise: str | None = None) -> str | None:
        """Which execution this attempt is, for the calls that are made on its behalf (HARD-11).

        Args:
            otherwise: that of an attempt which no restore made.
        """
        return self.admission.fences.epoch_of(episode_id, otherwise)

    async def conclude(self, episode: Episode, outcome: object) -> None:
        """Record what an episode answers as its last boundary, before it cleans up.

        While a checkpoint is open it parks here. Continued from here, it runs nothing.

        Cancelled: its result is kept.
        """
        await episode.conclude(outcome, last_boundary(outcome))

    def acknowledge(self, episode_id: EpisodeId, epoch: str | None = None) -> bool:
        """The caller has the result, and will not ask for it again; in every phase (HARD-9).

        Returns:
            Whether one was kept. False also when it is acknowledged again.

        Raises:
            StaleAttempt: it acknowledges that of a superseded execution.
        """
        self.admission.fences.check_execution(episode_id, epoch)
        return self.results.drop(episode_id)

    def disown(self, episode_id: EpisodeId) -> None:
        """What an episode returned turned out to be no answer; `deliver` follows."""
        self.results.drop(episode_id)

    def _claim(
        self, episode_id: EpisodeId, digest: str, at: Boundary
    ) -> tuple[EnvironmentRecord | None, object]:
        """The restored record of this attempt and its boundary, handed out once (ENV-3)."""
        waiting = self.restored.peek(episode_id)
        if waiting is None:
            return None, None
        if waiting.task_digest != digest:
            raise InvalidCheckpointState(
                f"{episode_id} was restored with a different task: digest {waiting.task_digest}, "
                f"asked to run {digest}"
            )
        boundary = at.value_of(waiting.boundary)
        return self.restored.claim(episode_id), boundary

    def deliver(self, episode_id: EpisodeId) -> Callable[[bool], None]:
        """Say that the reply of an ended episode goes to its connection now, see `Deliveries`."""
        return self._deliveries.deliver(episode_id.capture_key)

    async def clean_up(self, episode: Episode, cleanups: Cleanups) -> None:
        """End an episode's body: take back what it left elsewhere, now or after resume.

        A restored one whose caller left before its first step waits to be claimed again (V1): its
        sessions are not to be closed.

        Cancelled: the clean-ups go on to their end.
        """
        if episode.continuation is not None and _unused(episode):
            return
        if self.admission.closed:
            if len(cleanups):
                self._owed.append((episode.episode_id, cleanups))
            return
        episode.finishing()
        await cleanups.run()

    # -- checkpoints --------------------------------------------------------------------------

    def ready(self) -> bool:
        return not self._blocking()

    def _blocking(self) -> int:
        return self.episodes.blocking + len(self._deliveries.tickets) + len(self._late)

    def report(self) -> Report:
        return report_of(
            self._blocking(),
            self._blockers(),
            {
                "live": len(self.episodes.live),
                "waiting": self.admission.waiting,
                "delivering": len(self._deliveries.tickets),
                "restored": len(self.restored),
                "results_kept": len(self.results),
            },
        )

    def _blockers(self) -> Iterator[Blocker]:
        return chain(
            self.episodes.blockers(), self._deliveries.tickets.blockers(), self._late.blockers()
        )

    def status_fields(self) -> dict[str, object]:
        return {
            "restored_pending": self.restored.waiting(BLOCKERS_LISTED_MAX),
            "restored_pending_count": len(self.restored),
        }

    def close(self) -> None:
        super().close()
        self.episodes.close()

    def open(self) -> None:
        super().open()
        self.episodes.open()
        self.results.opened()
        self._opened.notify()

    async def export(self, scope: frozenset[CaptureKey] | None) -> Export:
        await trio.lowlevel.checkpoint()
        if not self.ready():
            raise InvalidPhase("no longer ready: " + ", ".join(self.report().blockers))
        live = list(self.episodes.live.values())
        noted = _Noted(
            live=live,
            boundaries=[episode.last_boundary for episode in live],
            digests=self._digests.copy(),
            results=[*self.results],
            waiting=[*self.restored],
        )
        kept = await noted.by_key()
        keys = tuple(sorted(kept if scope is None else kept.keys() & scope))
        return Export(records=_records(kept[key] for key in keys), episode_ids=keys)

    def unclaimed_outside(self, scope: frozenset[CaptureKey] | None) -> list[EpisodeId]:
        return self.restored.outside(scope)

    async def release(self, episode_ids: Sequence[EpisodeId]) -> None:
        await trio.lowlevel.checkpoint()
        self.restored.drop(episode_ids)

    def check_installable(self) -> None:
        in_the_way = [
            *(f"{name} runs" for name in self.episodes.live),
            *(f"{b.episode_id}: {b.doing}" for b in self._deliveries.tickets.blockers()),
            *(f"{b.episode_id}: {b.doing}" for b in self._late.blockers()),
            *(f"{key} was restored already" for key in self.restored.waiting(BLOCKERS_LISTED_MAX)),
        ]
        if in_the_way:
            raise InvalidPhase("in the way: " + ", ".join(in_the_way[:BLOCKERS_LISTED_MAX]))

    async def install(
        self,
        records: MutableSequence[Record],
        scope: Sequence[EpisodeId],
        *,
        execution_epoch: str | None = None,
    ) -> None:
        entries: Restored[EnvironmentRecord] = Restored()

        def take(some: list[tuple[EpisodeId, EnvironmentRecord]]) -> None:
            entries.put([(episode_id.next_attempt(), record) for episode_id, record in some])

        await decode_into(take, EnvironmentRecord, records)
        self.check_installable()
        # One instant from here on.
        self.admission.supersede(scope, execution_epoch)
        if len(self.results):
            for episode_id in scope:
                # Also that of an earlier execution of the attempt that is continued now.
                self.results.drop_up_to(episode_id.next_attempt())
        self.restored.put_all(entries)

    def refuse(self, episode_ids: Sequence[EpisodeId]) -> None:
        self.admission.refuse(episode_ids)
        for episode_id in episode_ids:
            self.episodes.retire_up_to(episode_id)
        # Thousands are named in one instant, and mostly nothing of them waits here.
        if len(self.restored):
            for episode_id in episode_ids:
                self.restored.drop_up_to(episode_id)
        if len(self.results):
            for episode_id in episode_ids:
                self.results.drop_up_to(episode_id)

    async def retire(self, episode_id: EpisodeId) -> None:
        await self.episodes.wait_up_to(episode_id)
        await self._late.wait_up_to(episode_id)
        await self._deliveries.wait_up_to(episode_id)
        # Whatever came of its end.
        self.restored.drop_up_to(episode_id)
        self.results.drop_up_to(episode_id)

    def still_running(self, rollout_ids: Sequence[RolloutId]) -> list[EpisodeId]:
        return sorted({*self.episodes.of(rollout_ids), *self._late.of(rollout_ids)})

    def forget(self, rollout_ids: Sequence[RolloutId]) -> None:
        super().forget(rollout_ids)
        self.results.forget(rollout_ids)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().run)
            nursery.start_soon(self.results.run)
            nursery.start_soon(self._pay)

    async def _pay(self) -> None:
        """Do the clean-ups that are owed, while the gate is open."""
        while True:
            while self._owed and not self.admission.closed:
                async with trio.open_nursery() as nursery:
                    for _ in range(min(len(self._owed), OWED_CLEANUPS_AT_ONCE_MAX)):
                        episode_id, cleanups = self._owed.popleft()
                        ticket = self._late.take(episode_id, "cleaning up")
                        nursery.start_soon(_clean_up_later, ticket, cleanups)
            await self._opened.wait()


def _unused(episode: Episode) -> bool:
    """Whether its caller left before it had done anything; called at the end of its body."""
    return episode.abandoned and episode.last_step is None


async def _clean_up_later(ticket: Ticket, cleanups: Cleanups) -> None:
    with ticket:
        await cleanups.run()


@attrs.frozen(kw_only=True)
class _Noted:
    """All that there was in one instant: references only, which takes a millisecond for thousands."""

    live: list[Episode]
    boundaries: list[object]
    """Of the live ones, each as it was given."""
    digests: dict[str, str]
    """Of their tasks, by capture key."""
    results: list[Result]
    waiting: list[tuple[EpisodeId, EnvironmentRecord]]

    async def by_key(self) -> dict[CaptureKey, _Kept]:
        """What is kept of each episode.

        A result comes after the live episode that it is of, and that after what was restored of it:
        what comes later says more.
        """
        kept: dict[CaptureKey, _Kept] = {}
        slices = LoopSlice()
        await slices.pause()
        for episode_id, entry in self.waiting:
            kept[episode_id.capture_key] = episode_id, entry, None
            await slices.turn()
        for episode, boundary in zip(self.live, self.boundaries, strict=True):
            key = episode.episode_id.capture_key
            kept[key] = episode.episode_id, self.digests[key], boundary
            await slices.turn()
        for result in self.results:
            last = partial(last_boundary, result.outcome)
            kept[result.episode_id.capture_key] = result.episode_id, result.task_digest, last
            await slices.turn()
        return kept


_Kept: TypeAlias = tuple[EpisodeId, "EnvironmentRecord | str", object]
"""What a record is made of: what was restored, or the digest of the task and a boundary as it was
given. A tuple, since thousands are noted in a row."""


def _records(all_kept: Iterable[_Kept]) -> Iterator[Record | None]:
    for episode_id, entry, boundary in all_kept:
        if not isinstance(entry, str):
            yield make_record(episode_id, entry)
            continue
        where = f"episode {episode_id.capture_key}"
        state = boundary_of(boundary, where)
        encoded = None if state is None else (yield from encode_steps(state, where))
        # An `EnvironmentRecord` that nobody looks at is not made: there are thousands.
        yield Record(episode_id, pack_fields({"task_digest": entry, "boundary": encoded}))
