"""The oracles are tested: each named fault of the real code is seen, by the plan aimed at it."""

from __future__ import annotations

from typing import Final

import attrs
import pytest

from tests.simulation.directed import DIRECTED
from tests.simulation.mutants import mutated
from tests.simulation.world import run

SHOWN_BY: Final = {
    "no file sync": "power is lost after a publication",
    "no directory sync": "power is lost after a publication",
    "no parent sync": "power is lost after a publication",
    "temporary file left": "nothing is left over",
    "no attempt mark": "crash and continue",
    "no id fence": "every control call twice",
    "late restore": "every control call twice",
    "no nonce": "a second controller with the same id",
    "any holder": "a second controller with the same id",
    "open at start": "stale requests during a slow restore",
    "any resume opens": "a second controller while the first is down",
    "anything while waiting for a restore": "a second controller while the first is down",
    "lease forgotten": "the controller is killed",
    "renewal not checked before publishing": "the controller stands still while it renews",
    "reply while prepared": "answers that come while it is prepared",
    "claim twice": "crash and continue",
    "unclaimed state left out": "crash before anything was claimed",
    "unclaimed cut left out": "crash before anything was claimed",
    "token doubled at the seam": "crash and continue",
    "newest version stamped": "crash and continue",
    "undelivered row exported": "checkpoints one after the other",
    "tokens not staged": "nothing is left over",
}
"""Mutant to the plan that must show it."""


@pytest.mark.parametrize("name", DIRECTED)
def test_the_real_code_passes_the_plan(name: str) -> None:
    """HARD-2, 3, 4, 5, 6, 8, 12: with its rules the code breaks no invariant under these plans."""
    assert run(DIRECTED[name]).violations == []


NEIGHBOURS: Final = 8


@pytest.mark.parametrize("mutant", SHOWN_BY)
def test_the_mutant_is_caught(mutant: str) -> None:
    """HARD-2, 3, 5, 6, 8: without the rule the same plan breaks one.

    A seed's schedule is that of one Python: with another, a neighbouring seed may have to show it.
    """
    plan = DIRECTED[SHOWN_BY[mutant]]
    with mutated(mutant):
        outcomes = (
            run(attrs.evolve(plan, seed=plan.seed + other), to_first_violation=True)
            for other in range(NEIGHBOURS)
        )
        assert any(outcome.violations for outcome in outcomes), f"{mutant} is not seen any more"


def test_a_second_crash_meets_a_restored_cut() -> None:
    """I8: the plan for it does what it is for."""
    happened = run(DIRECTED["crash before anything was claimed"]).sometimes
    assert happened["a crash while a restored cut was not delivered"]
