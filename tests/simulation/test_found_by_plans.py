"""Faults that random plans have found, written out: a rule covers each now."""

from __future__ import annotations

from tests.simulation.plans import Fault, Plan
from tests.simulation.world import run

ALL = Fault(what="all", after="published", steps=30)


def test_calls_of_an_attempt_that_ran_before_a_restore_made_it_again_are_refused() -> None:
    """I11, HARD-11: an attempt fails, its successor runs from the input; everything crashes, and the
    restore makes the successor again, from a boundary. What the first one still sends is served."""
    plan = Plan(
        seed=31,
        rollouts=3,
        checkpoint_at_s=(0.9,),
        faults=(
            Fault(what="cut trainer>env", after="published", steps=30),
            Fault(what="all", after="data env/run", steps=900),
            Fault(what="stale client", after="restored all", steps=5),
        ),
    )
    assert run(plan).violations == []


def test_a_run_whose_caller_left_does_not_run_again_as_the_same_attempt() -> None:
    """I5, I7: its boundary was claimed and used; what comes again under the same attempt begins at the
    input, and does once more what was done before the checkpoint."""
    plan = Plan(
        seed=1,
        rollouts=4,
        checkpoint_at_s=(0.9,),
        faults=(
            ALL,
            Fault(what="checkpoint", after="restored all", steps=1),
            Fault(what="cut trainer>env", after="resume at env", steps=36),
        ),
        repeats_runs=True,
    )
    assert run(plan).violations == []
