"""The control plane's promises, one by one, on virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.errors import (
    CheckpointConflict,
    CheckpointError,
    DeadlineExceeded,
    DirectoryRefused,
    GymtrioError,
    InvalidCheckpointState,
    InvalidPhase,
    InvalidRequest,
    RetireIncomplete,
    StaleAttempt,
    StaleCheckpoint,
)
from gymtrio.limits import WAKE_SLICE_TASKS
from gymtrio.storage.publication import Publication
from tests.helpers.halting_disk import loop_meter
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.plane import GRACE_S, episode, open_plane

R0, R1 = episode("r0"), episode("r1")


async def begin(nursery: trio.Nursery, call: Callable[[], Awaitable[object]]) -> list[object]:
    """Start a call that is going to wait; its answer or error appears in the list."""
    answers: list[object] = []

    async def run() -> None:
        try:
            answers.append(await call())
        except GymtrioError as error:
            answers.append(error)

    nursery.start_soon(run)
    await wait_all_tasks_blocked()
    return answers


# -- prepare ----------------------------------------------------------------------------------


async def test_a_ready_participant_is_prepared_and_stays_closed(autojump_clock: MockClock) -> None:
    """CTL-1, CTL-3: prepare closes admission; repeated, it answers the same and closes once."""
    async with open_plane() as plane:
        assert (await plane.prepare()).phase == "prepared"
        assert (await plane.prepare()).phase == "prepared"
        assert plane.participant.closes == 1
        assert plane.participant.admission.closed


async def test_a_blocked_prepare_answers_preparing_and_may_ask_again(
    autojump_clock: MockClock,
) -> None:
    """CTL-7: 200 with the blockers at the deadline, admission closed, same id becomes prepared."""
    async with open_plane() as plane:
        plane.participant.running.add(R0)
        reply = await plane.prepare(timeout_s=2)
        assert (reply.phase, reply.report.blockers) == ("preparing", ("r0",))
        assert plane.participant.admission.closed
        plane.participant.finish(R0, "n")
        assert (await plane.prepare()).phase == "prepared"


async def test_blockers_are_listed_once_for_a_reply_however_many_park(
    autojump_clock: MockClock,
) -> None:
    """STEP-6: a prepare looks again at each change; listing what blocks each time is quadratic."""
    async with open_plane() as plane, trio.open_nursery() as nursery:
        blockers = [episode(f"r{number}") for number in range(20)]
        plane.participant.running.update(blockers)

        async def park_each_second() -> None:
            for blocker in blockers:
                await trio.sleep(1)
                plane.participant.finish(blocker, "n")

        nursery.start_soon(park_each_second)
        reply = await plane.prepare(timeout_s=9.5)
        assert (reply.phase, reply.report.blocker_count) == ("preparing", 11)
        assert plane.participant.reports == 1
        assert (await plane.prepare(timeout_s=60)).phase == "prepared"
        assert plane.participant.reports == 2


async def test_a_prepare_becomes_ready_as_soon_as_the_blocker_parks(
    autojump_clock: MockClock,
) -> None:
    """CTL-7: woken by the change, not by the poll."""
    async with open_plane() as plane, trio.open_nursery() as nursery:
        plane.participant.running.add(R0)
        answers = await begin(nursery, plane.prepare)
        before = trio.current_time()
        plane.participant.finish(R0, "n")
        await wait_all_tasks_blocked()
        assert [getattr(a, "phase", a) for a in answers] == ["prepared"]
        assert trio.current_time() == before


async def test_a_change_that_nobody_announced_is_found_by_looking(
    autojump_clock: MockClock,
) -> None:
    """CTL-7: the wait looks again at least once a second."""
    async with open_plane() as plane, trio.open_nursery() as nursery:
        plane.participant.running.add(R0)
        answers = await begin(nursery, plane.prepare)
        plane.participant.running.clear()
        await trio.sleep(1.1)
        assert [getattr(a, "phase", a) for a in answers] == ["prepared"]


async def test_resume_status_and_retire_are_served_while_prepare_waits(
    autojump_clock: MockClock,
) -> None:
    """CTL-7, CTL-15: no lock is held; the waiting prepare answers idle after the resume."""
    async with open_plane() as plane, trio.open_nursery() as nursery:
        plane.participant.running |= {R0, R1}
        answers = await begin(nursery, plane.prepare)
        before = trio.current_time()
        assert plane.control.status().report.blocker_count == 2
        await plane.retire(R1)
        await plane.resume()
        await wait_all_tasks_blocked()
        assert [getattr(a, "phase", a) for a in answers] == ["idle"]
        assert trio.current_time() == before
        with pytest.raises(StaleCheckpoint):
            await plane.prepare()


async def test_retire_removes_what_blocks_a_waiting_prepare(autojump_clock: MockClock) -> None:
    """CTL-12: while preparing it is how a controller gets rid of a straggler."""
    async with open_plane() as plane, trio.open_nursery() as nursery:
        plane.participant.running.add(R0)
        answers = await begin(nursery, plane.prepare)
        assert (await plane.retire(R0)).retired == ("r0",)
        await wait_all_tasks_blocked()
        assert [getattr(a, "phase", a) for a in answers] == ["prepared"]


@pytest.mark.parametrize("where", ["close", "settle"])
async def test_a_prepare_that_raises_reopens_admission(
    where: str, autojump_clock: MockClock
) -> None:
    """CTL-7."""
    async with open_plane() as plane:
        plane.participant.failure, plane.participant.fail_at = CheckpointError("no"), where
        with pytest.raises(CheckpointError, match="no"):
            await plane.prepare()
        assert plane.phase == "idle"
        assert not plane.participant.admission.closed
        assert (await plane.prepare()).phase == "prepared"


async def test_a_caller_that_leaves_does_not_stop_a_prepare(autojump_clock: MockClock) -> None:
    """CTL-9: the same id joins what is under way."""
    async with open_plane() as plane:
        plane.participant.settling.shut()
        with trio.move_on_after(1):
            await plane.prepare()
        assert plane.phase == "preparing"
        plane.participant.settling.let_go()
        assert (await plane.prepare()).phase == "prepared"
        assert plane.participant.closes == 1


# -- fencing ----------------------------------------------------------------------------------


async def test_another_id_conflicts_while_one_is_open(autojump_clock: MockClock) -> None:
    """CTL-4: and nothing changes."""
    async with open_plane() as plane:
        await plane.prepare("c1")
        for call in (plane.prepare, plane.renew, plane.commit, plane.resume):
            with pytest.raises(CheckpointConflict, match="c1"):
                await call("c2")
        assert plane.control.status().checkpoint_id == "c1"


async def test_a_resumed_id_is_stale_also_if_it_never_was_open(autojump_clock: MockClock) -> None:
    """CTL-4: resuming an unknown id answers idempotent and fences a delayed prepare of it."""
    async with open_plane() as plane:
        assert (await plane.resume("c9")).idempotent
        with pytest.raises(StaleCheckpoint):
            await plane.prepare("c9")
        assert not plane.participant.admission.closed
        assert (await plane.resume("c9")).idempotent


async def test_the_last_64_resumed_ids_are_remembered(autojump_clock: MockClock) -> None:
    """CTL-4."""
    async with open_plane() as plane:
        for number in range(65):
            await plane.resume(f"c{number}")
        with pytest.raises(StaleCheckpoint):
            await plane.prepare("c1")
        assert (await plane.prepare("c0")).phase == "prepared"


async def test_the_same_id_from_another_controller_conflicts(autojump_clock: MockClock) -> None:
    """HARD-5: a hold is that of one controller; those that send no nonce work as before."""
    async with open_plane() as plane:
        await plane.prepare(nonce="a")
        for call in (plane.prepare, plane.renew, plane.commit, plane.resume):
            for nonce in ("b", None):
                with pytest.raises(CheckpointConflict, match="another controller"):
                    await call(nonce=nonce)
        await plane.resume(nonce="a")


async def test_retired_attempts_are_refused_until_forgotten(autojump_clock: MockClock) -> None:
    """CTL-5: the mark covers earlier attempts, and waiters are woken by it."""
    async with open_plane() as plane, trio.open_nursery() as nursery:
        admission = plane.participant.admission
        await plane.prepare()
        answers = await begin(nursery, lambda: admission.enter(episode("r0", 1)))
        await plane.retire(episode("r0", 2))
        await wait_all_tasks_blocked()
        assert isinstance(answers[0], StaleAttempt)
        await plane.resume()
        for attempt in (0, 1, 2):
            with pytest.raises(StaleAttempt):
                await admission.enter(episode("r0", attempt))
        await admission.enter(episode("r0", 3))
        assert plane.control.status().retired_rollouts == 1
        assert (await plane.forget("r0", name="c2")).forgotten == ("r0",)
        await admission.enter(episode("r0", 0))


async def test_the_mark_is_raised_before_the_stopping_begins(autojump_clock: MockClock) -> None:
    """CTL-5: a retire that fails half way still refuses."""
    async with open_plane() as plane:
        plane.participant.running.add(R0)
        plane.participant.cleaning_up.shut()
        with pytest.raises(DeadlineExceeded):
            await plane.retire(R0, timeout_s=1)
        with pytest.raises(StaleAttempt):
            await plane.participant.admission.enter(R0)


# -- deadlines --------------------------------------------------------------------------------


async def test_a_deadline_that_is_past_changes_nothing(autojump_clock: MockClock) -> None:
    """CTL-8: for every operation alike."""
    async with open_plane() as plane:
        for call in (plane.prepare, plane.renew, plane.commit, plane.resume):
            with pytest.raises(DeadlineExceeded):
                await call(timeout_s=-1)
        for many in (plane.restore, plane.retire):
            with pytest.raises(DeadlineExceeded):
                await many(R0, timeout_s=-1)
        with pytest.raises(DeadlineExceeded):
            await plane.forget("r0", timeout_s=-1)
        assert (plane.phase, plane.participant.closes) == ("idle", 0)
        assert plane.control.status().retired_rollouts == 0


async def test_a_deadline_more_than_a_day_ahead_is_refused(autojump_clock: MockClock) -> None:
    """CTL-8: it is milliseconds, most likely."""
    async with open_plane() as plane:
        with pytest.raises(InvalidRequest, match="ahead"):
            await plane.prepare(timeout_s=25 * 3600)


async def test_a_jump_of_the_wall_clock_moves_no_lease(autojump_clock: MockClock) -> None:
    """CTL-8: inside, time is monotonic."""
    async with open_plane() as plane:
        await plane.prepare(timeout_s=10)
        plane.clock.jump(10_000)
        await trio.sleep(1)
        assert plane.phase == "prepared"
        plane.clock.jump(-20_000)
        await trio.sleep(10 + GRACE_S)
        assert plane.phase == "idle"


# -- commit -----------------------------------------------------------------------------------


async def test_commit_needs_prepared(autojump_clock: MockClock) -> None:
    """CTL-13, CTL-3."""
    async with open_plane() as plane:
        with pytest.raises(InvalidPhase):
            await plane.commit()
        plane.participant.running.add(R0)
        await plane.prepare(timeout_s=1)
        with pytest.raises(InvalidPhase, match="preparing"):
            await plane.commit()


async def test_commit_checks_readiness_again(autojump_clock: MockClock) -> None:
    """CTL-13: what regressed is named."""
    async with open_plane() as plane:
        await plane.prepare()
        plane.participant.running.add(R1)
        with pytest.raises(InvalidPhase, match="no longer ready: r1"):
            await plane.commit()


async def test_commit_answers_what_was_exported_and_replays(autojump_clock: MockClock) -> None:
    """CTL-6, CTL-13: sorted keys, the kind's fields; scope order does not matter on repetition."""
    async with open_plane() as plane:
        plane.participant.parked |= {R1: "b", R0: "a"}
        await plane.prepare()
        reply = await plane.commit(episodes=(R1, R0))
        assert (reply.phase, reply.episode_ids) == ("committed", ("r0", "r1"))
        assert reply.extra == {"notes": 2}
        assert reply.manifest["checkpoint_id"] == "c1"
        assert await plane.commit(episodes=(R0, R1)) == reply
        assert plane.archive.writes == plane.participant.exports == 1
        for arguments in ({"directory": "e"}, {"episodes": (R0,)}, {"episodes": None}):
            with pytest.raises(CheckpointConflict):
                await plane.commit(**({"episodes": (R0, R1)} | arguments))
        assert (await plane.prepare()).phase == "committed"


async def test_records_of_replay_are_dropped_at_resume(autojump_clock: MockClock) -> None:
    """CTL-6, CTL-4."""
    async with open_plane() as plane:
        await plane.prepare()
        await plane.commit()
        await plane.resume()
        with pytest.raises(StaleCheckpoint):
            await plane.commit()


@pytest.mark.parametrize("stage", ["exporting", "writing"])
async def test_a_commit_that_outlives_its_deadline_is_joined(
    stage: str, autojump_clock: MockClock
) -> None:
    """CTL-9: one export, one write, whatever the number of calls."""
    async with open_plane() as plane:
        door = plane.participant.exporting if stage == "exporting" else plane.archive.writing
        await plane.prepare()
        door.shut()
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                await plane.commit(timeout_s=1)
        door.let_go()
        assert (await plane.commit()).phase == "committed"
        assert plane.archive.writes == plane.participant.exports == 1


async def test_a_failed_export_may_be_asked_again(autojump_clock: MockClock) -> None:
    """CTL-9: nothing was written, so another scope is no conflict either."""
    async with open_plane() as plane:
        await plane.prepare()
        plane.participant.failure = InvalidCheckpointState("r0: $.x: a set")
        plane.participant.fail_at = "export"
        with pytest.raises(InvalidCheckpointState, match="a set"):
            await plane.commit()
        assert (await plane.commit(episodes=(R1,))).phase == "committed"


async def test_a_directory_that_is_refused_may_be_corrected(autojump_clock: MockClock) -> None:
    """STO-7: nothing was begun, so the same checkpoint can be committed elsewhere."""
    async with open_plane() as plane:
        await plane.prepare()
        plane.archive.failure = DirectoryRefused("checkpoint_dir '../x': '..' is not resolved")
        with pytest.raises(DirectoryRefused):
            await plane.commit(directory="../x")
        plane.archive.failure = None
        assert (await plane.commit(directory="x")).phase == "committed"


async def test_a_commit_after_one_that_was_refused_is_aborted_like_any_other(
    autojump_clock: MockClock,
) -> None:
    """CTL-10: whatever the first one did with its publication; it is not the second one's."""

    class Refusing(MemoryArchive):
        async def write(
            self, checkpoint_dir: str, *, publication: Publication, **others: Any
        ) -> dict[str, object]:
            if checkpoint_dir == "refused":
                publication.end()
                raise DirectoryRefused("by a worker")
            return await super().write(checkpoint_dir, publication=publication, **others)

    async with open_plane(archive=Refusing()) as plane, trio.open_nursery() as nursery:
        await plane.prepare()
        with pytest.raises(DirectoryRefused):
            await plane.commit(directory="refused")
        plane.archive.publishing.shut()
        committing = await begin(nursery, lambda: plane.commit(directory="x"))
        resuming = await begin(nursery, plane.resume)
        assert committing == resuming == [], "what has begun to be published is waited for"
        plane.archive.publishing.let_go()
        await wait_all_tasks_blocked()
        assert len(resuming) == 1
        assert len(plane.archive.parts) == 1


async def test_a_restore_of_two_attempts_of_one_rollout_is_refused(
    autojump_clock: MockClock,
) -> None:
    """CTL-14: the fence of the later one would refuse the replacement of the earlier one."""
    async with open_plane(archive=await committed("r0")) as plane:
        with pytest.raises(InvalidRequest, match="r0 and r0-a1 are attempts of one rollout"):
            await plane.restore(R0, episode("r0", 1))
        assert plane.phase == "idle"
        assert not plane.participant.admission.closed


async def test_a_failed_write_stays_failed_for_that_checkpoint(autojump_clock: MockClock) -> None:
    """HARD-12, STO-8: a sync is never retried; the next checkpoint succeeds."""
    async with open_plane() as plane:
        await plane.prepare()
        plane.archive.failure = InvalidCheckpointState("disk full")
        with pytest.raises(InvalidCheckpointState):
            await plane.commit()
        plane.archive.failure = None
        with pytest.raises(InvalidCheckpointState, match="disk full"):
            await plane.commit()
        assert plane.archive.writes == 1
        await plane.resume()
        await plane.prepare("c2")
        assert (await plane.commit("c2")).phase == "committed"


# -- resume, the abort ------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["exporting", "writing"])
async def test_resume_stops_a_hung_commit_at_once(stage: str, autojump_clock: MockClock) -> None:
    """CTL-10, CTL-9: nothing is published later, and the waiting commit is told."""
    async with open_plane() as plane, trio.open_nursery() as nursery:
        door = plane.participant.exporting if stage == "exporting" else plane.archive.writing
        await plane.prepare()
        door.shut()
        answers = await begin(nursery, plane.commit)
        before = trio.current_time()
        assert not (await plane.resume()).idempotent
        await wait_all_tasks_blocked()
        assert trio.current_time() == before
        assert isinstance(answers[0], CheckpointError)
        door.let_go()
        await wait_all_tasks_blocked()
        assert not plane.archive.parts
        assert not plane.participant.admission.closed


async def test_resume_waits_for_a_publication_that_has_begun(autojump_clock: MockClock) -> None:
    """CTL-10: then it is published before the reply, and nothing appears after it."""
    async with open_plane() as plane, trio.open_nursery() as nursery:
        await plane.prepare()
        plane.archive.publishing.shut()
        commit = await begin(nursery, plane.commit)
        resume = await begin(nursery, plane.resume)
        assert resume == []
        plane.archive.publishing.let_go()
        await wait_all_tasks_blocked()
        assert len(commit) == len(resume) == len(plane.archive.parts) == 1
        assert plane.phase == "idle"


async def test_a_resume_whose_deadline_passes_during_publication_changes_nothing(
    autojump_clock: MockClock,
) -> None:
    """CTL-8, CTL-10."""
    async with open_plane() as plane, trio.open_nursery() as nursery:
        await plane.prepare()
        plane.archive.publishing.shut()
        await begin(nursery, plane.commit)
        with pytest.raises(DeadlineExceeded, match="published"):
            await plane.resume(timeout_s=1)
        assert plane.participant.admission.closed
        plane.archive.publishing.let_go()
        await plane.resume()


async def test_resume_cancels_settling_and_install(autojump_clock: MockClock) -> None:
    """CTL-10: in every phase; an install that was stopped leaves nothing behind."""
    async with open_plane() as plane, trio.open_nursery() as nursery:
        plane.participant.settling.shut()
        await begin(nursery, plane.prepare)
        await plane.resume()
        plane.participant.settling.let_go()
        plane.participant.parked[R0] = "a"
        await plane.prepare("c2")
        await plane.commit("c2")
        await plane.resume("c2")
        plane.participant.parked.clear()
        plane.participant.installing.shut()
        answers = await begin(nursery, lambda: plane.restore(R0))
        await plane.resume("x1")
        await wait_all_tasks_blocked()
        assert isinstance(answers[0], CheckpointError)
        assert len(plane.participant.restored) == 0
        assert not plane.participant.admission.closed


# -- lease ------------------------------------------------------------------------------------


async def test_a_silent_controller_is_given_up_after_deadline_and_grace(
    autojump_clock: MockClock,
) -> None:
    """CTL-11: the participant resumes by itself and fences the id."""
    async with open_plane() as plane:
        await plane.prepare(timeout_s=10)
        await trio.sleep(GRACE_S + 9)
        assert plane.phase == "prepared"
        await trio.sleep(1.5)
        assert plane.phase == "idle"
        assert not plane.participant.admission.closed
        with pytest.raises(StaleCheckpoint):
            await plane.commit()


async def test_renew_extends_the_lease_and_nothing_shortens_it(autojump_clock: MockClock) -> None:
    """CTL-11."""
    async with open_plane() as plane:
        await plane.prepare(timeout_s=10)
        reply = await plane.renew(timeout_s=1000)
        assert reply.lease_expires_at == pytest.approx(plane.clock.now_s() + 1000 + GRACE_S)
        assert (await plane.renew(timeout_s=5)).lease_expires_at == reply.lease_expires_at
        await trio.sleep(900 + GRACE_S)
        assert plane.phase == "prepared"
        await trio.sleep(101)
        assert plane.phase == "idle"


# -- restore ----------------------------------------------------------------------------------


async def committed(*names: str) -> MemoryArchive:
    archive = MemoryArchive()
    async with open_plane(archive=archive) as plane:
        plane.participant.parked |= {episode(name): f"note of {name}" for name in names}
        await plane.prepare()
        await plane.commit()
    return archive


async def test_restore_installs_the_scope_under_the_next_attempts(
    autojump_clock: MockClock,
) -> None:
    """CTL-14, CTL-5: fenced up to the checkpointed attempt, admitted after resume."""
    async with open_plane(archive=await committed("r0", "r1")) as plane:
        reply = await plane.restore(R0)
        assert (reply.phase, reply.restored) == ("restored", ("r0-a1",))
        assert reply.source_checkpoint_id == "c1"
        assert dict(plane.participant.restored) == {episode("r0", 1): "note of r0"}
        assert plane.participant.admission.closed
        assert await plane.restore(R0) == reply
        with pytest.raises(CheckpointConflict):
            await plane.restore(R1)
        await plane.resume("x1")
        with pytest.raises(StaleAttempt):
            await plane.participant.admission.enter(R0)
        await plane.participant.admission.enter(episode("r0", 1))


async def test_a_late_duplicate_of_a_restore_changes_nothing(autojump_clock: MockClock) -> None:
    """HARD-8."""
    async with open_plane(archive=await committed("r0")) as plane:
        await plane.restore(R0)
        await plane.resume("x1")
        assert plane.participant.restored.claim(episode("r0", 1)) == "note of r0"
        with pytest.raises(StaleCheckpoint):
            await plane.restore(R0)
        assert len(plane.participant.restored) == 0


@pytest.mark.parametrize("recover", [False, True])
@pytest.mark.parametrize("where", ["read", "install"])
async def test_a_failed_restore_leaves_admission_as_it_was(
    where: str, recover: bool, autojump_clock: MockClock
) -> None:
    """CTL-14: open, or for a server started to recover still closed and waiting."""
    async with open_plane(archive=await committed("r0"), recover=recover) as plane:
        if where == "read":
            plane.archive.failure = InvalidCheckpointState("digest mismatch")
        else:
            plane.participant.failure = InvalidCheckpointState("bad record")
            plane.participant.fail_at = "install"
        with pytest.raises(InvalidCheckpointState):
            await plane.restore(R0)
        assert plane.phase == "idle"
        assert len(plane.participant.restored) == 0
        assert plane.control.status().retired_rollouts == 0
        assert plane.participant.admission.closed is recover
        plane.archive.failure = None
        assert (await plane.restore(R0)).phase == "restored"


async def test_restore_needs_a_participant_without_live_work(autojump_clock: MockClock) -> None:
    """CTL-14: and a checkpoint that is open is in the way too."""
    async with open_plane(archive=await committed("r0")) as plane:
        plane.participant.running.add(R1)
        with pytest.raises(InvalidPhase, match="live"):
            await plane.restore(R0)
        plane.participant.running.clear()
        await plane.prepare("x1")
        with pytest.raises(InvalidPhase, match="prepared"):
            await plane.restore(R0)


async def test_a_restore_that_outlives_its_deadline_is_joined(autojump_clock: MockClock) -> None:
    """CTL-9."""
    async with open_plane(archive=await committed("r0")) as plane:
        plane.participant.installing.shut()
        with pytest.raises(DeadlineExceeded):
            await plane.restore(R0, timeout_s=1)
        with pytest.raises(InvalidPhase, match="restored"):
            await plane.prepare("x1")
        plane.participant.installing.let_go()
        assert (await plane.restore(R0)).phase == "restored"


async def test_unclaimed_restored_work_is_exported_again_or_freed(
    autojump_clock: MockClock,
) -> None:
    """CTL-13: in scope it is in the next checkpoint; out of scope it is freed without refusal."""
    async with open_plane(archive=await committed("r0", "r1")) as plane:
        await plane.restore(R0, R1)
        await plane.resume("x1")
        await plane.prepare("c2")
        reply = await plane.commit("c2", episodes=(episode("r0", 1),), directory="e")
        assert reply.episode_ids == ("r0-a1",)
        assert plane.participant.restored.waiting() == ["r0-a1"]
        await plane.resume("c2")
        await plane.participant.admission.enter(episode("r1", 1))


# -- a server started to recover --------------------------------------------------------------


async def test_a_recovering_server_serves_nobody_until_restored_and_resumed(
    autojump_clock: MockClock,
) -> None:
    """HARD-3, HARD-6: only status, restore and its own resume are accepted."""
    async with open_plane(archive=await committed("r0"), recover=True) as plane:
        assert plane.control.status().awaiting_restore
        assert plane.participant.admission.closed
        calls: list[Callable[[], Awaitable[object]]] = [
            plane.prepare,
            plane.renew,
            plane.commit,
            plane.resume,
            lambda: plane.retire(R0),
            lambda: plane.forget("r0"),
        ]
        for call in calls:
            with pytest.raises(InvalidPhase):
                await call()
        await plane.restore(R0, name="c1")
        assert plane.participant.admission.closed
        await plane.resume("c1")
        assert not plane.participant.admission.closed
        assert not plane.control.status().awaiting_restore


async def test_a_recovering_server_can_be_told_to_start_afresh(autojump_clock: MockClock) -> None:
    """HARD-3, I11: what is given up by it is refused from the instant of opening."""
    async with open_plane(recover=True) as plane, trio.open_nursery() as nursery:
        enter = plane.participant.admission.enter
        old = await begin(nursery, lambda: enter(episode("r0", 1)))
        new = await begin(nursery, lambda: enter(episode("r0", 2)))
        other = await begin(nursery, lambda: enter(episode("r1")))
        await plane.resume(start_afresh=True, given_up=(episode("r0", 1),))
        await wait_all_tasks_blocked()
        assert not plane.participant.admission.closed
        assert [type(answer) for answer in old] == [StaleAttempt]
        assert (len(new), len(other)) == (1, 1)
        with pytest.raises(StaleAttempt):
            await enter(R0)


async def test_only_a_start_afresh_gives_something_up(autojump_clock: MockClock) -> None:
    """CTL-12: everything else retires, which waits until it has stopped."""
    async with open_plane() as plane:
        with pytest.raises(InvalidRequest, match="start_afresh"):
            await plane.resume(given_up=(R0,))
        # What serves already has nothing to give up unheard.
        await plane.resume(start_afresh=True, given_up=(R0,))
        await plane.participant.admission.enter(R0)


# -- retire and forget ------------------------------------------------------------------------


async def test_retire_answers_when_everything_has_stopped(autojump_clock: MockClock) -> None:
    """CTL-12: a repeated retire joins, and does not cancel twice."""
    async with open_plane() as plane, trio.open_nursery() as nursery:
        plane.participant.running.add(R0)
        plane.participant.cleaning_up.shut()
        first = await begin(nursery, lambda: plane.retire(R0))
        second = await begin(nursery, lambda: plane.retire(R0))
        assert first == second == []
        plane.participant.cleaning_up.let_go()
        await wait_all_tasks_blocked()
        assert len(first) == len(second) == 1
        assert plane.participant.cancels == [R0]


async def test_a_retire_of_thousands_lets_the_loop_turn(autojump_clock: MockClock) -> None:
    """CTL-5, CTL-15: all are refused in its first turn; cancelled, it goes on."""
    thousands = [episode(f"r{number}") for number in range(30 * WAKE_SLICE_TASKS)]
    async with open_plane() as plane, trio.open_nursery() as nursery:
        plane.participant.running.update(thousands)
        leaving = trio.CancelScope()

        async def retire() -> None:
            with leaving:
                await plane.retire(*thousands)

        with loop_meter() as meter:
            nursery.start_soon(retire)
            while not plane.participant.stopping:
                await trio.lowlevel.checkpoint()
            assert plane.participant.stopping == set(thousands)
            with pytest.raises(RetireIncomplete, match="r0, r1, r10"):
                await plane.forget(*(e.rollout_id for e in thousands))
            leaving.cancel()
            await wait_all_tasks_blocked()
        assert plane.participant.stopping == plane.participant.running == set()
        assert meter.steps_most <= 2 * WAKE_SLICE_TASKS
        await plane.forget(*(e.rollout_id for e in thousands))


async def test_a_retire_cut_short_blocks_the_next_prepare_until_it_ends(
    autojump_clock: MockClock,
) -> None:
    """CTL-12: tracked, not exported; the retry completes it."""
    async with open_plane() as plane:
        plane.participant.running.add(R0)
        plane.participant.cleaning_up.shut()
        with pytest.raises(DeadlineExceeded):
            await plane.retire(R0, timeout_s=1)
        assert (await plane.prepare(timeout_s=1)).report.blockers == ("r0",)
        with pytest.raises(InvalidPhase):
            await plane.commit()
        with pytest.raises(RetireIncomplete, match="r0"):
            await plane.forget("r0")
        plane.participant.cleaning_up.let_go()
        await plane.retire(R0)
        assert (await plane.prepare()).phase == "prepared"


async def test_retire_is_served_in_every_phase(autojump_clock: MockClock) -> None:
    """CTL-12: also of an id that was resumed."""
    async with open_plane(archive=await committed("r0")) as plane:
        await plane.retire(episode("a"))
        await plane.prepare("c5")
        await plane.retire(episode("b"))
        await plane.commit("c5", directory="e")
        await plane.retire(episode("c"))
        await plane.resume("c5")
        await plane.restore(R0)
        await plane.retire(episode("r0", 1), name="c5")
        assert len(plane.participant.restored) == 0
        assert plane.control.status().retired_rollouts == 4


# -- ends -------------------------------------------------------------------------------------


async def test_nothing_outlives_the_owner(autojump_clock: MockClock) -> None:
    """CTL-9: hung work of every kind ends with the block that owns it."""
    before = trio.lowlevel.current_statistics().tasks_living
    async with open_plane() as plane:
        plane.participant.settling.shut()
        plane.participant.cleaning_up.shut()
        with pytest.raises(DeadlineExceeded):
            await plane.retire(R0, timeout_s=1)
        with trio.move_on_after(1):
            await plane.prepare()
    assert trio.lowlevel.current_statistics().tasks_living == before


async def test_status_names_everything(autojump_clock: MockClock) -> None:
    """CTL-15."""
    async with open_plane() as plane:
        plane.participant.running.add(R0)
        await plane.prepare(timeout_s=1)
        status = plane.control.status()
        assert (status.kind, status.instance) == ("environment", "scripted")
        assert (status.phase, status.checkpoint_id) == ("preparing", "c1")
        assert status.lease_expires_at == pytest.approx(plane.clock.now_s() + GRACE_S)
        assert status.report.blockers == ("r0",)
        assert status.extra == {"restored_pending": []}


# -- what only a broken rule would show --------------------------------------------------------


async def test_every_call_of_the_checkpoint_extends_its_lease(autojump_clock: MockClock) -> None:
    """CTL-11: the latest deadline over all calls counts, a repeated prepare's and a commit's too."""
    async with open_plane() as plane:
        await plane.prepare(timeout_s=10)
        for longer_s, call in ((1000, plane.prepare), (2000, plane.commit)):
            await call(timeout_s=longer_s)
            expected = plane.clock.now_s() + longer_s + GRACE_S
            assert plane.control.status().lease_expires_at == pytest.approx(expected)


async def test_a_lease_that_ends_during_publication_waits_for_it(
    autojump_clock: MockClock,
) -> None:
    """CTL-10, CTL-11: nothing appears after the participant has resumed by itself."""
    async with open_plane() as plane, trio.open_nursery() as nursery:
        await plane.prepare(timeout_s=10)
        plane.archive.publishing.shut()
        commit = await begin(nursery, lambda: plane.commit(timeout_s=2 * GRACE_S))
        await trio.sleep(4 * GRACE_S)
        assert plane.participant.admission.closed
        assert not plane.archive.parts
        plane.archive.publishing.let_go()
        await trio.sleep(1)
        assert len(plane.archive.parts) == len(commit) == 1
        assert not plane.participant.admission.closed


async def test_a_commit_that_stops_is_another_call(autojump_clock: MockClock) -> None:
    """CTL-6."""
    async with open_plane() as plane:
        await plane.prepare()
        await plane.commit()
        with pytest.raises(CheckpointConflict):
            await plane.commit(stop=True)


async def test_work_that_came_while_the_checkpoint_was_read_is_not_overwritten(
    autojump_clock: MockClock,
) -> None:
    """HARD-1, CTL-14: looked at again after the read."""
    async with open_plane(archive=await committed("r0")) as plane, trio.open_nursery() as nursery:
        plane.archive.reading.shut()
        answers = await begin(nursery, lambda: plane.restore(R0))
        plane.participant.running.add(R1)
        plane.archive.reading.let_go()
        await wait_all_tasks_blocked()
        assert isinstance(answers[0], InvalidPhase)
        assert len(plane.participant.restored) == 0


# -- taking a restore back, and late repetitions -----------------------------------------------


@pytest.mark.parametrize("recover", [False, True])
async def test_a_restore_that_is_undone_can_be_done_again(
    recover: bool, autojump_clock: MockClock
) -> None:
    """COORD-3, CTL-14: nothing is installed or newly refused, and a waiting server waits again."""
    async with open_plane(archive=await committed("r0"), recover=recover) as plane:
        for number in range(2):
            await plane.restore(R0, name=f"x{number}")
            await plane.resume(f"x{number}", undo_restore=True)
            assert plane.phase == "idle"
            assert len(plane.participant.restored) == 0
            assert plane.participant.admission.closed is recover
            assert plane.control.status().awaiting_restore is recover
        await plane.restore(R0, name="x9")
        await plane.resume("x9")
        await plane.participant.admission.enter(episode("r0", 1))


async def test_undoing_a_restore_stops_one_that_still_installs(autojump_clock: MockClock) -> None:
    """COORD-3, CTL-10."""
    async with open_plane(archive=await committed("r0")) as plane, trio.open_nursery() as nursery:
        plane.participant.installing.shut()
        answers = await begin(nursery, lambda: plane.restore(R0))
        await plane.resume("x1", undo_restore=True)
        await wait_all_tasks_blocked()
        assert isinstance(answers[0], CheckpointError)
        assert len(plane.participant.restored) == 0
        assert not plane.participant.admission.closed


async def test_a_repeated_resume_is_answered_while_another_checkpoint_is_open(
    autojump_clock: MockClock,
) -> None:
    """CTL-6, COORD-6: its first reply was lost; what is open now is not touched."""
    async with open_plane() as plane:
        await plane.prepare("c1")
        await plane.resume("c1")
        await plane.prepare("c2")
        assert (await plane.resume("c1")).idempotent
        assert plane.control.status().checkpoint_id == "c2"
        with pytest.raises(CheckpointConflict):
            await plane.resume("c3")
