"""Episodes and their steps under a checkpoint, one promise at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.episodes.episode import (
    Episode,
    EpisodeState,
    EpisodeTimedOut,
    OnClose,
    StepMode,
    boundary_of,
)
from gymtrio.errors import CheckpointConflict, SessionConflict, StaleAttempt, TransportError
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import WAKE_SLICE_TASKS
from tests.helpers.gated import Gated, open_gated
from tests.helpers.halting_disk import loop_meter


def episode(name: str = "r", attempt: int = 0) -> EpisodeId:
    return EpisodeId(RolloutId(name), attempt)


R = episode()


class Held:
    """Work that a test holds until it lets it go, and that counts its beginnings."""

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0
        self.error: Exception | None = None
        self._go = trio.Event()

    def let_go(self, error: Exception | None = None) -> None:
        self.error = error
        self._go.set()

    async def __call__(self) -> str:
        self.begun += 1
        try:
            await self._go.wait()
        except trio.Cancelled:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return f"result {self.begun}"


def stepping(
    work: Callable[[], Awaitable[object]], mode: StepMode, on_close: OnClose = OnClose.KEEP
) -> Callable[[Episode], Awaitable[object]]:
    """An episode of one boundary and one step."""

    async def body(live: Episode) -> object:
        await live.boundary("before")
        result = await live.step(work, mode=mode, doing="the step", on_close=on_close)
        await live.boundary("after")
        return result

    return body


def exported(gated: Gated) -> object:
    live = gated.only()
    assert live.exportable
    return boundary_of(live.last_boundary, "r")


# -- boundaries -------------------------------------------------------------------------------


async def test_a_boundary_parks_while_a_checkpoint_is_open(autojump_clock: MockClock) -> None:
    """STEP-2: recorded, parked until resume, then on."""
    async with open_gated() as gated:
        reached = trio.Event()

        async def body(live: Episode) -> str:
            await reached.wait()
            await live.boundary({"at": 1})
            return "done"

        answers = await gated.start(R, body)
        gated.close()
        assert gated.episodes.blocking == 1
        reached.set()
        await wait_all_tasks_blocked()
        assert gated.only().state is EpisodeState.PARKED
        assert gated.episodes.blocking == 0
        assert exported(gated) == {"at": 1}
        gated.open()
        await wait_all_tasks_blocked()
        assert answers == ["done"]


async def test_a_woken_episode_stays_parked_if_another_checkpoint_closed_first(
    autojump_clock: MockClock,
) -> None:
    """STEP-2: it neither runs nor blocks in between."""
    async with open_gated() as gated:
        gated.close()
        answers = await gated.start(R, stepping(Held(), StepMode.REPLAY))
        gated.open()
        gated.close()
        await wait_all_tasks_blocked()
        assert gated.only().state is EpisodeState.PARKED
        assert gated.episodes.blocking == 0
        assert answers == []


async def test_a_lazy_boundary_is_made_at_export_only(autojump_clock: MockClock) -> None:
    """STEP-2: the state may be a function; it is not called for an episode that is not exported."""
    async with open_gated() as gated:
        made: list[int] = []

        def state() -> object:
            made.append(1)
            return {"n": len(made)}

        async def body(live: Episode) -> None:
            for _ in range(10):
                await live.boundary(state)
            await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="x")

        await gated.start(R, body)
        gated.close()
        assert made == []
        assert exported(gated) == {"n": 1}


async def test_a_continuation_counts_as_the_boundary_until_another_is_recorded(
    autojump_clock: MockClock,
) -> None:
    """STEP-2, ENV-3."""
    async with open_gated() as gated:

        async def body(live: Episode) -> None:
            assert live.continuation == {"at": 3}
            await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="x")

        await gated.start(R, body, boundary={"at": 3})
        gated.close()
        assert exported(gated) == {"at": 3}


async def test_what_is_exported_stays_as_it_was_at_export(autojump_clock: MockClock) -> None:
    """STEP-2, I15: an episode that ends while records are being made changes nothing in them."""
    async with open_gated() as gated:
        gated.close()
        await gated.start(R, stepping(Held(), StepMode.REPLAY))
        given = gated.only().last_boundary
        gated.episodes.retire_up_to(R)
        await wait_all_tasks_blocked()
        assert not gated.episodes.live
        assert boundary_of(given, "r") == "before"


# -- wait steps -------------------------------------------------------------------------------


async def test_a_wait_step_is_waited_for(autojump_clock: MockClock) -> None:
    """STEP-3: shielded from the close, it blocks until the boundary after it."""
    async with open_gated() as gated:
        work = Held()
        answers = await gated.start(R, stepping(work, StepMode.WAIT))
        gated.close()
        await wait_all_tasks_blocked()
        assert gated.episodes.blocking == 1
        assert not gated.only().exportable
        work.let_go()
        await wait_all_tasks_blocked()
        assert gated.episodes.blocking == 0
        assert exported(gated) == "after"
        assert answers == []
        gated.open()
        await wait_all_tasks_blocked()
        assert answers == ["result 1"]


async def test_no_replay_step_may_follow_a_wait_step_without_a_boundary(
    autojump_clock: MockClock,
) -> None:
    """STEP-3, I5: it would be exported at a boundary that the wait step has left behind."""
    async with open_gated() as gated:

        async def nothing() -> None:
            pass

        async def body(live: Episode) -> None:
            await live.step(nothing, mode=StepMode.WAIT, doing="effect")
            await live.step(nothing, mode=StepMode.REPLAY, doing="again")

        with pytest.raises(AssertionError, match="again: no boundary since"):
            await gated.episodes.run(R, body)


async def test_a_boundary_after_a_wait_step_allows_a_replay_step(
    autojump_clock: MockClock,
) -> None:
    """STEP-3."""
    async with open_gated() as gated:
        work = Held()
        work.let_go()

        async def body(live: Episode) -> object:
            await live.step(work, mode=StepMode.WAIT, doing="effect")
            await live.boundary("after the effect")
            return await live.step(work, mode=StepMode.REPLAY, doing="again")

        assert await gated.episodes.run(R, body) == "result 2"


# -- replay steps -----------------------------------------------------------------------------


async def test_a_replay_step_goes_on_and_its_result_is_held(autojump_clock: MockClock) -> None:
    """STEP-3: keep; it does not block and is exported at the boundary before it."""
    async with open_gated() as gated:
        work = Held()
        answers = await gated.start(R, stepping(work, StepMode.REPLAY))
        gated.close()
        assert gated.episodes.blocking == 0
        assert exported(gated) == "before"
        work.let_go()
        await wait_all_tasks_blocked()
        assert gated.only().state is EpisodeState.REPLAY_STEP
        assert exported(gated) == "before"
        assert answers == []
        gated.open()
        await wait_all_tasks_blocked()
        assert answers == ["result 1"]
        assert work.begun == 1


async def test_a_held_result_stays_held_under_the_next_checkpoint(
    autojump_clock: MockClock,
) -> None:
    """STEP-3, STEP-2."""
    async with open_gated() as gated:
        work = Held()
        answers = await gated.start(R, stepping(work, StepMode.REPLAY))
        gated.close()
        work.let_go()
        await wait_all_tasks_blocked()
        gated.open()
        gated.close()
        await wait_all_tasks_blocked()
        assert answers == []
        assert exported(gated) == "before"


async def test_a_close_cancels_a_step_that_asked_for_it_and_resume_runs_it_again(
    autojump_clock: MockClock,
) -> None:
    """STEP-3: cancel; its scope is cancelled at the close, structurally."""
    async with open_gated() as gated:
        work = Held()
        answers = await gated.start(R, stepping(work, StepMode.REPLAY, OnClose.CANCEL))
        gated.close()
        await wait_all_tasks_blocked()
        assert (work.begun, work.cancelled) == (1, 1)
        assert exported(gated) == "before"
        gated.open()
        await wait_all_tasks_blocked()
        assert work.begun == 2
        work.let_go()
        await wait_all_tasks_blocked()
        assert answers == ["result 2"]


async def test_a_cancelled_step_runs_once_more_however_often_the_gate_moved(
    autojump_clock: MockClock,
) -> None:
    """STEP-3: closed, opened and closed again before it ran: it waits for the last opening."""
    async with open_gated() as gated:
        work = Held()
        await gated.start(R, stepping(work, StepMode.REPLAY, OnClose.CANCEL))
        gated.close()
        gated.open()
        gated.close()
        await wait_all_tasks_blocked()
        assert (work.begun, work.cancelled) == (1, 1)
        gated.open()
        await wait_all_tasks_blocked()
        assert work.begun == 2


async def test_an_error_on_the_way_out_of_a_cancelled_step_is_the_closes_doing(
    autojump_clock: MockClock,
) -> None:
    """STEP-3, STEP-4: the step runs again; the boundary stands."""
    async with open_gated() as gated:
        begun = 0

        async def work() -> str:
            nonlocal begun
            begun += 1
            if begun == 1:
                try:
                    await trio.sleep_forever()
                finally:
                    raise TransportError("the connection broke while it was being left")
            return "second"

        answers = await gated.start(R, stepping(work, StepMode.REPLAY, OnClose.CANCEL))
        gated.close()
        await wait_all_tasks_blocked()
        assert exported(gated) == "before"
        gated.open()
        await wait_all_tasks_blocked()
        assert answers == ["second"]


async def test_a_result_that_came_with_the_close_is_kept(autojump_clock: MockClock) -> None:
    """STEP-3: a step that had ended is not run again, whatever it asked for."""
    async with open_gated() as gated:
        work = Held()
        answers = await gated.start(R, stepping(work, StepMode.REPLAY, OnClose.CANCEL))
        work.let_go()
        gated.close()
        await wait_all_tasks_blocked()
        assert answers == []
        gated.open()
        await wait_all_tasks_blocked()
        # It was woken by its own end and by the close at once; either way it ran to its end once.
        assert answers == [f"result {work.begun}"]


async def test_no_work_begins_while_a_checkpoint_is_open(autojump_clock: MockClock) -> None:
    """STEP-3: an episode that comes to a replay step after the close waits before it."""
    async with open_gated() as gated:
        reached, work = trio.Event(), Held()

        async def body(live: Episode) -> object:
            await live.boundary("before")
            await reached.wait()
            return await live.step(work, mode=StepMode.REPLAY, doing="x")

        answers = await gated.start(R, body)
        gated.close()
        reached.set()
        await wait_all_tasks_blocked()
        assert work.begun == 0
        assert gated.episodes.blocking == 0
        assert exported(gated) == "before"
        gated.open()
        work.let_go()
        await wait_all_tasks_blocked()
        assert answers == ["result 1"]


async def test_a_step_that_fails_during_a_checkpoint_makes_the_episode_start_over(
    autojump_clock: MockClock,
) -> None:
    """STEP-4: exported from its input; the error is heard after resume."""
    async with open_gated() as gated:
        work = Held()
        answers = await gated.start(R, stepping(work, StepMode.REPLAY))
        gated.close()
        work.let_go(TransportError("gone"))
        await wait_all_tasks_blocked()
        assert gated.episodes.blocking == 0
        assert exported(gated) is None
        assert answers == []
        gated.open()
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in answers] == [TransportError]


async def test_a_step_that_fails_without_a_checkpoint_leaves_the_boundary(
    autojump_clock: MockClock,
) -> None:
    """STEP-4: nothing is lost by a failure that the episode handles."""
    async with open_gated() as gated:

        async def failing() -> None:
            raise TransportError("gone")

        async def body(live: Episode) -> None:
            await live.boundary("before")
            with pytest.raises(TransportError):
                await live.step(failing, mode=StepMode.REPLAY, doing="x")
            await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="y")

        await gated.start(R, body)
        gated.close()
        assert exported(gated) == "before"


# -- deadlines --------------------------------------------------------------------------------


async def test_an_episode_that_uses_up_its_time_is_ended(autojump_clock: MockClock) -> None:
    """STEP-5, STEP-1."""
    async with open_gated() as gated:
        with pytest.raises(EpisodeTimedOut, match=r"r timed out after 5 s in the step"):
            await gated.episodes.run(R, stepping(trio.sleep_forever, StepMode.REPLAY), timeout_s=5)
        assert trio.current_time() == pytest.approx(5)
        assert not gated.episodes.live


async def test_time_parked_does_not_count(autojump_clock: MockClock) -> None:
    """STEP-5, I32: the rest of its deadline is what it was."""
    async with open_gated() as gated:

        async def body(live: Episode) -> None:
            await trio.sleep(2)
            await live.boundary("here")
            woken = trio.current_time()
            try:
                await trio.sleep_forever()
            finally:
                used_after.append(trio.current_time() - woken)

        used_after: list[float] = []
        answers = await gated.start(R, body, timeout_s=5)
        gated.close()
        await trio.sleep(1000)
        assert gated.only().state is EpisodeState.PARKED
        gated.open()
        await trio.sleep(10)
        assert [type(answer) for answer in answers] == [EpisodeTimedOut]
        assert used_after == [pytest.approx(3)]


async def test_a_replay_step_under_a_checkpoint_does_not_count_and_otherwise_does(
    autojump_clock: MockClock,
) -> None:
    """STEP-5: also when it was entered while the checkpoint was open."""
    async with open_gated() as gated:
        answers = await gated.start(R, stepping(trio.sleep_forever, StepMode.REPLAY), timeout_s=5)
        await trio.sleep(2)
        gated.close()
        await trio.sleep(1000)
        gated.open()
        await trio.sleep(2.9)
        gated.close()
        gated.open()
        await trio.sleep(0.05)
        assert answers == []
        await trio.sleep(0.1)
        assert [type(answer) for answer in answers] == [EpisodeTimedOut]


async def test_a_replay_step_entered_under_a_checkpoint_does_not_count(
    autojump_clock: MockClock,
) -> None:
    """STEP-5: it waits for the opening, and its time stands still from its entry."""
    async with open_gated() as gated:
        reached = trio.Event()

        async def body(live: Episode) -> None:
            await reached.wait()
            await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="x")

        answers = await gated.start(R, body, timeout_s=5)
        gated.close()
        await trio.sleep(1)
        reached.set()
        await trio.sleep(1000)
        assert answers == []
        gated.open()
        await trio.sleep(3.9)
        assert answers == []
        await trio.sleep(0.2)
        assert [type(answer) for answer in answers] == [EpisodeTimedOut]


async def test_a_wait_step_counts_also_under_a_checkpoint(autojump_clock: MockClock) -> None:
    """STEP-5: what a checkpoint waits for is bounded by the episode's own time."""
    async with open_gated() as gated:
        answers = await gated.start(R, stepping(trio.sleep_forever, StepMode.WAIT), timeout_s=5)
        gated.close()
        await trio.sleep(6)
        assert [type(answer) for answer in answers] == [EpisodeTimedOut]
        assert gated.episodes.blocking == 0


# -- ending -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", StepMode)
async def test_retiring_cancels_the_episode_and_its_end_is_proof(
    autojump_clock: MockClock, mode: StepMode
) -> None:
    """STEP-1, CTL-12: the scope is cancelled; when `ended` is set nothing of it runs."""
    async with open_gated() as gated:
        work = Held()
        answers = await gated.start(R, stepping(work, mode))
        live = gated.only()
        gated.episodes.retire_up_to(R)
        gated.episodes.retire_up_to(R)
        assert gated.episodes.blocking == 1
        await live.ended.wait()
        assert work.cancelled == 1
        assert gated.episodes.blocking == 0
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in answers] == [StaleAttempt]


async def test_an_episode_that_ends_in_the_instant_of_its_retirement_is_not_heard(
    autojump_clock: MockClock,
) -> None:
    """CTL-5, I10: it is decided in that instant, whenever its turn to be cancelled comes."""
    async with open_gated() as gated:
        go = trio.Event()

        async def body(live: Episode) -> str:
            await go.wait()
            return "a result"

        answers = await gated.start(R, body)
        go.set()
        gated.episodes.retire_up_to(R)
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in answers] == [StaleAttempt]


@pytest.mark.parametrize("mode", StepMode)
async def test_what_is_retired_begins_no_further_step(
    autojump_clock: MockClock, mode: StepMode
) -> None:
    """CTL-5: also before its turn to be cancelled has come; a parked one does not go on either."""
    async with open_gated() as gated:
        go = trio.Event()
        begun: list[str] = []

        async def work() -> None:
            begun.append("a step")

        async def body(live: Episode) -> None:
            await go.wait()
            await live.step(work, mode=mode, doing="a step")

        async def parking(live: Episode) -> None:
            await go.wait()
            await live.boundary("here")
            begun.append("past a boundary")

        await gated.start(R, body)
        await gated.start(episode("s"), parking)
        go.set()
        gated.episodes.retire_up_to(R)
        gated.episodes.retire_up_to(episode("s"))
        await wait_all_tasks_blocked()
        assert begun == []
        assert gated.episodes.live == {}


async def test_thousands_are_retired_in_one_instant_and_cancelled_in_slices(
    autojump_clock: MockClock,
) -> None:
    """CTL-5, CTL-15: all block at once; the loop turns while they stop."""
    count = 20 * WAKE_SLICE_TASKS
    names = [episode(f"r{number}") for number in range(count)]
    async with open_gated() as gated:

        async def body(live: Episode) -> None:
            await live.boundary("here")

        gated.close()
        ended: list[object] = []

        async def run(name: EpisodeId) -> None:
            try:
                await gated.episodes.run(name, body)
            except StaleAttempt as error:
                ended.append(error)

        for name in names:
            gated.nursery.start_soon(run, name)
        await wait_all_tasks_blocked()
        with loop_meter() as meter:
            for name in names:
                gated.episodes.retire_up_to(name)
            assert gated.episodes.blocking == count
            gated.open()
            await wait_all_tasks_blocked()
        assert len(ended) == count
        # Those that the opening wakes run as well, and each takes a turn or two to end.
        assert meter.steps_most <= 5 * WAKE_SLICE_TASKS


async def test_a_retired_episode_blocks_until_it_has_stopped(autojump_clock: MockClock) -> None:
    """CTL-12, STEP-1: parked or not, it may still reach other servers and is not exported."""
    async with open_gated() as gated:

        async def body(live: Episode) -> None:
            try:
                await live.boundary("here")
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(5)

        gated.close()
        await gated.start(R, body)
        assert gated.episodes.blocking == 0
        await trio.sleep(60)
        live = gated.only()
        gated.episodes.retire_up_to(R)
        await trio.sleep(2)
        assert gated.episodes.blocking == 1
        assert not live.exportable
        report = gated.episodes.report()
        assert report.blockers == ("r",)
        assert report.details[0].doing == "stopping, at a boundary"
        assert report.details[0].since_s == 2, "it did not block while it was parked"
        await gated.episodes.wait_up_to(R)
        assert gated.episodes.blocking == 0


@pytest.mark.parametrize("comes_to", [EpisodeState.PARKED, EpisodeState.REPLAY_STEP])
async def test_a_stopped_episode_blocks_whatever_it_still_comes_to(
    autojump_clock: MockClock, comes_to: EpisodeState
) -> None:
    """CTL-12, STEP-1: until it has ended; where it parks on its way out it is not to be continued."""
    async with open_gated() as gated:

        async def body(live: Episode) -> None:
            try:
                await live.boundary("before")
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                    if comes_to is EpisodeState.PARKED:
                        await live.boundary("on the way out")
                    else:
                        await live.step(Held(), mode=StepMode.REPLAY, doing="the way out")

        await gated.start(R, body)
        gated.close()
        live = gated.only()
        live.stop(SessionConflict("closed"))
        await trio.sleep(4)
        assert live.state is comes_to
        assert gated.episodes.blocking == 1
        assert not live.exportable
        await live.ended.wait()
        assert gated.episodes.blocking == 0


async def test_from_finishing_on_a_retire_waits_and_the_result_is_not_heard(
    autojump_clock: MockClock,
) -> None:
    """STEP-7, I10: the clean-up completes uncancelled; what the episode returns is stale."""
    async with open_gated() as gated:
        cleaned: list[float] = []

        async def body(live: Episode) -> str:
            live.finishing()
            await trio.sleep(3)
            cleaned.append(trio.current_time())
            return "too late"

        answers = await gated.start(R, body)
        gated.episodes.retire_up_to(R)
        await gated.episodes.wait_up_to(R)
        await wait_all_tasks_blocked()
        assert cleaned == [pytest.approx(3)]
        assert [type(answer) for answer in answers] == [StaleAttempt]


async def test_stopping_says_why(autojump_clock: MockClock) -> None:
    """AGT-7, STEP-1: the first reason stands, and nothing is cancelled twice."""
    async with open_gated() as gated:
        answers = await gated.start(R, stepping(Held(), StepMode.REPLAY))
        live = gated.only()
        live.stop(SessionConflict("closed"))
        gated.episodes.retire_up_to(R)
        await live.ended.wait()
        await wait_all_tasks_blocked()
        assert [str(answer) for answer in answers] == ["closed"]


@pytest.mark.parametrize("refused", [False, True])
async def test_what_a_stopped_body_raises_is_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    """I10: the caller hears that it was stopped; whoever wrote the body hears of its own fault."""
    async with open_gated() as gated:

        async def body(live: Episode) -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise TransportError("gone") if refused else KeyError("a fault on the way out")

        answers = await gated.start(R, body)
        gated.episodes.retire_up_to(R)
        await gated.episodes.wait_up_to(R)
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in answers] == [StaleAttempt]
        assert ("a fault on the way out" in caplog.text) is not refused
        assert [record.levelname for record in caplog.records] == ["WARNING"] * (not refused)


async def test_background_work_ends_with_the_body(autojump_clock: MockClock) -> None:
    """STEP-1: the episode's nursery; leaving `run` proves that nothing runs (E2)."""
    async with open_gated() as gated:
        ended: list[str] = []

        async def background() -> None:
            try:
                await trio.sleep_forever()
            finally:
                ended.append("background")

        async def body(live: Episode) -> str:
            live.nursery.start_soon(background)
            await trio.sleep(1)
            return "done"

        assert await gated.episodes.run(R, body) == "done"
        assert ended == ["background"]


async def test_a_failure_in_the_background_ends_the_episode(autojump_clock: MockClock) -> None:
    """STEP-1: nothing is swallowed."""
    async with open_gated() as gated:

        async def failing() -> None:
            raise TransportError("background")

        async def body(live: Episode) -> None:
            live.nursery.start_soon(failing)
            await trio.sleep_forever()

        with pytest.RaisesGroup(TransportError):
            await gated.episodes.run(R, body)
        assert not gated.episodes.live


async def test_a_caller_that_leaves_takes_the_episode_with_it(autojump_clock: MockClock) -> None:
    """STEP-1: losing an episode is cancelling its scope."""
    async with open_gated() as gated:
        work = Held()
        with trio.move_on_after(1) as scope:
            await gated.episodes.run(R, stepping(work, StepMode.WAIT))
        assert scope.cancelled_caught
        assert work.cancelled == 1
        assert not gated.episodes.live
        assert gated.episodes.blocking == 0


async def test_an_attempt_runs_once_at_a_time(autojump_clock: MockClock) -> None:
    """STEP-1, HARD-1: the duplicate is refused and the first goes on."""
    async with open_gated() as gated:
        answers = await gated.start(R, stepping(Held(), StepMode.REPLAY))
        duplicate = await gated.start(R, stepping(Held(), StepMode.REPLAY))
        assert [type(answer) for answer in duplicate] == [CheckpointConflict]
        assert answers == []
        assert len(gated.episodes.live) == 1


async def test_a_rollouts_attempts_are_found_up_to_one(autojump_clock: MockClock) -> None:
    """CTL-12: retiring an attempt retires the earlier ones too, and no later one."""
    async with open_gated() as gated:
        for attempt in range(3):
            await gated.start(episode("r", attempt), stepping(Held(), StepMode.REPLAY))
        await gated.start(episode("s"), stepping(Held(), StepMode.REPLAY))
        found = sorted(live.episode_id for live in gated.episodes.up_to(episode("r", 1)))
        assert found == [episode("r", 0), episode("r", 1)]
        assert sorted(gated.episodes.of([RolloutId("s")])) == [episode("s")]


async def test_status_lists_what_an_episode_is_doing_and_since_when(
    autojump_clock: MockClock,
) -> None:
    """STEP-6, CTL-15."""
    async with open_gated() as gated:
        await gated.start(R, stepping(Held(), StepMode.WAIT))
        gated.close()
        await trio.sleep(4)
        report = gated.episodes.report()
        (detail,) = report.details
        assert (detail.blocker, detail.doing) == ("r", "in a wait step: the step")
        assert detail.since_s == pytest.approx(4)
        assert report.counts == {"live": 1, "waiting": 0, "blocking": 1}
