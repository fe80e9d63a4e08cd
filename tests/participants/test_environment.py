"""Whole episodes under a real control plane: record, crash, restore, claim."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.episodes.cleanups import Cleanups
from gymtrio.episodes.episode import Episode, StepMode
from gymtrio.errors import (
    AdmissionClosed,
    CheckpointConflict,
    InvalidCheckpointState,
    InvalidPhase,
    RetireIncomplete,
    StaleAttempt,
    TransportError,
)
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import CLEANUP_S_MAX, RESULT_UNHEARD_S_MAX
from gymtrio.participants.digest import json_digest
from gymtrio.participants.environment import EnvironmentParticipant, EnvironmentRecord
from gymtrio.wire.codec import pack, unpack
from tests.helpers.controlled import checkpoint, open_controlled
from tests.helpers.gated import begin
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.plane import Plane
from tests.helpers.ticking import TickingClock


def episode(name: str = "r", attempt: int = 0) -> EpisodeId:
    return EpisodeId(RolloutId(name), attempt)


R0, R1, R2 = episode(), episode(attempt=1), episode(attempt=2)
TASK = json_digest({"task": 1})

Body = Callable[[Episode], Awaitable[object]]


class Process:
    """One incarnation of an environment server: a participant, its plane, and callers."""

    def __init__(
        self, participant: EnvironmentParticipant, plane: Plane, nursery: trio.Nursery
    ) -> None:
        self.participant = participant
        self.plane = plane
        self.nursery = nursery

    async def run(
        self,
        episode_id: EpisodeId,
        body: Body,
        *,
        digest: str = TASK,
        timeout_s: float | None = None,
        refuse: bool = False,
        epoch: str | None = None,
    ) -> list[object]:
        """A caller whose reply is taken at once when the episode ends."""

        async def call() -> object:
            try:
                return await self.participant.run_episode(
                    episode_id, digest, body, timeout_s, refuse=refuse, epoch=epoch
                )
            finally:
                self.participant.deliver(episode_id)(True)

        return await begin(self.nursery, call)

    def live(self) -> Episode:
        (live,) = self.participant.episodes.live.values()
        return live


@asynccontextmanager
async def open_process(archive: MemoryArchive, *, recover: bool = False) -> AsyncIterator[Process]:
    """Leaving the block is a crash: what still runs is cancelled."""
    participant = EnvironmentParticipant("env")
    async with open_controlled(participant, archive, recover=recover) as plane:
        async with trio.open_nursery() as nursery:
            yield Process(participant, plane, nursery)
            nursery.cancel_scope.cancel()


class Script:
    """An episode of numbered boundaries; between them a step that a test lets end."""

    def __init__(self, mode: StepMode = StepMode.REPLAY, steps: int = 3) -> None:
        self.mode = mode
        self.steps = steps
        self.continued: object = "nothing"
        self.done: list[int] = []
        self._go, self._work = trio.open_memory_channel[None](10)

    def let_go(self) -> None:
        self._go.send_nowait(None)

    async def __call__(self, live: Episode) -> object:
        self.continued = live.continuation
        at = 0 if live.continuation is None else self._at(live.continuation)
        while at < self.steps:
            await live.boundary({"at": at})
            await live.step(self._work.receive, mode=self.mode, doing=f"step {at}")
            self.done.append(at)
            at += 1
        await live.boundary({"at": at})
        return f"result of {live.episode_id}"

    @staticmethod
    def _at(continuation: object) -> int:
        assert isinstance(continuation, dict)
        at = continuation["at"]
        assert isinstance(at, int)
        return at


async def one_step_done(checkpoint_id: str) -> MemoryArchive:
    """A checkpoint of R0 behind the first of its steps; its process is gone."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        script = Script()
        await process.run(R0, script)
        script.let_go()
        await wait_all_tasks_blocked()
        await checkpoint(process.plane, checkpoint_id)
    return archive


# -- prepare ----------------------------------------------------------------------------------


async def test_a_wait_step_is_waited_for_and_its_result_is_in_the_record(
    autojump_clock: MockClock,
) -> None:
    """ENV-2, STEP-3: prepare misses with the key; once the step ended, the boundary has it."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        script = Script(StepMode.WAIT)
        await process.run(R0, script)
        reply = await process.plane.prepare("c1", timeout_s=1)
        assert (reply.phase, reply.report.blockers) == ("preparing", ("r",))
        assert reply.report.details[0].doing == "in a wait step: step 0"
        script.let_go()
        assert (await process.plane.prepare("c1")).phase == "prepared"
        assert (await process.plane.commit("c1")).episode_ids == ("r",)
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        after = Script(StepMode.WAIT)
        await process.run(R1, after)
        assert after.continued == {"at": 1}


async def test_a_replay_step_is_prepared_at_once_with_the_boundary_before_it(
    autojump_clock: MockClock,
) -> None:
    """ENV-2, STEP-3: its result waits until resume."""
    async with open_process(MemoryArchive()) as process:
        script = Script()
        await process.run(R0, script)
        before = trio.current_time()
        assert await checkpoint(process.plane, "c1") == ("r",)
        assert trio.current_time() == before
        script.let_go()
        await wait_all_tasks_blocked()
        assert script.done == []
        await process.plane.resume("c1")
        await wait_all_tasks_blocked()
        assert script.done == [0]


async def test_a_new_episode_waits_for_resume_and_one_that_asks_is_refused(
    autojump_clock: MockClock,
) -> None:
    """ENV-2, CTL-18: waiting is not being in flight."""
    async with open_process(MemoryArchive()) as process:
        await process.plane.prepare("c1")
        script = Script(steps=0)
        answers = await process.run(R0, script)
        refused = await process.run(episode("s"), Script(), refuse=True)
        assert answers == []
        assert [type(answer) for answer in refused] == [AdmissionClosed]
        assert process.participant.ready()
        assert process.plane.control.status().report.counts["waiting"] == 1
        await process.plane.resume("c1")
        await wait_all_tasks_blocked()
        assert answers == ["result of r"]


async def test_readiness_is_a_counter(autojump_clock: MockClock) -> None:
    """STEP-6, I33: a thousand parked episodes and one that blocks."""
    async with open_process(MemoryArchive()) as process:
        for number in range(1000):
            process.nursery.start_soon(
                process.participant.run_episode, episode(f"p{number}"), TASK, Script()
            )
        script = Script(StepMode.WAIT)
        await process.run(R0, script)
        reply = await process.plane.prepare("c1", timeout_s=1)
        assert reply.report.blocker_count == process.participant.episodes.blocking == 1
        script.let_go()
        assert (await process.plane.prepare("c1")).phase == "prepared"
        assert len(await _keys(process.plane)) == 1001


async def _keys(plane: Plane) -> tuple[str, ...]:
    return (await plane.commit("c1")).episode_ids


# -- commit and restore -----------------------------------------------------------------------


async def test_a_restored_episode_continues_from_its_boundary_as_the_next_attempt(
    autojump_clock: MockClock,
) -> None:
    """ENV-1, ENV-3, ID-3: claimed once; the old attempt is stale."""
    archive = await one_step_done("d")
    async with open_process(archive) as process:
        assert (await process.plane.restore(R0)).restored == ("r-a1",)
        assert process.plane.control.status().extra["restored_pending"] == ["r-a1"]
        await process.plane.resume("x1")
        stale = await process.run(R0, Script())
        assert [type(answer) for answer in stale] == [StaleAttempt]
        after = Script()
        answers = await process.run(R1, after)
        assert after.continued == {"at": 1}
        assert process.plane.control.status().extra["restored_pending_count"] == 0
        after.let_go()
        after.let_go()
        await wait_all_tasks_blocked()
        assert after.done == [1, 2]
        assert answers == ["result of r-a1"]
        once_more = Script(steps=0)
        refused = await process.run(R1, once_more)
        assert [type(answer) for answer in refused] == [StaleAttempt]
        assert once_more.continued == "nothing"


async def test_a_replacement_waits_at_the_gate_until_the_resume_after_its_restore(
    autojump_clock: MockClock,
) -> None:
    """ENV-3, CTL-14, HARD-3: a server that recovers serves nothing before."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.run(R0, Script())
        await checkpoint(process.plane, "d")
    async with open_process(archive, recover=True) as process:
        old, replacement = Script(), Script()
        stale = await process.run(R0, old)
        await process.run(R1, replacement)
        await process.plane.restore(R0)
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in stale] == [StaleAttempt]
        assert replacement.continued == "nothing"
        await process.plane.resume("x1")
        await wait_all_tasks_blocked()
        assert replacement.continued == {"at": 0}


def test_the_gate_may_close_while_a_large_boundary_is_read() -> None:
    """STO-5, ENV-3: the loop turns meanwhile; then the attempt waits, and is claimed after all."""
    large = {"at": 3, "rows": [{"id": number, "name": f"row {number}"} for number in range(60_000)]}

    async def main() -> None:
        archive = MemoryArchive()
        async with open_process(archive) as process:

            async def body(live: Episode) -> None:
                await live.boundary(large)
                await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="x")

            process.nursery.start_soon(process.run, R0, body)
            await _until(lambda: bool(process.participant.episodes.live))
            await checkpoint(process.plane, "d")
        async with open_process(archive) as process:
            await process.plane.restore(R0)
            await process.plane.resume("x1")
            after = Script()
            process.nursery.start_soon(process.run, R1, after)
            for _ in range(10):
                # It is admitted, and reads for some thirty turns of the loop.
                await trio.lowlevel.checkpoint()
            prepared = await process.plane.prepare("c2")
            assert (prepared.phase, prepared.report.counts["restored"]) == ("prepared", 1)
            await _until(lambda: process.participant.admission.waiting == 1)
            assert after.continued == "nothing"
            assert (await process.plane.commit("c2", directory="e")).episode_ids == ("r-a1",)
            await process.plane.resume("c2")
            await _until(lambda: after.continued == large)

    trio.run(main, clock=TickingClock())


async def _until(it_is_so: Callable[[], bool]) -> None:
    while not it_is_so():
        await trio.lowlevel.checkpoint()


async def test_a_run_of_a_superseded_execution_that_waits_at_the_gate_claims_nothing(
    autojump_clock: MockClock,
) -> None:
    """HARD-11, I14: it came before the restore that it is older than."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.run(R0, Script())
        await checkpoint(process.plane, "d")
    async with open_process(archive, recover=True) as process:
        old, current = Script(), Script()
        late = await process.run(R1, old, epoch="e1")
        await process.run(R1, current, epoch="e2")
        await process.plane.restore(R0, epoch="e2")
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in late] == [StaleAttempt]
        assert process.participant.epoch_of(R1) == "e2"
        await process.plane.resume("x1")
        await wait_all_tasks_blocked()
        assert (old.continued, current.continued) == ("nothing", {"at": 0})


async def test_another_task_is_refused_and_the_boundary_stays(autojump_clock: MockClock) -> None:
    """ENV-3: 422, "different task"; I14: the claim was not used."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.run(R0, Script())
        await checkpoint(process.plane, "d")
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        other = await process.run(R1, Script(), digest=json_digest({"task": 2}))
        (error,) = other
        assert isinstance(error, InvalidCheckpointState)
        assert "different task" in error.detail
        script = Script()
        await process.run(R1, script)
        assert script.continued == {"at": 0}


async def test_a_claim_that_was_not_used_is_given_back(autojump_clock: MockClock) -> None:
    """ENV-3, I14, STEP-7: its caller left before the first step; its sessions are not closed."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.run(R0, Script())
        await checkpoint(process.plane, "d")
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        closed: list[str] = []

        async def close_session() -> None:
            closed.append("session")

        def cleaning(body: Body) -> Body:
            async def whole(live: Episode) -> object:
                cleanups = Cleanups("r")
                cleanups.register("session", close_session)
                try:
                    return await body(live)
                finally:
                    await process.participant.clean_up(live, cleanups)

            return whole

        async def hesitating(live: Episode) -> None:
            await trio.sleep_forever()

        with trio.move_on_after(1):
            await process.participant.run_episode(R1, TASK, cleaning(hesitating))
        assert R1 in process.participant.restored
        assert closed == []
        used = Script()
        with trio.move_on_after(1):
            await process.participant.run_episode(R1, TASK, cleaning(used))
        assert used.continued == {"at": 0}
        assert R1 not in process.participant.restored
        assert closed == ["session"]


@pytest.mark.parametrize("heard", [True, False], ids=["delivered", "unheard too long"])
async def test_a_replacement_that_was_answered_runs_no_second_time(
    autojump_clock: MockClock, heard: bool
) -> None:
    """I5: its boundary is used, so that it would begin at its input; a later restore brings it back."""
    archive = await one_step_done("c1")
    async with open_process(archive) as process:
        for restore in range(2):
            await process.plane.restore(R0, directory="c1", name=f"back-{restore}")
            await process.plane.resume(f"back-{restore}")
            script = Script()
            async with trio.open_nursery() as nursery:

                async def call(script: Script = script) -> None:
                    await process.participant.run_episode(R1, TASK, script)
                    process.participant.deliver(R1)(heard)

                nursery.start_soon(call)
                for _ in range(2):
                    script.let_go()
            assert (script.continued, script.done) == ({"at": 1}, [1, 2])
            await trio.sleep(0 if heard else RESULT_UNHEARD_S_MAX + 1)
            again = Script()
            with pytest.raises(StaleAttempt, match="r-a1 has ended, and was answered"):
                await process.participant.run_episode(R1, TASK, again)
            assert again.continued == "nothing"


async def test_a_claim_of_a_run_that_failed_before_its_first_step_is_given_back(
    autojump_clock: MockClock,
) -> None:
    """I14, I5: asked again, it must not start from its input as if nothing had been done."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.run(R0, Script())
        await checkpoint(process.plane, "d")
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")

        async def refused(live: Episode) -> object:
            raise InvalidCheckpointState("the boundary is of another protocol")

        async def used(live: Episode) -> object:
            await live.boundary({"at": 1})
            await live.step(trio.lowlevel.checkpoint, mode=StepMode.WAIT, doing="x")
            raise InvalidCheckpointState("too late")

        for _ in range(2):
            (answer,) = await process.run(R1, refused)
            assert isinstance(answer, InvalidCheckpointState)
            assert process.plane.control.status().extra["restored_pending"] == ["r-a1"]
        await process.run(R1, used)
        assert process.plane.control.status().extra["restored_pending"] == []


async def test_a_second_crash_before_the_replacement_starts_still_continues_it(
    autojump_clock: MockClock,
) -> None:
    """ENV-4, I8: exported again as the attempt that waits, and continued as the next."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        script = Script()
        await process.run(R0, script)
        script.let_go()
        await wait_all_tasks_blocked()
        await checkpoint(process.plane, "d")
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        assert await checkpoint(process.plane, "d2", R1) == ("r-a1",)
    async with open_process(archive) as process:
        await process.plane.restore(R1, directory="d2")
        await process.plane.resume("x1")
        after = Script()
        await process.run(R2, after)
        assert after.continued == {"at": 1}


async def test_a_restored_episode_left_out_of_a_commit_is_freed_without_a_refusal(
    autojump_clock: MockClock,
) -> None:
    """CTL-13, I19: attempt 1 may still start, from its input."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.run(R0, Script())
        await checkpoint(process.plane, "d")
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        assert await checkpoint(process.plane, "d2", scope_all=False) == ()
        assert process.plane.control.status().extra["restored_pending"] == []
        await process.plane.resume("d2")
        script = Script()
        await process.run(R1, script)
        assert script.continued is None


async def test_the_scope_given_is_the_scope_written(autojump_clock: MockClock) -> None:
    """I19, CTL-13: live episodes outside it are not exported and go on."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.run(episode("a"), Script())
        await process.run(episode("b"), Script())
        assert await checkpoint(process.plane, "d", episode("a"), episode("c")) == ("a",)
        assert len(archive.parts["d", "environment", "env"].records) == 1


async def test_a_lazy_boundary_that_raises_fails_the_commit_by_name_and_nothing_else(
    autojump_clock: MockClock,
) -> None:
    """STEP-2, CTL-13: it is the author's code; the server, its episodes and the next commit go on."""
    archive = MemoryArchive()
    broken = [True]

    def state() -> object:
        if broken[0]:
            raise KeyError("no such thing")
        return {"at": 1}

    async def body(live: Episode) -> None:
        await live.boundary(state)
        await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="x")

    async with open_process(archive) as process:
        await process.run(R0, body)
        await process.plane.prepare("d")
        with pytest.raises(
            InvalidCheckpointState, match=r"^episode r: its boundary: KeyError: 'no such thing'$"
        ):
            await process.plane.commit("d")
        assert archive.parts == {}
        await process.plane.resume("d")
        broken[0] = False
        assert await checkpoint(process.plane, "e") == ("r",)


async def test_a_record_is_packed_as_its_class_says(autojump_clock: MockClock) -> None:
    """STO-4: records of the thousand are packed without being made."""
    async with open_process(MemoryArchive()) as process:
        await process.run(R0, Script())
        process.participant.close()
        await process.run(R0, Script())
        export = await process.participant.export(None)
        for record in export.records:
            content = unpack(EnvironmentRecord, record.payload)
            assert record.payload == pack(content)


async def test_an_episode_without_a_boundary_is_exported_from_its_input(
    autojump_clock: MockClock,
) -> None:
    """ENV-1: boundary null."""
    archive = MemoryArchive()

    async def body(live: Episode) -> None:
        seen.append(live.continuation)
        await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="x")

    seen: list[object] = []
    async with open_process(archive) as process:
        await process.run(R0, body)
        assert await checkpoint(process.plane, "d") == ("r",)
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        await process.run(R1, body)
        assert seen == [None, None]
        assert R1 not in process.participant.restored


async def test_a_step_that_failed_during_the_checkpoint_starts_over_from_the_input(
    autojump_clock: MockClock,
) -> None:
    """STEP-4, ENV-1."""
    archive = MemoryArchive()
    fail = trio.Event()

    async def failing() -> None:
        await fail.wait()
        raise TransportError("the agent is gone")

    async def body(live: Episode) -> None:
        await live.boundary({"at": 1})
        await live.step(failing, mode=StepMode.REPLAY, doing="x")

    async with open_process(archive) as process:
        await process.run(R0, body)
        assert (await process.plane.prepare("d")).phase == "prepared"
        fail.set()
        await wait_all_tasks_blocked()
        await process.plane.commit("d")
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        script = Script()
        await process.run(R1, script)
        assert script.continued is None


async def test_state_that_is_not_json_fails_the_commit_by_name_and_path(
    autojump_clock: MockClock,
) -> None:
    """STO-3, CTL-13: nothing is published, and the next checkpoint may succeed."""
    archive = MemoryArchive()
    bad: object = {"when": {1, 2}}

    async def body(live: Episode) -> None:
        await live.boundary(lambda: bad)
        await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="x")

    async with open_process(archive) as process:
        await process.run(R0, body)
        await process.plane.prepare("d")
        with pytest.raises(InvalidCheckpointState, match=r"episode r.*\.when"):
            await process.plane.commit("d")
        assert archive.parts == {}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_a_boundary_comes_back_as_it_was(state: object) -> None:
    """ENV-1, I24: opaque state is exact, key order included."""

    async def main() -> None:
        archive = MemoryArchive()

        async def body(live: Episode) -> None:
            if live.continuation is not None:
                got.append(live.continuation)
            await live.boundary({"state": state})
            await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="x")

        got: list[object] = []
        async with open_process(archive) as process:
            await process.run(R0, body)
            await checkpoint(process.plane, "d")
        async with open_process(archive) as process:
            await process.plane.restore(R0)
            await process.plane.resume("x1")
            await process.run(R1, body)
        # Python's JSON text tells every value, type and order apart that JSON can carry.
        assert json.dumps(got) == json.dumps([{"state": state}])

    trio.run(main)


async def test_a_damaged_record_installs_nothing(autojump_clock: MockClock) -> None:
    """STO-4, CTL-14: 422 that names the episode; idle and open again."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.run(episode("a"), Script())
        await process.run(episode("b"), Script())
        await checkpoint(process.plane, "d")
    part = archive.parts["d", "environment", "env"]
    records = [
        part.records[0],
        type(part.records[1])(part.records[1].episode_id, b"\x91\x01"),
    ]
    archive.parts["d", "environment", "env"] = type(part)(
        part.checkpoint_id, tuple(records), part.fields
    )
    async with open_process(archive) as process:
        with pytest.raises(InvalidCheckpointState, match="record of b"):
            await process.plane.restore(episode("a"), episode("b"))
        assert len(process.participant.restored) == 0
        assert not process.participant.admission.closed


async def test_a_restore_is_refused_while_something_is_live_or_restored(
    autojump_clock: MockClock,
) -> None:
    """CTL-14: it says what is in the way and changes nothing."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.run(R0, Script())
        await checkpoint(process.plane, "d")
        await process.plane.resume("d")
        with pytest.raises(InvalidPhase, match="r runs"):
            await process.plane.restore(R0)
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        with pytest.raises(InvalidPhase, match="r-a1 was restored already"):
            await process.plane.restore(R0, name="x2")


async def test_an_export_of_what_is_not_at_a_safe_point_is_refused(
    autojump_clock: MockClock,
) -> None:
    """CTL-13: a retirement may come between the check of a commit and its export."""
    async with open_process(MemoryArchive()) as process:
        await process.run(R0, Script(StepMode.WAIT))
        with pytest.raises(InvalidPhase, match="no longer ready: r"):
            await process.participant.export(None)


# -- time -------------------------------------------------------------------------------------


async def test_parked_time_does_not_count(autojump_clock: MockClock) -> None:
    """STEP-5, I32: a pause longer than the episode's whole time, and it finishes."""
    async with open_process(MemoryArchive()) as process:
        script = Script(steps=2)
        answers = await process.run(R0, script, timeout_s=3)
        await trio.sleep(2)
        await process.plane.prepare("c1")
        await trio.sleep(100)
        await process.plane.resume("c1")
        script.let_go()
        script.let_go()
        await trio.sleep(0.5)
        assert answers == ["result of r"]


# -- retire -----------------------------------------------------------------------------------


async def test_retire_answers_only_when_the_episode_and_its_clean_up_have_ended(
    autojump_clock: MockClock,
) -> None:
    """CTL-12, STEP-7, I10."""
    async with open_process(MemoryArchive()) as process:
        cleaned: list[str] = []

        async def close_sessions() -> None:
            await trio.sleep(2)
            cleaned.append("sessions")

        async def body(live: Episode) -> None:
            cleanups = Cleanups("r")
            cleanups.register("sessions", close_sessions)
            try:
                await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="x")
            finally:
                await process.participant.clean_up(live, cleanups)

        answers = await process.run(R0, body)
        assert (await process.plane.retire(R0)).retired == ("r",)
        assert cleaned == ["sessions"]
        assert trio.current_time() == pytest.approx(2)
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in answers] == [StaleAttempt]
        late = await process.run(R0, Script())
        assert [type(answer) for answer in late] == [StaleAttempt]
        await process.plane.forget("r")
        again = await process.run(R0, Script(steps=0))
        assert again == ["result of r"]


async def test_retire_during_the_final_clean_up_lets_it_complete(
    autojump_clock: MockClock,
) -> None:
    """STEP-7: and what the episode would have answered is stale (I10)."""
    async with open_process(MemoryArchive()) as process:
        cleaned: list[str] = []

        async def slow() -> None:
            await trio.sleep(1)
            cleaned.append("done")

        async def body(live: Episode) -> str:
            cleanups = Cleanups("r")
            cleanups.register("slow", slow)
            await process.participant.clean_up(live, cleanups)
            return "a result"

        answers = await process.run(R0, body)
        await process.plane.retire(R0)
        assert cleaned == ["done"]
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in answers] == [StaleAttempt]


async def test_a_retire_cut_short_leaves_the_attempt_tracked(autojump_clock: MockClock) -> None:
    """CTL-12: it blocks the next prepare and is not exported; a repeated retire joins."""
    async with open_process(MemoryArchive()) as process:
        cancels: list[int] = []

        async def body(live: Episode) -> None:
            try:
                await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="x")
            except trio.Cancelled:
                cancels.append(1)
                with trio.CancelScope(shield=True):
                    await trio.sleep(8)
                raise

        await process.run(R0, body)
        await process.run(episode("s"), Script())
        with pytest.raises(Exception, match="did not end before the deadline"):
            await process.plane.retire(R0, timeout_s=1)
        with pytest.raises(RetireIncomplete, match="still running: r"):
            await process.plane.forget("r")
        reply = await process.plane.prepare("c1", timeout_s=1)
        assert (reply.phase, reply.report.blockers) == ("preparing", ("r",))
        await process.plane.retire(R0)
        assert cancels == [1]
        assert (await process.plane.prepare("c1")).phase == "prepared"
        assert (await process.plane.commit("c1")).episode_ids == ("s",)


async def test_a_retire_of_thousands_during_an_install_leaves_nothing_restored(
    autojump_clock: MockClock,
) -> None:
    """CTL-12, I10: what is put in after the instant of the retire is freed, whoever's turn it is."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.run(R0, Script())
        await checkpoint(process.plane, "d")
    async with open_process(archive) as process:
        archive.reading.shut()
        await begin(process.nursery, lambda: process.plane.restore(R0))
        others = [episode(f"o{number}") for number in range(1_000)]
        process.nursery.start_soon(process.plane.retire, *others, R1)
        while process.participant.admission.fences.is_stale(R1) is False:
            await trio.lowlevel.checkpoint()
        archive.reading.let_go()
        await wait_all_tasks_blocked()
        assert process.participant.restored.waiting() == []
        await process.plane.resume("x1")
        assert process.participant.restored.waiting() == []


async def test_an_episode_that_fails_in_the_instant_of_its_retirement_gives_nothing_back(
    autojump_clock: MockClock,
) -> None:
    """CTL-5, I10: its claim is gone with it, and its caller is told that it is stale."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.run(R0, Script())
        await checkpoint(process.plane, "d")
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        go = trio.Event()

        async def body(live: Episode) -> None:
            await go.wait()
            raise ValueError("the author's")

        answers = await process.run(R1, body)
        go.set()
        process.participant.refuse([R1])
        await process.participant.retire(R1)
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in answers] == [StaleAttempt]
        assert process.participant.restored.waiting() == []


async def test_retiring_drops_a_restored_episode(autojump_clock: MockClock) -> None:
    """CTL-12: its state is freed, and its replacement is refused."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        await process.run(R0, Script())
        await checkpoint(process.plane, "d")
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        await process.plane.retire(R1)
        assert process.plane.control.status().extra["restored_pending"] == []
        late = await process.run(R1, Script())
        assert [type(answer) for answer in late] == [StaleAttempt]


async def test_a_duplicate_of_a_running_attempt_is_refused(autojump_clock: MockClock) -> None:
    """HARD-1, STEP-1: the first goes on."""
    async with open_process(MemoryArchive()) as process:
        script = Script(steps=1)
        answers = await process.run(R0, script)
        with pytest.raises(CheckpointConflict):
            await process.participant.run_episode(R0, TASK, Script())
        script.let_go()
        await wait_all_tasks_blocked()
        assert answers == ["result of r"]


# -- replies and clean-ups --------------------------------------------------------------------


async def test_a_reply_on_its_way_blocks_until_it_is_out(autojump_clock: MockClock) -> None:
    """I2, I4: an episode past its last boundary at the close; its reply leaves before prepared."""
    async with open_process(MemoryArchive()) as process:
        result = await process.participant.run_episode(R0, TASK, Script(steps=0))
        done = process.participant.deliver(R0)
        assert result == "result of r"
        reply = await process.plane.prepare("c1", timeout_s=1)
        assert reply.phase == "preparing"
        assert [d.doing for d in reply.report.details] == ["delivering its reply"]
        waiting = await begin(process.nursery, lambda: process.plane.prepare("c1"))
        done(True)
        done(True)
        await wait_all_tasks_blocked()
        assert [getattr(answer, "phase", answer) for answer in waiting] == ["prepared"]
        assert (await process.plane.commit("c1")).episode_ids == ()


async def test_a_result_recorded_under_a_checkpoint_is_exported_and_leaves_after_resume(
    autojump_clock: MockClock,
) -> None:
    """I4, I2: an episode that finishes during prepare is neither lost nor redone."""
    archive = MemoryArchive()
    async with open_process(archive) as process:
        script = Script(StepMode.WAIT, steps=1)
        answers = await process.run(R0, script)
        prepared = await begin(process.nursery, lambda: process.plane.prepare("d"))
        script.let_go()
        await wait_all_tasks_blocked()
        assert [getattr(answer, "phase", answer) for answer in prepared] == ["prepared"]
        assert answers == []
        await process.plane.commit("d")
        await process.plane.resume("d")
        await wait_all_tasks_blocked()
        assert answers == ["result of r"]
    async with open_process(archive) as process:
        await process.plane.restore(R0)
        await process.plane.resume("x1")
        redone = Script(StepMode.WAIT, steps=1)
        assert await process.run(R1, redone) == ["result of r-a1"]
        assert redone.done == []


async def test_a_result_that_nobody_heard_stays_for_a_while_and_longer_under_a_checkpoint(
    autojump_clock: MockClock,
) -> None:
    """HARD-9, I34: it is dropped in its time, or in the instant of the resume after it."""
    async with open_process(MemoryArchive()) as process:
        participant = process.participant
        for under_checkpoint in (False, True):
            await participant.run_episode(R0, TASK, Script(steps=0))
            participant.deliver(R0)(False)
            if under_checkpoint:
                await process.plane.prepare("c1")
            await trio.sleep(RESULT_UNHEARD_S_MAX + 1)
            assert len(participant.results) == under_checkpoint
        assert (await process.plane.commit("c1")).episode_ids == ("r",)
        await process.plane.resume("c1")
        await wait_all_tasks_blocked()
        assert participant.report().counts["results_kept"] == 0


async def test_a_retirement_waits_for_a_reply_on_its_way_but_not_for_ever(
    autojump_clock: MockClock,
) -> None:
    """CTL-12: a peer that does not read is removed by retiring its attempt."""
    async with open_process(MemoryArchive()) as process:
        await process.participant.run_episode(R0, TASK, Script(steps=0))
        process.participant.deliver(R0)
        await process.plane.retire(R0, timeout_s=60)
        assert trio.current_time() == pytest.approx(CLEANUP_S_MAX)
        assert (await process.plane.prepare("c1")).phase == "prepared"


async def test_a_caller_that_leaves_under_a_checkpoint_blocks_nothing(
    autojump_clock: MockClock,
) -> None:
    """STEP-7, ENV-2: its clean-up is owed until resume, when other servers' gates are open."""
    async with open_process(MemoryArchive()) as process:
        cleaned: list[bool] = []

        async def close_sessions() -> None:
            cleaned.append(process.participant.admission.closed)

        async def body(live: Episode) -> None:
            cleanups = Cleanups("r")
            cleanups.register("sessions", close_sessions)
            try:
                await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="x")
            finally:
                await process.participant.clean_up(live, cleanups)

        with trio.CancelScope() as caller:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(process.participant.run_episode, R0, TASK, body)
                await wait_all_tasks_blocked()
                await process.plane.prepare("c1")
                caller.cancel()
        assert process.participant.ready()
        assert cleaned == []
        assert (await process.plane.commit("c1")).episode_ids == ()
        await process.plane.resume("c1")
        await wait_all_tasks_blocked()
        assert cleaned == [False]
        assert process.participant.ready()


async def test_a_clean_up_that_was_owed_is_in_flight_for_the_next_checkpoint(
    autojump_clock: MockClock,
) -> None:
    """STEP-7, CTL-12: it is waited for, and a retirement waits for it too."""
    async with open_process(MemoryArchive()) as process:

        async def slow() -> None:
            await trio.sleep(4)

        async def body(live: Episode) -> None:
            cleanups = Cleanups("r")
            cleanups.register("slow", slow)
            try:
                await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="x")
            finally:
                await process.participant.clean_up(live, cleanups)

        await process.run(R0, body)
        await process.plane.prepare("c1")
        before = trio.current_time()
        await process.plane.retire(R0)
        assert trio.current_time() == before
        await process.plane.resume("c1")
        await wait_all_tasks_blocked()
        reply = await process.plane.prepare("c2", timeout_s=1)
        assert reply.phase == "preparing"
        assert [d.doing for d in reply.report.details] == ["cleaning up"]
        await process.plane.retire(R0)
        assert (await process.plane.prepare("c2")).phase == "prepared"


async def test_nothing_is_left_when_all_episodes_have_ended(autojump_clock: MockClock) -> None:
    """I34: no episodes, tickets, digests or waiting callers."""
    async with open_process(MemoryArchive()) as process:
        for number in range(5):
            assert len(await process.run(episode(f"r{number}"), Script(steps=0))) == 1
        participant = process.participant
        assert participant.report().counts == {
            "live": 0,
            "waiting": 0,
            "delivering": 0,
            "restored": 0,
            "results_kept": 0,
            "blocking": 0,
        }
        assert not participant._digests
        assert participant.ready()
