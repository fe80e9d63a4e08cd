"""Attempts that are given up."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.errors import (
    DeadlineExceeded,
    InvalidCheckpointState,
    NotFound,
    RetireIncomplete,
    StaleAttempt,
)
from gymtrio.limits import CLEANUP_S_MAX
from gymtrio.participants.resources import Admitted, Mode, RequestKind
from tests.participants.resources.harness import (
    Q0,
    R0,
    R1,
    open_resources,
    shut_door,
)


async def test_a_retire_answers_when_the_work_has_stopped_and_the_state_is_freed(
    autojump_clock: MockClock,
) -> None:
    """CTL-12, I10 (scenario 12): the request is cancelled; meanwhile new ones are stale."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        cleaned_up = shut_door()

        async def work(admitted: Admitted) -> None:
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await cleaned_up.pass_through()

        call = plane.begin(plane.serve, RequestKind.TOOL, "s", R0, work)
        await wait_all_tasks_blocked()
        retire = plane.begin(plane.retire, R0)
        await cleaned_up.reached.wait()
        for late in (plane.increment, plane.seed, plane.verify):
            with pytest.raises(StaleAttempt):
                await late("s", R0)
        await wait_all_tasks_blocked()
        assert not retire.ended.is_set()
        assert plane.server.retired == []
        cleaned_up.let_go()
        await retire.ended.wait()
        assert isinstance(call.error, StaleAttempt)
        assert plane.server.retired == ["s"]
        assert plane.counts["inflight"] == plane.counts["sessions"] == 0


async def test_a_retire_waits_for_a_seed_and_frees_what_it_made(autojump_clock: MockClock) -> None:
    """CTL-12 (scenario 18)."""
    async with open_resources() as plane:

        async def work(admitted: Admitted) -> None:
            with trio.CancelScope(shield=True):
                await building.pass_through()
            plane.server.counts["s"] = 0

        building = shut_door()
        seed = plane.begin(plane.serve, RequestKind.SEED, "s", R0, work)
        await building.reached.wait()
        retire = plane.begin(plane.retire, R0)
        await wait_all_tasks_blocked()
        assert not retire.ended.is_set()
        building.let_go()
        await retire.ended.wait()
        assert isinstance(seed.error, StaleAttempt)
        assert plane.server.retired == ["s"]


async def test_late_requests_of_a_retired_attempt_are_refused_until_forget(
    autojump_clock: MockClock,
) -> None:
    """CTL-5, CTL-12 (scenario 14): by rollout and by session; a close ends well."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        await plane.retire(R0)
        for late in (plane.increment, plane.verify):
            with pytest.raises(StaleAttempt):
                await late("s", None)
        with pytest.raises(StaleAttempt):
            await plane.seed("s9", R0)
        await plane.close("s", R0)
        assert plane.extra["retired_sessions"] == 1
        await plane.seed("s1", R1)
        with pytest.raises(RetireIncomplete, match="r-a1"):
            # The rollout goes on: it is not finished for good.
            await plane.forget("r")
        assert await plane.increment("s1") == 1
        await plane.close("s1", R1)
        await plane.forget("r")
        assert plane.extra["retired_sessions"] == 0
        with pytest.raises(NotFound):
            await plane.increment("s", None)
        assert plane.control.status().retired_rollouts == 0


async def test_a_stateless_server_refuses_a_retired_session_by_its_id_alone(
    autojump_clock: MockClock,
) -> None:
    """CTL-5 (scenario 22)."""

    async def work(admitted: Admitted) -> str:
        return "sunny"

    async with open_resources(mode=Mode.STATELESS) as plane:
        await plane.seed("s", R0)
        assert await plane.serve(RequestKind.TOOL, "s", None, work) == "sunny"
        await plane.retire(R0)
        with pytest.raises(StaleAttempt):
            await plane.serve(RequestKind.TOOL, "s", None, work)


async def test_a_retire_cut_short_blocks_the_next_prepare_until_it_is_repeated(
    autojump_clock: MockClock,
) -> None:
    """CTL-12 (scenarios 15, 20): not exported, not forgotten; the repeated one joins."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        await plane.seed("t", Q0)
        plane.server.retiring.shut()
        with pytest.raises(DeadlineExceeded):
            await plane.retire(R0, timeout_s=1)
        reply = await plane.prepare(timeout_s=1)
        assert (reply.phase, reply.report.blockers) == ("preparing", ("r",))
        assert reply.report.details[0].doing == "session 's': retired, not freed yet"
        await plane.resume()
        with pytest.raises(RetireIncomplete):
            await plane.forget("r")
        retire = plane.begin(plane.retire, R0)
        await wait_all_tasks_blocked()
        plane.server.retiring.let_go()
        await retire.ended.wait()
        assert plane.server.retired == ["s"]
        assert await plane.exported("c2") == ("q",)
        await plane.forget("r")


async def test_a_retire_whose_hook_fails_says_so_and_can_be_repeated(
    autojump_clock: MockClock,
) -> None:
    """CTL-12, RES-1."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        plane.server.failure = OSError("no route to the sandbox")
        with pytest.raises(InvalidCheckpointState, match="session 's' of r: OSError"):
            await plane.retire(R0)
        assert plane.resources.still_running(["r"]) == [R0]
        plane.server.failure = None
        await plane.retire(R0)
        assert plane.server.retired == ["s"]
        assert (await plane.prepare()).phase == "prepared"


async def test_retiring_during_a_checkpoint_makes_it_ready(autojump_clock: MockClock) -> None:
    """CTL-12: how a controller removes what blocks; who waits at the gate is woken."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        stuck = plane.begin(plane.increment, "s", R0, shut_door())
        await wait_all_tasks_blocked()
        prepare = plane.begin(plane.prepare)
        waits = plane.begin(plane.increment, "s", R0)
        closes = plane.begin(plane.close, "s", R0)
        await wait_all_tasks_blocked()
        assert not prepare.ended.is_set()
        await plane.retire(R0)
        await prepare.ended.wait()
        assert prepare.result.phase == "prepared"
        for call in (stuck, waits):
            await call.ended.wait()
            assert isinstance(call.error, StaleAttempt)
        await closes.ended.wait()
        assert closes.error is None
        assert (await plane.commit()).episode_ids == ()


async def test_a_retired_session_is_left_out_of_an_export_that_is_under_way(
    autojump_clock: MockClock,
) -> None:
    """CTL-12, I10."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        await plane.seed("t", Q0)
        await plane.prepare()
        plane.server.exporting.shut()
        commit = plane.begin(plane.commit)
        await plane.server.exporting.reached.wait()
        await plane.retire(R0)
        plane.server.exporting.let_go()
        await commit.ended.wait()
        assert commit.result.episode_ids == ("q",)


async def test_a_retire_takes_a_replayed_verify_that_waits_for_ever(
    autojump_clock: MockClock,
) -> None:
    """CTL-12, RES-9."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        verify = plane.begin(plane.verify, "s", R0, shut_door())
        await wait_all_tasks_blocked()
        await plane.retire(R0)
        assert isinstance(verify.error, StaleAttempt)


async def test_a_close_in_progress_is_not_cancelled_by_a_retire(autojump_clock: MockClock) -> None:
    """CTL-12: both end, and the session is freed."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        plane.server.retiring.shut()
        close = plane.begin(plane.close, "s", R0)
        await plane.server.retiring.reached.wait()
        retire = plane.begin(plane.retire, R0)
        await wait_all_tasks_blocked()
        assert not retire.ended.is_set()
        plane.server.retiring.let_go()
        await close.ended.wait()
        await retire.ended.wait()
        assert (close.error, retire.error) == (None, None)
        assert plane.server.retired == ["s"]
        assert plane.counts["sessions"] == 0


async def test_a_reply_that_nobody_takes_does_not_hold_up_a_retire_for_ever(
    autojump_clock: MockClock,
) -> None:
    """CTL-12: the work is done; what is left is a deaf peer."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        async with plane.resources.request(
            RequestKind.TOOL, session_id="s", episode_id=R0
        ) as admitted:
            sent = admitted.until_sent()
        began = trio.current_time()
        await plane.retire(R0, timeout_s=60)
        assert trio.current_time() - began == CLEANUP_S_MAX
        assert (await plane.prepare()).phase == "prepared"
        sent(False)
        assert plane.resources.ready()


async def test_earlier_attempts_go_with_a_later_one(autojump_clock: MockClock) -> None:
    """CTL-5: up to and including the one that is named."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        await plane.seed("s1", R1)
        await plane.seed("t", Q0)
        await plane.retire(R1)
        assert plane.server.retired == ["s", "s1"]
        assert await plane.increment("t") == 1


async def test_a_retired_session_that_is_just_being_freed_is_waited_for(
    autojump_clock: MockClock,
) -> None:
    """CTL-12: freed once."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        plane.server.retiring.shut()
        await plane.verify("s", R0)
        await plane.server.retiring.reached.wait()
        retire = plane.begin(plane.retire, R0)
        await wait_all_tasks_blocked()
        assert not retire.ended.is_set()
        plane.server.retiring.let_go()
        await retire.ended.wait()
        assert plane.server.freeing == plane.server.retired == ["s"]


async def test_nothing_is_left_when_everything_has_ended(autojump_clock: MockClock) -> None:
    """I34: counters are zero, a session that could not be freed is told in the log."""
    async with open_resources() as plane:
        await plane.seed("s", R0)
        await plane.seed("t", Q0)
        await plane.close("s", R0)
        plane.server.failure = OSError("gone")
        await plane.verify("t", Q0)
        await wait_all_tasks_blocked()
        counts = plane.counts
        assert {name: n for name, n in counts.items() if n} == {}
        assert not len(plane.resources._keeper.sessions)
        assert plane.resources.ready()
