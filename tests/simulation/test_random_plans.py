"""Plans by seed: crashes, stops, lost and doubled calls, other controllers, clocks and disks that fail.

A bounded number by default; `GYMTRIO_SIM_SEEDS=2000 pytest tests/simulation/test_random_plans.py` runs
as many, `GYMTRIO_SIM_FROM=50000` begins elsewhere. A seed that fails prints its plan: paste it into a
test.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Final

import pytest

from tests.simulation.plans import random_plan, with_workers
from tests.simulation.world import run

SEEDS: Final = int(os.environ.get("GYMTRIO_SIM_SEEDS") or 36)
FROM: Final = int(os.environ.get("GYMTRIO_SIM_FROM") or 0)
BLOCK: Final = 12
ENOUGH_FOR_RARE: Final = 400
RARE: Final = (
    "a lease expired",
    "a second controller held",
    "a second controller was refused",
    "an eager controller held",
    "a stale request",
    "a crash before the restore was over",
    "a cut was continued",
    "a server could not start",
    "a server was replaced",
    "an older checkpoint was gone back to",
    "published",
    "fault: all",
    "fault: power",
    "fault: trainer",
    "fault: env",
    "fault: policy",
    "fault: agent",
    "fault: tools",
    "fault: stop",
    "fault: clock",
    "fault: cut",
    "fault: policy.0",
    "fault: policy.1",
    "a worker was lost",
)
"""What must have happened in a set of runs for it to prove anything about it. What is rarer still has
plans of its own, which assert it: see `test_mutants`."""

seen: Final[Counter[str]] = Counter()


@pytest.mark.parametrize("workers", [False, True], ids=["one process", "workers"])
@pytest.mark.parametrize("first", range(FROM, FROM + SEEDS, BLOCK))
def test_no_plan_breaks_an_invariant(first: int, workers: bool) -> None:
    """E2E-4: I1 to I14, I16 to I23, I25, I26, I28 to I31, I34; HARD-2, 6, 12; WRK-1, 3 to 6."""
    failures = []
    for seed in range(first, min(first + BLOCK, FROM + SEEDS)):
        plan = random_plan(seed)
        if workers:
            plan = with_workers(plan)
        outcome = run(plan)
        seen.update(outcome.sometimes)
        if outcome.violations:
            failures.append(
                "\n".join(
                    [
                        f"{plan!r}",
                        *outcome.violations,
                        f"python -m tests.simulation.repeat {'--workers ' * workers}{seed}",
                    ]
                )
            )
    assert not failures, "\n\n".join(failures)


def test_rare_things_happened() -> None:
    if SEEDS < ENOUGH_FOR_RARE or not seen:
        pytest.skip("too few plans ran")
    assert [what for what in RARE if not seen[what]] == []
