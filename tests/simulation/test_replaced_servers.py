"""Servers that die alone and are started again without a past (HARD-13)."""

from __future__ import annotations

import pytest

from tests.simulation.plans import Fault, Plan
from tests.simulation.world import run


@pytest.mark.parametrize("steps", [10, 100])
def test_a_policy_server_that_died_alone_costs_no_ledger_rows(steps: int) -> None:
    """I16, HARD-13: the next checkpoint of the live episode would have fewer rows than answers were
    delivered, so it is refused; the rollout runs again, and the one after that is published."""
    plan = Plan(
        seed=120,
        rollouts=1,
        checkpoint_at_s=(0.88, 1.6, 2.4),
        faults=(Fault(what="policy", after="checkpoint begun", steps=steps),),
    )
    outcome = run(plan)
    assert outcome.violations == []
    assert any("policy was replaced" in line for line in outcome.lines)
    assert any(" published " in line for line in outcome.lines)
