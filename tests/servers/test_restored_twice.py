"""One checkpoint restored twice: what the first restore has still under way is not let in (HARD-11)."""

from __future__ import annotations

from typing import Any, Final

import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.context import RolloutContext
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.wire.control import Kind
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.native import Call, Rig, Scripted, open_rig

R0, R1 = EpisodeId(RolloutId("r")), EpisodeId(RolloutId("r"), 1)

MODEL: Final = "/v1/responses"
AGENT: Final = {"model": "policy"}
TOOLS: Final = {"tools": "servers.resources.counter:app"}
TASK: Final = {
    "responses_create_params": {
        "input": "add 4",
        "tools": [{"type": "function", "name": "increment_counter"}],
    },
    "initial_count": 3,
    "expected_count": 7,
}


def play(call: Call) -> dict[str, Any]:
    if any(item.get("type") == "function_call_output" for item in call.body["input"]):
        return {"id": "last", "output": [{"type": "message", "role": "assistant", "content": []}]}
    move = {
        "type": "function_call",
        "name": "increment_counter",
        "call_id": "c",
        "arguments": '{"count": 4}',
    }
    return {"id": "first", "output": [move]}


async def checkpointed(model: Scripted) -> MemoryArchive:
    """A checkpoint of one rollout that waits for its first model call."""
    archive = MemoryArchive()
    model.door(MODEL).shut()
    async with open_rig(archive, agent=AGENT, scripted={"policy": model}, apps=TOOLS) as rig:
        rig.start_run(R0, TASK)
        await model.door(MODEL).reached.wait()
        await rig.checkpoint("d", R0)
    model.door(MODEL).let_go()
    return archive


def epochs(model: Scripted) -> list[str | None]:
    return [call.headers.get("x-ng-epoch") for call in model.calls]


async def test_calls_carry_the_epoch_of_the_last_restore(autojump_clock: MockClock) -> None:
    """HARD-11: from the environment through the agent; an attempt that no restore made has one of the
    process that runs it."""
    model = Scripted(Kind.MODEL, {MODEL: play})
    archive = await checkpointed(model)
    servers: Any = {"agent": AGENT, "scripted": {"policy": model}, "apps": TOOLS}
    for epoch in ("e1", "e2"):
        async with open_rig(archive, **servers) as rig:
            await rig.restore("d", R0, epoch=epoch)
            assert (await rig.run(R1, TASK))["result"]["reward"] == 1.0
    first, *restored = epochs(model)
    assert first is not None
    assert restored == ["e1", "e1", "e2", "e2"]


async def test_restored_twice_in_one_process_the_newer_one_runs(autojump_clock: MockClock) -> None:
    """HARD-11: the attempt number is the same, the execution is not."""
    model = Scripted(Kind.MODEL, {MODEL: play})
    archive = await checkpointed(model)
    servers: Any = {"agent": AGENT, "scripted": {"policy": model}, "apps": TOOLS}
    async with open_rig(archive, **servers) as rig:
        await rig.restore("d", R0, epoch="e1")
        assert (await rig.run(R1, TASK))["result"]["reward"] == 1.0
        await wait_all_tasks_blocked()
        await rig.restore("d", R0, epoch="e2", name="x2")
        assert (await rig.run(R1, TASK))["result"]["reward"] == 1.0
    first, *restored = epochs(model)
    assert first is not None
    assert restored == ["e1", "e1", "e2", "e2"]


async def test_a_late_run_of_the_first_restore_is_refused(autojump_clock: MockClock) -> None:
    """HARD-11: with the right epoch, or none, it is served; the reply tells which it was."""
    model = Scripted(Kind.MODEL, {MODEL: play})
    archive = await checkpointed(model)
    async with open_rig(archive, agent=AGENT, scripted={"policy": model}, apps=TOOLS) as rig:
        await rig.restore("d", R0, epoch="e2")
        late = await rig.run(R1, TASK, headers=[("x-ng-epoch", "e1")])
        assert late["error"]["code"] == "stale_attempt"
        assert "superseded" in late["error"]["detail"]
        reply = await rig.run(R1, TASK, headers=[("x-ng-epoch", "e2")])
        assert reply["result"]["reward"] == 1.0


@pytest.mark.parametrize("path", ["/v1/agent_sessions", MODEL, "/v1/agent_sessions/close"])
async def test_an_agent_refuses_what_the_first_restore_asks(
    autojump_clock: MockClock, path: str
) -> None:
    """HARD-11: the same session and attempt; the newer execution is not disturbed."""
    model = Scripted(Kind.MODEL, {MODEL: play})
    archive = await checkpointed(model)
    async with open_rig(archive, agent=AGENT, scripted={"policy": model}, apps=TOOLS) as rig:
        await rig.restore("d", R0, epoch="e2")
        model.door(MODEL).shut()
        replies = rig.start_run(R1, TASK)
        await wait_all_tasks_blocked()
        session_id, cookies = await agent_session(rig)
        late = await rig.client.request(
            "agent",
            "POST",
            path,
            json=late_body(path, session_id),
            cookies=cookies,
            context=RolloutContext(R1, epoch="e1"),
        )
        refused: Any = late.json()
        assert (late.status, refused["error"]["code"]) == (409, "stale_attempt")
        model.door(MODEL).let_go()
        await wait_all_tasks_blocked()
        assert [reply["result"]["reward"] for reply in replies] == [1.0]


async def agent_session(rig: Rig) -> tuple[str, dict[str, str]]:
    """Open a second session, for an id and a cookie that the server issued."""
    reply = await rig.client.request(
        "agent",
        "POST",
        "/v1/agent_sessions",
        json=late_body("/v1/agent_sessions", "s"),
        context=RolloutContext(R1, epoch="e2"),
    )
    assert reply.status == 200
    return "s", reply.cookies()


def late_body(path: str, session_id: str) -> dict[str, object]:
    if path == MODEL:
        return {"input": "hello"}
    body: dict[str, object] = {
        "agent_session_id": session_id,
        "episode_id": {"rollout_id": "r", "attempt": 1},
    }
    if path == "/v1/agent_sessions":
        body["task_id"] = {"taskset": "tasks", "task_id": "1"}
    return body
