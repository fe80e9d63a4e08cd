"""Two controllers, each doing as it likes, against the model of the protocol.

An example is a plan: what happens at which virtual time. It is played twice, by the real control plane
and by the model, and after every step all that can be seen of the two is compared: replies, refusals,
phase, open id, lease, gate, marks, the participant's work, what is published, and which jobs run. Some
invariants are checked besides, on the real one alone.

Several actions of one step happen at the same time; then the real outcome must be that of some order.
"""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.protocol_model import DOORS
from tests.helpers.protocol_plans import (
    PLANS,
    Action,
    Again,
    Arrive,
    Break,
    Fail,
    Jump,
    Leave,
    LetGo,
    Shut,
    Step,
    Work,
    ask,
)
from tests.helpers.protocol_play import HAPPENED, play

EXAMPLES_MIN: Final = 300
"""In the everyday run; a profile may ask for more."""

EXAMPLES_MANY: Final = 5_000
"""So many come across everything that can be."""

ORDERS: Final = 6
"""How often a written-out plan is played, each time in another order of tasks."""


# A failure takes a while to be made small; a night's examples take as long as they take.
@pytest.mark.timeout(0 if settings().max_examples > EXAMPLES_MANY else 900)
@settings(max_examples=max(EXAMPLES_MIN, settings().max_examples))
@given(plan=PLANS, recover=st.sampled_from((False, False, True)), stubborn=st.booleans())
def test_reality_is_what_the_model_says(plan: list[Step], recover: bool, stubborn: bool) -> None:
    """CTL-3..CTL-14, HARD-5, HARD-6, HARD-8, HARD-11, HARD-12, I10-I13, I19, I29-I31."""
    HAPPENED["example"] += 1
    play(plan, recover=recover, stubborn=stubborn)


SITUATIONS: Final = (
    *("idle", "awaiting", "settling", "preparing", "prepared", "committed", "failed"),
    *("exporting", "writing", "publishing", "releasing", "reading", "installing", "restored"),
    "freeing",
)
ENDED_BY_NO_LEASE: Final = ("idle", "awaiting", "publishing", "freeing")


@pytest.mark.hypothesis
def test_the_rare_things_happened() -> None:
    """Examples that never came across something have proved nothing about it."""
    if HAPPENED["example"] < EXAMPLES_MANY:
        pytest.skip(f"only {HAPPENED['example']} examples were played")
    wanted = {f"{what} while {s}" for s in SITUATIONS for what in ("resume", "several at once")}
    wanted |= {f"lease expired while {s}" for s in SITUATIONS if s not in ENDED_BY_NO_LEASE}
    assert wanted - {name for name, count in HAPPENED.items() if count} == set()


def in_turn(*steps: Action | list[Action] | int) -> list[Step]:
    """One action after the other; a list happens at once, a number is seconds that pass before."""
    plan: list[Step] = []
    pause_s = 0
    for step in steps:
        if isinstance(step, int):
            pause_s += step
        else:
            plan.append((pause_s, step if isinstance(step, list) else [step]))
            pause_s = 0
    return plan


R0, R1 = ("r0", 0), ("r0", 1)
LET_ALL_GO: Final[list[Action]] = [LetGo(door) for door in DOORS]
RESTORE: Final = ask("restore", R0, directory="d0")
UNDO: Final = ask("resume", undo=True)
UNDO_AND_KEEP_THE_ID: Final = ask("resume", undo=True, which="current")

WRITTEN_OUT: Final[dict[str, list[Step]]] = {
    **{
        f"a resume in the instant in which a commit goes on from {door}": in_turn(
            ask("prepare"), Shut(door), ask("commit"), [LetGo(door), ask("resume")]
        )
        for door in ("exporting", "writing", "publishing", "releasing")
    },
    **{
        f"a resume in the instant in which a restore goes on from {door}": in_turn(
            Shut(door), RESTORE, [LetGo(door), ask("resume")], ask("prepare")
        )
        for door in ("reading", "installing")
    },
    **{
        f"a restore taken back in the instant in which it goes on from {door}": in_turn(
            Shut(door), RESTORE, [LetGo(door), UNDO], RESTORE
        )
        for door in ("reading", "installing")
    },
    **{
        f"a restore taken back in the instant in which it fails {where}": in_turn(
            Shut(door), RESTORE, fails, [LetGo(door), UNDO], Fail(None), Break(None), Again(1)
        )
        for where, door, fails in (
            ("to be read", "reading", Break("full")),
            ("to be installed", "installing", Fail("install")),
        )
    },
    "everything of a commit at once": in_turn(
        ask("prepare"), [ask("commit"), ask("commit"), ask("resume")], ask("prepare")
    ),
    "a prepare that was resumed in the instant in which it closed": in_turn(
        [ask("prepare"), ask("resume")], Again(1)
    ),
    "the gate closes again before those it woke have entered": in_turn(
        ask("prepare"), Arrive(R0), [ask("resume"), ask("prepare")], ask("commit")
    ),
    "settling fails while two calls wait for it": in_turn(
        Shut("settling"), Fail("settle"), ask("prepare"), Again(0), LetGo("settling"), Again(0)
    ),
    "settling fails in the instant of a resume": in_turn(
        Shut("settling"), Fail("settle"), ask("prepare"), [LetGo("settling"), ask("resume")]
    ),
    "a lease that ends while it is published": in_turn(
        ask("prepare", timeout_s=3.5),
        Shut("publishing"),
        ask("commit", timeout_s=3.5),
        40,
        LetGo("publishing"),
    ),
    "a lease that ended while it is published, and is renewed": in_turn(
        ask("prepare", timeout_s=3.5),
        Shut("publishing"),
        ask("commit", timeout_s=3.5),
        40,
        ask("renew"),
        LetGo("publishing"),
        5,
        ask("commit"),
    ),
    "a lease that ends during an install": in_turn(
        Shut("installing"), RESTORE, 60, ask("restore", R0, directory="d0"), *LET_ALL_GO
    ),
    "a lease that ends while a restore is taken back": in_turn(
        RESTORE, Shut("releasing"), UNDO, 60, *LET_ALL_GO, RESTORE
    ),
    "a resume while a restore is taken back": in_turn(
        RESTORE, Shut("releasing"), UNDO, ask("resume", which="last"), *LET_ALL_GO, RESTORE
    ),
    "what was restored cannot be freed, and is when asked again": in_turn(
        RESTORE,
        Fail("release"),
        UNDO_AND_KEEP_THE_ID,
        ask("resume", which="current"),
        UNDO,
        RESTORE,
    ),
    "what was restored cannot be freed, and is when the lease tries again": in_turn(
        RESTORE, Fail("release"), 60, 20, Again(0), ask("resume"), RESTORE
    ),
    "what is out of scope cannot be freed, and is exported again": in_turn(
        RESTORE,
        ask("resume"),
        ask("prepare"),
        Fail("release"),
        ask("commit", ("r1", 1)),
        ask("resume"),
        ask("prepare"),
        ask("commit", R1),
    ),
    "a restore is taken back and made again": in_turn(RESTORE, UNDO, RESTORE, ask("resume")),
    "a retire of what is being installed": in_turn(
        Shut("installing"), RESTORE, ask("retire", R1), LetGo("installing"), ask("resume"), RESTORE
    ),
    "a retire of what is being installed and stopped": in_turn(
        Shut("installing"), RESTORE, ask("retire", R1), [LetGo("installing"), ask("resume")]
    ),
    "a prepare asked again in the instant in which what parked is retired": in_turn(
        Arrive(R0), Work("park", R0), ask("prepare"), [Again(0), ask("retire", R0)], ask("commit")
    ),
    "two resumes that start afresh, in the instant in which they end a restore": in_turn(
        Shut("reading"),
        RESTORE,
        [ask("resume", odd=True), Again(0)],
        ask("resume", odd=True),
    ),
    "a restore is resumed while it installs, and taken back by who comes next": in_turn(
        Shut("installing"),
        RESTORE,
        Fail("release"),
        ask("resume", which="last"),
        UNDO_AND_KEEP_THE_ID,
        LetGo("installing"),
    ),
    "two resumes of one moment wait for what they have stopped": in_turn(
        ask("prepare"),
        Shut("exporting"),
        ask("commit"),
        [ask("resume"), Again(0)],
        LetGo("exporting"),
    ),
    "a forget while the retirement is being cleaned up": in_turn(
        Arrive(R0),
        Work("park", R0),
        Shut("cleaning_up"),
        ask("retire", R0, timeout_s=3.5),
        5,
        ask("forget", R0),
        [LetGo("cleaning_up"), ask("forget", R0)],
    ),
    "a forget while what nobody knows is being retired": in_turn(
        Shut("cleaning_up"), ask("retire", R0), ask("forget", R0), LetGo("cleaning_up"), Again(0)
    ),
    "a retire cut short blocks a commit": in_turn(
        Arrive(R0),
        Work("park", R0),
        ask("prepare"),
        Shut("cleaning_up"),
        ask("retire", R0, timeout_s=3.5),
        5,
        ask("commit"),
        LetGo("cleaning_up"),
        ask("commit"),
    ),
    "the wall clock jumps while a lease runs": in_turn(
        ask("prepare", timeout_s=3.5),
        Jump(86_400.0),
        ask("renew", timeout_s=3.5),
        Jump(-86_400.0),
        ask("commit", timeout_s=3.5),
        23,
        ask("commit"),
        2,
        ask("commit"),
    ),
    "the wall clock jumps while calls wait": in_turn(
        Arrive(R0),
        ask("prepare"),
        Jump(86_400.0),
        5,
        ask("prepare"),
        Again(1),
        Jump(-86_400.0),
        40,
        Again(0),
    ),
    "another way to stop": in_turn(
        ask("prepare"), ask("commit", undo=True), ask("commit"), ask("commit", undo=True)
    ),
    "two controllers with one id": in_turn(
        ask("prepare"),
        ask("prepare", who="b", which="theirs"),
        ask("commit", who="b", which="theirs"),
        ask("resume", who="b", which="theirs"),
        ask("commit"),
    ),
    "the caller of a resume leaves while it is published": in_turn(
        ask("prepare"), Shut("publishing"), ask("commit"), ask("resume"), Leave(0), *LET_ALL_GO
    ),
    "the caller leaves in the instant in which it calls": in_turn(
        [ask("prepare"), Leave(0)], [ask("commit"), Leave(0)], [ask("resume"), Leave(0)]
    ),
    "a full disk, a refused directory, another scope": in_turn(
        ask("prepare"),
        Break("refused"),
        ask("commit", R0),
        Break("full"),
        ask("commit", R1),
        Break(None),
        ask("commit", R1),
        ask("commit", R0),
    ),
    "a door is shut again right behind an export": in_turn(
        ask("prepare"),
        Shut("exporting"),
        ask("commit"),
        [LetGo("exporting"), Shut("exporting")],
        ask("resume"),
    ),
    "a second crash before the replacement starts": in_turn(
        RESTORE, ask("resume"), ask("prepare"), ask("commit", R1), ask("resume"), Arrive(R1)
    ),
    "what is out of scope is freed without a refusal": in_turn(
        RESTORE, ask("resume"), ask("prepare"), ask("commit", ("r1", 1)), ask("resume"), Arrive(R1)
    ),
    "late requests of the first of two restores": in_turn(
        RESTORE,
        ask("resume"),
        ask("restore", R0, directory="d0", odd=True),
        ask("resume"),
        Arrive(R1, "e0"),
        Arrive(R1, "e1"),
        Arrive(R0),
    ),
    "a server that starts afresh": in_turn(
        ask("prepare"), ask("resume", odd=True), Arrive(R0), ask("prepare")
    ),
    "a late start afresh while another restore runs": in_turn(
        Shut("installing"), RESTORE, ask("resume"), RESTORE, ask("resume", which="last", odd=True)
    ),
}


@pytest.mark.parametrize("recover", [False, True], ids=["open", "recovers"])
@pytest.mark.parametrize("stubborn", [False, True], ids=["stops", "stubborn"])
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_a_written_out_plan(name: str, stubborn: bool, recover: bool) -> None:
    """CTL-7, CTL-9..CTL-14, HARD-3, HARD-5, HARD-6, HARD-8, I29-I31: in any order of tasks."""
    for _ in range(ORDERS):
        play(WRITTEN_OUT[name], recover=recover, stubborn=stubborn)
