"""The protocol core, checked in every interleaving by Spin, and each rule shown to be needed.

`make` of the model: `spin -a`, then the C compiler; skipped where either is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

MODEL: Final = Path(__file__).with_name("ckpt.pml")
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
    for command in (
        ["spin", "-a", *options, str(MODEL)],
        ["gcc", "-O2", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=3000", "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    done = subprocess.run(
        ["./pan", "-m300000"], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout


def test_no_interleaving_of_a_recovery_breaks_a_property(tmp_path: Path) -> None:
    """HARD-3, HARD-6, HARD-8: 5 million states."""
    said = check(tmp_path, "-DRECOVERY")
    assert "errors: 0" in said, said
    assert "Search not completed" not in said, said


@pytest.mark.skipif(
    not os.environ.get("GYMTRIO_SPIN_WHOLE"),
    reason="minutes and gigabytes: GYMTRIO_SPIN_WHOLE=1 runs it",
)
def test_no_interleaving_of_two_controllers_breaks_a_property(tmp_path: Path) -> None:
    """HARD-2, HARD-5, CTL-4."""
    said = check(tmp_path)
    assert "errors: 0" in said, said
    assert "Search not completed" not in said, said


@pytest.mark.parametrize(
    "options",
    [
        ("-DNO_RENEW",),
        ("-DNO_ID_FENCE",),
        ("-DRECOVERY", "-DOPEN_AT_START"),
        ("-DRECOVERY", "-DANY_RESUME"),
        ("-DRECOVERY", "-DLATE_RESTORE"),
    ],
)
def test_without_a_rule_a_property_fails(tmp_path: Path, options: tuple[str, ...]) -> None:
    """HARD-2, HARD-3, HARD-6, HARD-8, CTL-4: a counterexample exists."""
    assert "assertion violated" in check(tmp_path, *options)
