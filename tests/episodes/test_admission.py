"""The gate: what waits, what wakes it, and what the one who comes through may rely on."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.episodes.admission import Admission
from gymtrio.errors import AdmissionClosed, StaleAttempt, Unavailable
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import WAKE_SLICE_TASKS
from tests.helpers.gated import begin, open_gated
from tests.helpers.halting_disk import loop_meter


def episode(name: str, attempt: int = 0) -> EpisodeId:
    return EpisodeId(RolloutId(name), attempt)


R = episode("r")


async def test_what_arrives_while_closed_waits_for_the_opening(autojump_clock: MockClock) -> None:
    """CTL-18: it waits at the gate and is not refused."""
    async with open_gated() as gated:
        gated.close()
        answers = await begin(gated.nursery, lambda: gated.admission.enter(R))
        assert answers == []
        assert gated.admission.waiting == 1
        gated.open()
        await wait_all_tasks_blocked()
        assert answers == [None]
        assert gated.admission.waiting == 0


async def test_a_caller_that_would_rather_be_refused_is(autojump_clock: MockClock) -> None:
    """CTL-18: 409 admission_closed."""
    async with open_gated() as gated:
        gated.close()
        with pytest.raises(AdmissionClosed):
            await gated.admission.enter(R, refuse=True)
        gated.open()
        await gated.admission.enter(R, refuse=True)


async def test_retiring_wakes_the_waiters_of_the_attempt_and_no_others(
    autojump_clock: MockClock,
) -> None:
    """CTL-18, CTL-5: the waiter of a retired attempt gets stale_attempt at once."""
    async with open_gated() as gated:
        gated.close()
        retired = await begin(gated.nursery, lambda: gated.admission.enter(episode("r", 1)))
        later = await begin(gated.nursery, lambda: gated.admission.enter(episode("r", 2)))
        other = await begin(gated.nursery, lambda: gated.admission.enter(episode("s")))
        gated.admission.refuse([episode("r", 1)])
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in retired] == [StaleAttempt]
        assert later == other == []
        assert gated.admission.waiting == 2
        gated.open()
        await wait_all_tasks_blocked()
        assert later == other == [None]


async def test_a_stale_attempt_is_refused_at_an_open_gate_too(autojump_clock: MockClock) -> None:
    """CTL-5."""
    async with open_gated() as gated:
        gated.admission.refuse([R])
        with pytest.raises(StaleAttempt):
            await gated.admission.enter(R)
        await gated.admission.enter(episode("r", 1))


async def test_a_woken_waiter_stays_when_the_gate_closed_again_before_it_ran(
    autojump_clock: MockClock,
) -> None:
    """STEP-2, CTL-18: whoever comes through does so with the gate open."""
    async with open_gated() as gated:
        gated.close()
        closed_when_through: list[bool] = []

        async def enter() -> None:
            await gated.admission.enter(R)
            closed_when_through.append(gated.admission.closed)

        await begin(gated.nursery, enter)
        gated.open()
        gated.close()
        await wait_all_tasks_blocked()
        assert closed_when_through == []
        gated.open()
        await wait_all_tasks_blocked()
        assert closed_when_through == [False]


async def test_a_cancelled_waiter_leaves_nothing_behind(autojump_clock: MockClock) -> None:
    """CTL-18: a caller that left holds no place at the gate."""
    async with open_gated() as gated:
        gated.close()
        with trio.move_on_after(1) as scope:
            await gated.admission.enter(R)
        assert scope.cancelled_caught
        assert gated.admission.waiting == 0
        gated.admission.refuse([R])
        gated.open()
        await wait_all_tasks_blocked()


async def test_a_server_that_waits_for_its_restore_starts_closed() -> None:
    """CTL-18."""
    assert Admission(closed=True).closed


async def test_thousands_are_woken_in_slices_in_their_order(autojump_clock: MockClock) -> None:
    """CTL-18: the loop looks at I/O between slices, and no waiter is forgotten."""
    count = 2 * WAKE_SLICE_TASKS + 7
    async with open_gated() as gated:
        gated.close()
        through: list[int] = []

        async def enter(number: int) -> None:
            await gated.admission.enter(None)
            through.append(number)

        for number in range(count):
            gated.nursery.start_soon(enter, number)
            # One at a time, so that they stand in this order.
            await wait_all_tasks_blocked()
        gated.open()
        most = 0
        while len(through) < count:
            before = len(through)
            await trio.lowlevel.checkpoint()
            most = max(most, len(through) - before)
        # Two slices may run in one pass of ours, never all of them.
        assert most <= 2 * WAKE_SLICE_TASKS
        order = [number // WAKE_SLICE_TASKS for number in through]
        assert order == sorted(order)


async def test_thousands_who_are_refused_are_woken_in_slices(autojump_clock: MockClock) -> None:
    """CTL-15: and who left meanwhile, or came through the gate, is left alone."""
    count = 3 * WAKE_SLICE_TASKS
    async with open_gated() as gated:
        gated.close()
        told: list[type[BaseException]] = []
        leaving = trio.CancelScope()

        async def enter(number: int) -> None:
            with leaving if number == count - 1 else trio.CancelScope():
                try:
                    await gated.admission.enter(episode(f"r{number}"))
                except StaleAttempt as error:
                    told.append(type(error))

        for number in range(count):
            gated.nursery.start_soon(enter, number)
            await wait_all_tasks_blocked()
        with loop_meter() as meter:
            gated.admission.refuse([episode(f"r{number}") for number in range(count)])
            leaving.cancel()
            gated.open()
            await wait_all_tasks_blocked()
        assert len(told) == count - 1
        assert gated.admission.waiting == 0
        # Refusing and opening each wake a slice, and three tasks more run here.
        assert meter.steps_most <= 2 * WAKE_SLICE_TASKS + 5


async def test_opening_between_two_slices_wakes_the_rest(autojump_clock: MockClock) -> None:
    """CTL-18: closing and opening while waiters are being woken loses none of them."""
    count = WAKE_SLICE_TASKS + 5
    async with open_gated() as gated:
        gated.close()
        through: list[None] = []

        async def enter() -> None:
            await gated.admission.enter(None)
            through.append(None)

        for _ in range(count):
            gated.nursery.start_soon(enter)
        await wait_all_tasks_blocked()
        gated.open()
        await trio.lowlevel.checkpoint()
        gated.close()
        await wait_all_tasks_blocked()
        gated.open()
        await wait_all_tasks_blocked()
        assert len(through) == count


async def test_a_superseded_execution_is_refused_at_once_also_at_an_open_gate(
    autojump_clock: MockClock,
) -> None:
    """HARD-11."""
    async with open_gated() as gated:
        gated.admission.supersede([R], "e2")
        with pytest.raises(StaleAttempt):
            await gated.admission.enter(episode("r", 1), epoch="e1")
        await gated.admission.enter(episode("r", 1), epoch="e2")
        await gated.admission.enter(episode("r", 1))


async def test_a_restore_wakes_the_superseded_ones_at_the_gate_and_no_others(
    autojump_clock: MockClock,
) -> None:
    """HARD-11: they came before the epoch was known; what waits on goes through at the opening."""
    async with open_gated() as gated:
        gated.close()
        r1, nobody = episode("r", 1), None

        async def enter(epoch: str | None) -> None:
            await gated.admission.enter(r1, epoch=epoch)

        old = await begin(gated.nursery, lambda: enter("e1"))
        new = await begin(gated.nursery, lambda: enter("e2"))
        outside = await begin(gated.nursery, lambda: enter(nobody))
        gated.admission.supersede([R], "e2")
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in old] == [StaleAttempt]
        assert new == outside == []
        gated.open()
        await wait_all_tasks_blocked()
        assert new == outside == [None]


async def test_a_gate_that_ends_refuses_who_waits_and_who_would(autojump_clock: MockClock) -> None:
    """SRV-2: all of them, however many; what is inside and parks goes on waiting."""
    async with open_gated() as gated:
        admission = gated.admission
        gated.close()
        parked = await begin(gated.nursery, admission.wait_open)
        waiters = [
            await begin(gated.nursery, lambda: admission.enter(R))
            for _ in range(2 * WAKE_SLICE_TASKS)
        ]
        admission.end("this server is shutting down")
        await wait_all_tasks_blocked()
        assert all(isinstance(answers[0], Unavailable) for answers in waiters)
        assert parked == []
        with pytest.raises(Unavailable, match="shutting down"):
            await admission.enter(R)
        # A resume may still come: what is inside goes on, and an open gate refuses nobody.
        gated.open()
        await wait_all_tasks_blocked()
        assert parked == [None]
        await admission.enter(R)
