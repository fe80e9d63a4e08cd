"""What two controllers, the participant's work and the test's faults may do to a control plane."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import attrs
from hypothesis import strategies as st

from tests.helpers.protocol_model import DOORS, Attempt
from tests.helpers.protocol_run import ROLLOUTS


@attrs.frozen
class Ask:
    """A controller calls.

    The id: `mine` is the controller's own, a new one after each resume; `current` too, and it stays;
    `last` is the one before; `theirs` the other controller's.
    """

    who: str
    operation: str
    which: str
    timeout_s: float
    attempts: tuple[Attempt, ...]
    directory: str
    odd: bool
    """Commit: of everything. Resume: `start_afresh`. Restore: with another epoch."""
    undo: bool
    """Resume: `undo_restore`. Commit: `stop`."""


@attrs.frozen
class Again:
    """A reply was lost: an earlier call is sent once more, as it was."""

    nth: int


@attrs.frozen
class Leave:
    """The connection of an earlier call breaks."""

    nth: int


@attrs.frozen
class Arrive:
    attempt: Attempt
    epoch: str | None = None


@attrs.frozen
class Work:
    """`park`, `go_on` or `finish`."""

    what: str
    attempt: Attempt


@attrs.frozen
class Shut:
    door: str


@attrs.frozen
class LetGo:
    door: str


@attrs.frozen
class Fail:
    where: str | None


@attrs.frozen
class Break:
    how: str | None


@attrs.frozen
class Jump:
    """The wall clock is set, forward or back."""

    seconds: float


Action: TypeAlias = Ask | Again | Leave | Arrive | Work | Shut | LetGo | Fail | Break | Jump
Step: TypeAlias = tuple[int, list[Action]]
"""Seconds to let pass, and what happens then, at once."""


def ask(
    operation: str,
    *attempts: Attempt,
    who: str = "a",
    which: str = "mine",
    timeout_s: float = 30.5,
    directory: str = "own",
    odd: bool = False,
    undo: bool = False,
) -> Ask:
    """For plans that are written out."""
    return Ask(
        who=who,
        operation=operation,
        which=which,
        timeout_s=timeout_s,
        attempts=attempts or (("r0", 0),),
        directory=directory,
        odd=odd,
        undo=undo,
    )


# -- plans at random --------------------------------------------------------------------------

Moves: TypeAlias = st.SearchStrategy[list[Step]]

ATTEMPTS: Final = st.tuples(st.sampled_from(ROLLOUTS), st.integers(0, 2))
PAUSES: Final = st.sampled_from((0, 0, 0, 0, 1, 2, 5, 40))
OPERATIONS: Final = (
    *("prepare", "commit", "restore") * 2,
    *("resume",) * 3,
    *("retire", "renew", "forget"),
)


def asks(
    *operations: str,
    who: str = "aaaab",
    which: tuple[str, ...] = ("mine",) * 6 + ("last", "theirs"),
    timeouts_s: tuple[float, ...] = (30.5, 30.5, 30.5, 3.5, 3.5, 0.5, -0.5, 90_000.5),
    directories: tuple[str, ...] = ("own", "own", "own", "d0", "d0", "d1"),
) -> st.SearchStrategy[Ask]:
    return st.builds(
        Ask,
        who=st.sampled_from(who),
        operation=st.sampled_from(operations),
        which=st.sampled_from(which),
        timeout_s=st.sampled_from(timeouts_s),
        attempts=st.lists(ATTEMPTS, min_size=1, max_size=3).map(tuple),
        directory=st.sampled_from(directories),
        odd=st.booleans(),
        undo=st.booleans(),
    )


def surely(operation: str, directory: str = "own") -> st.SearchStrategy[Ask]:
    """A call that leads somewhere, if anything can."""
    return asks(
        operation, who="a", which=("mine",), timeouts_s=(30.5, 3.5), directories=(directory,)
    )


def shut(*doors: str) -> st.SearchStrategy[Shut]:
    return st.builds(Shut, st.sampled_from(doors))


def in_turn(*actions: st.SearchStrategy[Any]) -> Moves:
    """One after the other, each when the one before has come to rest."""
    steps = [st.tuples(PAUSES, action.map(lambda a: [a])) for action in actions]
    return st.tuples(*steps).map(list)


TOGETHER: Final = st.one_of(
    asks(*OPERATIONS),
    asks(*OPERATIONS),
    asks(*OPERATIONS),
    asks(*OPERATIONS),
    st.builds(Again, st.integers(0, 5)),
    st.builds(Leave, st.integers(0, 3)),
    st.builds(Arrive, ATTEMPTS, st.sampled_from((None, "e0", "e1"))),
    st.builds(Work, st.sampled_from(("park", "park", "go_on", "finish")), ATTEMPTS),
    st.builds(Shut, st.sampled_from(DOORS)),
    st.builds(LetGo, st.sampled_from(DOORS)),
    st.builds(Fail, st.sampled_from((None, "close", "settle", "export", "install", "release"))),
    st.builds(Break, st.sampled_from((None, "full", "refused"))),
)
JUMPS: Final = st.builds(Jump, st.sampled_from((-86_400.0, -10.0, 10.0, 86_400.0)))
"""In the moment of a call, nothing seen would tell by which clock its deadline was read."""

ALONE: Final[Moves] = in_turn(st.integers(0, 12).flatmap(lambda n: TOGETHER if n else JUMPS))
AT_ONCE: Final[Moves] = st.tuples(PAUSES, st.lists(TOGETHER, min_size=2, max_size=3)).map(
    lambda step: [step]
)
ALL_DOORS: Final[list[Step]] = [(0, [LetGo(door)]) for door in DOORS]
RESUME: Final[Moves] = in_turn(surely("resume"))
UNDO: Final = surely("resume").map(lambda ask: attrs.evolve(ask, undo=True, which="current"))
"""The id stays the controller's own, so that it may ask again."""

SITUATIONS: Final[tuple[Moves, ...]] = (
    st.just([]),
    ATTEMPTS.flatmap(lambda a: in_turn(st.just(Arrive(a)), st.just(Work("park", a)))),
    ATTEMPTS.flatmap(lambda a: in_turn(st.just(Arrive(a)), shut("cleaning_up"), asks("retire"))),
    ATTEMPTS.flatmap(lambda a: in_turn(st.just(Arrive(a)), surely("prepare"))),
    in_turn(shut("settling"), surely("prepare")),
    in_turn(surely("prepare")),
    *(
        in_turn(surely("prepare"), shut(door), surely("commit"))
        for door in ("exporting", "writing", "publishing", "releasing")
    ),
    in_turn(surely("prepare"), st.just(Break("full")), surely("commit"), st.just(Break(None))),
    in_turn(surely("prepare"), surely("commit")),
    in_turn(shut("reading"), surely("restore", "d0")),
    in_turn(shut("installing"), surely("restore", "d0")),
    in_turn(surely("restore", "d0")),
    in_turn(surely("restore", "d0"), shut("releasing"), UNDO),
    in_turn(surely("restore", "d0"), st.just(Fail("release")), UNDO),
)
ROUNDS: Final[Moves] = st.tuples(
    st.one_of(SITUATIONS),
    st.lists(st.one_of(ALONE, ALONE, AT_ONCE), min_size=1, max_size=4).map(
        lambda moves: [step for move in moves for step in move]
    ),
    st.one_of(st.just([]), st.just(ALL_DOORS), RESUME, RESUME.map(lambda steps: steps + ALL_DOORS)),
).map(lambda parts: [step for part in parts for step in part])
PLANS: Final = st.lists(ROUNDS, min_size=1, max_size=5).map(
    lambda rounds: [step for steps in rounds for step in steps]
)
