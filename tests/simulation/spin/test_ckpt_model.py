"""The protocol core, checked in every interleaving by Spin, and each rule shown to be needed.

`spin -a`, then the C compiler, then the search; skipped where one of the two is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

MODEL: Final = Path(__file__).with_name("ckpt.pml")
MEMORY_MB_MAX: Final = 4000
DEPTH_MAX: Final = 300_000
SAFETY: Final = ("-DSAFETY",)
LIVENESS: Final = ("-DNFAIR=4",)
"""Weak fairness for as many processes as there are."""

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (shutil.which("spin") and shutil.which("gcc")),
        reason="the model checker needs spin and gcc: apt-get install spin gcc",
    ),
    pytest.mark.skipif(
        not os.environ.get("GYMTRIO_SPIN"), reason="minutes: GYMTRIO_SPIN=1, or make spin, runs it"
    ),
]


def check(folder: Path, *options: str) -> str:
    """Search every state; gives what pan says."""
    of_liveness = "-DLIVENESS" in options
    memory = ("-DCOLLAPSE", f"-DMEMLIM={MEMORY_MB_MAX}")
    for command in (
        ["spin", "-a", *options, str(MODEL)],
        ["gcc", "-O2", "-w", *memory, *(LIVENESS if of_liveness else SAFETY), "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    search = ["./pan", f"-m{DEPTH_MAX}", *(("-a", "-f", "-N", "free") if of_liveness else ())]
    done = subprocess.run(search, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.mark.parametrize(
    "options",
    [(), ("-DRECOVERY",), ("-DLIVENESS", "-DNP=1")],
    ids=["two controllers", "recovery", "liveness"],
)
def test_no_interleaving_breaks_a_property(tmp_path: Path, options: tuple[str, ...]) -> None:
    """HARD-2, HARD-3, HARD-5, HARD-6, HARD-8, CTL-4, CTL-11, COORD-3, I2, I29, I30: 7.6 million states
    of two controllers, 50 thousand of a recovery, 2 million of fair runs."""
    said = check(tmp_path, *options)
    assert "errors: 0" in said, said
    assert "Search not completed" not in said, said


@pytest.mark.parametrize(
    "options",
    [
        ("-DNO_RENEW",),
        ("-DNO_ID_FENCE",),
        ("-DNO_NONCE",),
        ("-DNO_WAIT",),
        ("-DNO_RECHECK",),
        ("-DRECOVERY", "-DOPEN_AT_START"),
        ("-DRECOVERY", "-DANY_RESUME"),
        ("-DRECOVERY", "-DLEASE_OPENS"),
        ("-DRECOVERY", "-DLATE_RESTORE"),
        ("-DRECOVERY", "-DLATE_RESUME"),
    ],
    ids=" ".join,
)
def test_without_a_rule_a_property_fails(tmp_path: Path, options: tuple[str, ...]) -> None:
    """HARD-2, HARD-3, HARD-5, HARD-6, HARD-8, CTL-4, COORD-3, STEP-2: a counterexample exists."""
    assert "assertion violated" in check(tmp_path, *options)


@pytest.mark.parametrize("omission", ["-DNO_LEASE", "-DNO_WAKE"])
def test_without_a_rule_an_episode_stays_parked(tmp_path: Path, omission: str) -> None:
    """CTL-11, I29, I30: a fair run exists in which it does."""
    said = check(tmp_path, "-DLIVENESS", "-DNP=1", omission)
    assert "acceptance cycle" in said, said
