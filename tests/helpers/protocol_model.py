"""The control protocol of one participant, small, slow and obvious: what the real one is compared to.

Written from the requirements (CTL, HARD), not from the code. There is no concurrency in here: an
action changes the model in one instant, and `settle` lets everything happen that can happen without
time passing or a door being opened. What the participant does (its work, its doors, its planned
failures) is modelled as far as the protocol can see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, TypeAlias

import attrs

Attempt: TypeAlias = tuple[str, int]
Answer: TypeAlias = str | tuple[object, ...]
"""A refusal is its code; every other reply is a tuple."""

ABORTED: Final = "aborted"
"""Some refusal: a resume came, and the requirements do not say which code its victims get."""

DAY_S: Final = 24 * 3600.0
UNDO_AGAIN_S: Final = 10.0
"""After the lease has ended, what could not be taken back is tried again so often."""

DOORS: Final = (
    "settling",
    "exporting",
    "writing",
    "publishing",
    "releasing",
    "reading",
    "installing",
    "cleaning_up",
)


def key(attempt: Attempt) -> str:
    rollout, number = attempt
    return f"{rollout}-a{number}" if number else rollout


@attrs.define(eq=False, kw_only=True)
class Call:
    """One call of a controller."""

    operation: str
    checkpoint_id: str
    nonce: str | None
    deadline: float
    """On the wall clock; once it was begun, on the clock that never jumps (CTL-8)."""
    directory: str = ""
    scope: tuple[Attempt, ...] | None = None
    rollouts: tuple[str, ...] = ()
    start_afresh: bool = False
    epoch: str | None = None
    undo: bool = False
    """Resume: take back what was restored."""
    stop: bool = False
    """Commit: free what lies outside the process."""
    answer: Answer | None = None
    # What it waits for.
    opened: Opened | None = None
    jobs: tuple[Job, ...] = ()
    idempotent: bool = False

    @property
    def arguments(self) -> tuple[object, ...]:
        scope = None if self.scope is None else tuple(sorted(self.scope))
        return (self.operation, self.directory, scope, self.epoch, self.stop)


@attrs.define(eq=False, kw_only=True)
class Job:
    """Work that outlives its call."""

    kind: str
    stage: str
    opened: Opened | None = None
    call: Call | None = None
    attempt: Attempt | None = None
    exported: tuple[tuple[Attempt, str], ...] = ()
    stopped: bool = False
    ended: bool = False
    answer: Answer | None = None

    def end(self, answer: Answer | None = None) -> None:
        self.ended = True
        self.answer = answer

    @property
    def name(self) -> str:
        return self.kind if self.attempt is None else f"{self.kind} {key(self.attempt)}"


@attrs.define(eq=False, kw_only=True)
class Opened:
    """The checkpoint that is open."""

    checkpoint_id: str
    nonce: str | None
    phase: str
    lease: float
    resumed: bool = False
    failed: str | None = None
    settle: Job | None = None
    commit: Job | None = None
    restore: Job | None = None
    undo: Job | None = None
    awaited: bool = False
    """The server waited to be restored when it was opened."""
    undo_again: float = 0.0
    """When the lease tries it next."""

    @property
    def jobs(self) -> tuple[Job, ...]:
        every = (self.settle, self.commit, self.restore, self.undo)
        return tuple(job for job in every if job is not None)

    @property
    def stage(self) -> str:
        """Where it is, more exactly than the phase says."""
        busy = [job.stage for job in self.jobs if not job.ended]
        if busy:
            return busy[0]
        return self.phase if self.failed is None else "failed"

    @property
    def publishing(self) -> bool:
        return (
            self.commit is not None and self.commit.stage == "publishing" and not self.commit.ended
        )

    @property
    def installing(self) -> bool:
        """Restored state may still appear or go: the gate stays as it is."""
        return any(job is not None and not job.ended for job in (self.restore, self.undo))


class ProtocolModel:
    """
    Args:
        recover: started to be restored (HARD-3).
        stubborn: an export that hangs cannot be stopped, nor can an install at all.
        published: checkpoints that exist, by directory: id, and the notes of its attempts.
    """

    def __init__(
        self,
        *,
        grace_s: float,
        recover: bool,
        stubborn: bool,
        published: dict[str, tuple[str, tuple[tuple[Attempt, str], ...]]],
    ) -> None:
        self.now = 0.0
        self.jumped_s = 0.0
        """The wall clock has, since the start."""
        self.grace_s = grace_s
        self.stubborn = stubborn
        self.awaiting = recover
        self.opened: Opened | None = None
        self.ending: Opened | None = None
        """It was resumed, and what was stopped for that is about to end."""
        self.fenced: dict[str, tuple[Job, ...]] = {}
        """Resumed ids, and their jobs."""
        self.undone: set[str] = set()
        """Those of restores that were taken back."""
        self.marks: dict[str, int] = {}
        self.epochs: dict[Attempt, str | None] = {}
        """Of the replacement attempts, as the last restore named it (HARD-11)."""
        self.published = dict(published)
        self.jobs: list[Job] = []
        self.calls: dict[int, Call] = {}
        self.gone: set[int] = set()
        """Callers that left in the instant in which they called."""
        # What the participant does.
        self.running: set[Attempt] = set()
        self.parked: dict[Attempt, str] = {}
        self.stopping: set[Attempt] = set()
        self.restored: dict[Attempt, str] = {}
        self.at_gate: dict[int, tuple[Attempt, str | None]] = {}
        self.arrivals: dict[int, str] = {}
        # What the test holds and breaks.
        self.shut: set[str] = set()
        self.failure: str | None = None
        """Where the participant fails next."""
        self.disk: str | None = None
        """`full`, or `refused` for a directory that is not accepted."""

    # -- what is seen from outside ------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """The whole rule of admission."""
        return self.opened is not None or self.awaiting

    @property
    def situation(self) -> str:
        """In one word, for counting what happened."""
        if self.opened is not None:
            return self.opened.stage
        return "awaiting" if self.awaiting else "idle"

    def view(self) -> dict[str, object]:
        opened = self.opened
        return {
            "phase": "idle" if opened is None else opened.phase,
            "open": None if opened is None else opened.checkpoint_id,
            "lease": None if opened is None else round(opened.lease, 6),
            "awaiting": self.awaiting,
            "closed": self.closed,
            "marks": dict(self.marks),
            "running": frozenset(self.running),
            "parked": dict(self.parked),
            "stopping": frozenset(self.stopping),
            "restored": dict(self.restored),
            "published": dict(self.published),
            "jobs": sorted(job.name for job in self.jobs if not job.ended),
            "arrivals": dict(self.arrivals),
            "answers": {n: c.answer for n, c in self.calls.items() if c.answer is not None},
        }

    # -- what happens -------------------------------------------------------------------------

    def advance_to(self, time: float) -> None:
        """Let time pass, stopping wherever a deadline or a lease ends."""
        while (at := self._next_timer()) <= time:
            self.now = at
            self.settle()
        self.now = time
        self.settle()

    def _next_timer(self) -> float:
        timers = [c.deadline for c in self.calls.values() if c.answer is None]
        if self.opened is not None:
            timers += [self.opened.lease, self.opened.undo_again]
        return min((timer for timer in timers if timer > self.now), default=math.inf)

    def settle(self, *, gate: bool = True) -> None:
        """Until nothing happens any more by itself.

        Args:
            gate: those whom it lets in are in; else they are woken, and may find it closed again.
        """
        changed = True
        while changed:
            changed = False
            if self.ending is not None:
                self._let_go(self.ending)
                self.ending = None
                changed = True
            for job in list(self.jobs):
                while self._step(job):
                    changed = True
            self.jobs = [job for job in self.jobs if not job.ended]
            changed |= self._lease_expires()
            changed |= gate and self._gate()
            for call in list(self.calls.values()):
                if call.answer is None:
                    call.answer = self._look(call)
                    changed |= call.answer is not None

    def begin(self, number: int, call: Call) -> None:
        self.calls[number] = call
        call.deadline -= self.jumped_s
        call.answer = self._begin(call)
        if number in self.gone:
            self.leave(number)

    def shut_door(self, name: str) -> None:
        self.shut.add(name)

    def open_door(self, name: str) -> None:
        self.shut.discard(name)

    def jump(self, seconds: float) -> None:
        """The wall clock is set; nothing else notices."""
        self.jumped_s += seconds

    def fail(self, where: str | None) -> None:
        self.failure = where

    def break_disk(self, how: str | None) -> None:
        self.disk = how

    def leave(self, number: int) -> None:
        """The caller goes away; what it asked for goes on, and is begun if it was sent."""
        if number not in self.calls:
            self.gone.add(number)
        elif self.calls[number].answer is None:
            self.calls[number].answer = "left"

    def arrive(self, number: int, attempt: Attempt, epoch: str | None) -> None:
        self.at_gate[number] = (attempt, epoch)

    def park(self, attempt: Attempt, note: str) -> None:
        if attempt in self.running and attempt not in self.stopping:
            self.running.remove(attempt)
            self.parked[attempt] = note

    def go_on(self, attempt: Attempt) -> None:
        if attempt in self.parked and attempt not in self.stopping and not self.closed:
            del self.parked[attempt]
            self.running.add(attempt)

    def finish(self, attempt: Attempt) -> None:
        if attempt not in self.stopping and not self.closed:
            self.running.discard(attempt)
            self.parked.pop(attempt, None)

    # -- calls --------------------------------------------------------------------------------

    def _begin(self, call: Call) -> Answer | None:
        """Answer at once, or begin to wait."""
        if call.deadline <= self.now:
            return "deadline_exceeded"
        if call.deadline > self.now + DAY_S:
            return "invalid_request"
        begin = {
            "prepare": self._prepare,
            "renew": self._renew,
            "commit": self._commit,
            "restore": self._restore,
            "resume": self._resume,
            "retire": self._retire,
            "forget": self._forget,
        }
        return begin[call.operation](call)

    def _look(self, call: Call) -> Answer | None:
        """Answer a call that waits, if it can be by now."""
        look = {
            "prepare": self._prepared,
            "commit": self._job_answered,
            "restore": self._job_answered,
            "resume": self._resumed,
            "retire": self._retired,
        }
        return look[call.operation](call)

    def _refused(self, call: Call) -> str | None:
        """Who does not hold what is open (CTL-4, HARD-5)."""
        if call.checkpoint_id in self.fenced:
            return "stale_checkpoint"
        if self.opened is None:
            return None
        if (call.checkpoint_id, call.nonce) != (self.opened.checkpoint_id, self.opened.nonce):
            return "checkpoint_conflict"
        return None

    def _prolong(self, call: Call) -> None:
        assert self.opened is not None
        self.opened.lease = max(self.opened.lease, call.deadline + self.grace_s)

    def _open(self, call: Call, phase: str) -> Opened:
        self.opened = Opened(
            checkpoint_id=call.checkpoint_id,
            nonce=call.nonce,
            phase=phase,
            lease=call.deadline + self.grace_s,
        )
        return self.opened

    def _prepare(self, call: Call) -> Answer | None:
        if self.awaiting:
            return "invalid_phase"
        if refused := self._refused(call):
            return refused
        if self.opened is None:
            if self._fails("close"):
                return "invalid_checkpoint_state"
            opened = self._open(call, "preparing")
            opened.settle = self._start(Job(kind="settle", stage="settling", opened=opened))
        elif self.opened.restore is not None:
            return "invalid_phase"
        else:
            self._prolong(call)
        call.opened = self.opened
        return None

    def _prepared(self, call: Call) -> Answer | None:
        opened = call.opened
        assert opened is not None
        assert opened.settle is not None
        if opened.settle.answer is not None and not opened.resumed:
            return opened.settle.answer
        if self.opened is not opened:
            return ("idle", ())
        if opened.phase == "preparing" and opened.settle.ended and not self._blockers():
            opened.phase = "prepared"
        if opened.phase == "preparing" and self.now < call.deadline:
            return None
        return (opened.phase, self._blockers())

    def _renew(self, call: Call) -> Answer | None:
        if refused := self._refused(call):
            return refused
        if self.opened is None:
            return "invalid_phase"
        self._prolong(call)
        return ("renewed", round(self.opened.lease, 6))

    def _commit(self, call: Call) -> Answer | None:
        if refused := self._refused(call):
            return refused
        opened = self.opened
        if opened is None:
            return "invalid_phase"
        if opened.failed is not None:
            return opened.failed
        if opened.commit is None:
            if opened.phase != "prepared" or self._blockers():
                return "invalid_phase"
            opened.commit = self._start(
                Job(kind="commit", stage="exporting", opened=opened, call=call)
            )
        begun = opened.commit.call
        assert begun is not None
        if begun.arguments != call.arguments:
            return "checkpoint_conflict"
        self._prolong(call)
        call.jobs = (opened.commit,)
        return None

    def _restore(self, call: Call) -> Answer | None:
        if refused := self._refused(call):
            return refused
        opened = self.opened
        scope = call.scope
        assert scope is not None
        if opened is None:
            if self.running or self.parked:
                return "invalid_phase"
            if any(self._is_stale((rollout, number + 1)) for rollout, number in scope):
                return "stale_attempt"
            if not self.awaiting and self._fails("close"):
                return "invalid_checkpoint_state"
            opened = self._open(call, "idle")
            opened.awaited = self.awaiting
            opened.restore = self._start(
                Job(kind="restore", stage="reading", opened=opened, call=call)
            )
        elif opened.restore is None:
            return "invalid_phase"
        assert opened.restore is not None
        begun = opened.restore.call
        assert begun is not None
        if begun.arguments != call.arguments:
            return "checkpoint_conflict"
        self._prolong(call)
        call.jobs = (opened.restore,)
        return None

    def _job_answered(self, call: Call) -> Answer | None:
        (job,) = call.jobs
        if job.ended:
            return job.answer
        return "deadline_exceeded" if self.now >= call.deadline else None

    def _resume(self, call: Call) -> Answer | None:
        opened = self.opened
        known = call.checkpoint_id in self.fenced or call.undo
        if call.checkpoint_id in self.undone and not call.undo:
            return "stale_checkpoint"
        if opened is None:
            if self.awaiting and call.start_afresh:
                self._refuse(call.scope or ())
                self.awaiting = False
            elif self.awaiting and not known:
                return "invalid_phase"
        if opened is None or (
            call.checkpoint_id in self.fenced and call.checkpoint_id != opened.checkpoint_id
        ):
            # Nothing of it is open: it is fenced, and that is all.
            self.fenced.setdefault(call.checkpoint_id, ())
            call.jobs = self.fenced[call.checkpoint_id]
            call.idempotent = True
            return None
        if (call.checkpoint_id, call.nonce) != (opened.checkpoint_id, opened.nonce):
            return "checkpoint_conflict"
        call.opened = opened
        if call.undo and opened.restore is not None:
            self._take_back(opened)
        elif not opened.publishing:
            self._end(opened)
        return None

    def _resumed(self, call: Call) -> Answer | None:
        if call.opened is not None:
            if not call.opened.publishing:
                self._end(call.opened)
                call.jobs = self.fenced[call.checkpoint_id]
            elif self.now < call.deadline:
                return None
            else:
                return "deadline_exceeded"
        if all(job.ended for job in call.jobs):
            undo = None if call.opened is None else call.opened.undo
            if undo is not None and undo.answer is not None:
                return undo.answer
            return ("idle", call.idempotent)
        return "deadline_exceeded" if self.now >= call.deadline else None

    def _retire(self, call: Call) -> Answer | None:
        if self.awaiting:
            return "invalid_phase"
        assert call.scope is not None
        self._refuse(call.scope)
        jobs = []
        for attempt in call.scope:
            under_way = [j for j in self.jobs if j.attempt == attempt and not j.ended]
            if not under_way:
                under_way = [self._start(Job(kind="retire", stage="waiting", attempt=attempt))]
            jobs += under_way
        call.jobs = tuple(jobs)
        return None

    def _retired(self, call: Call) -> Answer | None:
        assert call.scope is not None
        if all(job.ended for job in call.jobs):
            return ("retired", tuple(map(key, call.scope)))
        return "deadline_exceeded" if self.now >= call.deadline else None

    def _forget(self, call: Call) -> Answer | None:
        if self.awaiting:
            return "invalid_phase"
        retiring = {job.attempt for job in self.jobs if job.attempt is not None and not job.ended}
        if any(rollout in call.rollouts for rollout, _ in self.running | self.stopping | retiring):
            return "retire_incomplete"
        for rollout in call.rollouts:
            self.marks.pop(rollout, None)
            self.epochs = {a: epoch for a, epoch in self.epochs.items() if a[0] != rollout}
        return ("forgotten", tuple(sorted(set(call.rollouts))))

    # -- the end of a checkpoint --------------------------------------------------------------

    def _end(self, opened: Opened) -> None:
        """A resume, or the lease: the id is fenced, and all that can be stopped is (CTL-10)."""
        if self.opened is not opened or opened.resumed:
            return
        opened.resumed = True
        self.fenced[opened.checkpoint_id] = opened.jobs
        was_installing = opened.installing
        for job in opened.jobs:
            self._stop(job)
        if not was_installing:
            self._let_go(opened)
        elif not opened.installing:
            self.ending = opened

    def _take_back(self, opened: Opened) -> None:
        """The id is fenced at once; the gate opens when nothing is left of the restore."""
        if opened.undo is None or opened.undo.answer is not None:
            opened.undo = self._start(Job(kind="undo", stage="undoing", opened=opened))
        opened.resumed = True
        self.fenced[opened.checkpoint_id] = opened.jobs
        self.undone.add(opened.checkpoint_id)
        assert opened.restore is not None
        self._stop(opened.restore)

    def _stop(self, job: Job) -> None:
        if job.kind == "undo":
            return
        job.stopped = True
        if not (self.stubborn and job.stage in ("exporting", "installing")) and not job.ended:
            job.end(ABORTED)

    def _let_go(self, opened: Opened) -> None:
        if self.opened is opened:
            self.opened = None

    def _lease_expires(self) -> bool:
        opened = self.opened
        if opened is None or self.now < opened.lease or opened.publishing:
            return False
        if opened.restore is None:
            self._end(opened)
            return True
        if self.now < opened.undo_again or (opened.resumed and opened.undo is None):
            return False
        # A restore without its resume is none.
        opened.undo_again = self.now + UNDO_AGAIN_S
        self._take_back(opened)
        return True

    # -- jobs ---------------------------------------------------------------------------------

    def _start(self, job: Job) -> Job:
        self.jobs.append(job)
        return job

    def _step(self, job: Job) -> bool:
        """Take a job one stage further; False: it cannot go on."""
        door = "releasing" if job.stage == "freeing" else job.stage
        if job.ended or door in self.shut:
            return False
        step = {
            "settling": self._settled,
            "exporting": self._exported,
            "writing": self._written,
            "publishing": self._published,
            "releasing": self._released,
            "reading": self._read,
            "installing": self._installed,
            "undoing": self._undo,
            "freeing": self._freed,
            "waiting": self._stop_attempt,
            "cleaning_up": self._cleaned_up,
        }
        return step[job.stage](job)

    def _settled(self, job: Job) -> bool:
        assert job.opened is not None
        if self._fails("settle"):
            # Closing or waiting failed: admission is open again, the id may ask again (CTL-7).
            self._let_go(job.opened)
            job.end("invalid_checkpoint_state")
        else:
            job.end()
        return True

    def _exported(self, job: Job) -> bool:
        assert job.opened is not None
        assert job.call is not None
        if job.stopped:
            job.end(ABORTED)
        elif self._fails("export"):
            # Nothing was written: it may be asked again, also with another scope.
            job.opened.commit = None
            job.end("invalid_checkpoint_state")
        else:
            scope = job.call.scope
            notes = {**self.parked, **self.restored}
            job.exported = tuple(
                (attempt, note)
                for attempt, note in sorted(notes.items())
                if (scope is None or attempt in scope) and attempt not in self.stopping
            )
            job.stage = "writing"
        return True

    def _written(self, job: Job) -> bool:
        assert job.opened is not None
        if self.disk == "refused":
            job.opened.commit = None
            job.end("invalid_checkpoint_state")
        elif self.disk == "full":
            job.opened.failed = "invalid_checkpoint_state"
            job.end("invalid_checkpoint_state")
        else:
            job.stage = "publishing"
        return True

    def _published(self, job: Job) -> bool:
        assert job.opened is not None
        assert job.call is not None
        part = (job.opened.checkpoint_id, job.exported)
        if self.published.setdefault(job.call.directory, part) == part:
            job.stage = "releasing"
        else:
            job.opened.failed = "invalid_checkpoint_state"
            job.end("invalid_checkpoint_state")
        return True

    def _released(self, job: Job) -> bool:
        assert job.opened is not None
        assert job.call is not None
        scope = job.call.scope
        # What fails to be freed stays; what is published is whole without.
        if not self._fails("release") and scope is not None:
            self.restored = {a: note for a, note in self.restored.items() if a in scope}
        job.opened.phase = "committed"
        job.end(("committed", tuple(sorted(key(attempt) for attempt, _ in job.exported))))
        return True

    def _read(self, job: Job) -> bool:
        assert job.opened is not None
        assert job.call is not None
        if self.disk is not None or job.call.directory not in self.published:
            self._let_go(job.opened)
            job.end("invalid_checkpoint_state")
        else:
            job.stage = "installing"
        return True

    def _installed(self, job: Job) -> bool:
        """All of it or nothing, and the fences in the same instant (CTL-5, CTL-14)."""
        assert job.opened is not None
        assert job.call is not None
        scope = job.call.scope
        assert scope is not None
        if self._fails("install"):
            job.end("invalid_checkpoint_state")
            self._let_go(job.opened)
            return True
        source, notes = self.published[job.call.directory]
        for rollout, number in scope:
            self.marks[rollout] = max(self.marks.get(rollout, -1), number)
            self.epochs[rollout, number + 1] = job.call.epoch
        for (rollout, number), note in notes:
            if (rollout, number) in scope:
                self.restored[rollout, number + 1] = note
        job.opened.phase = "restored"
        self.awaiting = False
        replacements = sorted(key((rollout, number + 1)) for rollout, number in scope)
        job.end(("restored", source, tuple(replacements)))
        if job.opened.resumed and job.opened.undo is None:
            # It could not be stopped: then it is a restore that was resumed.
            self._let_go(job.opened)
        return True

    def _undo(self, job: Job) -> bool:
        assert job.opened is not None
        assert job.opened.restore is not None
        if not job.opened.restore.ended:
            return False
        if job.opened.phase == "restored":
            job.stage = "freeing"
        else:
            self._let_go(job.opened)
            job.end()
        return True

    def _freed(self, job: Job) -> bool:
        """As before the restore, but for the marks, which are never lowered."""
        assert job.opened is not None
        assert job.opened.restore is not None
        assert job.opened.restore.call is not None
        if self._fails("release"):
            # The gate stays closed; the same resume tries again, and so does the lease.
            job.end("invalid_checkpoint_state")
            return True
        for rollout, number in job.opened.restore.call.scope or ():
            self.restored.pop((rollout, number + 1), None)
        self.awaiting = job.opened.awaited
        self._let_go(job.opened)
        job.end()
        return True

    def _stop_attempt(self, job: Job) -> bool:
        assert job.attempt is not None
        restore = None if self.opened is None else self.opened.restore
        if restore is not None and not restore.ended:
            return False
        self._refuse([job.attempt])
        job.stage = "cleaning_up"
        return True

    def _cleaned_up(self, job: Job) -> bool:
        assert job.attempt is not None
        rollout, number = job.attempt
        gone = {
            attempt
            for attempt in {*self.running, *self.parked, *self.stopping, *self.restored}
            if attempt[0] == rollout and attempt[1] <= number
        }
        self.running -= gone
        self.stopping -= gone
        for attempt in gone:
            self.parked.pop(attempt, None)
            self.restored.pop(attempt, None)
        job.end()
        return True

    # -- the participant ----------------------------------------------------------------------

    def _fails(self, where: str) -> bool:
        if self.failure != where:
            return False
        self.failure = None
        return True

    def _is_stale(self, attempt: Attempt) -> bool:
        rollout, number = attempt
        return number <= self.marks.get(rollout, -1)

    def _refuse(self, attempts: Iterable[Attempt]) -> None:
        for rollout, number in attempts:
            self.marks[rollout] = max(self.marks.get(rollout, -1), number)
        self.stopping |= {a for a in {*self.running, *self.parked} if self._is_stale(a)}

    def _blockers(self) -> tuple[str, ...]:
        return tuple(key(attempt) for attempt in sorted(self.running | self.stopping))

    def _gate(self) -> bool:
        passed = False
        for number, (attempt, epoch) in list(self.at_gate.items()):
            superseded = epoch is not None and epoch != self.epochs.get(attempt, epoch)
            if superseded or self._is_stale(attempt):
                self.arrivals[number] = "stale_attempt"
            elif not self.closed:
                self.arrivals[number] = "entered"
                self.restored.pop(attempt, None)
                if attempt not in self.parked:
                    self.running.add(attempt)
            else:
                continue
            del self.at_gate[number]
            passed = True
        return passed
