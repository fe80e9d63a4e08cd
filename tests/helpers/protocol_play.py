"""Plays a plan twice, on the real control plane and on the model of the protocol, and compares."""

from __future__ import annotations

import copy
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from enum import Enum
from typing import Any, Final, TypeAlias

import attrs
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.wire.control import REQUESTS
from tests.helpers.protocol_invariants import Invariants
from tests.helpers.protocol_model import (
    ABORTED,
    DOORS,
    Answer,
    Attempt,
    Call,
    ProtocolModel,
    key,
)
from tests.helpers.protocol_plans import (
    Action,
    Again,
    Arrive,
    Ask,
    Break,
    Fail,
    Jump,
    Leave,
    LetGo,
    Shut,
    Step,
    Work,
)
from tests.helpers.protocol_run import (
    GRACE_S,
    ROLLOUTS,
    ProtocolRun,
    episode_of,
    open_protocol_run,
)

Published: TypeAlias = dict[str, tuple[str, tuple[tuple[Attempt, str], ...]]]
Player: TypeAlias = ProtocolRun | ProtocolModel

EARLIER: Final[Published] = {
    "d0": ("earlier", tuple(((rollout, 0), f"{rollout} of d0") for rollout in ROLLOUTS))
}
HAPPENED: Final[Counter[str]] = Counter()
"""What the plans that were played came across."""

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
        self._jumped_s = 0.0
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
            case Jump(seconds):
                self._jumped_s += seconds
                return Deed(lambda p: p.jump(seconds), False)

    def _call(self, ask: Ask, now: float) -> Call:
        other = "b" if ask.who == "a" else "a"
        number = self._made[ask.who]
        if ask.which == "theirs":
            checkpoint_id = f"{other}{self._made[other]}"
        elif ask.which == "last":
            checkpoint_id = f"{ask.who}{max(0, number - 1)}"
        else:
            checkpoint_id = f"{ask.who}{number}"
            self._made[ask.who] += ask.operation == "resume" and ask.which == "mine"
        scope = tuple(dict.fromkeys(ask.attempts))
        if ask.operation == "restore":
            # Of each rollout one; a message that names more is none.
            scope = tuple(dict(reversed(scope)).items())
        return Call(
            operation=ask.operation,
            checkpoint_id=checkpoint_id,
            nonce=None if ask.who == "a" else "nonce-b",
            deadline=now + self._jumped_s + ask.timeout_s,
            directory=f"of {checkpoint_id}" if ask.directory == "own" else ask.directory,
            scope=None if ask.operation == "commit" and ask.odd else scope,
            rollouts=tuple(rollout for rollout, _ in scope),
            start_afresh=ask.odd,
            undo=ask.operation == "resume" and ask.undo,
            stop=ask.operation == "commit" and ask.undo,
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
        "stop": call.stop,
    }
    if call.operation == "resume" and not call.start_afresh:
        del every["episode_ids"]
    known = {field.name for field in attrs.fields(REQUESTS[call.operation])}
    return {name: value for name, value in every.items() if name in known}


# -- comparing --------------------------------------------------------------------------------


class Rest(Enum):
    """What happens between two deeds of the same moment."""

    NONE = "nothing"
    FULL = "everything"
    BUT_FOR_THE_GATE = "nobody has come through the gate yet"


def outcomes(model: ProtocolModel, deeds: list[Deed]) -> Iterator[ProtocolModel]:
    """What the model makes of deeds that happen at the same time.

    Those that are no calls are done in their order. Between any two, everything may come to rest, or
    nothing, or all but those who are woken at the gate.
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
        for rests in itertools.product(Rest, repeat=len(deeds) - 1):
            outcome = copy.deepcopy(model)
            for number, rest in zip(order, (*rests, Rest.FULL), strict=True):
                deeds[number].on(outcome)
                if rest is not Rest.NONE:
                    outcome.settle(gate=rest is Rest.FULL)
            yield outcome


def differences(
    expected: dict[str, Any],
    found: dict[str, Any],
    *,
    deeds: Sequence[Deed],
    twins: Set[int] = frozenset(),
) -> dict[str, object]:
    """By part of the view: what the model says, and what was seen.

    Args:
        deeds: of the moment that has passed.
        twins: resumes that came in one moment with others; which was the first is told only by their
            answers, which may come later.
    """
    differing: dict[str, object] = {
        name: (value, found[name])
        for name, value in expected.items()
        if name != "answers" and value != found[name]
    }
    expected_answers, found_answers = expected["answers"], found["answers"]
    for number in sorted(expected_answers.keys() | found_answers.keys()):
        said, heard = expected_answers.get(number), found_answers.get(number)
        if number in twins and _is_idle(said) and _is_idle(heard):
            continue
        if not _same_answer(said, heard, deeds):
            differing[f"answer {number}"] = (said, heard)
    return differing


def _same_answer(said: Answer | None, heard: Answer | None, deeds: Sequence[Deed]) -> bool:
    if said == ABORTED:
        return isinstance(heard, str) and heard != "left"
    if len(deeds) > 1 and isinstance(said, tuple) and isinstance(heard, tuple):
        if said[0] == "idle":
            # Two resumes of the same moment: the second may still find open what the first ends.
            return heard[0] == "idle"
        if said == (heard[0], ()) and said[0] in ("prepared", "committed"):
            # A prepare asked again reports what a retire of the same moment is stopping.
            return isinstance(heard[1], tuple) and _retired_in(deeds).issuperset(heard[1])
    return said == heard


def _is_idle(answer: Answer | None) -> bool:
    return isinstance(answer, tuple) and answer[0] == "idle"


def _retired_in(deeds: Sequence[Deed]) -> set[str]:
    calls = [deed.call for deed in deeds if deed.call is not None]
    retires = [call for call in calls if call.operation == "retire"]
    return {key(attempt) for call in retires for attempt in call.scope or ()}


class Play:
    """One plan, played by both."""

    def __init__(self, run: ProtocolRun, model: ProtocolModel, plan: list[Step]) -> None:
        self.run = run
        self.model = model
        self.plan = plan
        self.controllers = Controllers()
        self.twins: set[int] = set()
        self.invariants = Invariants(run, self.controllers.calls, stubborn=model.stubborn)
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
        self.compare([self.model], f"at {self.now} s", [])
        if opened is not None and self.model.opened is not opened:
            HAPPENED[f"lease expired while {situation}"] += 1

    async def act(self, actions: list[Action]) -> None:
        deeds = [d for a in actions if (d := self.controllers.deed(a, self.now)) is not None]
        before, situation = self.run.view(), self.model.situation
        if len(deeds) > 1:
            calls = enumerate(self.controllers.calls)
            sent = {id(deed.call) for deed in deeds if deed.call is not None}
            self.twins |= {n for n, c in calls if c.operation == "resume" and id(c) in sent}
        for deed in deeds:
            deed.on(self.run)
        await wait_all_tasks_blocked()
        when = f"at {self.now} s, after {actions}"
        self.compare(outcomes(self.model, deeds), when, deeds)
        if len(deeds) == 1 and deeds[0].call is not None:
            self.invariants.refusals_change_nothing(before)
            HAPPENED[f"{deeds[0].call.operation} while {situation}"] += 1
        elif len(deeds) > 1:
            HAPPENED[f"several at once while {situation}"] += 1

    def compare(self, possible: Iterable[ProtocolModel], when: str, deeds: Sequence[Deed]) -> None:
        found = self.run.view()
        told: list[str] = []
        for model in possible:
            differing = differences(model.view(), found, deeds=deeds, twins=self.twins)
            if not differing:
                self.model = model
                for number, heard in self.run.answers.items():
                    model.calls[number].answer = heard
                # Which of two at the same moment a planned failure has met is no matter of ours.
                model.failure = self.run.planned_failure
                break
            told.append("\n".join(f"  {name}: {pair}" for name, pair in differing.items()))
        else:
            raise AssertionError(
                f"{when}: model and reality differ (part: model, reality)\n" + "\nor\n".join(told)
            )
        self.invariants.check(self.now, found)


def play(plan: list[Step], *, recover: bool = False, stubborn: bool = False) -> None:
    """Play a plan on virtual time.

    Raises:
        AssertionError: reality differs from the model, or an invariant does not hold.
    """

    async def main() -> None:
        async with open_protocol_run(recover=recover, stubborn=stubborn, published=EARLIER) as run:
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
