"""The owner of one participant: phases, fences, lease and jobs (CTL).

Rules of this module:

- C1 A transition is one synchronous block. No lock is held across an await: resume, status and
  retire never queue behind another call (CTL-7, CTL-10, CTL-15).
- C2 After every await the open checkpoint is looked at again before anything is changed; whoever
  finds that it has gone changes nothing (HARD-1).
- C3 What must outlive its call is a `Job` in the owner's nursery, at most one of each kind per
  checkpoint; a repeated call joins it (CTL-9).
- C4 Resume fences the id, cancels the jobs and drops the open checkpoint in one instant; the reply
  waits until the jobs have ended. Only an install holds the drop back until it has ended: what it
  puts in must never appear behind a gate that is open already (CTL-14).
- C5 A mark is raised before the stopping begins and is never lowered (CTL-5).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from gymtrio.background import open_background
from gymtrio.checkpoint.archive import Archive
from gymtrio.checkpoint.committing import commit_once
from gymtrio.checkpoint.deadlines import monotonic_deadline
from gymtrio.checkpoint.jobs import Job, wait_all_ended
from gymtrio.checkpoint.lease import watch_lease
from gymtrio.checkpoint.opened import (
    Arguments,
    OpenCheckpoint,
    check_replacements,
    commit_arguments,
    restore_arguments,
)
from gymtrio.checkpoint.participant import Participant, Settling
from gymtrio.checkpoint.phases import Step, advance
from gymtrio.checkpoint.restoring import restore_once
from gymtrio.checkpoint.resumed import ResumedIds
from gymtrio.checkpoint.retirements import Retirements
from gymtrio.episodes.signal import Signal
from gymtrio.errors import (
    DeadlineExceeded,
    GymtrioError,
    InvalidPhase,
    RetireIncomplete,
    StaleCheckpoint,
)
from gymtrio.ids import CheckpointId
from gymtrio.limits import READINESS_POLL_S
from gymtrio.ports import HostRandomness, Randomness, WallClock
from gymtrio.wire.control import (
    CommitReply,
    CommitRequest,
    ControlRequest,
    ForgetReply,
    ForgetRequest,
    Phase,
    PrepareReply,
    PrepareRequest,
    RenewReply,
    RenewRequest,
    RestoreReply,
    RestoreRequest,
    ResumeReply,
    ResumeRequest,
    RetireReply,
    RetireRequest,
    StatusReply,
)

LOG = logging.getLogger(__name__)

INCARNATION_BYTES: Final = 16
"""Never the same twice."""


@asynccontextmanager
async def open_control(
    participant: Participant,
    *,
    archive: Archive,
    wall_clock: WallClock,
    lease_grace_s: float,
    recover: bool = False,
    randomness: Randomness | None = None,
) -> AsyncIterator[Control]:
    """Own a participant for as long as the block runs.

    Args:
        recover: the server was started to be restored; it starts closed and accepts only status,
            restore and resume until it is (HARD-3, HARD-6).
        randomness: names this incarnation (HARD-13); None: the machine's.

    Cancelled: every job has ended when the block is left.
    """
    async with open_background() as nursery:
        control = Control(
            participant,
            archive=archive,
            wall_clock=wall_clock,
            lease_grace_s=lease_grace_s,
            recover=recover,
            incarnation=(randomness or HostRandomness()).hex(INCARNATION_BYTES),
            nursery=nursery,
        )
        nursery.start_soon(participant.run)
        nursery.start_soon(control.watch_lease)
        yield control


class Control:
    """Serves the eight operations; made by `open_control`."""

    def __init__(
        self,
        participant: Participant,
        *,
        archive: Archive,
        wall_clock: WallClock,
        lease_grace_s: float,
        recover: bool,
        incarnation: str,
        nursery: trio.Nursery,
    ) -> None:
        self.incarnation = incarnation
        """Told in replies, so that who drives several servers notices one that was replaced."""
        self._participant = participant
        self._archive = archive
        self._wall_clock = wall_clock
        self._lease_grace_s = lease_grace_s
        self._nursery = nursery
        self._awaiting_restore = recover
        self._open: OpenCheckpoint | None = None
        self._resumed = ResumedIds()
        self._retirements = Retirements(participant, nursery, lambda: self._open)
        self._lease_changed = Signal()
        if recover:
            participant.close()

    # -- status -------------------------------------------------------------------------------

    def status(self) -> StatusReply:
        """Answer at once, in every situation (CTL-15)."""
        opened = self._open
        return StatusReply(
            kind=self._participant.kind.value,
            instance=self._participant.instance,
            phase=self.phase.value,
            checkpoint_id=None if opened is None else opened.checkpoint_id,
            lease_expires_at=None if opened is None else self._on_wall(opened.lease_expires),
            retired_rollouts=len(self._participant.admission.fences),
            awaiting_restore=self._awaiting_restore,
            report=self._participant.report(),
            incarnation=self.incarnation,
            extra=self._participant.status_fields(),
        )

    @property
    def awaiting_restore(self) -> bool:
        """The server serves nothing until it is restored and resumed (HARD-3)."""
        return self._awaiting_restore

    @property
    def phase(self) -> Phase:
        return Phase.IDLE if self._open is None else self._open.phase

    # -- prepare ------------------------------------------------------------------------------

    async def prepare(self, request: PrepareRequest) -> PrepareReply:
        """Close admission, wait until everything live is at a safe point (CTL-7).

        Raises:
            DeadlineExceeded, StaleCheckpoint, CheckpointConflict, InvalidPhase: nothing changed.
            GymtrioError: closing or waiting failed; admission is open again.

        Cancelled: admission stays closed and the lease runs; the same id may ask again.
        """
        deadline = self._deadline(request)
        self._check_not_awaiting("prepare")
        self._check_not_stale(request.checkpoint_id)
        opened = self._open
        if opened is None:
            opened = self._close_for(request, deadline)
        else:
            opened.check_holder(request)
            if opened.restore is not None:
                raise InvalidPhase(f"{request.checkpoint_id} is being restored")
            self._renew(opened, deadline)
        try:
            await self._wait_ready(opened, deadline)
        except Exception:
            self._drop(opened)
            raise
        phase = opened.phase if self._open is opened else Phase.IDLE
        return PrepareReply(
            phase=phase.value, report=self._participant.report(), incarnation=self.incarnation
        )

    def _close_for(self, request: PrepareRequest, deadline: float) -> OpenCheckpoint:
        opened = OpenCheckpoint(
            checkpoint_id=request.checkpoint_id,
            nonce=request.controller_nonce,
            lease_expires=deadline + self._lease_grace_s,
            phase=advance(Phase.IDLE, Step.PREPARE),
        )
        self._close()
        self._open = opened
        settling = Settling(checkpoint_id=request.checkpoint_id, deadline=deadline)
        opened.settle = Job.start(self._nursery, "settle", lambda: self._settle(opened, settling))
        self._lease_changed.notify()
        LOG.info("checkpoint %s: admission closed", opened.checkpoint_id)
        return opened

    def _close(self) -> None:
        """Close admission; what fails half way is taken back (CTL-7)."""
        try:
            self._participant.close()
        except BaseException:
            self._participant.open()
            raise

    async def _settle(self, opened: OpenCheckpoint, settling: Settling) -> None:
        try:
            await self._participant.settle(settling)
        except GymtrioError:
            self._drop(opened)
            raise
        finally:
            self._participant.changed.notify()

    async def _wait_ready(self, opened: OpenCheckpoint, deadline: float) -> None:
        """Wait until it is prepared, the deadline has come, or it is not open any more.

        Raises:
            GymtrioError: settling failed; it is not open any more.
        """
        assert opened.settle is not None
        while self._open is opened and opened.phase is Phase.PREPARING:
            if opened.settle.ended and self._participant.ready():
                opened.advance(Step.READY)
            elif trio.current_time() >= deadline:
                return
            else:
                with trio.move_on_at(min(deadline, trio.current_time() + READINESS_POLL_S)):
                    await self._participant.changed.wait()
        if opened.settle.error is not None and not opened.resumed:
            raise opened.settle.error

    # -- renew --------------------------------------------------------------------------------

    async def renew(self, request: RenewRequest) -> RenewReply:
        """Extend the lease; it is never shortened (CTL-11)."""
        deadline = self._deadline(request)
        opened = self._require_open(request)
        self._renew(opened, deadline)
        return RenewReply(
            lease_expires_at=self._on_wall(opened.lease_expires),
            lease_s=opened.lease_expires - trio.current_time(),
            incarnation=self.incarnation,
        )

    # -- commit -------------------------------------------------------------------------------

    async def commit(self, request: CommitRequest) -> CommitReply:
        """Export once and write manifest-last (CTL-13).

        Raises:
            DeadlineExceeded: before the work ended; it goes on, and a retry joins it.
            InvalidPhase: not prepared, or no longer ready.
            InvalidCheckpointState: nothing was published, and once a write failed nothing will be
                under this id (HARD-12).

        Cancelled: the work goes on, and a retry joins it.

        Durable: after a reply, the manifest and every byte it names.
        """
        deadline = self._deadline(request)
        opened = self._require_open(request)
        arguments = commit_arguments(request)
        if opened.failed is not None:
            raise opened.failed
        if opened.commit is not None:
            opened.check_arguments(arguments)
        else:
            advance(opened.phase, Step.COMMIT)
            if not self._participant.ready():
                blockers = self._participant.report().blockers
                raise InvalidPhase("no longer ready: " + ", ".join(blockers))
            opened.arguments = arguments
            opened.commit = Job.start(
                self._nursery,
                "commit",
                lambda: commit_once(
                    self._participant, self._archive, opened, request, self.incarnation
                ),
            )
        self._renew(opened, deadline)
        return await opened.commit.wait(deadline)

    # -- restore ------------------------------------------------------------------------------

    async def restore(self, request: RestoreRequest) -> RestoreReply:
        """Verify the whole file and install the scope, all of it or nothing (CTL-14).

        Raises:
            DeadlineExceeded: before the work ended; it goes on, and a retry joins it.
            InvalidPhase: live state is in the way.
            StaleAttempt: a replacement is refused already, since it was retired; it would never be
                served. Nothing changed.
            InvalidCheckpointState: nothing is installed, admission is as it was.

        Cancelled: the work goes on, and a retry joins it.
        """
        deadline = self._deadline(request)
        self._check_not_stale(request.checkpoint_id)
        arguments = restore_arguments(request)
        opened = self._open
        if opened is None:
            opened = self._begin_restore(request, arguments, deadline)
        else:
            opened.check_holder(request)
            if opened.restore is None:
                advance(opened.phase, Step.RESTORE)
            opened.check_arguments(arguments)
            self._renew(opened, deadline)
        assert opened.restore is not None
        return await opened.restore.wait(deadline)

    def _begin_restore(
        self, request: RestoreRequest, arguments: Arguments, deadline: float
    ) -> OpenCheckpoint:
        self._participant.check_installable()
        check_replacements(request, self._participant.admission.fences)
        opened = OpenCheckpoint(
            checkpoint_id=request.checkpoint_id,
            nonce=request.controller_nonce,
            lease_expires=deadline + self._lease_grace_s,
            arguments=arguments,
            awaited=self._awaiting_restore,
            scope=request.episode_ids,
        )
        if not self._awaiting_restore:
            self._close()
        self._open = opened
        opened.restore = Job.start(self._nursery, "restore", lambda: self._restore(opened, request))
        self._lease_changed.notify()
        return opened

    async def _restore(self, opened: OpenCheckpoint, request: RestoreRequest) -> RestoreReply:
        try:
            reply = await restore_once(
                self._participant, self._archive, opened, request, self.incarnation
            )
            # Still the instant in which it was restored.
            self._awaiting_restore = False
            return reply
        except GymtrioError:
            self._drop(opened)
            raise
        finally:
            if opened.resumed and not opened.taken_back:
                self._drop(opened)

    # -- resume -------------------------------------------------------------------------------

    async def resume(self, request: ResumeRequest) -> ResumeReply:
        """Let everything go on, from every phase, at once; also the abort (CTL-10).

        A publication that has begun is waited for, so that after the reply nothing appears; a write
        before that point is stopped.

        Raises:
            DeadlineExceeded: a publication did not end in time, and nothing changed; or what was
                stopped has not ended, and the resume is complete but for that.
            CheckpointConflict: another checkpoint or controller holds.
            InvalidPhase: the server waits for a restore, and this would fence it (HARD-6).
            StaleCheckpoint: it was a restore, and what it had installed was taken back.
            GymtrioError: what was restored could not be freed; the gate stays closed, and the same
                resume tries again.

        Cancelled: either nothing changed, or the resume completes by itself.
        """
        deadline = self._deadline(request)
        if self._resumed.taken_back(request.checkpoint_id) and not request.undo_restore:
            raise StaleCheckpoint(f"{request.checkpoint_id} was not resumed in time and is undone")
        opened = self._open
        if opened is None:
            self._resume_unopened(request)
        elif (
            request.checkpoint_id != opened.checkpoint_id and request.checkpoint_id in self._resumed
        ):
            # A late repetition; what is open now is not its business.
            opened = None
        elif request.undo_restore and opened.restore is not None:
            opened.check_holder(request)
            self._take_back(opened)
        else:
            opened.check_holder(request)
            if not opened.publication.stop():
                with trio.move_on_at(deadline):
                    await opened.publication.ended.wait()
                if not opened.publication.ended.is_set():
                    raise DeadlineExceeded(f"{opened.checkpoint_id} is being published")
            self._end(opened)
        LOG.info("checkpoint %s: resumed", request.checkpoint_id)
        await self._wait_stopped(request.checkpoint_id, deadline)
        if opened is not None and opened.undo is not None and opened.undo.error is not None:
            raise opened.undo.error
        return ResumeReply(
            phase=Phase.IDLE.value, idempotent=opened is None, incarnation=self.incarnation
        )

    def _take_back(self, opened: OpenCheckpoint) -> None:
        """Begin to undo a restore: the id is fenced at once, the gate opens when it is undone."""
        opened.resumed = opened.taken_back = True
        opened.stop_jobs()
        if opened.undo is None or opened.undo.error is not None:
            opened.undo = Job.start(self._nursery, "undo", lambda: self._undo_restore(opened))
            self._resumed.add(opened.checkpoint_id, [opened.undo], taken_back=True)

    async def _undo_restore(self, opened: OpenCheckpoint) -> None:
        """Nothing of the replacements was admitted, so dropping them leaves nothing to refuse."""
        await opened.installed()
        if opened.phase is Phase.RESTORED:
            await self._participant.release([e.next_attempt() for e in opened.scope])
            self._awaiting_restore = opened.awaited
        self._drop(opened)

    def _resume_unopened(self, request: ResumeRequest) -> None:
        if self._awaiting_restore and request.start_afresh:
            self._participant.refuse(request.episode_ids)
            self._awaiting_restore = False
            self._participant.open()
        elif (
            self._awaiting_restore
            and request.checkpoint_id not in self._resumed
            # What a failed restore is taken back by may overtake it, and fences its id alone.
            and not request.undo_restore
        ):
            raise InvalidPhase("this server waits for a restore; start_afresh opens it without")
        self._resumed.add(request.checkpoint_id)

    async def _wait_stopped(self, checkpoint_id: CheckpointId, deadline: float) -> None:
        """
        Raises:
            DeadlineExceeded: something of that checkpoint still runs.
        """
        # More may be begun meanwhile: by who takes a restore back that was resumed.
        while jobs := self._resumed.stopping(checkpoint_id):
            if running := await wait_all_ended(jobs, deadline):
                names = ", ".join(job.name for job in running)
                raise DeadlineExceeded(f"{checkpoint_id} was resumed, but still runs: {names}")

    def _end(self, opened: OpenCheckpoint) -> None:
        """The instant of resuming, by whoever comes first."""
        if opened.resumed or self._open is not opened:
            return
        opened.resumed = True
        self._resumed.add(opened.checkpoint_id, opened.jobs())
        if opened.installing:
            opened.stop_jobs()
        else:
            self._drop(opened)

    def _drop(self, opened: OpenCheckpoint) -> None:
        """Nothing is open any more; the gate is, unless a restore is still waited for."""
        if self._open is not opened:
            return
        opened.stop_jobs()
        if opened.phase is not Phase.IDLE:
            opened.advance(Step.RESUME)
        self._open = None
        opened.ended.set()
        if not self._awaiting_restore:
            self._participant.open()
        self._participant.changed.notify()
        self._lease_changed.notify()

    # -- retire and forget --------------------------------------------------------------------

    async def retire(self, request: RetireRequest) -> RetireReply:
        """Mark, stop, wait until stopped, free; in every phase (CTL-12).

        Raises:
            DeadlineExceeded: something has not stopped; it stays marked and tracked, blocks the
                next prepare, and a repeated retire joins.

        Cancelled: the stopping goes on.
        """
        deadline = self._deadline(request)
        self._check_not_awaiting("retire")
        self._participant.refuse(request.episode_ids)
        for job in await self._retirements.start(request.episode_ids).wait(deadline):
            await job.wait(deadline)
        return RetireReply(retired=tuple(e.capture_key for e in request.episode_ids))

    async def forget(self, request: ForgetRequest) -> ForgetReply:
        """Drop the marks of rollouts that are finished for good (CTL-12).

        Raises:
            RetireIncomplete: something of them still runs; every mark is kept.
        """
        self._deadline(request)
        self._check_not_awaiting("forget")
        rollout_ids = request.checked()
        running = set(self._participant.still_running(rollout_ids))
        running.update(self._retirements.of(rollout_ids))
        if running:
            raise RetireIncomplete("still running: " + ", ".join(map(str, sorted(running))))
        self._participant.forget(rollout_ids)
        return ForgetReply(forgotten=tuple(sorted(set(rollout_ids))))

    # -- lease --------------------------------------------------------------------------------

    async def watch_lease(self) -> None:
        """Resume by ourselves when a controller went silent."""
        await watch_lease(lambda: self._open, self._lease_changed, self._expire)

    def _expire(self, opened: OpenCheckpoint) -> None:
        """A restore without its resume is none: other servers may have failed it (COORD-3)."""
        of = {"checkpoint": opened.checkpoint_id, "phase": self.phase.value}
        LOG.warning("checkpoint %s: lease expired", opened.checkpoint_id, extra=of)
        if opened.restore is None or (opened.resumed and not opened.taken_back):
            self._end(opened)
        else:
            self._take_back(opened)

    # -- shared -------------------------------------------------------------------------------

    def _deadline(self, request: ControlRequest) -> float:
        return monotonic_deadline(request.deadline_ts, self._wall_clock)

    def _on_wall(self, monotonic: float) -> float:
        return self._wall_clock.now_s() + monotonic - trio.current_time()

    def _renew(self, opened: OpenCheckpoint, deadline: float) -> None:
        opened.renew(deadline + self._lease_grace_s)

    def _check_not_stale(self, checkpoint_id: CheckpointId) -> None:
        if checkpoint_id in self._resumed:
            raise StaleCheckpoint(f"{checkpoint_id} was resumed already")

    def _check_not_awaiting(self, operation: str) -> None:
        if self._awaiting_restore:
            raise InvalidPhase(f"{operation}: this server waits to be restored")

    def _require_open(self, request: ControlRequest) -> OpenCheckpoint:
        self._check_not_stale(request.checkpoint_id)
        if self._open is None:
            raise InvalidPhase(f"{request.checkpoint_id} is not open")
        self._open.check_holder(request)
        return self._open
