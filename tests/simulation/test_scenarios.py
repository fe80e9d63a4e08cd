"""Runs in which little goes wrong, written out."""

from __future__ import annotations

import pytest

from tests.simulation.network import Mishap, NetworkFaults
from tests.simulation.plans import OPERATIONS, Fault, Plan
from tests.simulation.world import Outcome, run

QUIET = Plan(seed=1, rollouts=4, checkpoint_at_s=())


def whole(plan: Plan) -> Outcome:
    """Run a plan that must have no violation."""
    outcome = run(plan)
    assert not outcome.violations, f"{plan!r}\n" + "\n".join(outcome.violations)
    return outcome


def answers(outcome: Outcome) -> dict[str, object]:
    """What rollouts came to, without the ids of this run."""
    return {
        rollout: (
            result["reward"],
            [item.get("generation_token_ids") for item in result["response"]["output"]],
            [item.get("output") for item in result["response"]["output"]],
        )
        for rollout, result in outcome.results.items()
    }


def events(outcome: Outcome) -> list[str]:
    return [line.split(" ", 1)[1].strip() for line in outcome.lines]


def test_rollouts_without_a_checkpoint_finish() -> None:
    assert len(whole(QUIET).results) == 4


@pytest.mark.parametrize("at_s", [0.2, 0.9, 1.6])
def test_a_checkpoint_without_a_crash_changes_no_result(at_s: float) -> None:
    """I2, I4, V13: as a run without it."""
    held = whole(Plan(seed=1, rollouts=4, checkpoint_at_s=(at_s,)))
    assert "published c1" in events(held)
    assert answers(held) == answers(whole(QUIET))


@pytest.mark.parametrize("what", ["all", "power"])
@pytest.mark.parametrize("at_s", [0.2, 0.9, 1.6])
def test_after_a_crash_of_everything_the_results_are_the_same(what: str, at_s: float) -> None:
    """I3, I5, I20, I26: checkpoint, crash, restore, finish."""
    crash = Fault(what=what, after="published", steps=30)
    outcome = whole(Plan(seed=1, rollouts=4, checkpoint_at_s=(at_s,), faults=(crash,)))
    assert "restored all c1" in events(outcome)
    assert answers(outcome) == answers(whole(QUIET))


def test_the_same_checkpoint_is_restored_three_times() -> None:
    """I8, I9: twice the servers die before, and once after the replacements have begun."""
    crashes = (
        Fault(what="all", after="published", steps=30),
        Fault(what="power", after="restored all", steps=3),
        Fault(what="all", after="restored all", steps=400),
    )
    plan = Plan(seed=1, rollouts=4, checkpoint_at_s=(0.9,), faults=crashes)
    outcome = whole(plan)
    assert events(outcome).count("restored all c1") == 3
    assert answers(outcome) == answers(whole(QUIET))


def test_a_restored_checkpoint_is_taken_again_before_anything_ran() -> None:
    """I8: what nobody claimed is in the next checkpoint, and continues from there."""
    crashes = (
        Fault(what="all", after="published", steps=30),
        Fault(what="all", after="published", steps=30),
    )
    plan = Plan(seed=1, rollouts=4, checkpoint_at_s=(0.0, 0.9), faults=crashes)
    outcome = whole(plan)
    assert answers(outcome) == answers(whole(QUIET))


@pytest.mark.parametrize("server", ["env", "policy", "agent", "tools", "trainer"])
def test_one_process_dies_alone_while_a_checkpoint_is_open(server: str) -> None:
    """I7, I29, I30: its rollouts run again from their input; the others are not held up for ever."""
    for after in ("closed", "all prepared", "all committed"):
        crash = Fault(what=server, after=after, steps=10)
        whole(Plan(seed=1, rollouts=3, checkpoint_at_s=(0.9,), faults=(crash,)))


@pytest.mark.parametrize("server", ["env", "policy", "agent", "tools"])
def test_one_server_stands_still_while_a_checkpoint_is_open(server: str) -> None:
    """I29, I30: for longer than a call may take, or than its lease lasts; then it goes on."""
    for after, for_s in (("closed", 3.0), ("all prepared", 20.0)):
        stop = Fault(what=f"stop {server}", after=after, steps=10, for_s=for_s)
        whole(Plan(seed=1, rollouts=3, checkpoint_at_s=(0.9,), faults=(stop,)))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_control_calls_are_lost_and_come_twice(operation: str) -> None:
    """COORD-6, CTL-6, HARD-8: the first request to each server, the reply to the second, and the third
    comes again after it was answered. All that it costs is time."""
    mishaps = (
        Mishap(path=operation, what="request lost"),
        Mishap(path=operation, what="reply lost", first=2),
        Mishap(path=operation, what="twice", first=3, for_s=0.3),
    )
    faults = (
        Fault(what="cut trainer>env", after="all prepared", steps=1),
        Fault(what="all", after="published", steps=30),
    )
    outcome = whole(
        Plan(
            seed=1,
            rollouts=3,
            checkpoint_at_s=(0.5, 0.9),
            faults=faults,
            network=NetworkFaults(mishaps=mishaps),
        )
    )
    assert any(event.startswith("published") for event in events(outcome))


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("env", "/run"),
        ("tools", "/seed_session"),
        ("agent", "/v1/agent_sessions"),
        ("agent", "/v1/responses"),
        ("policy", "/v1/responses"),
        ("tools", "/increment_counter"),
        ("agent", "/v1/agent_sessions/close"),
        ("tools", "/verify"),
    ],
)
def test_the_reply_to_a_call_of_an_episode_is_lost(target: str, path: str) -> None:
    """I4, I7: at whichever step, with checkpoints and a crash around it."""
    lost = Mishap(path=path, target=target, what="reply lost", first=2, count=2)
    crash = Fault(what="all", after="published", steps=30)
    whole(
        Plan(
            seed=1,
            rollouts=3,
            checkpoint_at_s=(0.5, 0.9, 1.3, 1.7),
            faults=(crash,),
            network=NetworkFaults(mishaps=(lost,)),
        )
    )
