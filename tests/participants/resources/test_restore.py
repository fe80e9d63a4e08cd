"""Sessions that come back, and the attempts that go on with them."""

from __future__ import annotations

import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.checkpoint.participant import Export
from gymtrio.episodes.episode import StepMode
from gymtrio.errors import InvalidCheckpointState, InvalidPhase, SessionConflict, StaleAttempt
from gymtrio.ids import CheckpointId
from gymtrio.participants.base import make_record
from gymtrio.participants.resources import Mode
from gymtrio.participants.resources.record import ResourcesRecord, SessionRecord
from gymtrio.storage.publication import Publication
from gymtrio.storage.records import Record
from gymtrio.wire.control import Kind
from tests.helpers.memory_archive import MemoryArchive
from tests.participants.resources.harness import (
    Q0,
    Q1,
    R0,
    R1,
    R2,
    open_resources,
)


async def checkpointed(*sessions: tuple[str, object, int]) -> MemoryArchive:
    """A checkpoint `d` with these sessions: id, episode, count."""
    archive = MemoryArchive()
    async with open_resources(archive) as plane:
        for session_id, episode_id, count in sessions:
            await plane.seed(session_id, episode_id, count)
        await plane.prepare()
        await plane.commit()
    return archive


async def test_a_restored_session_goes_on_where_it_was(autojump_clock: MockClock) -> None:
    """RES-1, ID-3, CTL-14 (scenario 1): a request before the resume waits, then counts 3, 4."""
    archive = MemoryArchive()
    async with open_resources(archive) as plane:
        await plane.seed("s", R0)
        assert [await plane.increment("s") for _ in range(2)] == [1, 2]
        await plane.prepare()
        await plane.commit()
    async with open_resources(archive, recover=True) as plane:
        early = plane.begin(plane.increment, "s", None)
        await wait_all_tasks_blocked()
        assert (await plane.restore(R0)).restored == ("r-a1",)
        assert plane.extra["restored_pending"] == ["r-a1"]
        await wait_all_tasks_blocked()
        assert not early.ended.is_set()
        await plane.resume("x1")
        await early.ended.wait()
        assert early.result == 3
        assert await plane.increment("s", R1) == 4
        assert plane.extra["restored_pending"] == []


async def test_without_its_state_a_restored_session_is_not_the_same(
    autojump_clock: MockClock,
) -> None:
    """RES-1: the control of the test before; what is compared is the output, never a reward."""
    await checkpointed(("s", R0, 2))
    async with open_resources() as plane:
        await plane.seed("s", R1)
        assert await plane.increment("s", R1) == 1


async def test_nothing_is_admitted_before_the_restore(autojump_clock: MockClock) -> None:
    """HARD-3: not even what could run again."""
    archive = await checkpointed(("s", R0, 2))
    async with open_resources(archive, verify=StepMode.REPLAY, recover=True) as plane:
        calls = [plane.begin(plane.seed, "t", Q0), plane.begin(plane.verify, "s", R1)]
        await wait_all_tasks_blocked()
        await plane.restore(R0)
        await wait_all_tasks_blocked()
        assert not any(call.ended.is_set() for call in calls)
        await plane.resume("x1")
        for call in calls:
            await call.ended.wait()
            assert call.error is None


async def test_nothing_is_admitted_during_a_restore_in_place(autojump_clock: MockClock) -> None:
    """HARD-3: also when a checkpoint was open before, during which a seed was."""
    archive = await checkpointed(("s", R0, 2))
    async with open_resources(archive) as plane:
        await plane.prepare()
        await plane.resume()
        await plane.restore(R0)
        seed = plane.begin(plane.seed, "t", Q0)
        await wait_all_tasks_blocked()
        assert not seed.ended.is_set()
        await plane.resume("x1")
        await seed.ended.wait()


async def test_the_old_attempt_is_refused_after_a_restore(autojump_clock: MockClock) -> None:
    """CTL-5, I11: with its rollout, and as the owner of a session it never seeded here."""
    archive = await checkpointed(("s", R0, 2))
    async with open_resources(archive) as plane:
        await plane.restore(R0, Q0)
        await plane.resume("x1")
        for call in (plane.increment, plane.verify, plane.seed):
            with pytest.raises(StaleAttempt):
                await call("s", R0)
        with pytest.raises(StaleAttempt):
            await plane.seed("t", Q0)
        # Its clean-up ends well, and takes nothing from the attempt that goes on.
        await plane.close("s", R0)
        assert await plane.increment("s", R1) == 3
        with pytest.raises(SessionConflict):
            await plane.increment("s", R2)


async def test_any_number_of_crashes_keeps_a_session_that_nobody_used(
    autojump_clock: MockClock,
) -> None:
    """I8: exported again under the attempt as which it waits."""
    archive = await checkpointed(("s", R0, 2), ("t", Q0, 5))
    async with open_resources(archive) as plane:
        await plane.restore(R0, Q0)
        await plane.resume("x1")
        assert await plane.increment("s", R1) == 3
        assert plane.extra["restored_pending"] == ["q-a1"]
        assert await plane.exported("c2") == ("q-a1", "r-a1")
    async with open_resources(archive) as plane:
        await plane.restore(R1, Q1, directory="c2")
        await plane.resume("x1")
        assert await plane.increment("s") == 4
        assert await plane.increment("t") == 6
        assert plane.control.status().retired_rollouts == 2


async def test_a_seed_of_a_restored_session_claims_it(autojump_clock: MockClock) -> None:
    """HARD-1 (scenario 30): it is not pending any more, and keeps its state."""
    archive = await checkpointed(("s", R0, 2))
    async with open_resources(archive) as plane:
        await plane.restore(R0)
        await plane.resume("x1")
        await plane.seed("s", R1, count=99)
        assert plane.extra["restored_pending_count"] == 0
        assert await plane.increment("s", R1) == 3


async def test_sessions_of_one_episode_are_claimed_one_by_one(autojump_clock: MockClock) -> None:
    """I14: what no request asked for can still be left out of a commit."""
    archive = await checkpointed(("s", R0, 2), ("t", R0, 5))
    async with open_resources(archive) as plane:
        await plane.restore(R0)
        await plane.resume("x1")
        await plane.increment("s", R1)
        assert plane.extra["restored_pending"] == ["r-a1"]
        await plane.prepare("c2")
        await plane.commit("c2", episodes=(Q0,), directory="c2")
        await plane.resume("c2")
        assert plane.server.retired == ["t"]
        assert await plane.increment("s", R1) == 4


@pytest.mark.parametrize("closed", [False, True])
async def test_a_seed_of_the_only_session_lets_go_what_was_left_over(
    closed: bool, autojump_clock: MockClock
) -> None:
    """STEP-4, I34, RES-5: the attempt has started over from its input and asks for none of what it had.
    While a checkpoint is open nothing that it is made of is changed."""
    archive = await checkpointed(("s", R0, 2), ("t", R0, 5), ("q", Q0, 7))
    async with open_resources(archive) as plane:
        await plane.restore(R0, Q0)
        await plane.resume("x1")
        if closed:
            await plane.prepare("c2")
        await plane.seed("new", R1, only_session=True)
        await wait_all_tasks_blocked()
        assert plane.extra["restored_pending"] == ["q-a1"]
        if closed:
            assert plane.server.retired == []
            assert (await plane.commit("c2", directory="c2")).episode_ids == ("q-a1", "r-a1")
            await plane.resume("c2")
            await wait_all_tasks_blocked()
        assert sorted(plane.server.retired) == ["s", "t"]
        assert await plane.increment("new", R1) == 1
        assert await plane.exported("c3") == ("q-a1", "r-a1")
        assert sorted(plane.server.counts) == ["new", "q"]


async def test_a_seed_that_does_not_say_so_lets_nothing_go(autojump_clock: MockClock) -> None:
    """STEP-4, RES-1: an episode may have several sessions, and ask for the first one later."""
    archive = await checkpointed(("s", R0, 2), ("t", R0, 5))
    async with open_resources(archive) as plane:
        await plane.restore(R0)
        await plane.resume("x1")
        await plane.seed("new", R1)
        assert await plane.increment("s", R1) == 3
        # The one that it names is no other one, and what was asked for is in use.
        await plane.seed("t", R1, only_session=True)
        await wait_all_tasks_blocked()
        assert plane.server.retired == []
        assert await plane.increment("t", R1) == 6
        assert await plane.increment("s", R1) == 4


async def test_a_commit_that_leaves_a_restored_session_out_frees_it_without_a_refusal(
    autojump_clock: MockClock,
) -> None:
    """CTL-13 (scenarios 13, 23): attempt 1 may be seeded again."""
    archive = await checkpointed(("s", R0, 2), ("t", Q0, 5))
    async with open_resources(archive) as plane:
        await plane.restore(R0, Q0)
        await plane.resume("x1")
        await plane.prepare("c2")
        reply = await plane.commit("c2", episodes=(Q1,), directory="c2")
        assert reply.episode_ids == ("q-a1",)
        assert plane.server.retired == ["s"]
        assert plane.extra["restored_pending"] == ["q-a1"]
        await plane.resume("c2")
        await plane.seed("s", R1, count=7)
        assert await plane.increment("s", R1) == 8


async def test_a_seed_that_comes_while_its_session_is_left_out_begins_anew(
    autojump_clock: MockClock,
) -> None:
    """HARD-1: it waits until the old state is gone, and its own is not freed."""
    archive = await checkpointed(("s", R0, 2))
    async with open_resources(archive) as plane:
        await plane.restore(R0)
        await plane.resume("x1")
        await plane.prepare("c2")
        plane.server.retiring.shut()
        commit = plane.begin(plane.commit, "c2", (Q0,), "c2")
        await plane.server.retiring.reached.wait()
        seed = plane.begin(plane.seed, "s", R1, 7)
        await wait_all_tasks_blocked()
        assert not seed.ended.is_set()
        plane.server.retiring.let_go()
        await commit.ended.wait()
        await seed.ended.wait()
        await plane.resume("c2")
        assert await plane.increment("s", R1) == 8


async def test_a_resume_while_restored_sessions_are_freed_loses_none_halfway(
    autojump_clock: MockClock,
) -> None:
    """CTL-9, CTL-10: the one that is being freed is freed to its end, the others stay pending."""
    archive = await checkpointed(("s", R0, 2), ("t", Q0, 5))
    async with open_resources(archive) as plane:
        await plane.restore(R0, Q0)
        await plane.resume("x1")
        await plane.prepare("c2")
        plane.server.retiring.shut()
        plane.begin(plane.commit, "c2", (), "c2")
        await plane.server.retiring.reached.wait()
        resume = plane.begin(plane.resume, "c2")
        await wait_all_tasks_blocked()
        plane.server.retiring.let_go()
        await resume.ended.wait()
        assert plane.server.retired == ["t"]
        assert plane.extra["restored_pending"] == ["r-a1"]
        assert await plane.increment("s", R1) == 3


async def test_a_restored_session_that_the_server_dropped_is_not_listed(
    autojump_clock: MockClock,
) -> None:
    """RES-2 (scenario 17)."""
    archive = await checkpointed(("s", R0, 2), ("t", Q0, 5))
    async with open_resources(archive) as plane:
        await plane.restore(R0, Q0)
        await plane.resume("x1")
        del plane.server.counts["s"]
        assert await plane.exported("c2") == ("q-a1",)
        assert plane.extra["restored_pending"] == ["q-a1"]


async def test_a_state_that_the_server_refuses_installs_nothing(autojump_clock: MockClock) -> None:
    """CTL-14, RES-1 (scenario 4): phase idle, admission open, no attempt refused."""
    archive = MemoryArchive()
    async with open_resources(archive) as plane:
        await plane.seed("s", R0)
        plane.server.counts["s"] = "many"
        await plane.prepare()
        await plane.commit()
    async with open_resources(archive) as plane:
        with pytest.raises(InvalidCheckpointState, match=r"session 's' of r: .*'many' is not a"):
            await plane.restore(R0)
        assert plane.phase == "idle"
        assert plane.server.counts == {}
        assert plane.counts["sessions"] == plane.counts["restored"] == 0
        await plane.seed("s", R0)


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([Record(R0, b"\xc1")], "record of r"),
        ([make_record(R0, ResourcesRecord(sessions=(SessionRecord(session_id="s", state=b"{"),)))],
         "session 's' of r: not JSON"),
        ([make_record(e, ResourcesRecord(sessions=(SessionRecord(session_id="s", state=b"1"),)))
          for e in (R0, Q0)], "session 's' of q: it is there twice"),
    ],
)  # fmt: skip
async def test_a_record_that_is_not_one_installs_nothing(
    records: list[Record], why: str, autojump_clock: MockClock
) -> None:
    """STO-4, CTL-14: the error names the episode."""
    archive = MemoryArchive()
    await archive.write(
        "d",
        kind=Kind.RESOURCES,
        instance="counter",
        checkpoint_id=CheckpointId("c1"),
        export=Export(records=records, episode_ids=()),
        publication=Publication(),
    )
    async with open_resources(archive) as plane:
        with pytest.raises(InvalidCheckpointState, match=why):
            await plane.restore(R0, Q0)
        assert (plane.phase, plane.server.counts) == ("idle", {})


async def test_only_a_server_without_live_state_can_be_restored(autojump_clock: MockClock) -> None:
    """CTL-14: neither sessions nor requests in flight."""
    archive = await checkpointed(("s", R0, 2))
    async with open_resources(archive) as plane:
        await plane.seed("t", Q0)
        with pytest.raises(InvalidPhase, match="1 sessions and 0 requests"):
            await plane.restore(R0)
        await plane.retire(Q0)
        await plane.restore(R0)
        assert plane.phase == "restored"


async def test_what_has_ended_is_not_in_the_way_of_a_restore(autojump_clock: MockClock) -> None:
    """CTL-14: not even with the id of a session that comes back."""
    archive = await checkpointed(("s", R0, 2))
    async with open_resources(archive, verify=StepMode.REPLAY) as plane:
        await plane.seed("s", R0, 9)
        await plane.verify("s", R0)
        plane.server.retiring.shut()
        restore = plane.begin(plane.restore, R0)
        await wait_all_tasks_blocked()
        assert plane.server.counts == {"s": 9}
        plane.server.retiring.let_go()
        await restore.ended.wait()
        await plane.resume("x1")
        assert plane.server.retired == ["s"]
        assert await plane.increment("s", R1) == 3


async def test_a_stateless_server_is_restored_without_hooks(autojump_clock: MockClock) -> None:
    """RES-1 (scenario 5): nothing is exported; the fences rise all the same."""
    archive = MemoryArchive()
    async with open_resources(archive, mode=Mode.STATELESS) as plane:
        await plane.seed("s", R0)
        await plane.prepare()
        assert (await plane.commit()).episode_ids == ()
    async with open_resources(archive, mode=Mode.STATELESS) as plane:
        await plane.restore(R0)
        await plane.resume("x1")
        with pytest.raises(StaleAttempt):
            await plane.seed("s", R0)
        await plane.seed("s", R1)


async def test_a_server_that_exports_no_more_refuses_what_it_cannot_take(
    autojump_clock: MockClock,
) -> None:
    """CTL-14."""
    archive = await checkpointed(("s", R0, 2))
    async with open_resources(archive, mode=Mode.RESTART_ONLY) as plane:
        with pytest.raises(InvalidCheckpointState, match="restart_only.*session 's' of r"):
            await plane.restore(R0)


async def test_a_restore_that_is_given_up_installs_nothing(autojump_clock: MockClock) -> None:
    """CTL-10: resume cancels the install."""
    archive = await checkpointed(("s", R0, 2))
    async with open_resources(archive) as plane:
        plane.server.restoring.shut()
        plane.begin(plane.restore, R0)
        await plane.server.restoring.reached.wait()
        await plane.resume("x1")
        assert (plane.phase, plane.counts["sessions"]) == ("idle", 0)
        await plane.seed("s", R0, 7)
        assert await plane.increment("s", R0) == 8


async def test_a_retire_during_a_restore_waits_and_takes_away_what_it_brought(
    autojump_clock: MockClock,
) -> None:
    """CTL-12 (scenarios 24 of the control plane, 29): a seed that waits gets stale_attempt."""
    archive = await checkpointed(("s", R0, 2))
    async with open_resources(archive) as plane:
        plane.server.restoring.shut()
        restore = plane.begin(plane.restore, R0)
        await plane.server.restoring.reached.wait()
        seed = plane.begin(plane.seed, "t", R1)
        await wait_all_tasks_blocked()
        retire = plane.begin(plane.retire, R1, name="x1")
        await seed.ended.wait()
        assert isinstance(seed.error, StaleAttempt)
        await wait_all_tasks_blocked()
        assert not retire.ended.is_set()
        plane.server.retiring.shut()
        plane.server.restoring.let_go()
        await restore.ended.wait()
        await plane.server.retiring.reached.wait()
        assert not plane.resources.ready()
        plane.server.retiring.let_go()
        await retire.ended.wait()
        assert plane.server.retired == ["s"]
        assert plane.counts["sessions"] == plane.counts["restored"] == 0
        await plane.resume("x1")
        with pytest.raises(StaleAttempt):
            await plane.increment("s", None)
