"""Two controllers, each doing as it likes, against the model of the protocol.

An example is a plan: what happens at which virtual time. It is played twice, by the real control plane
and by the model, and after every step all that can be seen of the two is compared: replies, refusals,
phase, open id, lease, gate, marks, the participant's work, what is published, and which jobs run. Some
invariants are checked besides, on the real one alone.

Several actions of one step happen at the same time; then the real outcome must be that of some order.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import attrs
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.wire.control import REQUESTS
from tests.helpers.protocol_model import ABORTED, DOORS, Answer, Attempt, Call, ProtocolModel
from tests.helpers.protocol_run import (
    GRACE_S,
    ROLLOUTS,
    ProtocolRun,
    episode_of,
    open_protocol_run,
)

EXAMPLES_MIN: Final = 300
"""In the everyday run; a profile may ask for more."""

Published: TypeAlias = dict[str, tuple[str, tuple[tuple[Attempt, str], ...]]]
Player: TypeAlias = ProtocolRun | ProtocolModel

EARLIER: Final[Published] = {
    "d0": ("earlier", tuple(((rollout, 0), f"{rollout} of d0") for rollout in ROLLOUTS))
}

HAPPENED: Final[Counter[str]] = Counter()
"""What the examples of this run came across."""

# -- plans ------------------------------------------------------------------------------------


@attrs.frozen
class Ask:
    """A controller calls.

    The id: `mine` is the controller's own, a new one after each resume; `last` the one before;
    `theirs` the other controller's.
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
    """Resume: `undo_restore`."""


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


Action: TypeAlias = Ask | Again | Leave | Arrive | Work | Shut | LetGo | Fail | Break
Step: TypeAlias = tuple[int, list[Action]]
"""Seconds to let pass, and what happens then, at once."""

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


ACTIONS: Final = st.one_of(
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
    st.builds(Fail, st.sampled_from((None, "close", "settle", "export", "install"))),
    st.builds(Break, st.sampled_from((None, "full", "refused"))),
)
ALONE: Final[Moves] = in_turn(ACTIONS)
AT_ONCE: Final[Moves] = st.tuples(PAUSES, st.lists(ACTIONS, min_size=2, max_size=3)).map(
    lambda step: [step]
)
ALL_DOORS: Final[list[Step]] = [(0, [LetGo(door)]) for door in DOORS]
RESUME: Final[Moves] = in_turn(surely("resume"))
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

# -- actions, made concrete -------------------------------------------------------------------


@attrs.frozen
class Deed:
    """One action for either player; a call's body is decided already."""

    on: Callable[[Player], None]
    is_call: bool
    call: Call | None = None


class Controllers:
    """Turns a plan's actions into what is sent and done."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._made = {"a": 0, "b": 0}
        self._arrivals = 0
        self._notes = 0

    def deed(self, action: Action, now: float) -> Deed | None:
        match action:
            case Ask():
                return self._send(self._call(action, now))
            case Again(nth):
                return self._send(self.calls[-1 - nth]) if nth < len(self.calls) else None
            case Leave(nth):
                number = len(self.calls) - 1 - nth
                return None if number < 0 else Deed(lambda p: p.leave(number), False)
            case Arrive(attempt, epoch):
                self._arrivals += 1
                arrival = self._arrivals
                return Deed(lambda p: p.arrive(arrival, attempt, epoch), True)
            case Work("park", attempt):
                self._notes += 1
                note = f"note {self._notes}"
                return Deed(lambda p: p.park(attempt, note), False)
            case Work("go_on", attempt):
                return Deed(lambda p: p.go_on(attempt), False)
            case Work(_, attempt):
                return Deed(lambda p: p.finish(attempt), False)
            case Shut(door):
                return Deed(lambda p: p.shut_door(door), False)
            case LetGo(door):
                return Deed(lambda p: p.open_door(door), False)
            case Fail(where):
                return Deed(lambda p: p.fail(where), False)
            case Break(how):
                return Deed(lambda p: p.break_disk(how), False)

    def _call(self, ask: Ask, now: float) -> Call:
        other = "b" if ask.who == "a" else "a"
        number = self._made[ask.who]
        if ask.which == "theirs":
            checkpoint_id = f"{other}{self._made[other]}"
        elif ask.which == "last":
            checkpoint_id = f"{ask.who}{max(0, number - 1)}"
        else:
            checkpoint_id = f"{ask.who}{number}"
            self._made[ask.who] += ask.operation == "resume"
        scope = tuple(dict.fromkeys(ask.attempts))
        return Call(
            operation=ask.operation,
            checkpoint_id=checkpoint_id,
            nonce=None if ask.who == "a" else "nonce-b",
            deadline=now + ask.timeout_s,
            directory=f"of {checkpoint_id}" if ask.directory == "own" else ask.directory,
            scope=None if ask.operation == "commit" and ask.odd else scope,
            rollouts=tuple(rollout for rollout, _ in scope),
            start_afresh=ask.odd,
            undo=ask.undo,
            epoch=None if ask.operation != "restore" else f"e{int(ask.odd)}",
        )

    def _send(self, call: Call) -> Deed:
        number = len(self.calls)
        self.calls.append(call)

        def send(player: Player) -> None:
            if isinstance(player, ProtocolModel):
                player.begin(number, copy.copy(call))
            else:
                player.begin(number, call.operation, body_of(call), call.deadline)

        return Deed(send, True, call)


def body_of(call: Call) -> dict[str, Any]:
    episodes = None if call.scope is None else tuple(map(episode_of, call.scope))
    every: dict[str, Any] = {
        "checkpoint_id": call.checkpoint_id,
        "controller_nonce": call.nonce,
        "checkpoint_dir": call.directory,
        "episode_ids": episodes,
        "rollout_ids": call.rollouts,
        "start_afresh": call.start_afresh,
        "execution_epoch": call.epoch,
        "undo_restore": call.undo,
    }
    known = {field.name for field in attrs.fields(REQUESTS[call.operation])}
    return {name: value for name, value in every.items() if name in known}


# -- comparing --------------------------------------------------------------------------------


def outcomes(model: ProtocolModel, deeds: list[Deed]) -> Iterator[ProtocolModel]:
    """What the model makes of deeds that happen at the same time.

    Those that are no calls are done in their order; between any two, everything may or may not come
    to rest.
    """
    if len(deeds) <= 1:
        for deed in deeds:
            deed.on(model)
        model.settle()
        yield model
        return
    numbers = range(len(deeds))
    done_in_order = [n for n in numbers if not deeds[n].is_call]
    for order in itertools.permutations(numbers):
        if [n for n in order if n in done_in_order] != done_in_order:
            continue
        for rests in itertools.product((False, True), repeat=len(deeds) - 1):
            outcome = copy.deepcopy(model)
            for number, rest in zip(order, (*rests, True), strict=True):
                deeds[number].on(outcome)
                if rest:
                    outcome.settle()
            yield outcome


def agree(expected: dict[str, Any], found: dict[str, Any]) -> bool:
    return not differences(expected, found)


def differences(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, object]:
    """By part of the view: what the model says, and what was seen."""
    differing: dict[str, object] = {
        name: (value, found[name])
        for name, value in expected.items()
        if name != "answers" and value != found[name]
    }
    expected_answers, found_answers = expected["answers"], found["answers"]
    for number in sorted(expected_answers.keys() | found_answers.keys()):
        said, heard = expected_answers.get(number), found_answers.get(number)
        aborted = said == ABORTED and isinstance(heard, str) and heard != "left"
        if said != heard and not aborted:
            differing[f"answer {number}"] = (said, heard)
    return differing


class Play:
    """One plan, played by both."""

    def __init__(self, run: ProtocolRun, model: ProtocolModel, plan: list[Step]) -> None:
        self.run = run
        self.model = model
        self.plan = plan
        self.controllers = Controllers()
        self.invariants = Invariants(run, self.controllers, stubborn=model.stubborn)
        self.now = 0

    async def play(self) -> None:
        for pause_s, actions in self.plan:
            await self.pass_time(pause_s)
            await self.act(actions)
        for door in DOORS:
            await self.act([LetGo(door)])
        await self.pass_time(200_000)
        assert self.run.jobs == []
        assert self.run.view()["closed"] is self.model.awaiting
        assert self.run.answers.keys() == set(range(len(self.controllers.calls)))

    async def pass_time(self, seconds: int) -> None:
        self.now += seconds
        situation, opened = self.model.situation, self.model.opened
        await self.run.sleep_until(self.now)
        await wait_all_tasks_blocked()
        self.model.advance_to(self.now)
        self.compare([self.model], f"at {self.now} s")
        if opened is not None and self.model.opened is not opened:
            HAPPENED[f"lease expired while {situation}"] += 1

    async def act(self, actions: list[Action]) -> None:
        deeds = [d for a in actions if (d := self.controllers.deed(a, self.now)) is not None]
        before, situation = self.run.view(), self.model.situation
        for deed in deeds:
            deed.on(self.run)
        await wait_all_tasks_blocked()
        self.compare(outcomes(self.model, deeds), f"at {self.now} s, after {actions}")
        if len(deeds) == 1 and deeds[0].call is not None:
            self.invariants.refusals_change_nothing(before)
            HAPPENED[f"{deeds[0].call.operation} while {situation}"] += 1
        elif len(deeds) > 1:
            HAPPENED[f"several at once while {situation}"] += 1

    def compare(self, possible: Iterator[ProtocolModel] | list[ProtocolModel], when: str) -> None:
        found = self.run.view()
        told: list[str] = []
        for model in possible:
            differing = differences(model.view(), found)
            if not differing:
                self.model = model
                # Which of two at the same moment a planned failure has met is no matter of ours.
                model.failure = self.run.planned_failure
                break
            told.append("\n".join(f"  {name}: {pair}" for name, pair in differing.items()))
        else:
            raise AssertionError(
                f"{when}: model and reality differ (part: model, reality)\n" + "\nor\n".join(told)
            )
        self.invariants.check(self.now, found)


class Invariants:
    """What must hold of the real one whatever the model says."""

    def __init__(self, run: ProtocolRun, controllers: Controllers, *, stubborn: bool) -> None:
        self.run = run
        self.calls = controllers.calls
        self.stubborn = stubborn
        self.heard: set[int] = set()
        self.fenced: dict[str, set[str]] = {}
        """Resumed ids, and the directories that held a part of that id when it was resumed."""
        self.retired: dict[str, int] = {}
        self.superseded: dict[str, int] = {}
        self.entered: set[int] = set()

    def check(self, now: float, view: dict[str, Any]) -> None:
        self.listen(view)
        for checkpoint_id, directories in self.fenced.items():
            assert view["open"] != checkpoint_id or "restore" in view["jobs"], "I12"
            assert self.holding(checkpoint_id, view) == directories, "I12, I31"
        for rollout, number in {*view["running"], *view["parked"], *view["restored"]}:
            assert number > self.retired.get(rollout, -1), "I10"
        for rollout, number in self.superseded.items():
            assert view["marks"].get(rollout, -1) >= number, "I11"
        assert view["closed"] is (view["open"] is not None or view["awaiting"]), "I29"
        if not view["closed"]:
            assert self.run.participant.admission.waiting == 0, "I29"
        for number, call in enumerate(self.calls):
            assert number in view["answers"] or call.deadline > now, "I29, CTL-8"
        if view["open"] is not None and now >= view["lease"]:
            assert {"publishing", "installing"} & self.run.shut, "I30"
        if view["open"] is None:
            left = {name for name in view["jobs"] if not name.startswith("retire")}
            assert left <= ({"commit"} if self.stubborn else set()), "I31"
        cancels = self.run.participant.cancels
        for episode_id in self.run.participant.stopping:
            assert cancels.count(episode_id) >= 1, "CTL-12"

    def listen(self, view: dict[str, Any]) -> None:
        """Take in the replies that came with this step; retirements first, they only add."""
        fresh = view["answers"].keys() - self.heard
        for number in fresh:
            call, answer = self.calls[number], view["answers"][number]
            if isinstance(answer, tuple):
                self.promise(call, answer, view)
        self.heard |= fresh

    def promise(self, call: Call, answer: Answer, view: dict[str, Any]) -> None:
        assert call.scope is not None or call.operation == "commit"
        if call.operation == "resume":
            self.fenced.setdefault(call.checkpoint_id, self.holding(call.checkpoint_id, view))
        elif call.operation == "retire":
            for rollout, number in call.scope or ():
                self.retired[rollout] = max(number, self.retired.get(rollout, -1))
        elif call.operation == "restore":
            for rollout, number in call.scope or ():
                self.superseded[rollout] = max(number, self.superseded.get(rollout, -1))
        elif call.operation == "forget":
            for rollout in call.rollouts:
                self.retired.pop(rollout, None)
                self.superseded.pop(rollout, None)
        elif call.operation == "commit":
            checkpoint_id, records = view["published"][call.directory]
            assert checkpoint_id == call.checkpoint_id, "I20"
            if call.scope is not None:
                assert {attempt for attempt, _ in records} <= set(call.scope), "I19"

    def refusals_change_nothing(self, before: dict[str, Any]) -> None:
        """I13: of a call that was alone and was refused at once."""
        after = self.run.view()
        (number,) = [len(self.calls) - 1]
        answer = after["answers"].get(number)
        if answer in ("checkpoint_conflict", "stale_checkpoint", "invalid_request"):
            assert {**after, "answers": 0} == {**before, "answers": 0}, "I13"

    @staticmethod
    def holding(checkpoint_id: str, view: dict[str, Any]) -> set[str]:
        return {where for where, (owner, _) in view["published"].items() if owner == checkpoint_id}


def play(plan: list[Step], *, recover: bool = False, stubborn: bool = False) -> ProtocolRun:
    """Play a plan on virtual time.

    Raises:
        AssertionError: reality differs from the model, or an invariant does not hold.
    """
    runs: list[ProtocolRun] = []

    async def main() -> None:
        async with open_protocol_run(recover=recover, stubborn=stubborn, published=EARLIER) as run:
            runs.append(run)
            model = ProtocolModel(
                grace_s=GRACE_S, recover=recover, stubborn=stubborn, published=EARLIER
            )
            try:
                await Play(run, model, plan).play()
            finally:
                for door in DOORS:
                    run.open_door(door)

    logging.disable()
    try:
        trio.run(main, clock=MockClock(autojump_threshold=0))
    finally:
        logging.disable(logging.NOTSET)
    return runs[0]


@settings(max_examples=max(EXAMPLES_MIN, settings().max_examples))
@given(plan=PLANS, recover=st.sampled_from((False, False, True)), stubborn=st.booleans())
def test_reality_is_what_the_model_says(plan: list[Step], recover: bool, stubborn: bool) -> None:
    """CTL-3..CTL-14, HARD-5, HARD-6, HARD-8, HARD-12, I10-I13, I19, I29-I31."""
    play(plan, recover=recover, stubborn=stubborn)
