"""The real control plane, played by the actions that the model of the protocol takes too.

A participant whose every wait is a door, an archive in memory, and calls that run as tasks, so that any
number of them is under way. Everything is looked at from outside, and only when every task waits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Final

import trio

from gymtrio.background import open_background
from gymtrio.checkpoint.control import Control, open_control
from gymtrio.checkpoint.dispatch import perform
from gymtrio.checkpoint.participant import Export
from gymtrio.errors import (
    CheckpointError,
    DirectoryRefused,
    InvalidCheckpointState,
    Refusal,
)
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId
from gymtrio.participants.base import make_record
from gymtrio.storage.publication import Publication
from gymtrio.storage.records import Record
from gymtrio.wire.codec import unpack
from gymtrio.wire.control import (
    REQUESTS,
    CommitReply,
    ControlRequest,
    ForgetReply,
    PrepareReply,
    RenewReply,
    Reply,
    RestoreReply,
    ResumeReply,
    RetireReply,
)
from tests.helpers.clocks import EPOCH_S, FollowingClock
from tests.helpers.memory_archive import Door, MemoryArchive
from tests.helpers.protocol_model import Answer, Attempt
from tests.helpers.scripted_participant import ScriptedParticipant, ScriptedRecord

GRACE_S: Final = 20.25
ROLLOUTS: Final = ("r0", "r1", "r2")
ATTEMPTS_MAX: Final = 6

DISK_FAILURES: Final[dict[str, CheckpointError]] = {
    "full": InvalidCheckpointState("no space left"),
    "refused": DirectoryRefused("'..' is not resolved"),
}


class DooredParticipant(ScriptedParticipant):
    """Retires earlier attempts too, tracks what is being retired, and may be stubborn.

    Args:
        stubborn: an export that hangs cannot be cancelled, nor can an install at all.
    """

    def __init__(self, *, stubborn: bool) -> None:
        super().__init__()
        self.releasing = Door()
        self._stubborn = stubborn

    async def _stand_at_export(self) -> None:
        with trio.CancelScope(shield=self._stubborn):
            await self.exporting.pass_through()
        await trio.lowlevel.checkpoint_if_cancelled()

    async def install(
        self,
        records: Sequence[Record],
        scope: Sequence[EpisodeId],
        *,
        execution_epoch: str | None = None,
    ) -> None:
        with trio.CancelScope(shield=self._stubborn):
            await super().install(records, scope, execution_epoch=execution_epoch)

    async def release(self, episode_ids: Sequence[EpisodeId]) -> None:
        await self.releasing.pass_through()
        self._maybe_fail("release")
        self.restored.drop(episode_ids)

    def refuse(self, episode_ids: Sequence[EpisodeId]) -> None:
        self.admission.refuse(episode_ids)
        for episode_id in sorted(self.running | self.parked.keys()):
            if self.admission.fences.is_stale(episode_id) and episode_id not in self.stopping:
                self.stopping.add(episode_id)
                self.cancels.append(episode_id)

    async def retire(self, episode_id: EpisodeId) -> None:
        await self.cleaning_up.pass_through()
        for other in sorted(self.running | self.parked.keys() | self.stopping):
            if other.rollout_id == episode_id.rollout_id and other.attempt <= episode_id.attempt:
                self.running.discard(other)
                self.stopping.discard(other)
                self.parked.pop(other, None)
        self.restored.drop_up_to(episode_id)


def attempt_of(episode_id: EpisodeId) -> Attempt:
    return (episode_id.rollout_id, episode_id.attempt)


def attempts_of(episode_ids: Iterable[EpisodeId]) -> frozenset[Attempt]:
    return frozenset(map(attempt_of, episode_ids))


@cache
def episode_of(attempt: Attempt) -> EpisodeId:
    rollout, number = attempt
    return EpisodeId(RolloutId(rollout), number)


class ProtocolRun:
    """Made by `open_protocol_run`."""

    def __init__(
        self,
        control: Control,
        participant: DooredParticipant,
        archive: MemoryArchive,
        clock: FollowingClock,
        owner: trio.Nursery,
        calls: trio.Nursery,
    ) -> None:
        self.control = control
        self.participant = participant
        self.archive = archive
        self.answers: dict[int, Answer] = {}
        self.arrivals: dict[int, str] = {}
        self.shut: set[str] = set()
        self.deadlines: dict[int, float] = {}
        """Of every call that was begun, on the clock that never jumps."""
        self._clock = clock
        self._jumped_s = 0.0
        self._owner = owner
        self._calls = calls
        self._callers: dict[int, trio.CancelScope] = {}
        self._standing = {task.name for task in owner.child_tasks}
        self._started_at = trio.current_time()

    @property
    def now(self) -> float:
        return trio.current_time() - self._started_at

    async def sleep_until(self, time: float) -> None:
        await trio.sleep_until(self._started_at + time)

    def _door(self, name: str) -> Door:
        of = self.archive if name in ("writing", "publishing", "reading") else self.participant
        door = getattr(of, name)
        assert isinstance(door, Door)
        return door

    # -- what happens -------------------------------------------------------------------------

    def begin(self, number: int, operation: str, body: dict[str, Any], deadline: float) -> None:
        request = REQUESTS[operation](deadline_ts=EPOCH_S + deadline, **body)
        scope = self._callers[number] = trio.CancelScope()
        self._calls.start_soon(self._call, number, operation, request, scope)

    async def _call(
        self, number: int, operation: str, request: ControlRequest, scope: trio.CancelScope
    ) -> None:
        self.deadlines[number] = self._since_start(request.deadline_ts)
        with scope:
            try:
                reply = await perform(self.control, operation, request)
                self.answers[number] = said(reply, self._since_start)
            except Refusal as refusal:
                self.answers[number] = refusal.code
        self.answers.setdefault(number, "left")

    def leave(self, number: int) -> None:
        self._callers[number].cancel()

    def arrive(self, number: int, attempt: Attempt, epoch: str | None) -> None:
        self._calls.start_soon(self._arrive, number, episode_of(attempt), epoch)

    async def _arrive(self, number: int, episode_id: EpisodeId, epoch: str | None) -> None:
        try:
            await self.participant.admission.enter(episode_id, epoch=epoch)
        except Refusal as refusal:
            self.arrivals[number] = refusal.code
            return
        self.arrivals[number] = "entered"
        self.participant.restored.claim(episode_id)
        if episode_id not in self.participant.parked:
            self.participant.running.add(episode_id)

    def park(self, attempt: Attempt, note: str) -> None:
        episode_id = episode_of(attempt)
        if episode_id in self.participant.running - self.participant.stopping:
            self.participant.finish(episode_id, note)

    def go_on(self, attempt: Attempt) -> None:
        episode_id, participant = episode_of(attempt), self.participant
        if participant.admission.closed or episode_id in participant.stopping:
            return
        if participant.parked.pop(episode_id, None) is not None:
            participant.running.add(episode_id)

    def finish(self, attempt: Attempt) -> None:
        episode_id, participant = episode_of(attempt), self.participant
        if participant.admission.closed or episode_id in participant.stopping:
            return
        participant.running.discard(episode_id)
        participant.parked.pop(episode_id, None)
        participant.changed.notify()

    def shut_door(self, name: str) -> None:
        if name not in self.shut:
            self.shut.add(name)
            self._door(name).shut()

    def open_door(self, name: str) -> None:
        if name in self.shut:
            self.shut.remove(name)
            self._door(name).let_go()

    def jump(self, seconds: float) -> None:
        self._clock.jump(seconds)
        self._jumped_s += seconds

    def fail(self, where: str | None) -> None:
        self.participant.fail_at = where
        self.participant.failure = None if where is None else InvalidCheckpointState("planned")

    def break_disk(self, how: str | None) -> None:
        self.archive.failure = None if how is None else DISK_FAILURES[how]

    # -- what is seen -------------------------------------------------------------------------

    def _since_start(self, wall_s: float) -> float:
        return round(wall_s - EPOCH_S - self._jumped_s, 6)

    @property
    def planned_failure(self) -> str | None:
        return self.participant.fail_at if self.participant.failure is not None else None

    @property
    def jobs(self) -> list[str]:
        """What runs in the owner's nursery beside what always runs there."""
        names = [task.name for task in self._owner.child_tasks]
        assert self._standing <= set(names)
        return sorted(name for name in names if name not in self._standing)

    def view(self) -> dict[str, object]:
        """The same as the model's view."""
        participant, status = self.participant, self.control.status()
        lease = status.lease_expires_at
        return {
            "phase": status.phase,
            "open": status.checkpoint_id,
            "lease": None if lease is None else self._since_start(lease),
            "awaiting": status.awaiting_restore,
            "closed": participant.admission.closed,
            "marks": self._marks(),
            "running": attempts_of(participant.running),
            "parked": {attempt_of(e): note for e, note in participant.parked.items()},
            "stopping": attempts_of(participant.stopping),
            "restored": {attempt_of(e): note for e, note in participant.restored},
            "published": {
                directory: (
                    part.checkpoint_id,
                    tuple((attempt_of(r.episode_id), note_of(r)) for r in part.records),
                )
                for (directory, _, _), part in self.archive.parts.items()
            },
            "jobs": self.jobs,
            "arrivals": dict(self.arrivals),
            "answers": dict(self.answers),
        }

    def _marks(self) -> dict[str, int]:
        """The highest refused attempt of each rollout, found by asking."""
        is_stale = self.participant.admission.fences.is_stale
        marks = {}
        for rollout in ROLLOUTS:
            refused = [n for n in range(ATTEMPTS_MAX) if is_stale(episode_of((rollout, n)))]
            assert refused == list(range(len(refused)))
            if refused:
                marks[rollout] = refused[-1]
        assert len(marks) == self.control.status().retired_rollouts
        return marks


def said(reply: Reply, since_start: Callable[[float], float]) -> Answer:
    """What of a reply the requirements promise.

    Args:
        since_start: makes a time of the wall clock one of the plan.
    """
    match reply:
        case PrepareReply():
            assert reply.report.ready is (not reply.report.blockers)
            # After a resume, what the report says is no matter of the checkpoint any more.
            return (reply.phase, () if reply.phase == "idle" else reply.report.blockers)
        case RenewReply():
            return ("renewed", since_start(reply.lease_expires_at))
        case CommitReply():
            assert reply.manifest["record_count"] == len(reply.episode_ids)
            return (reply.phase, reply.episode_ids)
        case RestoreReply():
            return (reply.phase, reply.source_checkpoint_id, reply.restored)
        case ResumeReply():
            return (reply.phase, reply.idempotent)
        case RetireReply():
            return ("retired", reply.retired)
        case ForgetReply():
            return ("forgotten", reply.forgotten)
    raise AssertionError(reply)


def note_of(record: Record) -> str:
    return unpack(ScriptedRecord, record.payload).note


@asynccontextmanager
async def open_protocol_run(
    *,
    recover: bool,
    stubborn: bool,
    published: dict[str, tuple[str, tuple[tuple[Attempt, str], ...]]],
) -> AsyncIterator[ProtocolRun]:
    """Run a control plane; the block must leave nothing hanging behind a door."""
    participant = DooredParticipant(stubborn=stubborn)
    archive = MemoryArchive()
    for directory, (checkpoint_id, notes) in published.items():
        records = [
            make_record(episode_of(attempt), ScriptedRecord(note)) for attempt, note in notes
        ]
        await archive.write(
            directory,
            kind=participant.kind,
            instance=participant.instance,
            checkpoint_id=CheckpointId(checkpoint_id),
            export=Export(
                records=records, episode_ids=tuple(r.episode_id.capture_key for r in records)
            ),
            publication=Publication(),
        )
    archive.writes = 0
    clock = FollowingClock()
    async with (
        open_control(
            participant,
            archive=archive,
            wall_clock=clock,
            lease_grace_s=GRACE_S,
            recover=recover,
        ) as control,
        open_background() as calls,
    ):
        owner = trio.lowlevel.current_task().child_nurseries[-2]
        yield ProtocolRun(control, participant, archive, clock, owner, calls)
