"""Agent sessions under a real control plane."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.episodes.episode import Episode, StepMode
from gymtrio.errors import (
    ActivationOutOfOrder,
    AdmissionClosed,
    BackendFailed,
    CheckpointConflict,
    InvalidCheckpointState,
    InvalidPhase,
    NotFound,
    RetireIncomplete,
    SessionConflict,
    SettingsError,
    StaleAttempt,
)
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import CLEANUP_S_MAX
from gymtrio.participants.agent.participant import AgentParticipant
from gymtrio.participants.agent.sessions import CLOSED_REMEMBERED_MAX, AgentSessions
from gymtrio.participants.digest import json_digest
from tests.helpers.controlled import checkpoint, open_controlled
from tests.helpers.gated import begin
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.plane import Plane
from tests.helpers.scripted_agent import BareAgent, ScriptedAgent


def episode(name: str = "r", attempt: int = 0) -> EpisodeId:
    return EpisodeId(RolloutId(name), attempt)


R0, R1, R2 = episode(), episode(attempt=1), episode(attempt=2)
REQUEST = json_digest({"input": "hello"})

Work = Callable[[Episode, int], Awaitable[dict[str, object]]]


class Process:
    """One incarnation of an agent server: its agent, participant, plane, and callers."""

    def __init__(
        self,
        agent: BareAgent,
        participant: AgentParticipant,
        plane: Plane,
        nursery: trio.Nursery,
    ) -> None:
        self.agent = agent
        self.participant = participant
        self.plane = plane
        self.nursery = nursery

    @property
    def sessions(self) -> AgentSessions:
        return self.participant.sessions

    async def seed(
        self,
        key: str = "s",
        episode_id: EpisodeId = R0,
        *,
        refuse: bool = False,
        only: bool = False,
    ) -> list[object]:
        seed = partial(
            self.sessions.seed,
            episode_id,
            key,
            partial(self.agent.build, key),
            refuse=refuse,
            only=only,
        )
        return await begin(self.nursery, seed)

    async def activate(
        self,
        work: Work,
        key: str = "s",
        episode_id: EpisodeId = R0,
        *,
        index: int | None = None,
        digest: str = REQUEST,
    ) -> list[object]:
        async def call() -> object:
            try:
                return await self.sessions.activate(
                    episode_id, key, work, index=index, request_digest=digest
                )
            finally:
                self.sessions.deliveries.deliver(key)(True)

        return await begin(self.nursery, call)

    async def close(self, key: str = "s", episode_id: EpisodeId = R0) -> list[object]:
        close = partial(
            self.sessions.close, episode_id, key, partial(self.agent.close_session, key)
        )
        return await begin(self.nursery, close)


@asynccontextmanager
async def open_process(
    archive: MemoryArchive | None = None, agent: BareAgent | None = None, *, recover: bool = False
) -> AsyncIterator[Process]:
    """Leaving the block is a crash: what still runs is cancelled."""
    agent = agent or ScriptedAgent()
    participant = AgentParticipant("agent", agent)
    archive = archive or MemoryArchive()
    async with open_controlled(participant, archive, recover=recover) as plane:
        async with trio.open_nursery() as nursery:
            yield Process(agent, participant, plane, nursery)
            nursery.cancel_scope.cancel()


class Turns:
    """An activation of model calls (replay) and tool calls (wait) that a test lets end."""

    def __init__(self, process: Process, turns: int = 2) -> None:
        self.turns = turns
        self.continued: object = "nothing"
        self.snapshots = 0
        self.model_calls = 0
        self.tool_calls = 0
        self._process = process
        self._model, self._model_answers = trio.open_memory_channel[Exception | None](10)
        self._tool, self._tool_answers = trio.open_memory_channel[None](10)

    def model_answers(self, error: Exception | None = None) -> None:
        self._model.send_nowait(error)

    def tool_answers(self) -> None:
        self._tool.send_nowait(None)

    async def __call__(self, live: Episode, index: int) -> dict[str, object]:
        self.continued = live.continuation
        at = live.continuation
        turn = at["turn"] if isinstance(at, dict) else 0
        assert isinstance(turn, int)
        while turn < self.turns:
            await live.boundary(partial(self._snapshot, turn))
            await live.step(self._call_model, mode=StepMode.REPLAY, doing="awaiting the model")
            await live.boundary({"turn": turn, "pending": True})
            await live.step(self._call_tool, mode=StepMode.WAIT, doing="tool")
            turn += 1
        return {"index": index, "attempt": live.episode_id.attempt}

    def _snapshot(self, turn: int) -> object:
        self.snapshots += 1
        return {"turn": turn}

    async def _call_model(self) -> None:
        self.model_calls += 1
        error = await self._model_answers.receive()
        if error is not None:
            raise error

    async def _call_tool(self) -> None:
        self.tool_calls += 1
        await self._tool_answers.receive()
        self._process.agent.counts["s"].value += 1


async def answering(live: Episode, index: int) -> dict[str, object]:
    return {"index": index, "attempt": live.episode_id.attempt}


async def stuck(live: Episode, index: int) -> dict[str, object]:
    await live.step(trio.sleep_forever, mode=StepMode.WAIT, doing="a tool that hangs")
    raise AssertionError


def of(answers: list[object]) -> list[object]:
    """Answers, errors by their type."""
    return [type(a) if isinstance(a, Exception) else a for a in answers]


# -- activations and prepare ------------------------------------------------------------------


async def test_a_lazy_boundary_that_raises_fails_the_commit_by_name_and_nothing_else(
    autojump_clock: MockClock,
) -> None:
    """STEP-2, CTL-13: it is the author's code; the server and its activations go on."""
    archive = MemoryArchive()

    def broken() -> object:
        raise KeyError("no such thing")

    async def work(live: Episode, index: int) -> dict[str, object]:
        await live.boundary(broken)
        await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="awaiting the model")
        raise AssertionError

    async with open_process(archive) as process:
        await process.seed()
        answers = await process.activate(work)
        await process.plane.prepare("d")
        with pytest.raises(
            InvalidCheckpointState,
            match=r"^episode r, session s: its boundary: KeyError: 'no such thing'$",
        ):
            await process.plane.commit("d")
        assert archive.parts == {}
        await process.plane.resume("d")
        assert answers == []


async def test_a_running_activation_parks_at_its_next_boundary(autojump_clock: MockClock) -> None:
    """AGT-1: it blocks in a tool call, parks after it, and the record has that boundary."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed()
        turns = Turns(process)
        answers = await process.activate(turns)
        turns.model_answers()
        await wait_all_tasks_blocked()
        reply = await process.plane.prepare("d", timeout_s=1)
        assert (reply.phase, reply.report.blockers) == ("preparing", ("r",))
        turns.tool_answers()
        assert await checkpoint(process.plane, "d") == ("r",)
        await process.plane.resume("d")
        for _ in range(1):
            turns.model_answers()
            turns.tool_answers()
        await wait_all_tasks_blocked()
        assert answers == [{"index": 0, "attempt": 0}]
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        after = Turns(process)
        await process.activate(after, episode_id=R1)
        assert after.continued == {"turn": 1}


async def test_awaiting_a_model_reply_counts_as_parked_at_the_last_boundary(
    autojump_clock: MockClock,
) -> None:
    """AGT-1, STEP-3: ready at once; a reply that comes is held until resume."""
    async with open_process() as process:
        await process.seed()
        turns = Turns(process)
        await process.activate(turns)
        before = trio.current_time()
        assert await checkpoint(process.plane, "d") == ("r",)
        assert trio.current_time() == before
        turns.model_answers()
        await wait_all_tasks_blocked()
        assert turns.tool_calls == 0
        await process.plane.resume("d")
        await wait_all_tasks_blocked()
        assert turns.tool_calls == 1


async def test_a_woken_activation_stays_parked_under_a_new_close(
    autojump_clock: MockClock,
) -> None:
    """STEP-2, AGT-1."""
    async with open_process() as process:
        await process.seed()
        turns = Turns(process)
        await process.activate(turns)
        process.participant.close()
        turns.model_answers()
        await wait_all_tasks_blocked()
        process.participant.open()
        process.participant.close()
        await wait_all_tasks_blocked()
        assert turns.tool_calls == 0
        assert process.participant.ready()
        process.participant.open()


async def test_an_activation_that_comes_while_closed_waits_before_it_does_anything(
    autojump_clock: MockClock,
) -> None:
    """CTL-18, AGT-1."""
    async with open_process() as process:
        await process.seed()
        await process.plane.prepare("c1")
        answers = await process.activate(answering)
        assert answers == []
        assert process.participant.ready()
        await process.plane.resume("c1")
        await wait_all_tasks_blocked()
        assert answers == [{"index": 0, "attempt": 0}]


async def test_without_a_checkpoint_no_snapshot_is_made(autojump_clock: MockClock) -> None:
    """AGT-8, STEP-2: a long turn loop serialises nothing per step."""
    async with open_process() as process:
        await process.seed()
        turns = Turns(process, turns=3)
        answers = await process.activate(turns)
        for _ in range(3):
            turns.model_answers()
            turns.tool_answers()
        await wait_all_tasks_blocked()
        assert len(answers) == 1
        assert turns.snapshots == 0


async def test_a_reply_on_its_way_blocks(autojump_clock: MockClock) -> None:
    """I2: an activation past its last boundary at the close."""
    async with open_process() as process:
        await process.seed()
        await process.sessions.activate(R0, "s", answering, index=0, request_digest=REQUEST)
        done = process.sessions.deliveries.deliver("s")
        reply = await process.plane.prepare("c1", timeout_s=1)
        assert [d.doing for d in reply.report.details] == ["delivering its reply"]
        done(False)
        assert (await process.plane.prepare("c1")).phase == "prepared"


# -- activation index -------------------------------------------------------------------------


async def test_a_completed_activation_asked_for_again_answers_its_stored_reply(
    autojump_clock: MockClock,
) -> None:
    """AGT-6: it is not run again; the next is."""
    async with open_process() as process:
        await process.seed()
        assert await process.activate(answering, index=0) == [{"index": 0, "attempt": 0}]
        assert await process.activate(stuck, index=0) == [{"index": 0, "attempt": 0}]
        assert await process.activate(answering, index=1) == [{"index": 1, "attempt": 0}]
        assert of(await process.activate(stuck, index=0)) == [ActivationOutOfOrder]


async def test_an_activation_that_skips_ahead_is_refused(autojump_clock: MockClock) -> None:
    """AGT-6: 409 activation_out_of_order."""
    async with open_process() as process:
        await process.seed()
        assert of(await process.activate(answering, index=1)) == [ActivationOutOfOrder]
        assert await process.activate(answering) == [{"index": 0, "attempt": 0}]
        assert await process.activate(answering) == [{"index": 1, "attempt": 0}]


async def test_a_stored_reply_is_for_its_own_request(autojump_clock: MockClock) -> None:
    """AGT-6: another request under a used index is a fault that is told."""
    async with open_process() as process:
        await process.seed()
        await process.activate(answering, index=0)
        other = await process.activate(answering, index=0, digest=json_digest("other"))
        assert of(other) == [InvalidCheckpointState]


async def test_one_activation_of_a_session_runs_at_a_time(autojump_clock: MockClock) -> None:
    """HARD-1, AGT-6."""
    async with open_process() as process:
        await process.seed()
        first = await process.activate(stuck, index=0)
        assert of(await process.activate(answering, index=0)) == [CheckpointConflict]
        assert first == []


async def test_a_reply_that_was_held_is_stored_in_the_checkpoint(
    autojump_clock: MockClock,
) -> None:
    """AGT-6, I5: it completed during prepare; after a crash it is answered, not run again."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed()
        turns = Turns(process, turns=1)
        answers = await process.activate(turns)
        turns.model_answers()
        await wait_all_tasks_blocked()
        prepared = await begin(process.nursery, lambda: process.plane.prepare("d"))
        turns.tool_answers()
        await wait_all_tasks_blocked()
        assert len(prepared) == 1
        assert answers == []
        await process.plane.commit("d")
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        again = Turns(process, turns=1)
        answers = await process.activate(again, episode_id=R1, index=0)
        assert answers == [{"index": 0, "attempt": 0}]
        assert again.continued == "nothing"
        after = await process.activate(
            answering, episode_id=R1, index=1, digest=json_digest("another question")
        )
        assert after == [{"index": 1, "attempt": 1}]


# -- restore ----------------------------------------------------------------------------------


async def test_a_session_is_restored_under_the_replacement_attempt(
    autojump_clock: MockClock,
) -> None:
    """AGT-2, I14: the hook gets key, attempt and state; the boundary is claimed once."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed()
        process.agent.counts["s"].value = 7
        await process.activate(Turns(process))
        await checkpoint(process.plane, "d")
    agent = ScriptedAgent()
    async with open_process(archive, agent) as process:
        await process.plane.restore(R0)
        assert agent.restored == [("s", R1, {"count": 7})]
        assert process.plane.control.status().extra["restored_pending"] == ["r-a1"]
        await process.plane.resume("x1")
        assert of(await process.activate(answering)) == [StaleAttempt]
        wrong = await process.activate(answering, episode_id=R2)
        assert of(wrong) == [SessionConflict]
        first = Turns(process)
        with trio.CancelScope() as caller:
            async with trio.open_nursery() as nursery:
                call = partial(
                    process.sessions.activate, R1, "s", first, index=0, request_digest=REQUEST
                )
                nursery.start_soon(call)
                await wait_all_tasks_blocked()
                caller.cancel()
        assert first.continued == {"turn": 0}
        second = Turns(process)
        await process.activate(second, episode_id=R1, index=0)
        assert second.continued is None
        assert process.plane.control.status().extra["restored_pending_count"] == 0


async def test_a_restored_activation_continues_only_its_own_request(
    autojump_clock: MockClock,
) -> None:
    """AGT-6, I14: the boundary stays for the right one."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed()
        await process.activate(Turns(process))
        await checkpoint(process.plane, "d")
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        other = await process.activate(answering, episode_id=R1, digest=json_digest("other"))
        assert of(other) == [InvalidCheckpointState]
        turns = Turns(process)
        await process.activate(turns, episode_id=R1)
        assert turns.continued == {"turn": 0}


@pytest.mark.parametrize("ends", ["its caller leaves", "it fails"])
async def test_a_claim_that_an_activation_did_not_use_is_given_back(
    ends: str, autojump_clock: MockClock
) -> None:
    """I14, AGT-5, I5: it is in the next checkpoint, and whoever asks next continues from it."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed()
        turns = Turns(process)
        await process.activate(turns)
        turns.model_answers()
        turns.tool_answers()
        await wait_all_tasks_blocked()
        await checkpoint(process.plane, "d")
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")

        async def before_its_first_step(live: Episode, index: int) -> dict[str, object]:
            assert live.continuation == {"turn": 1}
            if ends == "it fails":
                raise BackendFailed("no client yet")
            await trio.sleep_forever()
            raise AssertionError

        with trio.CancelScope() as caller:
            async with trio.open_nursery() as nursery:
                work = before_its_first_step
                activate = partial(
                    process.sessions.activate, R1, "s", work, index=0, request_digest=REQUEST
                )
                answers = await begin(nursery, activate)
                assert of(answers) == ([BackendFailed] if ends == "it fails" else [])
                process.sessions.deliveries.deliver("s")(True)
                assert process.plane.control.status().extra["restored_pending"] == (
                    ["r-a1"] if answers else []
                )
                caller.cancel()
        assert process.plane.control.status().extra["restored_pending"] == ["r-a1"]
        await checkpoint(process.plane, "d2", R1)
        await process.plane.resume("d2")
        after = Turns(process)
        await process.activate(after, episode_id=R1, index=0)
        assert after.continued == {"turn": 1}
    async with open_process(archive) as process:
        await process.plane.restore(R1, directory="d2")
        await process.plane.resume("x1")
        again = Turns(process)
        await process.activate(again, episode_id=R2, index=0)
        assert again.continued == {"turn": 1}


async def test_a_claim_that_was_used_is_not_given_back(autojump_clock: MockClock) -> None:
    """I14, I5: what it has done since would be done again; the next one starts from its input."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed()
        await process.activate(Turns(process))
        await checkpoint(process.plane, "d")
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        with trio.CancelScope() as caller:
            async with trio.open_nursery() as nursery:
                first = Turns(process)
                activate = partial(
                    process.sessions.activate, R1, "s", first, index=0, request_digest=REQUEST
                )
                await begin(nursery, activate)
                assert (first.continued, first.model_calls) == ({"turn": 0}, 1)
                caller.cancel()
        assert process.plane.control.status().extra["restored_pending"] == []
        second = Turns(process)
        await process.activate(second, episode_id=R1, index=0)
        assert second.continued is None


async def test_nothing_is_installed_over_a_session_that_came_meanwhile(
    autojump_clock: MockClock,
) -> None:
    """CTL-14, AGT-2: looked at once more when the records were read, before the agent is given any."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed()
        await checkpoint(process.plane, "d")
        (part,) = archive.parts.values()
    agent = ScriptedAgent()
    async with open_process(archive, agent) as process:
        await process.seed("other", episode("q"))
        with pytest.raises(InvalidPhase, match="session other is live"):
            await process.participant.install(list(part.records), [R0])
        assert agent.restored == []
        assert [*process.sessions.live] == ["other"]
        assert not process.participant.admission.fences.is_stale(R0)


@pytest.mark.parametrize("failing", [False, True])
async def test_a_seed_of_the_only_session_frees_what_was_left_over(
    failing: bool, autojump_clock: MockClock
) -> None:
    """STEP-4, I34: the attempt has started over from its input and asks for none of what it had; what
    cannot be freed is kept as before, and tried again."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed("s")
        await process.seed("t")
        await process.seed("q", episode("q"))
        await checkpoint(process.plane, "d")
    agent = ScriptedAgent()
    async with open_process(archive, agent) as process:
        await process.plane.restore(R0, episode("q"))
        await process.plane.resume("x1")
        if failing:
            agent.failure = ValueError("busy")
        assert await process.seed("new", R1, only=True) == [None]
        if failing:
            assert sorted(process.sessions.live) == ["new", "q", "s", "t"]
            agent.failure = None
            assert await process.seed("new", R1, only=True) == [None]
        assert sorted(agent.freed) == ["s", "t"]
        assert sorted(process.sessions.live) == ["new", "q"]
        assert process.plane.control.status().extra["restored_pending"] == ["q-a1"]
        assert await checkpoint(process.plane, "d2") == ("q-a1", "r-a1")


async def test_a_seed_that_does_not_say_so_frees_nothing(autojump_clock: MockClock) -> None:
    """STEP-4, AGT-5: an episode may have several sessions, and ask for the first one later."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed("s")
        await checkpoint(process.plane, "d")
    agent = ScriptedAgent()
    async with open_process(archive, agent) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        await process.seed("new", R1)
        assert agent.freed == []
        # The one that it names is no other one, and what it has claimed is in use.
        await process.seed("s", R1, only=True)
        await process.seed("new", R1, only=True)
        assert sorted(process.sessions.live) == ["new", "s"]


async def test_a_commit_with_stop_lets_the_agent_free_what_is_outside(
    autojump_clock: MockClock,
) -> None:
    """CTL-13: the sessions that were exported, once their state is durable."""
    archive = MemoryArchive()

    class Sandboxed(ScriptedAgent):
        def __init__(self) -> None:
            super().__init__()
            self.stopped: list[list[str]] = []

        async def free_exported_agent_sessions(self, keys: Sequence[str]) -> None:
            await trio.lowlevel.checkpoint()
            assert archive.parts
            self.stopped.append([*keys])

    agent = Sandboxed()
    async with open_process(archive, agent) as process:
        await process.seed("s")
        await process.seed("t")
        await process.seed("q", episode("q"))
        await process.plane.prepare("d")
        await process.plane.commit("d", (R0,), directory="d", stop=True)
        assert agent.stopped == [["s", "t"]]
        await process.plane.commit("d", (R0,), directory="d", stop=True)
        assert agent.stopped == [["s", "t"]]


async def test_restored_sessions_that_nobody_claimed_are_in_the_next_checkpoint(
    autojump_clock: MockClock,
) -> None:
    """AGT-5, I8: with their boundary, as the attempt that waits."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed()
        turns = Turns(process)
        await process.activate(turns)
        turns.model_answers()
        turns.tool_answers()
        await wait_all_tasks_blocked()
        await checkpoint(process.plane, "d")
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        assert await checkpoint(process.plane, "d2", R1) == ("r-a1",)
    agent = ScriptedAgent()
    async with open_process(archive, agent) as process:
        await process.plane.restore(R1, directory="d2")
        await process.plane.resume("x1")
        assert agent.restored == [("s", R2, {"count": 1})]
        after = Turns(process)
        await process.activate(after, episode_id=R2)
        assert after.continued == {"turn": 1}


async def test_a_seed_that_is_repeated_after_a_restore_finds_the_session(
    autojump_clock: MockClock,
) -> None:
    """AGT-5, I5: it claims it, and builds nothing."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed()
        await checkpoint(process.plane, "d")
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        process.agent.building.shut()
        assert await process.seed(episode_id=R1) == [None]
        assert process.plane.control.status().extra["restored_pending"] == []


async def test_a_restored_session_left_out_of_a_commit_is_freed(
    autojump_clock: MockClock,
) -> None:
    """CTL-13, AGT-5: its hook is called, the other is kept, and no refusal is left behind."""
    archive = MemoryArchive()
    a0, a1, b0, b1 = episode("a"), episode("a", 1), episode("b"), episode("b", 1)
    async with open_process(archive) as process:
        await process.seed("sa", a0)
        await process.seed("sb", b0)
        await checkpoint(process.plane, "d")
    agent = ScriptedAgent()
    async with open_process(archive, agent) as process:
        await process.plane.restore(a0, b0)
        await process.plane.resume("x1")
        assert await checkpoint(process.plane, "d2", a1) == ("a-a1",)
        assert agent.freed == ["sb"]
        assert sorted(process.sessions.live) == ["sa"]
        await process.plane.resume("d2")
        assert await process.seed("sb", b1) == [None]


async def test_a_failing_restore_hook_installs_nothing(autojump_clock: MockClock) -> None:
    """AGT-2, CTL-14: all or nothing; idle, open and without fences."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed()
        await checkpoint(process.plane, "d")
    agent = ScriptedAgent()
    async with open_process(archive, agent) as process:
        agent.failure = ValueError("no room")
        with pytest.raises(InvalidCheckpointState, match="ValueError: no room"):
            await process.plane.restore(R0)
        assert process.plane.phase == "idle"
        assert not process.sessions.live
        assert len(process.participant.admission.fences) == 0
        assert await process.seed() == [None]


async def test_a_restore_is_refused_while_a_session_or_seed_is_there(
    autojump_clock: MockClock,
) -> None:
    """CTL-14."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed()
        await checkpoint(process.plane, "d")
        await process.plane.resume("d")
        with pytest.raises(InvalidPhase, match="session s is live"):
            await process.plane.restore(R0)
    async with open_process(archive) as process:
        process.agent.building.shut()
        await process.seed("other", episode("q"))
        with pytest.raises(InvalidPhase, match="seeding session other"):
            await process.plane.restore(R0)


async def test_several_sessions_of_one_episode_are_one_record(autojump_clock: MockClock) -> None:
    """AGT-2, CTL-13."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed("s")
        await process.seed("t")
        await process.activate(Turns(process), "s")
        assert await checkpoint(process.plane, "d") == ("r",)
        assert len(archive.parts["d", "agent", "agent"].records) == 1
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        assert sorted(process.sessions.live) == ["s", "t"]
        turns = Turns(process)
        await process.activate(turns, episode_id=R1)
        assert turns.continued == {"turn": 0}
        # A session of a claimed episode is not for a commit to free.
        assert process.participant.unclaimed_outside(frozenset()) == []


# -- commit -----------------------------------------------------------------------------------


async def test_a_session_missing_from_the_export_fails_the_commit(
    autojump_clock: MockClock,
) -> None:
    """AGT-2: by name."""
    agent = ScriptedAgent()
    async with open_process(agent=agent) as process:
        await process.seed("s")
        await process.seed("t")
        agent.left_out = {"t"}
        await process.plane.prepare("d")
        with pytest.raises(InvalidCheckpointState, match="did not export sessions t of r"):
            await process.plane.commit("d")


async def test_a_session_that_was_retired_meanwhile_may_be_missing(
    autojump_clock: MockClock,
) -> None:
    """AGT-2, CTL-12: a retirement is served while the export runs."""
    agent = ScriptedAgent()
    async with open_process(agent=agent) as process:
        await process.seed("s")
        await process.seed("t", episode("q"))
        await process.plane.prepare("d")
        agent.exporting.shut()
        agent.left_out = {"s"}
        committed = await begin(process.nursery, lambda: process.plane.commit("d"))
        await process.plane.retire(R0)
        agent.exporting.let_go()
        await wait_all_tasks_blocked()
        assert [getattr(a, "episode_ids", a) for a in committed] == [("q",)]


@pytest.mark.parametrize("failure", [ValueError("no"), BackendFailed("no")])
async def test_a_hook_that_fails_fails_the_commit(
    autojump_clock: MockClock, failure: Exception
) -> None:
    """AGT-2: whatever it raises; the next commit may succeed."""
    agent = ScriptedAgent()
    async with open_process(agent=agent) as process:
        await process.seed()
        await process.plane.prepare("d")
        agent.failure = failure
        with pytest.raises(InvalidCheckpointState, match="export_agent_sessions: .*no"):
            await process.plane.commit("d")
        agent.failure = None
        assert (await process.plane.commit("d")).episode_ids == ("r",)


async def test_an_export_that_is_no_mapping_fails_the_commit(autojump_clock: MockClock) -> None:
    """AGT-2."""

    class Odd(ScriptedAgent):
        async def export_agent_sessions(self, keys: object) -> Any:
            return ["s"]

    async with open_process(agent=Odd()) as process:
        await process.seed()
        await process.plane.prepare("d")
        with pytest.raises(InvalidCheckpointState, match="a list is not a mapping"):
            await process.plane.commit("d")


async def test_an_export_of_what_is_not_at_a_safe_point_is_refused(
    autojump_clock: MockClock,
) -> None:
    """CTL-13: a retirement may come between the check of a commit and its export."""
    async with open_process() as process:
        await process.seed()
        await process.activate(stuck)
        with pytest.raises(InvalidPhase, match="no longer ready: r"):
            await process.participant.export(None)


async def test_the_scope_given_is_the_scope_written(autojump_clock: MockClock) -> None:
    """I19, CTL-13."""
    async with open_process() as process:
        await process.seed("s")
        await process.seed("t", episode("q"))
        assert await checkpoint(process.plane, "d", episode("q")) == ("q",)


async def test_a_caller_that_leaves_during_the_write_changes_nothing_in_it(
    autojump_clock: MockClock,
) -> None:
    """I15: what was noted at export is what is written."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed()
        turns = Turns(process)
        with trio.CancelScope() as caller:
            async with trio.open_nursery() as nursery:
                call = partial(
                    process.sessions.activate, R0, "s", turns, index=0, request_digest=REQUEST
                )
                nursery.start_soon(call)
                await wait_all_tasks_blocked()
                await process.plane.prepare("d")
                export = await process.participant.export(None)
                caller.cancel()
        await process.plane.resume("d")
        (record,) = export.records
        await process.plane.prepare("d2")
        await process.plane.commit("d2", directory="d")
        where = ("d", "agent", "agent")
        part = archive.parts[where]
        archive.parts[where] = type(part)(part.checkpoint_id, (record,), part.fields)
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        after = Turns(process)
        await process.activate(after, episode_id=R1)
        assert after.continued == {"turn": 0}


# -- retire -----------------------------------------------------------------------------------


async def test_retire_stops_a_stuck_activation_and_frees_its_session_before_it_answers(
    autojump_clock: MockClock,
) -> None:
    """CTL-12, AGT-7: while preparing it is how a controller gets rid of it."""
    agent = ScriptedAgent()
    async with open_process(agent=agent) as process:
        await process.seed()
        answers = await process.activate(stuck)
        assert (await process.plane.prepare("c1", timeout_s=1)).phase == "preparing"
        await process.plane.retire(R0)
        assert agent.freed == ["s"]
        assert of(answers) == [StaleAttempt]
        assert (await process.plane.prepare("c1")).phase == "prepared"
        await process.plane.resume("c1")
        assert of(await process.seed()) == [StaleAttempt]
        assert of(await process.activate(answering)) == [StaleAttempt]
        assert of(await process.close()) == [StaleAttempt]


async def test_a_retire_cut_short_by_a_slow_hook_leaves_the_session_tracked(
    autojump_clock: MockClock,
) -> None:
    """CTL-12: it blocks, is not exported, and is freed once."""
    agent = ScriptedAgent()
    async with open_process(agent=agent) as process:
        await process.seed()
        agent.freeing.shut()
        with pytest.raises(Exception, match="did not end before the deadline"):
            await process.plane.retire(R0, timeout_s=1)
        with pytest.raises(RetireIncomplete, match="still running: r"):
            await process.plane.forget("r")
        reply = await process.plane.prepare("c1", timeout_s=1)
        assert (reply.phase, reply.report.blockers) == ("preparing", ("r",))
        assert reply.report.details[0].doing == "retired, not freed yet: session s"
        agent.freeing.let_go()
        await process.plane.retire(R0)
        assert agent.freed == ["s"]
        assert await checkpoint(process.plane, "c1") == ()
        await process.plane.forget("r")


async def test_a_retire_hook_that_fails_leaves_the_session_tracked_and_a_retry_frees_it(
    autojump_clock: MockClock,
) -> None:
    """CTL-12."""
    agent = ScriptedAgent()
    async with open_process(agent=agent) as process:
        await process.seed()
        agent.failure = OSError("sandbox away")
        with pytest.raises(InvalidCheckpointState, match="retire_agent_session s: OSError"):
            await process.plane.retire(R0)
        assert not process.participant.ready()
        agent.failure = None
        await process.plane.retire(R0)
        assert process.participant.ready()


async def test_retire_waits_for_a_seed_that_is_building_and_the_seed_frees_what_it_built(
    autojump_clock: MockClock,
) -> None:
    """AGT-7: the seed gets stale_attempt, and nothing of it is left when the retire answers."""
    agent = ScriptedAgent()
    async with open_process(agent=agent) as process:
        agent.building.shut()
        seeded = await process.seed()
        retired = await begin(process.nursery, lambda: process.plane.retire(R0))
        assert retired == []
        agent.building.let_go()
        await wait_all_tasks_blocked()
        assert of(seeded) == [StaleAttempt]
        assert len(retired) == 1
        assert agent.freed == ["s"]
        assert not agent.counts
        assert not process.sessions.live


async def test_two_retirements_that_meet_free_a_session_once(autojump_clock: MockClock) -> None:
    """CTL-12, HARD-1: of an attempt and of a later one of the same rollout."""
    agent = ScriptedAgent()
    async with open_process(agent=agent) as process:
        await process.seed()
        agent.freeing.shut()
        first = await begin(process.nursery, lambda: process.plane.retire(R0))
        second = await begin(process.nursery, lambda: process.plane.retire(R1))
        agent.freeing.let_go()
        await wait_all_tasks_blocked()
        assert len(first) == len(second) == 1
        assert agent.freed == ["s"]
        assert process.participant.ready()


async def test_retiring_an_attempt_leaves_later_attempts_and_other_rollouts(
    autojump_clock: MockClock,
) -> None:
    """CTL-5, CTL-12."""
    async with open_process() as process:
        await process.seed("s", R0)
        await process.seed("t", R1)
        await process.seed("u", R2)
        await process.seed("v", episode("q"))
        await process.plane.retire(R1)
        assert sorted(process.sessions.live) == ["u", "v"]


# -- seeds ------------------------------------------------------------------------------------


async def test_a_seed_that_comes_while_closed_waits_and_does_not_block(
    autojump_clock: MockClock,
) -> None:
    """CTL-18: it is not part of the checkpoint."""
    async with open_process() as process:
        await process.plane.prepare("c1")
        seeded = await process.seed()
        assert of(await process.seed("t", refuse=True)) == [AdmissionClosed]
        assert (await process.plane.commit("c1")).episode_ids == ()
        await process.plane.resume("c1")
        await wait_all_tasks_blocked()
        assert seeded == [None]


async def test_a_seed_under_way_at_the_close_blocks_and_is_exported(
    autojump_clock: MockClock,
) -> None:
    """AGT-1."""
    async with open_process() as process:
        process.agent.building.shut()
        await process.seed()
        reply = await process.plane.prepare("c1", timeout_s=1)
        assert reply.report.details[0].doing == "seeding session s"
        process.agent.building.let_go()
        assert await checkpoint(process.plane, "c1") == ("r",)


async def test_overlapping_seeds_of_one_session_make_it_once(autojump_clock: MockClock) -> None:
    """HARD-1: the second joins the first."""
    async with open_process() as process:
        process.agent.building.shut()
        first, second = await process.seed(), await process.seed()
        process.agent.building.let_go()
        await wait_all_tasks_blocked()
        assert first == second == [None]
        assert len(process.sessions.live) == 1
        assert await process.seed() == [None]
        assert of(await process.seed("s", R1)) == [SessionConflict]


async def test_a_seed_that_fails_leaves_nothing(autojump_clock: MockClock) -> None:
    """AGT-1, I34."""
    async with open_process() as process:

        async def failing() -> None:
            raise BackendFailed("no sandbox")

        with pytest.raises(BackendFailed):
            await process.sessions.seed(R0, "s", failing)
        assert not process.sessions.live
        assert process.participant.ready()
        assert await process.seed() == [None]


# -- close ------------------------------------------------------------------------------------


async def test_close_stops_the_running_activation_and_answers_when_it_has_stopped(
    autojump_clock: MockClock,
) -> None:
    """AGT-7: no more model calls; the session blocks until it has really stopped."""
    async with open_process() as process:
        await process.seed()
        stopped: list[float] = []

        async def slow_to_stop(live: Episode, index: int) -> dict[str, object]:
            try:
                await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="model")
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(2)
                    stopped.append(trio.current_time())
            raise AssertionError

        answers = await process.activate(slow_to_stop)
        closed = await process.close()
        assert closed == []
        assert of(await process.activate(answering, index=0)) == [SessionConflict]
        prepared = await begin(process.nursery, lambda: process.plane.prepare("c1"))
        assert prepared == []
        await trio.sleep(3)
        assert stopped == [pytest.approx(2)]
        assert closed == [{"receipt": "s", "count": 0}]
        assert of(answers) == [SessionConflict]
        assert len(prepared) == 1
        assert (await process.plane.commit("c1")).episode_ids == ()


async def test_closing_twice_gives_the_receipt_twice(autojump_clock: MockClock) -> None:
    """AGT-7: also at the same time; the agent closes once."""
    async with open_process() as process:
        await process.seed()
        await process.activate(stuck)
        async with trio.open_nursery() as nursery:
            close = partial(
                process.sessions.close, R0, "s", partial(process.agent.close_session, "s")
            )
            answers = [await begin(nursery, close), await begin(nursery, close)]
        assert answers == [[{"receipt": "s", "count": 0}]] * 2
        assert await process.close() == [{"receipt": "s", "count": 0}]
        assert process.agent.closed == ["s"]


async def test_a_close_whose_seed_never_came_succeeds_and_refuses_the_late_seed(
    autojump_clock: MockClock,
) -> None:
    """AGT-7: a lost seed is cleaned up by the id that its caller chose."""
    async with open_process() as process:
        assert await process.close() == [None]
        assert of(await process.seed()) == [SessionConflict]
        assert of(await process.activate(answering)) == [NotFound]


async def test_a_close_waits_for_the_seed_that_is_under_way(autojump_clock: MockClock) -> None:
    """AGT-7."""
    async with open_process() as process:
        process.agent.building.shut()
        await process.seed()
        closed = await process.close()
        assert closed == []
        process.agent.building.let_go()
        await wait_all_tasks_blocked()
        assert closed == [{"receipt": "s", "count": 0}]
        assert not process.sessions.live


async def test_retire_during_a_close_does_not_cancel_again_and_frees_the_session(
    autojump_clock: MockClock,
) -> None:
    """AGT-7, CTL-12: the close is stale, the retirement answers after the activation stopped."""
    agent = ScriptedAgent()
    async with open_process(agent=agent) as process:
        await process.seed()
        cancels: list[int] = []

        async def slow_to_stop(live: Episode, index: int) -> dict[str, object]:
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                cancels.append(1)
                with trio.CancelScope(shield=True):
                    await trio.sleep(2)
                raise
            raise AssertionError

        await process.activate(slow_to_stop)
        closed = await process.close()
        await process.plane.retire(R0)
        assert trio.current_time() == pytest.approx(2)
        assert cancels == [1]
        assert of(closed) == [StaleAttempt]
        assert agent.freed == ["s"]
        assert not process.sessions.live


async def test_the_replacement_attempt_opens_the_session_that_was_closed_after_the_checkpoint(
    autojump_clock: MockClock,
) -> None:
    """I9, AGT-7: a restore from before its seed; the receipt of the attempt before is not its own."""
    async with open_process() as process:
        assert await process.seed() == [None]
        first = await process.close()
        assert await process.seed("s", R1) == [None]
        assert await process.close("s", R1) == first
        assert process.agent.closed == ["s", "s"]


async def test_receipts_are_bounded(autojump_clock: MockClock) -> None:
    """AGT-7, I34."""
    async with open_process() as process:
        for number in range(CLOSED_REMEMBERED_MAX + 10):
            await process.sessions.close(R0, f"s{number}", partial(process.agent.close_session, ""))
        assert len(process.sessions._closed) == CLOSED_REMEMBERED_MAX


# -- restart-only agents ----------------------------------------------------------------------


async def test_an_agent_without_hooks_blocks_until_its_sessions_are_retired(
    autojump_clock: MockClock,
) -> None:
    """AGT-4: in-flight work blocks; a retirement closes the session in the agent."""
    agent = BareAgent()
    async with open_process(agent=agent) as process:
        await process.seed()
        answers = await process.activate(stuck)
        reply = await process.plane.prepare("c1", timeout_s=1)
        assert (reply.phase, set(reply.report.blockers)) == ("preparing", {"r"})
        assert process.plane.control.status().extra["restart_only"] is True
        await process.plane.retire(R0)
        assert of(answers) == [StaleAttempt]
        assert agent.closed == ["s"]
        assert await checkpoint(process.plane, "c1") == ()


async def test_an_agent_without_hooks_cannot_be_given_sessions(autojump_clock: MockClock) -> None:
    """AGT-4, CTL-14: nothing is installed, and the detail says why."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.seed()
        await checkpoint(process.plane, "d")
    async with open_process(archive, BareAgent()) as process:
        with pytest.raises(InvalidCheckpointState, match="its agent has no hooks"):
            await process.plane.restore(R0)
        await process.plane.restore(episode("other"), name="x2")


def test_an_agent_with_half_the_hooks_is_refused_at_start() -> None:
    """AGT-1: missing hooks are told by name."""

    class Half(BareAgent):
        async def export_agent_sessions(self, keys: object) -> object:
            return {}

    with pytest.raises(SettingsError, match="lacks async restore_agent_sessions"):
        AgentParticipant("agent", Half())


# -- readiness --------------------------------------------------------------------------------


async def test_readiness_is_counted_not_listed(autojump_clock: MockClock) -> None:
    """STEP-6, I33: a thousand idle sessions and one that blocks."""
    async with open_process() as process:
        for number in range(1000):
            process.nursery.start_soon(
                process.sessions.seed,
                episode(f"p{number}"),
                f"s{number}",
                partial(process.agent.build, f"s{number}"),
            )
        await wait_all_tasks_blocked()
        await process.seed()
        await process.activate(stuck)
        assert process.sessions.blocking == 1
        assert not process.participant.ready()


async def test_a_reply_that_nobody_reads_holds_a_retirement_for_a_bounded_time(
    autojump_clock: MockClock,
) -> None:
    """CTL-12."""
    async with open_process() as process:
        await process.seed()
        await process.sessions.activate(R0, "s", answering, index=0, request_digest=REQUEST)
        process.sessions.deliveries.deliver("s")
        await process.plane.retire(R0, timeout_s=60)
        assert trio.current_time() == pytest.approx(CLEANUP_S_MAX)
        assert process.participant.ready()
