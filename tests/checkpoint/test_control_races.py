"""What happens to the control plane at the same moment, and what will not stop when it is told to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.checkpoint.participant import Export
from gymtrio.errors import (
    CheckpointConflict,
    CheckpointError,
    DeadlineExceeded,
    InvalidCheckpointState,
    InvalidPhase,
    RetireIncomplete,
    StaleAttempt,
    StaleCheckpoint,
)
from gymtrio.ids import CaptureKey, CheckpointId, EpisodeId
from gymtrio.storage.records import Record
from gymtrio.wire.control import ResumeReply, ResumeRequest
from tests.helpers.controlled import open_controlled
from tests.helpers.gated import begin
from tests.helpers.memory_archive import Door, MemoryArchive
from tests.helpers.plane import GRACE_S, Plane, episode, open_plane
from tests.helpers.scripted_participant import ScriptedParticipant

R0, R1 = episode("r0"), episode("r1")


class Stubborn(ScriptedParticipant):
    """Its export and its install do not let themselves be cancelled, as when a thread does them."""

    async def export(self, scope: frozenset[CaptureKey] | None) -> Export:
        with trio.CancelScope(shield=True):
            return await super().export(scope)

    async def install(
        self,
        records: Sequence[Record],
        scope: Sequence[EpisodeId],
        *,
        execution_epoch: str | None = None,
    ) -> None:
        with trio.CancelScope(shield=True):
            await super().install(records, scope, execution_epoch=execution_epoch)


class ClosesHalfway(ScriptedParticipant):
    """Closes its gate and fails then, once."""

    fails = True

    def close(self) -> None:
        super().close()
        if self.fails:
            self.fails = False
            raise CheckpointError("half way")


class Unsure(ScriptedParticipant):
    """Cannot say whether it is ready, once it is told to."""

    broken = False

    def ready(self) -> bool:
        if self.broken:
            raise ZeroDivisionError
        return super().ready()


async def committed(*names: str) -> MemoryArchive:
    archive = MemoryArchive()
    async with open_plane(archive=archive) as plane:
        plane.participant.parked |= {episode(name): f"note of {name}" for name in names}
        await plane.prepare()
        await plane.commit()
    return archive


# -- what raises ------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["prepare", "restore"])
async def test_a_close_that_fails_half_way_reopens(
    operation: str, autojump_clock: MockClock
) -> None:
    """CTL-7, CTL-14: nothing is open, so nothing but this would ever open the gate again."""
    participant = ClosesHalfway()
    async with open_controlled(participant, await committed("r0")) as plane:
        call: Callable[[], Awaitable[object]] = (
            plane.prepare if operation == "prepare" else lambda: plane.restore(R0)
        )
        with pytest.raises(CheckpointError, match="half way"):
            await call()
        assert (plane.phase, participant.admission.closed) == ("idle", False)
        await call()


async def test_a_wait_that_raises_reopens(autojump_clock: MockClock) -> None:
    """CTL-7: also when it is a fault of the participant."""
    participant = Unsure()
    async with open_controlled(participant, MemoryArchive()) as plane:
        participant.broken = True
        with pytest.raises(ZeroDivisionError):
            await plane.prepare()
        assert (plane.phase, participant.admission.closed) == ("idle", False)
        participant.broken = False
        assert (await plane.prepare()).phase == "prepared"


async def test_everyone_who_waits_is_told_that_settling_failed(autojump_clock: MockClock) -> None:
    """CTL-7, CTL-9: a repeated prepare joins the first, and must not take its failure for a resume."""
    async with open_plane() as plane, trio.open_nursery() as nursery:
        plane.participant.settling.shut()
        plane.participant.failure, plane.participant.fail_at = CheckpointError("no"), "settle"
        first = await begin(nursery, plane.prepare)
        again = await begin(nursery, plane.prepare)
        plane.participant.settling.let_go()
        await wait_all_tasks_blocked()
        assert [str(answer) for answer in (*first, *again)] == ["no", "no"]
        assert not plane.participant.admission.closed


async def test_settling_that_fails_when_nobody_waits_reopens_at_once(
    autojump_clock: MockClock,
) -> None:
    """CTL-7: not at the next call, which may never come."""
    async with open_plane() as plane:
        plane.participant.settling.shut()
        plane.participant.failure, plane.participant.fail_at = CheckpointError("no"), "settle"
        assert (await plane.prepare(timeout_s=1)).phase == "preparing"
        plane.participant.settling.let_go()
        await wait_all_tasks_blocked()
        assert (plane.phase, plane.participant.admission.closed) == ("idle", False)
        assert (await plane.prepare()).phase == "prepared"


# -- resume -----------------------------------------------------------------------------------


async def test_a_repeated_resume_waits_for_what_the_first_one_stopped(
    autojump_clock: MockClock,
) -> None:
    """CTL-9, COORD-6, I31: the reply says that nothing runs, whichever of the calls it answers."""
    participant = Stubborn()
    async with open_controlled(participant, MemoryArchive()) as plane, trio.open_nursery() as calls:
        await plane.prepare()
        participant.exporting.shut()
        await begin(calls, plane.commit)
        first = await begin(calls, plane.resume)
        again = await begin(calls, plane.resume)
        assert not participant.admission.closed
        assert first == again == []
        participant.exporting.let_go()
        await wait_all_tasks_blocked()
        assert [getattr(answer, "idempotent", answer) for answer in (*first, *again)] == [
            False,
            True,
        ]
        assert not plane.archive.parts


async def test_a_resume_is_bounded_by_its_deadline(autojump_clock: MockClock) -> None:
    """CTL-8: what will not stop is named, and the resume has taken effect all the same."""
    participant = Stubborn()
    async with open_controlled(participant, MemoryArchive()) as plane, trio.open_nursery() as calls:
        await plane.prepare()
        participant.exporting.shut()
        await begin(calls, plane.commit)
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match="commit"):
                await plane.resume(timeout_s=1)
            assert not participant.admission.closed
        participant.exporting.let_go()
        await plane.resume()


async def test_a_resume_answers_idle_although_the_next_checkpoint_has_begun(
    autojump_clock: MockClock,
) -> None:
    """CTL-1: it answers for its own checkpoint."""
    participant = Stubborn()
    async with open_controlled(participant, MemoryArchive()) as plane, trio.open_nursery() as calls:
        await plane.prepare()
        participant.exporting.shut()
        await begin(calls, plane.commit)
        resume = await begin(calls, plane.resume)
        await plane.prepare("c2")
        participant.exporting.let_go()
        await wait_all_tasks_blocked()
        assert [getattr(answer, "phase", answer) for answer in resume] == ["idle"]
        assert plane.phase == "prepared"


@pytest.mark.parametrize("recover", [False, True])
async def test_the_gate_opens_when_an_install_has_ended_and_not_before(
    recover: bool, autojump_clock: MockClock
) -> None:
    """CTL-14, HARD-3: an old attempt is not served by a server that is about to refuse it."""
    participant = Stubborn()
    async with (
        open_controlled(participant, await committed("r0"), recover=recover) as plane,
        trio.open_nursery() as calls,
    ):
        participant.installing.shut()
        await begin(calls, lambda: plane.restore(R0))
        arrival = await begin(calls, lambda: participant.admission.enter(R0))
        resume = await begin(calls, lambda: plane.resume("x1"))
        assert participant.admission.closed
        assert resume == arrival == []
        with pytest.raises(StaleCheckpoint):
            await plane.restore(R0)
        with pytest.raises(InvalidPhase if recover else CheckpointConflict):
            await plane.prepare("c2")
        participant.installing.let_go()
        await wait_all_tasks_blocked()
        # It could not be stopped any more: then it is a restore that was resumed.
        assert len(participant.restored) == 1
        assert [type(answer).__name__ for answer in (*resume, *arrival)] == [
            "ResumeReply",
            "StaleAttempt",
        ]
        assert not participant.admission.closed
        assert not plane.control.status().awaiting_restore


async def test_a_resume_in_the_instant_in_which_the_install_goes_on(
    autojump_clock: MockClock,
) -> None:
    """CTL-10, CTL-14: whoever is first, the server is restored and open, or neither."""
    for _ in range(8):
        participant = ScriptedParticipant()
        async with (
            open_controlled(participant, await committed("r0"), recover=True) as plane,
            trio.open_nursery() as calls,
        ):
            participant.installing.shut()
            await begin(calls, lambda: plane.restore(R0))
            calls.start_soon(plane.resume, "x1")
            participant.installing.let_go()
            await wait_all_tasks_blocked()
            awaiting = plane.control.status().awaiting_restore
            assert awaiting is participant.admission.closed
            assert awaiting is (len(participant.restored) == 0)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_resume_of_a_restore_takes_effect_without_its_caller(
    leaves: bool, autojump_clock: MockClock
) -> None:
    """CTL-10: cancelled, it is complete all the same; past its deadline as well."""
    participant = Stubborn()
    async with open_controlled(participant, await committed("r0")) as plane:
        participant.installing.shut()
        with pytest.raises(DeadlineExceeded):
            await plane.restore(R0, timeout_s=1)
        if leaves:
            with trio.move_on_after(1):
                await plane.resume("x1")
        else:
            with pytest.raises(DeadlineExceeded, match="restore"):
                await plane.resume("x1", timeout_s=1)
        participant.installing.let_go()
        await wait_all_tasks_blocked()
        assert (plane.phase, participant.admission.closed) == ("idle", False)


async def test_a_lease_that_expires_during_an_install_ends_it(autojump_clock: MockClock) -> None:
    """CTL-11, I30: once, and the gate opens when the install has ended."""
    participant = Stubborn()
    async with open_controlled(participant, await committed("r0")) as plane:
        participant.installing.shut()
        with pytest.raises(DeadlineExceeded):
            await plane.restore(R0, timeout_s=1)
        await trio.sleep(GRACE_S + 10)
        assert participant.admission.closed
        with pytest.raises(StaleCheckpoint):
            await plane.renew("x1")
        participant.installing.let_go()
        await wait_all_tasks_blocked()
        assert (plane.phase, participant.admission.closed) == ("idle", False)


async def test_a_resume_that_lost_its_reply_may_be_repeated_on_a_recovering_server(
    autojump_clock: MockClock,
) -> None:
    """COORD-6, HARD-6: it is the resume of the same id, and opens nothing."""
    async with open_plane(archive=await committed("r0"), recover=True) as plane:
        plane.participant.installing.shut()
        with pytest.raises(DeadlineExceeded):
            await plane.restore(R0, timeout_s=1)
        assert not (await plane.resume("x1")).idempotent
        assert (await plane.resume("x1")).idempotent
        assert plane.participant.admission.closed
        with pytest.raises(InvalidPhase):
            await plane.resume("x2")


async def test_resuming_again_keeps_an_id_fenced_the_longer(autojump_clock: MockClock) -> None:
    """CTL-4, I12: the last 64 resumed, counted from the last time."""
    async with open_plane() as plane:
        for number in range(64):
            await plane.resume(f"c{number}")
        await plane.resume("c0")
        await plane.resume("c64")
        with pytest.raises(StaleCheckpoint):
            await plane.prepare("c0")
        assert (await plane.prepare("c1")).phase == "prepared"


# -- lease ------------------------------------------------------------------------------------


async def test_a_renewal_while_an_expired_checkpoint_is_published_holds(
    autojump_clock: MockClock,
) -> None:
    """CTL-11, HARD-2: who was told that the lease is longer may rely on it."""
    async with open_plane() as plane, trio.open_nursery() as calls:
        await plane.prepare(timeout_s=1)
        plane.archive.publishing.shut()
        await begin(calls, lambda: plane.commit(timeout_s=1))
        await trio.sleep(GRACE_S + 5)
        await plane.renew(timeout_s=100)
        plane.archive.publishing.let_go()
        await wait_all_tasks_blocked()
        assert plane.phase == "committed"
        await trio.sleep(99 + GRACE_S)
        assert plane.phase == "committed"
        await trio.sleep(2)
        assert plane.phase == "idle"


async def test_an_expired_checkpoint_that_is_published_ends_after_it(
    autojump_clock: MockClock,
) -> None:
    """CTL-11, I30: and nothing appears later."""
    async with open_plane() as plane, trio.open_nursery() as calls:
        await plane.prepare(timeout_s=1)
        plane.archive.publishing.shut()
        await begin(calls, lambda: plane.commit(timeout_s=1))
        await trio.sleep(GRACE_S + 5)
        assert plane.participant.admission.closed
        plane.archive.publishing.let_go()
        await wait_all_tasks_blocked()
        assert (plane.phase, plane.participant.admission.closed) == ("idle", False)
        assert len(plane.archive.parts) == 1


# -- phases -----------------------------------------------------------------------------------


async def test_a_commit_of_what_was_restored_is_told_the_phase(autojump_clock: MockClock) -> None:
    """CTL-3, CTL-13: there is no row for it, and no other arguments would help."""
    async with open_plane(archive=await committed("r0")) as plane:
        await plane.restore(R0)
        with pytest.raises(InvalidPhase, match="restored"):
            await plane.commit("x1")


# -- retire and forget ------------------------------------------------------------------------


async def test_a_retire_during_an_install_frees_what_it_puts_in(autojump_clock: MockClock) -> None:
    """CTL-12, I10: it answers when nothing of the attempt is there, and nothing comes later."""
    async with (
        open_plane(archive=await committed("r0", "r1")) as plane,
        trio.open_nursery() as calls,
    ):
        plane.participant.installing.shut()
        await begin(calls, lambda: plane.restore(R0, R1))
        retire = await begin(calls, lambda: plane.retire(episode("r0", 1)))
        assert retire == []
        plane.participant.installing.let_go()
        await wait_all_tasks_blocked()
        assert len(retire) == 1
        assert plane.participant.restored.waiting() == ["r1-a1"]
        await plane.resume("x1")
        await plane.prepare()
        assert (await plane.commit(directory="e")).episode_ids == ("r1-a1",)


async def test_a_retire_during_an_install_that_is_stopped_answers(
    autojump_clock: MockClock,
) -> None:
    """CTL-10, CTL-12."""
    async with open_plane(archive=await committed("r0")) as plane, trio.open_nursery() as calls:
        plane.participant.installing.shut()
        await begin(calls, lambda: plane.restore(R0))
        retire = await begin(calls, lambda: plane.retire(episode("r0", 1)))
        await plane.resume("x1")
        await wait_all_tasks_blocked()
        assert [getattr(answer, "retired", answer) for answer in retire] == [("r0-a1",)]


async def test_a_restore_of_what_could_not_continue_is_refused(autojump_clock: MockClock) -> None:
    """CTL-5, CTL-14, I7: a replacement that was retired would be installed and never be served."""
    async with open_plane(archive=await committed("r0", "r1")) as plane:
        await plane.restore(R0, R1)
        # As a controller does when the restore failed elsewhere (COORD-3).
        await plane.retire(episode("r0", 1), episode("r1", 1))
        await plane.resume("x1")
        with pytest.raises(StaleAttempt, match="r0-a1, r1-a1"):
            await plane.restore(R0, R1, name="x2")
        assert (plane.phase, plane.participant.admission.closed) == ("idle", False)
        await plane.forget("r0", "r1")
        assert (await plane.restore(R0, R1, name="x2")).phase == "restored"


async def test_forget_is_refused_while_a_retirement_runs(autojump_clock: MockClock) -> None:
    """CTL-12: whatever the participant says runs: its own freeing is something of it."""
    async with open_plane() as plane:
        plane.participant.parked[R0] = "a"
        plane.participant.cleaning_up.shut()
        with pytest.raises(DeadlineExceeded):
            await plane.retire(R0, timeout_s=1)
        with pytest.raises(RetireIncomplete, match="r0"):
            await plane.forget("r0", "r1")
        await plane.forget("r1")
        plane.participant.cleaning_up.let_go()
        await plane.retire(R0)
        await plane.forget("r0")
        assert plane.control.status().retired_rollouts == 0


# -- a restore that is taken back ---------------------------------------------------------------


class SlowToFree(ScriptedParticipant):
    """Frees restored state only when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.freeing = Door()

    async def release(self, episode_ids: Sequence[EpisodeId]) -> None:
        await self.freeing.pass_through()
        self.restored.drop(episode_ids)


async def undo(plane: Plane, name: str = "x1", timeout_s: float = 10.0) -> ResumeReply:
    return await plane.control.resume(
        ResumeRequest(
            checkpoint_id=CheckpointId(name),
            deadline_ts=plane.clock.now_s() + timeout_s,
            undo_restore=True,
        )
    )


@pytest.mark.parametrize("recover", [False, True])
@pytest.mark.parametrize("by", ["resume", "lease"])
async def test_the_gate_opens_when_a_restore_was_taken_back_and_not_before(
    by: str, recover: bool, autojump_clock: MockClock
) -> None:
    """COORD-3, HARD-3: whoever else ends it meanwhile; a server that waited waits again, closed. A
    resume that counts on what was restored is told that it is gone."""
    participant = SlowToFree()
    async with (
        open_controlled(participant, await committed("r0"), recover=recover) as plane,
        trio.open_nursery() as calls,
    ):
        await plane.restore(R0)
        participant.freeing.shut()
        undone = await begin(calls, lambda: undo(plane, timeout_s=2 * GRACE_S))
        if by == "resume":
            resumed = await begin(calls, lambda: plane.resume("x1"))
            assert len(resumed) == 1
        else:
            resumed = []
            await trio.sleep(GRACE_S + 11)
        assert participant.admission.closed
        participant.freeing.let_go()
        await wait_all_tasks_blocked()
        assert [getattr(answer, "phase", answer) for answer in undone] == ["idle"]
        assert all(isinstance(answer, StaleCheckpoint) for answer in resumed)
        assert len(participant.restored) == 0
        assert plane.control.status().awaiting_restore is recover
        assert participant.admission.closed is recover
        with pytest.raises(StaleCheckpoint):
            await plane.restore(R0)
        assert (await plane.restore(R0, name="x2")).phase == "restored"


@pytest.mark.parametrize("recover", [False, True])
@pytest.mark.parametrize("installed", [False, True])
async def test_a_restore_whose_lease_ends_before_its_resume_is_undone(
    installed: bool, recover: bool, autojump_clock: MockClock
) -> None:
    """HARD-3, CTL-11, CTL-14, COORD-3: other servers may have failed it, and nobody is left to tell. A
    server that was started to be restored waits again; a late resume is told."""
    async with open_plane(archive=await committed("r0"), recover=recover) as plane:
        if not installed:
            plane.participant.installing.shut()
            with pytest.raises(DeadlineExceeded):
                await plane.restore(R0)
        else:
            await plane.restore(R0)
        await trio.sleep(GRACE_S + 11)
        assert plane.phase == "idle"
        assert len(plane.participant.restored) == 0
        assert plane.participant.admission.closed is recover
        assert plane.control.status().awaiting_restore is recover
        with pytest.raises(StaleCheckpoint, match="not resumed in time"):
            await plane.resume("x1")
        with pytest.raises(StaleCheckpoint):
            await plane.restore(R0)
        assert plane.participant.admission.closed is recover
        if not installed:
            plane.participant.installing.let_go()
        await plane.restore(R0, name="x2")
        await plane.resume("x2")
        assert list(dict(plane.participant.restored)) == [episode("r0", 1)]


class FailsToFree(ScriptedParticipant):
    """Cannot free what was restored, so many times."""

    failures = 1

    async def release(self, episode_ids: Sequence[EpisodeId]) -> None:
        await trio.lowlevel.checkpoint()
        if self.failures:
            self.failures -= 1
            raise InvalidCheckpointState("the server's hook failed")
        self.restored.drop(episode_ids)


async def test_what_a_commit_cannot_free_costs_no_checkpoint(autojump_clock: MockClock) -> None:
    """CTL-13, I8: it is published already; what was left out stays restored, for the next commit to
    decide."""
    participant = FailsToFree()
    archive = await committed("r0", "r1")
    async with open_controlled(participant, archive) as plane:
        await plane.restore(R0, R1)
        await plane.resume("x1")
        for name, left in (("c2", 2), ("c3", 1)):
            await plane.prepare(name)
            reply = await plane.commit(name, (episode("r0", 1),), directory=name)
            assert (reply.phase, reply.episode_ids) == ("committed", ("r0-a1",))
            assert len(participant.restored) == left
            await plane.resume(name)


@pytest.mark.parametrize("by", ["resume", "lease"])
async def test_an_undo_that_fails_is_told_and_tried_again(
    by: str, autojump_clock: MockClock
) -> None:
    """COORD-3, CTL-14: until then the gate stays closed: what is restored must not be served."""
    participant = FailsToFree()
    async with open_controlled(participant, await committed("r0")) as plane:
        await plane.restore(R0)
        if by == "resume":
            with pytest.raises(InvalidCheckpointState, match="hook failed"):
                await undo(plane)
            assert participant.admission.closed
            assert len(participant.restored) == 1
            await undo(plane)
        else:
            await trio.sleep(GRACE_S + 11)
            assert participant.admission.closed
            await trio.sleep(11)
        assert not participant.admission.closed
        assert (plane.phase, len(participant.restored)) == ("idle", 0)


async def test_a_restore_that_fails_while_it_is_taken_back_is_fenced(
    autojump_clock: MockClock,
) -> None:
    """I12, HARD-8: a late duplicate of it must not bring it back."""
    async with open_plane(archive=await committed("r0")) as plane, trio.open_nursery() as calls:
        plane.participant.installing.shut()
        plane.participant.failure = InvalidCheckpointState("bad record")
        plane.participant.fail_at = "install"
        await begin(calls, lambda: plane.restore(R0))
        calls.start_soon(undo, plane)
        plane.participant.installing.let_go()
        await wait_all_tasks_blocked()
        assert (plane.phase, plane.participant.admission.closed) == ("idle", False)
        with pytest.raises(StaleCheckpoint):
            await plane.restore(R0)


async def test_taking_back_what_never_arrived_fences_it(autojump_clock: MockClock) -> None:
    """HARD-6, HARD-8: the restore may still be under way to a server that waits for another one."""
    async with open_plane(archive=await committed("r0"), recover=True) as plane:
        assert (await undo(plane)).idempotent
        assert plane.participant.admission.closed
        with pytest.raises(StaleCheckpoint):
            await plane.restore(R0)
        assert (await plane.restore(R0, name="x2")).phase == "restored"


async def test_a_late_start_afresh_does_not_open_what_is_being_restored(
    autojump_clock: MockClock,
) -> None:
    """HARD-3: what is open now is not its business."""
    async with open_plane(archive=await committed("r0"), recover=True) as plane:
        plane.participant.installing.shut()
        with pytest.raises(DeadlineExceeded):
            await plane.restore(R0, timeout_s=1)
        await plane.resume("x1")
        with pytest.raises(DeadlineExceeded):
            await plane.restore(R0, name="x2", timeout_s=1)
        assert (await plane.resume("x1", start_afresh=True)).idempotent
        assert plane.participant.admission.closed
        assert plane.control.status().awaiting_restore
