"""Steps that no checkpoint sees."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from gymtrio.episodes.steps import OnClose, StepMode, Unrecorded


async def test_without_checkpoints_a_step_is_its_work_and_a_boundary_is_nothing(
    autojump_clock: MockClock,
) -> None:
    """SET-1: nothing is kept; a lazy state is never called."""
    steps = Unrecorded()

    async def work() -> int:
        return 7

    assert steps.continuation is None
    assert await steps.step(work, mode=StepMode.WAIT, doing="x") == 7
    replay = steps.step(work, mode=StepMode.REPLAY, doing="x", on_close=OnClose.CANCEL)
    assert await replay == 7
    await steps.boundary(lambda: pytest.fail("called"))


async def test_a_boundary_is_still_a_place_to_be_cancelled(autojump_clock: MockClock) -> None:
    """STEP-1: a body of boundaries alone can be stopped."""
    with trio.CancelScope() as scope:
        scope.cancel()
        await Unrecorded().boundary(None)
    assert scope.cancelled_caught
