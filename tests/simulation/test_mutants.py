"""The oracles are tested: each named fault of the real code is seen, by the plan aimed at it."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Final

import attrs
import pytest

from tests.simulation import mutants_hard
from tests.simulation.directed import DIRECTED
from tests.simulation.mutants import MUTANTS, mutated
from tests.simulation.plans import Fault, Plan
from tests.simulation.world import Outcome, run

SHOWN_BY: Final = {
    "no file sync": "power is lost after a publication",
    "no directory sync": "power is lost after a publication",
    "no parent sync": "power is lost after a publication",
    "temporary file left": "nothing is left over",
    "no attempt mark": "stale requests after the restore",
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
    "manifest before parts": "nothing is left over",
    "retire replies early": "rollouts are given up in the middle",
    "mark after stop": "calls come again in the instant of a retirement",
    "a gap after admission": "calls come again in the instant of a retirement",
    "wake without re-check of a new close": "closed again in the instant of opening",
    "boundaries do not park": "callers that read slowly",
    "replies in flight do not count": "callers that read slowly",
    "policy replies in flight do not count": "callers that read slowly",
    "a tool call as a replay step": "callers that read slowly",
    "scope ignored": "a rollout is left out of a checkpoint",
    "a failed commit is tried again": "a commit fails and its report is lost",
    "lease counted from the reply": "a proof of the lease that comes late",
    "the controller does not read the status": "crash and continue",
    "a result is dropped before it is acknowledged": "a result is on its way, to be acknowledged",
    "no incarnation lock": "a second incarnation beside the first",
    "epochs are not compared": "calls of an earlier restore of the same checkpoint",
    "a replaced server goes unnoticed": "a policy server is replaced",
    "the first cut instead of the latest": "a model call comes twice",
    "resume does not wait for what it stops": "commits that take longer than they may",
    "resume leaves the write going on": "commits that take longer than they may",
    "calls of a lost worker stay in": "workers die with calls",
    "what a lost worker was sending counts as heard": "workers die while they answer",
    "parts of a stopped commit stay": "commits of several processes that take longer than they may",
    "an answered replacement runs again": (
        "runs come again in the instant of a retirement after a restore"
    ),
    "what starts over keeps its restored sessions": "an episode starts over from its input",
}
"""Mutant to the plan that must show it."""


@cache
def outcome_of(name: str) -> Outcome:
    return run(DIRECTED[name])


@pytest.mark.parametrize("name", DIRECTED)
def test_the_real_code_passes_the_plan(name: str) -> None:
    """HARD-1 to 6, 8 to 13: with its rules the code breaks no invariant under these plans."""
    assert outcome_of(name).violations == []


NEIGHBOURS: Final = 8


@pytest.mark.parametrize("mutant", SHOWN_BY)
def test_the_mutant_is_caught(mutant: str) -> None:
    """HARD-1 to 6, 8 to 13: without the rule the same plan breaks one.

    A seed's schedule is that of one Python: with another, a neighbouring seed may have to show it.
    """
    plan = DIRECTED[SHOWN_BY[mutant]]
    with mutated(mutant):
        outcomes = (
            run(attrs.evolve(plan, seed=plan.seed + other), to_first_violation=True)
            for other in range(NEIGHBOURS)
        )
        assert any(outcome.violations for outcome in outcomes), f"{mutant} is not seen any more"


def test_every_mutant_has_its_plan() -> None:
    assert mutants_hard.__doc__
    assert MUTANTS.keys() == SHOWN_BY.keys() | {"claim not given back"}


def test_a_claim_that_is_not_given_back_is_seen() -> None:
    """I14: its caller leaves in the very pass of the loop in which it is let in.

    A few steps later it would have begun, so the instant is looked for: the real code passes there, and
    without the rule it does not.
    """
    for steps, seed in product((5, 6, 4, 7, 3, 8), (2, 5, 3, 4)):
        faults = (
            Fault(what="all", after="published", steps=30),
            Fault(what="checkpoint", after="restored all", steps=1),
            Fault(what="cut trainer>env", after="resume at env", steps=steps),
        )
        plan = Plan(seed=seed, rollouts=4, checkpoint_at_s=(0.9,), faults=faults, repeats_runs=True)
        with mutated("claim not given back"):
            broken = run(plan, to_first_violation=True).violations
        if broken and not run(plan).violations:
            return
    raise AssertionError("the instant is not found any more")


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("a crash while a restored cut was unclaimed", "crash before anything was claimed"),
        ("a reply in flight at a publication", "a result is on its way"),
        ("a lease expired during publishing", "a lease ends while manifests are published"),
        ("an older checkpoint was gone back to", "bits change in a published checkpoint"),
        (
            "a stale request of an earlier restore",
            "calls of an earlier restore of the same checkpoint",
        ),
        ("a twin was refused", "a second incarnation beside the first"),
        ("a server was replaced", "a policy server is replaced"),
        ("an eager controller held", "closed again in the instant of opening"),
        ("a worker was lost", "workers die while they answer"),
    ],
)
def test_the_rare_thing_happens(what: str, name: str) -> None:
    """I8, I23, HARD-2, HARD-9, HARD-10, HARD-11: a plan does what it is for."""
    assert outcome_of(name).sometimes[what]
