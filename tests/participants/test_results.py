"""The table of results that are kept: how many, and for how long (HARD-9)."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.episodes.admission import Admission
from gymtrio.errors import InvalidCheckpointState, Unavailable
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import (
    RESULT_UNHEARD_S_MAX,
    RESULTS_UNACKNOWLEDGED_MAX,
    RESULTS_UNHEARD_MAX,
)
from gymtrio.participants.results import Result, Results, last_boundary, outcome_of


def episode(name: str = "r", attempt: int = 0) -> EpisodeId:
    return EpisodeId(RolloutId(name), attempt)


def result(name: str = "r", *, attempt: int = 0, wants_ack: bool = False) -> Result:
    return Result(
        episode_id=episode(name, attempt), task_digest="t", wants_ack=wants_ack, outcome={"x": name}
    )


async def test_without_asking_it_stays_until_it_was_handed_over(autojump_clock: MockClock) -> None:
    """HARD-9: by whichever reply comes first."""
    results = Results(Admission())
    kept = results.keep(result())
    results.sent(kept, False)
    results.sent(kept, False)
    assert results.find(episode(), "t") is kept
    results.sent(kept, True)
    assert results.find(episode(), "t") is None
    results.sent(kept, False)
    assert len(results) == 0


async def test_asked_for_it_stays_until_acknowledged(autojump_clock: MockClock) -> None:
    """HARD-9: delivered or not, whatever the time."""
    results = Results(Admission())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(results.run)
        kept = results.keep(result(wants_ack=True))
        results.sent(kept, True)
        results.sent(kept, False)
        await trio.sleep(10 * RESULT_UNHEARD_S_MAX)
        assert [*results] == [kept]
        assert results.drop(episode())
        assert not results.drop(episode())
        nursery.cancel_scope.cancel()


async def test_a_repeated_run_may_ask_for_what_the_first_did_not(autojump_clock: MockClock) -> None:
    """HARD-9."""
    results = Results(Admission())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(results.run)
        kept = results.keep(result())
        results.sent(kept, False)
        results.ask_ack(kept)
        results.sent(kept, True)
        await trio.sleep(2 * RESULT_UNHEARD_S_MAX)
        assert [*results] == [kept]
        nursery.cancel_scope.cancel()


async def test_another_task_is_refused(autojump_clock: MockClock) -> None:
    """HARD-9, ENV-3: 422."""
    results = Results(Admission())
    results.keep(result())
    with pytest.raises(InvalidCheckpointState, match="r has ended with a different task"):
        results.find(episode(), "other")


async def test_what_nobody_heard_has_its_time_but_not_under_a_checkpoint(
    autojump_clock: MockClock,
) -> None:
    """HARD-9, U3: what a checkpoint saw, its commit finds."""
    admission = Admission()
    results = Results(admission)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(results.run)
        await wait_all_tasks_blocked()
        results.sent(results.keep(result("a")), False)
        await trio.sleep(RESULT_UNHEARD_S_MAX / 2)
        results.sent(results.keep(result("b")), False)
        await trio.sleep(RESULT_UNHEARD_S_MAX / 2 + 1)
        assert [kept.episode_id for kept in results] == [episode("b")]
        admission.close()
        await trio.sleep(RESULT_UNHEARD_S_MAX)
        assert len(results) == 1
        admission.open()
        results.opened()
        await wait_all_tasks_blocked()
        assert len(results) == 0
        nursery.cancel_scope.cancel()


async def test_of_those_that_nobody_heard_the_oldest_make_room(autojump_clock: MockClock) -> None:
    """HARD-9: and none that its caller asked to keep."""
    results = Results(Admission())
    asked = results.keep(result("asked", wants_ack=True))
    results.sent(asked, False)
    for number in range(RESULTS_UNHEARD_MAX + 2):
        results.sent(results.keep(result(f"r{number}")), False)
    assert len(results) == RESULTS_UNHEARD_MAX + 1
    assert results.find(episode("asked"), "t") is asked
    assert results.find(episode("r1"), "t") is None
    assert results.find(episode("r2"), "t") is not None


async def test_new_ones_are_refused_rather_than_one_that_is_kept_is_lost(
    autojump_clock: MockClock,
) -> None:
    """HARD-9, U2: until some are acknowledged."""
    results = Results(Admission())
    for number in range(RESULTS_UNACKNOWLEDGED_MAX):
        results.check_room()
        results.keep(result(f"r{number}", wants_ack=True))
    with pytest.raises(Unavailable, match=f"limit {RESULTS_UNACKNOWLEDGED_MAX}"):
        results.check_room()
    assert results.drop(episode("r0"))
    results.check_room()


async def test_retiring_drops_up_to_the_attempt_and_forgetting_all(
    autojump_clock: MockClock,
) -> None:
    """HARD-9, CTL-12."""
    results = Results(Admission())
    for attempt in range(3):
        results.sent(results.keep(result(attempt=attempt, wants_ack=attempt == 1)), False)
    results.keep(result("s"))
    results.drop_up_to(episode("r", 1))
    assert [kept.episode_id for kept in results] == [episode("r", 2), episode("s")]
    results.forget([RolloutId("r"), RolloutId("never")])
    assert [kept.episode_id for kept in results] == [episode("s")]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=6,
    )
)
def test_the_last_boundary_gives_the_outcome_back_and_others_none(value: object) -> None:
    """HARD-9, U1."""
    boundary = last_boundary(value)
    found = outcome_of(boundary)
    assert found is not None
    assert found.value == value
    assert outcome_of({**boundary, "next": "verify"}) is None
    assert outcome_of({**boundary, "stage": "verify"}) is None
