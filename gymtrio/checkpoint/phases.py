"""The phase table of a participant (CTL-3), and nothing else.

Rules of this file: everything that moves a phase is a row here; it does not know which kind of
participant it serves, and it has no clock and no I/O. `tests/checkpoint/test_phases.py` walks every
cell; the diagram in the docs is generated from `TRANSITIONS`.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from gymtrio.errors import InvalidPhase
from gymtrio.wire.control import Phase


class Step(Enum):
    """What happens to a participant."""

    PREPARE = "prepare"
    READY = "ready"
    COMMIT = "commit"
    RESTORE = "restore"
    RESUME = "resume"


TRANSITIONS: Final[dict[tuple[Phase, Step], Phase]] = {
    (Phase.IDLE, Step.PREPARE): Phase.PREPARING,
    (Phase.PREPARING, Step.READY): Phase.PREPARED,
    (Phase.PREPARED, Step.COMMIT): Phase.COMMITTED,
    (Phase.IDLE, Step.RESTORE): Phase.RESTORED,
    (Phase.PREPARING, Step.RESUME): Phase.IDLE,
    (Phase.PREPARED, Step.RESUME): Phase.IDLE,
    (Phase.COMMITTED, Step.RESUME): Phase.IDLE,
    (Phase.RESTORED, Step.RESUME): Phase.IDLE,
}
"""Every legal transition; a pair that is not here is refused. A lease that expires is a resume."""


def advance(phase: Phase, step: Step) -> Phase:
    """Look up where a step leads.

    Raises:
        InvalidPhase: it leads nowhere from this phase.
    """
    try:
        return TRANSITIONS[phase, step]
    except KeyError:
        raise InvalidPhase(f"{step.value} is not possible while {phase.value}") from None


def diagram() -> str:
    """Draw the table as a Mermaid state diagram."""
    rows = [
        f"    {phase.value} --> {after.value}: {step.value}"
        for (phase, step), after in TRANSITIONS.items()
    ]
    return "\n".join(["stateDiagram-v2", "    [*] --> idle", *rows])
