from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from gymtrio.checkpoint import phases
from gymtrio.checkpoint.phases import TRANSITIONS, Step, advance, diagram
from gymtrio.errors import InvalidPhase
from gymtrio.wire.control import Phase

EXPECTED = {
    # phase: prepare, ready, commit, restore, resume
    Phase.IDLE: (Phase.PREPARING, None, None, Phase.RESTORED, None),
    Phase.PREPARING: (None, Phase.PREPARED, None, None, Phase.IDLE),
    Phase.PREPARED: (None, None, Phase.COMMITTED, None, Phase.IDLE),
    Phase.COMMITTED: (None, None, None, None, Phase.IDLE),
    Phase.RESTORED: (None, None, None, None, Phase.IDLE),
}
CELLS = [
    (phase, step, EXPECTED[phase][column])
    for phase, (column, step) in itertools.product(Phase, enumerate(Step))
]


@pytest.mark.parametrize(("phase", "step", "after"), CELLS)
def test_every_cell(phase: Phase, step: Step, after: Phase | None) -> None:
    """CTL-3: each legal transition leads where it must, each other one is refused by name."""
    if after is not None:
        assert advance(phase, step) is after
        return
    with pytest.raises(InvalidPhase) as caught:
        advance(phase, step)
    assert step.value in caught.value.detail
    assert phase.value in caught.value.detail


def test_every_phase_has_a_way_out_and_in() -> None:
    """CTL-3: no phase is a trap, and none is unreachable."""
    assert {phase for phase, _ in TRANSITIONS} == set(Phase)
    assert set(TRANSITIONS.values()) == set(Phase)
    for phase in set(Phase) - {Phase.IDLE}:
        assert TRANSITIONS[phase, Step.RESUME] is Phase.IDLE


def test_the_diagram_is_drawn_from_the_table() -> None:
    lines = diagram().splitlines()
    assert len(lines) == len(TRANSITIONS) + 2
    assert "    idle --> preparing: prepare" in lines


def test_the_design_note_shows_the_diagram_of_the_table() -> None:
    """CTL-3: generated, so that the picture cannot differ from the code."""
    note = (Path(phases.__file__).parent / "DESIGN.md").read_text()
    assert f"```mermaid\n{diagram()}\n```\n" in note
