"""What every test gets: property profiles, a schedule that can be repeated, and an end.

trio runs the tasks that are ready in a random order. The order of each test follows from one seed
and the test's name, so that a failure that depends on the order can be had again, alone or in the
whole run: `GYMTRIO_TEST_SEED=<seed> pytest <test>`.
"""

from __future__ import annotations

import os
import random
from typing import Any, Final

import pytest
import trio
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester", "tests.helpers.hang"]

SEED: Final = int(os.environ.get("GYMTRIO_TEST_SEED") or random.SystemRandom().randrange(2**32))
SEED_HINT: Final = f"schedule seed {SEED}: GYMTRIO_TEST_SEED={SEED} repeats the order of tasks"

# Time limits per example fail on a busy machine and say nothing; pytest-timeout bounds the test.
settings.register_profile(
    "default",
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "ci", parent=settings.get_profile("default"), max_examples=200, print_blob=True
)
settings.register_profile("nightly", parent=settings.get_profile("ci"), max_examples=100_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "default")


@pytest.fixture(autouse=True)
def _seeded_schedule(request: pytest.FixtureRequest) -> None:
    """Order trio's tasks by the seed; test_schedule.py guards the private name."""
    trio._core._run._r.seed(f"{SEED} {request.node.nodeid}")


def pytest_report_header() -> str:
    return SEED_HINT


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(SEED_HINT)
