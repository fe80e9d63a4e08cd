"""Finished rollouts over crashes: what their caller is not known to have is not lost (HARD-9)."""

from __future__ import annotations

from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.serving.http import Response, json_response
from gymtrio.wire.control import Kind
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.native import Call, Rig, Scripted, open_rig

R0, R1, R2 = (EpisodeId(RolloutId("r"), attempt) for attempt in range(3))

TASK: Final = {"responses_create_params": {"input": "add 3"}}
ACK: Final = [("x-ng-result-ack", "1")]
VERIFY: Final = "/verify"
CLOSE: Final = "/close_session"


class Outside:
    """Resources and agent server, which survive a crash of the environment server."""

    def __init__(self, verify: str = "wait") -> None:
        def seed(call: Call) -> Response:
            session_id = call.body["resources_session_id"]
            mode = [("x-ng-checkpoint-verify", verify)]
            return json_response({"resources_session_id": session_id}, headers=mode)

        def agent_session(call: Call) -> dict[str, object]:
            return {"agent_session_id": call.body["agent_session_id"]}

        self.tools = Scripted(
            Kind.RESOURCES,
            {
                "/seed_session": seed,
                VERIFY: lambda call: {**call.body, "reward": 1.0},
                CLOSE: lambda call: {"resources_session_id": call.body["resources_session_id"]},
            },
        )
        self.agent = Scripted(
            Kind.AGENT,
            {
                "/v1/agent_sessions": agent_session,
                "/v1/responses": {"id": "resp_1", "output": []},
                "/v1/agent_sessions/close": agent_session,
            },
        )

    @property
    def scripted(self) -> dict[str, Scripted]:
        return {"tools": self.tools, "agent": self.agent}

    @property
    def calls(self) -> int:
        return len(self.tools.calls) + len(self.agent.calls)


async def kept(rig: Rig) -> int:
    count: int = (await rig.status("env"))["report"]["counts"]["results_kept"]
    return count


@pytest.mark.parametrize("fails", [False, True])
async def test_a_crash_between_the_reply_and_its_acknowledgement_loses_nothing(
    autojump_clock: MockClock, fails: bool
) -> None:
    """HARD-9, I3, I5: the next attempt answers the same and reaches no other server."""
    outside, archive = Outside(), MemoryArchive()
    if fails:
        outside.tools.answers[VERIFY] = json_response({"error": {"detail": "broken"}}, 500)
    async with open_rig(archive, scripted=outside.scripted) as rig:
        reply = await rig.run(R0, TASK, headers=ACK)
        assert ("failure" in reply) is fails
        assert await kept(rig) == 1
        assert await rig.checkpoint("d", R0) == {"env": ["r"]}
    before = outside.calls
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        stale = await rig.run(R0, TASK)
        assert stale["error"]["code"] == "stale_attempt"
        again = await rig.run(R1, TASK, headers=ACK)
        assert again == reply | {"episode_id": {"rollout_id": "r", "attempt": 1}}
        assert await rig.run(R1, TASK) == again
        assert (await rig.acknowledge(R1))["known"]
        assert await kept(rig) == 0
    assert outside.calls == before


async def test_a_second_crash_keeps_it_too(autojump_clock: MockClock) -> None:
    """HARD-9, I8: restored and not claimed, then claimed and not acknowledged."""
    outside, archive = Outside(), MemoryArchive()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        reply = await rig.run(R0, TASK, headers=ACK)
        await rig.checkpoint("d", R0)
    before = outside.calls
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        assert await rig.checkpoint("d1", R1) == {"env": ["r-a1"]}
        await rig.resume("d1")
        await rig.run(R1, TASK, headers=ACK)
        assert await rig.checkpoint("d2", R1) == {"env": ["r-a1"]}
    for directory in ("d1", "d2"):
        async with open_rig(archive, scripted=outside.scripted) as rig:
            await rig.restore(directory, R1)
            assert (await rig.run(R2, TASK))["result"] == reply["result"]
    assert outside.calls == before


async def test_an_acknowledged_result_is_in_no_checkpoint(autojump_clock: MockClock) -> None:
    """HARD-9, I19; and one whose caller did not ask is not either, once its reply was heard."""
    outside = Outside()
    async with open_rig(scripted=outside.scripted) as rig:
        await rig.run(R0, TASK, headers=ACK)
        await rig.run(EpisodeId(RolloutId("s")), TASK)
        await rig.acknowledge(R0)
        assert await rig.checkpoint("d", R0, EpisodeId(RolloutId("s"))) == {"env": []}


async def test_while_a_checkpoint_is_open_a_repeated_run_waits_and_an_acknowledgement_does_not(
    autojump_clock: MockClock,
) -> None:
    """HARD-9, I2: what was kept at the close is in the checkpoint all the same."""
    outside, archive = Outside(), MemoryArchive()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        reply = await rig.run(R0, TASK, headers=ACK)
        await rig.control("env", "prepare", "d")
        replies = rig.start_run(R0, TASK)
        await wait_all_tasks_blocked()
        assert replies == []
        await rig.control("env", "commit", "d", checkpoint_dir="d", episode_ids=(R0,))
        assert (await rig.acknowledge(R0))["known"]
        await rig.retire(R0, name="d")
        await wait_all_tasks_blocked()
        assert [got["error"]["code"] for got in replies] == ["stale_attempt"]
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        assert (await rig.run(R1, TASK))["result"] == reply["result"]


async def test_a_caller_that_leaves_while_its_result_waits_for_resume_may_ask_again(
    autojump_clock: MockClock,
) -> None:
    """HARD-9, I4: the verify that may not run twice does not; the sessions are closed after it."""
    outside, archive = Outside("wait"), MemoryArchive()
    door = outside.tools.door(VERIFY)
    door.shut()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        with trio.CancelScope() as caller:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rig.run, R0, TASK)
                await door.reached.wait()
                rig.nursery.start_soon(rig.control, "env", "prepare", "d")
                await wait_all_tasks_blocked()
                door.let_go()
                await wait_all_tasks_blocked()
                caller.cancel()
        await wait_all_tasks_blocked()
        assert await kept(rig) == 1
        reply = await rig.control("env", "commit", "d", checkpoint_dir="d", episode_ids=(R0,))
        assert reply["episode_ids"] == ["r"]
        assert CLOSE not in outside.tools.paths()
        await rig.control("env", "resume", "d")
        await wait_all_tasks_blocked()
        assert outside.tools.paths().count(CLOSE) == 1
        result = (await rig.run(R0, TASK))["result"]
        assert await kept(rig) == 0
    assert outside.tools.paths().count(VERIFY) == 1
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        assert (await rig.run(R1, TASK))["result"] == result
    assert outside.tools.paths().count(VERIFY) == 1


async def test_a_failure_under_a_checkpoint_is_recorded_and_heard_after_it(
    autojump_clock: MockClock,
) -> None:
    """HARD-9, I4: as a result is; a crash before that repeats it, and nothing else."""
    outside, archive = Outside("wait"), MemoryArchive()
    door = outside.tools.door(VERIFY)
    door.shut()
    outside.tools.answers[VERIFY] = json_response({"error": {"detail": "broken"}}, 500)
    async with open_rig(archive, scripted=outside.scripted) as rig:
        replies = rig.start_run(R0, TASK)
        await door.reached.wait()
        rig.nursery.start_soon(rig.control, "env", "prepare", "d")
        await wait_all_tasks_blocked()
        door.let_go()
        await wait_all_tasks_blocked()
        assert replies == []
        assert (await rig.checkpoint("d", R0))["env"] == ["r"]
        await rig.resume("d")
        await wait_all_tasks_blocked()
        assert [reply["failure"]["stage"] for reply in replies] == ["verify"]
    before = outside.calls
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        assert (await rig.run(R1, TASK))["failure"] == replies[0]["failure"]
    assert outside.calls == before


@pytest.mark.parametrize("operation", ["retire", "forget"])
async def test_retiring_and_forgetting_drop_it(autojump_clock: MockClock, operation: str) -> None:
    """HARD-9, CTL-12, I34."""
    outside = Outside()
    async with open_rig(scripted=outside.scripted) as rig:
        await rig.run(R0, TASK, headers=ACK)
        scope: dict[str, Any] = {"episode_ids": (R0,)}
        if operation == "forget":
            scope = {"rollout_ids": ("r",)}
        await rig.control("env", operation, **scope)
        assert await kept(rig) == 0
        assert (await rig.acknowledge(R0))["known"] is False


async def test_a_restore_drops_the_results_of_what_it_supersedes(autojump_clock: MockClock) -> None:
    """HARD-9, HARD-11: that of the first execution is no answer for the second; others stay."""
    outside, archive = Outside("replay"), MemoryArchive()
    outside.tools.door(VERIFY).shut()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        rig.start_run(R0, TASK)
        await outside.tools.door(VERIFY).reached.wait()
        await rig.checkpoint("d", R0)
    outside.tools.door(VERIFY).let_go()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0, epoch="e1")
        await rig.run(R1, TASK, headers=ACK)
        await rig.run(EpisodeId(RolloutId("s")), TASK, headers=ACK)
        verified = outside.tools.paths().count(VERIFY)
        await rig.restore("d", R0, epoch="e2", name="x2")
        assert await kept(rig) == 1
        assert (await rig.run(R1, TASK))["result"]["reward"] == 1.0
        assert outside.tools.paths().count(VERIFY) == verified + 1
        assert (await rig.acknowledge(EpisodeId(RolloutId("s"))))["known"]


async def test_a_restored_result_whose_caller_left_is_kept(autojump_clock: MockClock) -> None:
    """HARD-9, I14: claimed by a run that is refused for its task, it is still there."""
    outside, archive = Outside(), MemoryArchive()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.run(R0, TASK, headers=ACK)
        await rig.checkpoint("d", R0)
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        other = await rig.run(R1, {"responses_create_params": {"input": "other"}})
        assert other["error"]["code"] == "invalid_checkpoint_state"
        with trio.CancelScope() as caller:
            caller.cancel()
            await rig.run(R1, TASK)
        assert (await rig.run(R1, TASK))["result"]["reward"] == 1.0
