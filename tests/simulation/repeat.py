"""Repeat one run and show all of it: `python -m tests.simulation.repeat SEED`.

With `--trace` its trace alone; with `--workers` the policy server has several processes.
"""

from __future__ import annotations

import sys

from tests.simulation.plans import random_plan, with_workers
from tests.simulation.world import run


def main(arguments: list[str]) -> int:
    only_trace = "--trace" in arguments
    seeds = [int(text) for text in arguments if not text.startswith("--")]
    failed = False
    for seed in seeds:
        plan = random_plan(seed)
        if "--workers" in arguments:
            plan = with_workers(plan)
        outcome = run(plan)
        if not only_trace:
            print(plan, *outcome.lines, *outcome.violations, sep="\n")  # noqa: T201
        print(seed, outcome.trace)  # noqa: T201
        failed = failed or bool(outcome.violations)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
