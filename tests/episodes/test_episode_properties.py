"""Random sequences of events against an obvious model of episodes (STEP-1..4, STEP-6).

The bodies do what the sequence tells them; the model says in a few lines what must come of it. The
count of what blocks is compared with a recount after every single step of every task (E1).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import trio
from hypothesis import example, given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from gymtrio.episodes.episode import Episode, EpisodeState, OnClose, StepMode, boundary_of
from gymtrio.errors import GymtrioError, StaleAttempt, TransportError
from gymtrio.ids import EpisodeId, RolloutId
from tests.helpers.gated import Gated, open_gated

EPISODES: Final = 3
NAMES: Final = [EpisodeId(RolloutId(f"r{number}")) for number in range(EPISODES)]

TO_GATE: Final = ("close", "open", "open and close", "close and open")
TO_BODY: Final = ("boundary", "wait", "keep", "cancel", "finishing", "return")
TO_WORK: Final = ("finish", "fail")
TO_OTHERS: Final = ("start", "retire", "leave")
SAFE: Final = (EpisodeState.PARKED, EpisodeState.REPLAY_STEP)

EVENTS = st.tuples(
    st.integers(0, EPISODES - 1), st.sampled_from(TO_GATE + TO_BODY + TO_BODY + TO_WORK + TO_OTHERS)
)


@attrs.define
class Obvious:
    """What an episode must look like from outside, once nothing moves any more."""

    state: str = "absent"
    """absent, running, wait, working, queued (before its work), held (after it), parked, finishing."""
    on_close: OnClose = OnClose.KEEP
    boundary: object = None
    clean: bool = True
    """No wait step since the last boundary."""
    retired: bool = False
    outcome: str | None = None

    @property
    def blocks(self) -> bool:
        return self.state in ("running", "wait", "finishing")

    def expected_state(self) -> EpisodeState:
        return {
            "running": EpisodeState.RUNNING,
            "wait": EpisodeState.WAIT_STEP,
            "working": EpisodeState.REPLAY_STEP,
            "queued": EpisodeState.REPLAY_STEP,
            "held": EpisodeState.REPLAY_STEP,
            "parked": EpisodeState.PARKED,
            "finishing": EpisodeState.FINISHING,
        }[self.state]

    def closed(self) -> None:
        if self.state == "working" and self.on_close is OnClose.CANCEL:
            self.state = "queued"

    def opened(self) -> None:
        self.state = {"parked": "running", "held": "running", "queued": "working"}.get(
            self.state, self.state
        )


class Puppet:
    """The body of an episode: does what it is told, step by step."""

    def __init__(self, gated: Gated, episode_id: EpisodeId) -> None:
        self.gated = gated
        self.episode_id = episode_id
        self.outcomes: list[str] = []
        self.inside = 0
        """How many of its tasks and works run."""
        self.boundaries = 0
        self.scope = trio.CancelScope()
        self._commands, self._from_test = trio.open_memory_channel[str](1)
        self._ends, self._work_from_test = trio.open_memory_channel[str](1)

    def tell(self, command: str) -> None:
        (self._ends if command in TO_WORK else self._commands).send_nowait(command)

    async def run(self) -> None:
        with self.scope:
            try:
                await self.gated.episodes.run(self.episode_id, self._body)
                self.outcomes.append("returned")
            except StaleAttempt:
                self.outcomes.append("stale")
            except GymtrioError as error:
                self.outcomes.append(str(error))
        if self.scope.cancelled_caught:
            self.outcomes.append("left")

    async def _body(self, live: Episode) -> None:
        live.nursery.start_soon(self._inside, trio.sleep_forever)
        await self._inside(lambda: self._obey(live))

    async def _inside(self, work: Callable[[], Awaitable[object]]) -> None:
        self.inside += 1
        try:
            await work()
        finally:
            self.inside -= 1

    async def _obey(self, live: Episode) -> None:
        async for command in self._from_test:
            if command == "return":
                return
            if command == "finishing":
                live.finishing()
            elif command == "boundary":
                self.boundaries += 1
                await live.boundary(self.boundaries)
            else:
                await self._step(live, command)

    async def _step(self, live: Episode, command: str) -> None:
        try:
            if command == "wait":
                await live.step(self._work, mode=StepMode.WAIT, doing=command)
            else:
                on_close = OnClose.CANCEL if command == "cancel" else OnClose.KEEP
                await live.step(self._work, mode=StepMode.REPLAY, doing=command, on_close=on_close)
        except TransportError:
            pass

    async def _work(self) -> None:
        self.inside += 1
        try:
            if await self._work_from_test.receive() == "fail":
                raise TransportError("told to fail")
        finally:
            self.inside -= 1


class Recount(trio.abc.Instrument):
    """Checks E1 after every step of every task."""

    def __init__(self, gated: Gated) -> None:
        self._gated = gated
        self.faults = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        episodes = self._gated.episodes
        # An exception here would only be logged.
        blocking = {
            e.episode_id
            for e in episodes.live.values()
            if e.state not in SAFE or e.stopping is not None
        }
        self.faults += episodes.blocking != len(blocking)
        self.faults += {b.episode_id for b in episodes.blockers()} != blocking
        self.faults += {e.episode_id for e in episodes.live.values() if e.blocks} != blocking


class Comparison:
    """Carries each event out on the real thing and on the model, if the model allows it."""

    def __init__(self, gated: Gated) -> None:
        self.gated = gated
        self.closed = False
        self.models = [Obvious() for _ in NAMES]
        self.puppets = [Puppet(gated, name) for name in NAMES]

    def apply(self, index: int, event: str) -> None:
        if event in TO_GATE:
            for part in event.split(" and "):
                self._gate(part)
        else:
            self._episode(index, event)

    def _gate(self, part: str) -> None:
        # Opened and closed in one instant, nobody has run in between: nothing has moved but works
        # that a close cancels.
        if part == "close" and not self.closed:
            self.gated.close()
            for model in self.models:
                model.closed()
        elif part == "open" and self.closed:
            self.gated.open()
        self.closed = part == "close"

    def _episode(self, index: int, event: str) -> None:
        model, puppet = self.models[index], self.puppets[index]
        if event == "start":
            if model.state == "absent" and not self.closed:
                self.models[index] = Obvious(state="running")
                self.puppets[index] = Puppet(self.gated, NAMES[index])
                self.gated.nursery.start_soon(self.puppets[index].run)
        elif model.state == "absent" or model.retired:
            if event == "return" and model.state == "finishing":
                puppet.tell(event)
                self._gone(model, "stale")
        elif event == "retire":
            self.gated.episodes.retire_up_to(NAMES[index])
            model.retired = True
            if model.state != "finishing":
                self._gone(model, "stale")
        elif event == "leave":
            puppet.scope.cancel()
            self._gone(model, "left")
        elif event in TO_WORK:
            if model.state in ("wait", "working"):
                puppet.tell(event)
                self._work_ends(model, failed=event == "fail")
        elif model.state == "running":
            self._command(model, puppet, event)
        elif model.state == "finishing" and event == "return":
            puppet.tell(event)
            self._gone(model, "returned")

    def _command(self, model: Obvious, puppet: Puppet, event: str) -> None:
        if event in ("keep", "cancel") and not model.clean:
            return
        puppet.tell(event)
        if event == "return":
            self._gone(model, "returned")
        elif event == "finishing":
            model.state = "finishing"
        elif event == "boundary":
            model.boundary, model.clean = puppet.boundaries + 1, True
            model.state = "parked" if self.closed else "running"
        elif event == "wait":
            model.state, model.clean = "wait", False
        else:
            model.on_close = OnClose.CANCEL if event == "cancel" else OnClose.KEEP
            model.state = "queued" if self.closed else "working"

    def _work_ends(self, model: Obvious, *, failed: bool) -> None:
        if model.state == "working" and self.closed:
            model.state = "held"
            model.boundary = None if failed else model.boundary
        else:
            model.state = "running"

    @staticmethod
    def _gone(model: Obvious, outcome: str) -> None:
        model.state, model.outcome = "absent", outcome

    def settle(self) -> None:
        """Everybody has run: whom the gate let through has moved on."""
        if not self.closed:
            for model in self.models:
                model.opened()

    def check(self) -> None:
        live = self.gated.episodes.live
        for name, model, puppet in zip(NAMES, self.models, self.puppets, strict=True):
            if model.state == "absent":
                assert name.capture_key not in live
                assert puppet.inside == 0, "something of an ended episode still runs (E2)"
                assert puppet.outcomes == ([] if model.outcome is None else [model.outcome])
                continue
            episode = live[name.capture_key]
            assert episode.state is model.expected_state()
            assert episode.exportable == (not model.blocks and not model.retired)
            assert boundary_of(episode.last_boundary, "r") == model.boundary
            assert puppet.outcomes == []
        assert self.gated.episodes.blocking == sum(
            model.blocks or model.retired for model in self.models if model.state != "absent"
        )


async def play(events: list[tuple[int, str]]) -> None:
    async with open_gated() as gated:
        comparison = Comparison(gated)
        recount = Recount(gated)
        trio.lowlevel.add_instrument(recount)
        for index, event in events:
            comparison.apply(index, event)
            await wait_all_tasks_blocked()
            comparison.settle()
            comparison.check()
        trio.lowlevel.remove_instrument(recount)
        assert recount.faults == 0


@given(st.lists(EVENTS, max_size=40))
@example([(0, "start"), (0, "boundary"), (0, "cancel"), (0, "close and open"), (0, "finish")])
@example([(0, "start"), (0, "keep"), (0, "close"), (0, "fail"), (0, "open"), (0, "return")])
@example([(0, "start"), (0, "finishing"), (0, "retire"), (0, "close"), (0, "return")])
def test_any_sequence_of_events_comes_out_as_the_model_says(events: list[tuple[int, str]]) -> None:
    """STEP-1, STEP-2, STEP-3, STEP-4, STEP-6, STEP-7: states, boundaries, counts and ends."""
    trio.run(play, events)
