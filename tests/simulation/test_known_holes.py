"""Faults that plans have found and no rule covers yet: each fails until it does."""

from __future__ import annotations

import pytest

from tests.simulation.plans import Fault, Plan
from tests.simulation.world import World, run


class Strict(World):
    keeps_lineage = True


@pytest.mark.xfail(
    strict=True, reason="a checkpoint does not notice that a participant was replaced"
)
def test_a_policy_server_that_died_alone_costs_no_ledger_rows() -> None:
    """I16: it is started again without a past; the next checkpoint of the live episode is published
    with fewer rows than answers were delivered."""
    plan = Plan(
        seed=120,
        rollouts=1,
        checkpoint_at_s=(0.88,),
        faults=(Fault(what="policy", after="checkpoint begun", steps=10),),
    )
    assert run(plan, world=Strict).violations == []
