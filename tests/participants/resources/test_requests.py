"""Requests and sessions while checkpoints open and close."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.episodes.episode import StepMode
from gymtrio.errors import (
    AdmissionClosed,
    CheckpointError,
    InvalidCheckpointState,
    NotFound,
    RolloutIdRequired,
    SessionConflict,
)
from gymtrio.participants.resources import Admitted, Mode, RequestKind
from gymtrio.participants.resources.keeper import ENDED_KEPT_S
from tests.participants.resources.harness import (
    Q0,
    R0,
    R1,
    open_resources,
    shut_door,
)


async def test_a_request_in_flight_is_waited_for_and_its_session_is_counted(
    autojump_clock: MockClock,
) -> None:
    """RES-5, CTL-15 (scenario 2): counts, and who blocks by doing what."""
    async with open_resources() as plane:
        await plane.seed("s")
        door = shut_door()
        call = plane.begin(plane.increment, "s", R0, door)
        await door.reached.wait()
        reply = await plane.prepare(timeout_s=1)
        assert reply.phase == "preparing"
        assert reply.report.blockers == ("r",)
        assert (reply.report.counts["inflight"], reply.report.counts["sessions"]) == (1, 1)
        assert [(d.doing, round(d.since_s)) for d in reply.report.details] == [("increment", 1)]
        door.let_go()
        assert (await plane.prepare()).phase == "prepared"
        assert call.result == 1


@pytest.mark.parametrize("kind", ["verify", "close"])
async def test_a_verify_or_a_close_ends_a_session(kind: str, autojump_clock: MockClock) -> None:
    """RES-3 (scenario 2): what it held is freed, and the next checkpoint has nothing of it."""
    async with open_resources() as plane:
        await plane.seed("s")
        await (plane.verify("s", R0) if kind == "verify" else plane.close("s", R0))
        await wait_all_tasks_blocked()
        assert plane.counts["sessions"] == 0
        assert plane.server.retired == ["s"]
        assert await plane.exported() == ()


async def test_a_request_that_failed_changes_nothing(autojump_clock: MockClock) -> None:
    """RES-3: only 2xx counts."""

    async def fail(admitted: Admitted) -> None:
        raise NotFound("no")

    async with open_resources() as plane:
        await plane.seed("s")
        for kind in (RequestKind.VERIFY, RequestKind.CLOSE, RequestKind.TOOL):
            with pytest.raises(NotFound):
                await plane.serve(kind, "s", R0, fail)
        assert plane.counts["sessions"] == 1
        with pytest.raises(NotFound):
            await plane.serve(RequestKind.SEED, "s2", R0, fail)
        await wait_all_tasks_blocked()
        assert plane.counts["sessions"] == 1
        assert plane.counts["inflight"] == 0


async def test_a_seed_during_a_checkpoint_is_admitted_and_no_part_of_it(
    autojump_clock: MockClock,
) -> None:
    """RES-5 (scenario 7): it becomes ordinary on resume."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        await plane.prepare()
        await plane.seed("late", Q0)
        assert (await plane.commit()).episode_ids == ("r",)
        await plane.resume()
        assert await plane.exported("c2") == ("q", "r")


async def test_what_was_admitted_during_a_checkpoint_is_waited_for_by_the_next(
    autojump_clock: MockClock,
) -> None:
    """RES-5: a seed that is still running at the next close."""
    async with open_resources() as plane:
        await plane.prepare("c1")
        door = shut_door()
        seed = plane.begin(plane.seed, "late", R0, door=door)
        await door.reached.wait()
        assert (await plane.commit("c1")).episode_ids == ()
        await plane.resume("c1")
        reply = await plane.prepare("c2", timeout_s=1)
        assert (reply.phase, reply.report.blockers) == ("preparing", ("r",))
        door.let_go()
        await plane.prepare("c2")
        await seed.ended.wait()
        assert (await plane.commit("c2", directory="c2")).episode_ids == ("r",)


async def test_a_seed_in_flight_at_close_blocks_and_is_exported(autojump_clock: MockClock) -> None:
    """RES-5 (scenario 8)."""
    async with open_resources() as plane:
        door = shut_door()
        plane.begin(plane.seed, "s", R0, door=door)
        await door.reached.wait()
        reply = await plane.prepare(timeout_s=1)
        assert (reply.phase, reply.report.details[0].doing) == ("preparing", "seed_session")
        door.let_go()
        assert (await plane.prepare()).phase == "prepared"
        assert (await plane.commit()).episode_ids == ("r",)


async def test_a_close_during_a_checkpoint_waits_and_ends_the_session_after_resume(
    autojump_clock: MockClock,
) -> None:
    """RES-5 (scenario 11): it is not in flight meanwhile."""
    async with open_resources() as plane:
        await plane.seed("s")
        await plane.prepare()
        close = plane.begin(plane.close, "s", R0)
        await wait_all_tasks_blocked()
        assert (plane.counts["inflight"], plane.counts["waiting"]) == (0, 1)
        assert (await plane.commit()).episode_ids == ("r",)
        await plane.resume()
        await close.ended.wait()
        assert close.error is None
        assert plane.counts["sessions"] == 0


async def test_a_caller_that_will_not_wait_is_refused(autojump_clock: MockClock) -> None:
    """CTL-18 (scenario 24)."""
    async with open_resources() as plane:
        await plane.seed("s")
        await plane.prepare()
        with pytest.raises(AdmissionClosed):
            await plane.increment("s", R0, refuse=True)


async def test_a_replayed_verify_is_answered_during_a_checkpoint_and_ends_at_resume(
    autojump_clock: MockClock,
) -> None:
    """RES-5, RES-4 (scenario 19): the session is still exported."""
    async with open_resources(verify=StepMode.REPLAY) as plane:
        await plane.seed("s", count=3)
        await plane.prepare()
        assert await plane.verify("s", R0) == 3
        assert plane.counts["sessions"] == 0
        assert (await plane.commit()).episode_ids == ("r",)
        assert plane.server.retired == []
        await plane.resume()
        await wait_all_tasks_blocked()
        assert plane.server.retired == ["s"]
        assert await plane.exported("c2") == ()


async def test_a_verify_that_is_not_replayed_waits_for_resume(autojump_clock: MockClock) -> None:
    """RES-5."""
    async with open_resources() as plane:
        await plane.seed("s", count=3)
        await plane.prepare()
        verify = plane.begin(plane.verify, "s", R0)
        await wait_all_tasks_blocked()
        assert not verify.ended.is_set()
        await plane.resume()
        await verify.ended.wait()
        assert verify.result == 3


async def test_a_checkpoint_does_not_wait_for_a_replayed_verify(autojump_clock: MockClock) -> None:
    """RES-9: one that waits for other episodes would never end. Its session is exported."""
    async with open_resources(verify=StepMode.REPLAY) as plane:
        await plane.seed("s")
        door = shut_door()
        verify = plane.begin(plane.verify, "s", R0, door)
        await door.reached.wait()
        assert (await plane.prepare()).phase == "prepared"
        assert (await plane.commit()).episode_ids == ("r",)
        door.let_go()
        await verify.ended.wait()
        await plane.resume()
        await wait_all_tasks_blocked()
        assert plane.counts["ended"] == 0


async def test_a_verify_between_the_close_of_its_caller_and_ours_can_run_again(
    autojump_clock: MockClock,
) -> None:
    """RES-5, I15: the caller's server closed first and recorded the boundary before the verify."""
    async with open_resources(verify=StepMode.REPLAY) as plane:
        await plane.seed("s", count=3)
        await plane.verify("s", R0)
        assert await plane.exported() == ("r",)
        await wait_all_tasks_blocked()
        assert plane.server.retired == ["s"]


async def test_a_verified_session_is_not_kept_for_ever(autojump_clock: MockClock) -> None:
    """RES-3: when no checkpoint comes, nor a close."""
    async with open_resources(verify=StepMode.REPLAY) as plane:
        await plane.seed("s")
        await plane.verify("s", R0)
        await plane.seed("s2", Q0)
        await trio.sleep(1)
        await plane.verify("s2", Q0)
        await trio.sleep(ENDED_KEPT_S - 1)
        await wait_all_tasks_blocked()
        assert plane.server.retired == ["s"]
        await trio.sleep(1)
        await wait_all_tasks_blocked()
        assert plane.server.retired == ["s", "s2"]
        assert plane.counts["ended"] == 0


async def test_an_open_checkpoint_keeps_verified_sessions_longer(autojump_clock: MockClock) -> None:
    """RES-5: until resume, however late it comes."""
    async with open_resources(verify=StepMode.REPLAY) as plane:
        await plane.seed("s")
        await plane.verify("s", R0)
        await plane.prepare(timeout_s=ENDED_KEPT_S)
        await trio.sleep(ENDED_KEPT_S + 1)
        assert plane.server.retired == []
        assert (await plane.commit()).episode_ids == ("r",)
        await plane.resume()
        await wait_all_tasks_blocked()
        assert plane.server.retired == ["s"]


async def test_a_reply_on_its_way_holds_the_checkpoint(autojump_clock: MockClock) -> None:
    """I2: none reaches a caller between prepared and resume."""
    async with open_resources() as plane:
        await plane.seed("s")
        async with plane.resources.request(
            RequestKind.TOOL, session_id="s", episode_id=R0, doing="increment"
        ) as admitted:
            admitted.succeeded()
            sent = admitted.until_sent()
        reply = await plane.prepare(timeout_s=1)
        assert (reply.phase, reply.report.details[0].doing) == ("preparing", "reply to increment")
        sent(True)
        sent(True)
        assert (await plane.prepare()).phase == "prepared"


async def test_a_caller_that_leaves_is_not_counted_any_more(autojump_clock: MockClock) -> None:
    """SRV-3 (scenario 21): nor does a seed leave anything behind."""
    async with open_resources() as plane:
        await plane.seed("s")
        door = shut_door()
        call = plane.begin(plane.increment, "s", R0, door)
        seed = plane.begin(plane.seed, "s2", Q0, door=shut_door())
        await door.reached.wait()
        await wait_all_tasks_blocked()
        plane.server.counts["s2"] = 0
        assert plane.counts["inflight"] == 2
        call.leave()
        seed.leave()
        await wait_all_tasks_blocked()
        assert (plane.counts["inflight"], plane.counts["sessions"]) == (0, 1)
        assert plane.server.retired == ["s2"]
        assert (await plane.prepare()).phase == "prepared"


async def test_two_seeds_of_a_session_are_one(autojump_clock: MockClock) -> None:
    """HARD-1: the later one joins the first."""
    async with open_resources() as plane:
        door = shut_door()
        first = plane.begin(plane.seed, "s", R0, 1, door)
        await door.reached.wait()
        second = plane.begin(plane.seed, "s", R0, 2)
        await wait_all_tasks_blocked()
        assert not second.ended.is_set()
        door.let_go()
        await second.ended.wait()
        assert first.ended.is_set()
        assert plane.server.counts == {"s": 1}


async def test_a_seed_may_be_repeated_after_it_failed(autojump_clock: MockClock) -> None:
    """HARD-1: the second waits until nothing is left of the first, then seeds."""
    async with open_resources() as plane:
        first = plane.begin(plane.seed, "s", R0, door=shut_door())
        await wait_all_tasks_blocked()
        plane.server.retiring.shut()
        second = plane.begin(plane.seed, "s", R0, 2)
        await wait_all_tasks_blocked()
        first.leave()
        await wait_all_tasks_blocked()
        assert not second.ended.is_set()
        plane.server.retiring.let_go()
        await second.ended.wait()
        assert plane.server.counts == {"s": 2}
        assert plane.counts["sessions"] == 1


async def test_a_close_stops_the_seed_of_its_session(autojump_clock: MockClock) -> None:
    """RES-3: what the seed had made is freed before the close answers."""
    async with open_resources() as plane:
        door = shut_door()
        seed = plane.begin(plane.seed, "s", R0, door=door)
        await door.reached.wait()
        plane.server.counts["s"] = 0
        await plane.close("s", R0)
        await seed.ended.wait()
        assert isinstance(seed.error, SessionConflict)
        assert plane.server.retired == ["s"]
        assert plane.counts["sessions"] == 0


async def test_a_session_is_one_episodes(autojump_clock: MockClock) -> None:
    """RES-3: neither seed nor use nor close by another one."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        for call in (plane.seed, plane.increment, plane.verify, plane.close):
            for other in (Q0, R1):
                with pytest.raises(SessionConflict, match="session 's' of r was asked for by"):
                    await call("s", other)
        assert plane.server.counts == {"s": 0}


async def test_a_request_without_rollout_finds_it_by_its_session(autojump_clock: MockClock) -> None:
    """RES-3, ID-7: and is refused when nothing says whose it is."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        assert await plane.increment("s", None) == 1
        with pytest.raises(NotFound, match="session 'x'"):
            await plane.increment("x", None)
        with pytest.raises(RolloutIdRequired):
            await plane.seed("x", None)
        assert plane.counts["inflight"] == 0


async def test_a_stateless_server_serves_whoever_comes(autojump_clock: MockClock) -> None:
    """RES-1: and waits for them at a close."""

    async def work(admitted: Admitted) -> str:
        await door.pass_through()
        return "sunny"

    async with open_resources(mode=Mode.STATELESS) as plane:
        door = shut_door()
        call = plane.begin(plane.serve, RequestKind.TOOL, None, None, work)
        await door.reached.wait()
        reply = await plane.prepare(timeout_s=1)
        assert (reply.phase, reply.report.ready) == ("preparing", False)
        assert reply.report.blockers == ("requests without a rollout: 1",)
        door.let_go()
        assert (await plane.prepare()).phase == "prepared"
        assert call.result == "sunny"


async def test_a_server_that_cannot_export_blocks_until_its_rollouts_are_retired(
    autojump_clock: MockClock,
) -> None:
    """RES-1 (scenario 3): it fails closed. A session that is seeded meanwhile does not block."""
    async with open_resources(mode=Mode.RESTART_ONLY) as plane:
        await plane.seed("s", R0)
        reply = await plane.prepare(timeout_s=1)
        assert (reply.phase, reply.report.blockers) == ("preparing", ("r",))
        assert reply.report.details[0].doing == "session 's': cannot be exported"
        await plane.seed("late", Q0)
        await plane.retire(R0)
        assert plane.server.retired == ["s"]
        assert (await plane.prepare()).phase == "prepared"
        assert (await plane.commit()).episode_ids == ()
        await plane.resume()
        reply = await plane.prepare("c2", timeout_s=1)
        assert reply.report.blockers == ("q",)


async def test_sessions_that_are_begun_and_ended_by_other_requests(
    autojump_clock: MockClock,
) -> None:
    """RES-3 (scenario 6): only the live one is exported."""
    async with open_resources() as plane:
        for session_id, episode_id in (("s", R0), ("s", R0), ("t", Q0)):
            plane.resources.checkpoint_session_started(session_id, episode_id)
            plane.server.counts[session_id] = 0
        with pytest.raises(SessionConflict):
            plane.resources.checkpoint_session_started("s", Q0)
        plane.resources.checkpoint_session_ended("t")
        plane.resources.checkpoint_session_ended("unknown")
        assert await plane.exported() == ("r",)
        await plane.prepare("c2")
        plane.resources.checkpoint_session_ended("s")
        assert (await plane.commit("c2", directory="c2")).episode_ids == ("r",)
        await plane.resume("c2")
        assert plane.counts["sessions"] == plane.counts["ended"] == 0
        # It is the server that frees.
        assert plane.server.retired == []


async def test_a_session_that_the_server_has_dropped_is_not_tracked_any_more(
    autojump_clock: MockClock,
) -> None:
    """RES-2 (scenario 10): the commit goes on without it."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        await plane.seed("t", Q0)
        del plane.server.counts["s"]
        assert await plane.exported() == ("q",)
        assert plane.counts["sessions"] == 1


async def test_the_scope_given_is_the_scope_written(autojump_clock: MockClock) -> None:
    """CTL-13, I19."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        await plane.seed("t", Q0)
        assert await plane.exported(episodes=(R0,)) == ("r",)
        assert await plane.increment("t") == 1


async def test_a_commit_whose_hook_fails_may_be_tried_again(autojump_clock: MockClock) -> None:
    """RES-1, CTL-17: the error names the sessions."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        await plane.prepare()
        plane.server.failure = OSError("snapshot failed")
        with pytest.raises(InvalidCheckpointState, match=r"session 's' of r: OSError: snapshot"):
            await plane.commit()
        plane.server.failure = None
        assert (await plane.commit()).episode_ids == ("r",)


async def test_a_state_that_is_not_json_fails_the_commit_by_name(autojump_clock: MockClock) -> None:
    """STO-3: the session, and the path inside its state."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        plane.server.counts["s"] = {"deck": [1, {2}]}
        await plane.prepare()
        with pytest.raises(InvalidCheckpointState, match=r"session 's' of r: \$\.deck\[1\]"):
            await plane.commit()
        await plane.resume()
        plane.server.counts["s"] = 1
        assert await plane.exported("c2") == ("r",)


async def test_a_resume_does_not_wait_for_a_hook_that_hangs(autojump_clock: MockClock) -> None:
    """CTL-10: the export is cancelled."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        await plane.prepare()
        plane.server.exporting.shut()
        commit = plane.begin(plane.commit)
        await plane.server.exporting.reached.wait()
        began = trio.current_time()
        await plane.resume()
        assert trio.current_time() == began
        await commit.ended.wait()
        assert isinstance(commit.error, CheckpointError)
        assert plane.archive.writes == 0


async def test_status_says_how_the_server_takes_part(autojump_clock: MockClock) -> None:
    """RES-4, CTL-15 (scenario 9)."""
    async with open_resources(verify=StepMode.REPLAY) as plane:
        assert plane.extra == {
            "mode": "exported",
            "verify": "replay",
            "retired_sessions": 0,
            "restored_pending": [],
            "restored_pending_count": 0,
        }
        assert plane.control.status().kind == "resources"
