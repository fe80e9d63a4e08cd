"""The Simple Agent over HTTP, between a scripted policy and scripted or real tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.context import RolloutContext
from gymtrio.errors import PeerRefused, SettingsError
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.participants.agent.participant import AgentParticipant
from gymtrio.serving.client import Reply
from gymtrio.serving.http import Response, json_response
from gymtrio.strict import unstructure
from gymtrio.wire.control import Kind
from servers.agent.loop import call_seed
from tests.helpers.controlled import checkpoint, open_controlled
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.native import Call, Rig, Scripted, open_rig
from tests.helpers.scripted_agent import ScriptedAgent


def episode(name: str = "r", attempt: int = 0) -> EpisodeId:
    return EpisodeId(RolloutId(name), attempt)


R0, R1, R2 = episode(), episode(attempt=1), episode(attempt=2)

MODEL: Final = "/v1/responses"
ADD: Final = "/add"
PARAMS: Final = {
    "input": [{"role": "user", "content": "count to 3"}],
    "tools": [{"type": "function", "name": "add", "parameters": {}}],
}
MESSAGE: Final = {"type": "message", "role": "assistant", "content": []}
SETTINGS: Final = {"model": "policy"}


def function_call(number: int, name: str = "add", arguments: str | None = None) -> dict[str, Any]:
    return {
        "type": "function_call",
        "name": name,
        "call_id": f"call_{number}",
        "arguments": json.dumps({"n": number}) if arguments is None else arguments,
    }


def playing(calls: int) -> Callable[[Call], Any]:
    """A policy that calls the tool so often and then says something, whatever was asked before."""

    def answer(call: Call) -> Any:
        done = sum(item.get("type") == "function_call_output" for item in call.body["input"])
        output = [function_call(done)] if done < calls else [MESSAGE]
        return {"id": f"resp_{done}", "output": output, "usage": {"output_tokens": 5}}

    return answer


class Outside:
    """The policy, and tools whose count survives a crash: what is doubled shows."""

    def __init__(self, calls: int = 3) -> None:
        self.policy = Scripted(Kind.MODEL, {MODEL: playing(calls)})
        self.tools = Scripted(Kind.RESOURCES, {ADD: lambda call: {"added": call.body["n"]}})

    @property
    def scripted(self) -> dict[str, Scripted]:
        return {"policy": self.policy, "tools": self.tools}


class Session:
    """A caller's side of one agent session."""

    def __init__(self, rig: Rig, session_id: str = "s1") -> None:
        self.rig = rig
        self.session_id = session_id
        self.cookies: dict[str, str] = {}

    async def open(self, episode_id: EpisodeId = R0, **changes: Any) -> Reply:
        access = {
            "kind": "direct_http",
            "name": "tools",
            "base_url": "http://tools",
            "cookies": {"tools": "seeded"},
        }
        reply = await self.rig.client.request(
            "agent",
            "POST",
            "/v1/agent_sessions",
            json={
                "agent_session_id": self.session_id,
                "episode_id": unstructure(episode_id),
                "task_id": {"taskset": "tasks", "task_id": "1"},
                "tool_accesses": [access],
                **changes,
            },
        )
        self.cookies = reply.cookies() or self.cookies
        return reply

    async def ask(
        self,
        params: Any = PARAMS,
        *,
        episode_id: EpisodeId | None = R0,
        index: object = None,
        headers: Any = (),
    ) -> Reply:
        more = [] if index is None else [("x-ng-activation-index", str(index))]
        return await self.rig.client.request(
            "agent",
            "POST",
            MODEL,
            json=params,
            cookies=self.cookies,
            headers=[*headers, *more],
            context=None if episode_id is None else RolloutContext(episode_id),
        )

    def start_asking(self, **options: Any) -> list[Any]:
        replies: list[Any] = []

        async def call() -> None:
            replies.append((await self.ask(**options)).json())

        self.rig.nursery.start_soon(call)
        return replies

    async def close(self, episode_id: EpisodeId = R0) -> Any:
        reply = await self.rig.client.request(
            "agent",
            "POST",
            "/v1/agent_sessions/close",
            json={"agent_session_id": self.session_id, "episode_id": unstructure(episode_id)},
        )
        return reply.json()


def error_of(reply: Reply) -> tuple[int, str]:
    value: Any = reply.json()
    return reply.status, value["error"]["code"]


# -- the loop ---------------------------------------------------------------------------------


async def test_it_calls_the_tools_that_the_model_calls_until_it_calls_none(
    autojump_clock: MockClock,
) -> None:
    """AGT-8, ID-5: results go back as outputs; the reply has everything that came of it."""
    outside = Outside(calls=2)
    async with open_rig(agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        reply: Any = (await session.ask()).json()
    output = [
        function_call(0),
        {"type": "function_call_output", "call_id": "call_0", "output": '{"added":0}'},
        function_call(1),
        {"type": "function_call_output", "call_id": "call_1", "output": '{"added":1}'},
        MESSAGE,
    ]
    assert reply == {"id": "resp_2", "output": output, "usage": {"output_tokens": 15}}
    assert [call.body["input"] for call in outside.policy.calls] == [
        PARAMS["input"],
        [*PARAMS["input"], *output[:2]],
        [*PARAMS["input"], *output[:4]],
    ]
    assert [call.body for call in outside.tools.calls] == [{"n": 0}, {"n": 1}]
    calls = [*outside.policy.calls, *outside.tools.calls]
    assert {call.episode for call in calls} == {"r"}
    assert {call.cookies["tools"] for call in outside.tools.calls} == {"seeded"}


async def test_cookies_that_tools_and_model_set_are_sent_back(autojump_clock: MockClock) -> None:
    """AGT-8: those of the tools are the receipt's, for verification."""
    outside = Outside(calls=2)
    plain = outside.policy.answers[MODEL]
    outside.tools.answers[ADD] = lambda call: json_response(
        {}, cookies={"tools": f"after {call.body['n']}".replace(" ", "-")}
    )
    outside.policy.answers[MODEL] = lambda call: json_response(plain(call), cookies={"route": "w1"})
    async with open_rig(agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        await session.ask()
        receipt = await session.close()
    assert [call.cookies for call in outside.tools.calls] == [
        {"tools": "seeded"},
        {"tools": "after-0"},
    ]
    assert [call.cookies for call in outside.policy.calls] == [{}, {"route": "w1"}, {"route": "w1"}]
    assert receipt["resources_cookies"] == {"tools": "after-1"}


async def test_what_the_agent_did_is_in_the_receipt(autojump_clock: MockClock) -> None:
    """AGT-8, AGT-7: model calls and tool calls of every activation, in order; twice the same."""
    outside = Outside(calls=1)
    async with open_rig(agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        await session.ask()
        await session.ask()
        receipt = await session.close()
        assert await session.close() == receipt
        assert error_of(await session.ask()) == (404, "not_found")
    records = receipt["agent_observations"]["records"]
    turn = ["model_call", "tool_call", "model_call"]
    assert [record["type"] for record in records] == turn * 2
    assert records[1] == {
        "type": "tool_call",
        "call_id": "call_0",
        "name": "add",
        "arguments": '{"n": 0}',
        "output": '{"added":0}',
    }


async def test_what_a_tool_says_is_for_the_model(autojump_clock: MockClock) -> None:
    """AGT-8: wrong arguments, unknown tools and 4xx answers are outputs that it sees."""
    outside = Outside()
    outputs = [
        [function_call(1, arguments="{")],
        [function_call(2, name="verify")],
        [function_call(3)],
        [MESSAGE],
    ]
    outside.policy.answers[MODEL] = lambda call: {"id": "x", "output": outputs.pop(0)}
    outside.tools.answers[ADD] = json_response({"error": "n is too large"}, 400)
    async with open_rig(agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        reply: Any = (await session.ask()).json()
    seen = [i["output"] for i in reply["output"] if i["type"] == "function_call_output"]
    assert "not JSON" in seen[0]
    assert "unknown tool: verify" in seen[1]
    assert seen[2] == '{"error":"n is too large"}'
    assert outside.tools.paths() == [ADD]


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (
            json_response({"error": {"code": "stale_attempt", "detail": "r"}}, 409),
            409,
            "stale_attempt",
        ),
        (json_response({}, 503), 502, "backend_failed"),
    ],
)
async def test_what_stands_before_a_tool_is_not_for_the_model(
    autojump_clock: MockClock, answer: Response, status: int, code: str
) -> None:
    """CTL-5: a refusal must not reach a model as a tool's answer."""
    outside = Outside()
    outside.tools.answers[ADD] = answer
    async with open_rig(agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        assert error_of(await session.ask()) == (status, code)
    assert len(outside.policy.calls) == 1


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (
            json_response({"error": {"code": "x", "message": "too long"}}, 400),
            422,
            "invalid_request",
        ),
        (json_response({}, 500), 502, "backend_failed"),
        (json_response([]), 502, "backend_failed"),
        (json_response({"output": None}), 502, "backend_failed"),
        (Response(200, b"<html>"), 502, "backend_failed"),
    ],
)
async def test_a_model_that_fails_fails_the_activation(
    autojump_clock: MockClock, answer: Response, status: int, code: str
) -> None:
    """AGT-8: and says whether asking again could help."""
    outside = Outside()
    outside.policy.answers[MODEL] = answer
    async with open_rig(agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        assert error_of(await session.ask()) == (status, code)
        counts = (await rig.status("agent"))["report"]["counts"]
        assert (counts["live"], counts["blocking"]) == (0, 0)


async def test_model_calls_are_bounded(autojump_clock: MockClock) -> None:
    """AGT-8."""
    outside = Outside(calls=100)
    async with open_rig(agent={**SETTINGS, "max_steps": 4}, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        reply: Any = (await session.ask()).json()
    assert len(outside.policy.calls) == len(outside.tools.calls) == 4
    assert len(reply["output"]) == 8


async def test_a_session_without_tools_tells_the_model_so(autojump_clock: MockClock) -> None:
    """AGT-8."""
    outside = Outside()
    outputs = [[function_call(1)], [MESSAGE]]
    outside.policy.answers[MODEL] = lambda call: {"id": "x", "output": outputs.pop(0)}
    async with open_rig(agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open(tool_accesses=[])
        reply: Any = (await session.ask()).json()
    assert "known: none" in reply["output"][1]["output"]


async def test_tools_are_reached_by_url_where_the_deployment_does_not_know_them(
    autojump_clock: MockClock,
) -> None:
    """AGT-8: and by name where it does, since after a restart the address may be another."""
    outside = Outside(calls=1)
    async with open_rig(agent=SETTINGS, scripted=outside.scripted) as rig:
        for name, url in (("foreign", "http://tools"), ("tools", "http://nowhere")):
            session = Session(rig, f"session-{name}")
            access = {"kind": "direct_http", "name": name, "base_url": url}
            await session.open(tool_accesses=[access])
            assert (await session.ask()).status == 200
    assert len(outside.tools.calls) == 2


async def test_preambles_and_sampling_go_into_every_model_call(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """AGT-8: the seed of a call is the same in every attempt of the rollout."""
    few = tmp_path / "few.jsonl"
    few.write_text('{"role": "system", "content": "count"}\n')
    outside = Outside(calls=1)
    settings = {
        **SETTINGS,
        "preambles": {"tasks": str(few)},
        "sampling": {"temperature": 0.8, "seed": 11},
    }
    async with open_rig(agent=settings, scripted=outside.scripted) as rig:
        for attempt in (0, 1):
            session = Session(rig, f"s{attempt}")
            await session.open(episode("r", attempt))
            await session.ask(episode_id=episode("r", attempt))
    bodies = [call.body for call in outside.policy.calls]
    assert {json.dumps(body["input"][0]) for body in bodies} == {few.read_text().strip()}
    assert {body["temperature"] for body in bodies} == {0.8}
    expected = [call_seed(11, RolloutId("r"), 0, number) for number in (0, 1)]
    assert [body["seed"] for body in bodies] == expected * 2


# -- sessions and requests --------------------------------------------------------------------


async def test_an_activation_without_a_session_is_refused_clearly(
    autojump_clock: MockClock,
) -> None:
    """AGT-8: also under a cookie that we did not issue."""
    async with open_rig(agent=SETTINGS, scripted=Outside().scripted) as rig:
        session = Session(rig)
        for cookies in ({}, {"session": "made-up"}):
            session.cookies = cookies
            reply = await session.ask()
            assert error_of(reply) == (422, "invalid_request")
            assert b"/v1/agent_sessions" in reply.body


async def test_work_without_a_rollout_is_refused_when_checkpointing_is_on(
    autojump_clock: MockClock,
) -> None:
    """ID-7: it could be neither recorded nor retired."""
    async with open_rig(agent=SETTINGS, scripted=Outside().scripted) as rig:
        session = Session(rig)
        await session.open()
        assert error_of(await session.ask(episode_id=None)) == (400, "rollout_id_required")
    outside = Outside(calls=0)
    async with open_rig(agent=SETTINGS, scripted=outside.scripted, checkpointing=False) as rig:
        session = Session(rig)
        await session.open()
        assert (await session.ask(episode_id=None)).status == 200
    # On behalf of the session's own episode, then.
    assert [call.episode for call in outside.policy.calls] == ["r"]


async def test_the_activation_index_tells_a_retry_from_the_next_turn(
    autojump_clock: MockClock,
) -> None:
    """AGT-6."""
    outside = Outside(calls=1)
    async with open_rig(agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        first = (await session.ask(index=0)).json()
        assert (await session.ask(index=0)).json() == first
        assert len(outside.policy.calls) == 2
        assert error_of(await session.ask(index=5)) == (409, "activation_out_of_order")
        assert error_of(await session.ask(index="one")) == (422, "invalid_request")


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"sandbox_access": {"id": "x"}}, "sandboxes"),
        ({"tool_accesses": [{"kind": "mcp", "name": "m"}]}, "direct_http only: m"),
        ({"tool_accesses": [{"kind": "direct_http", "name": n} for n in "ab"]}, "not several"),
        ({"agent_session_id": ""}, "agent_session_id is empty"),
        ({"agent_session_id": "x" * 200}, "session id of 200 characters"),
        ({"surplus": 1}, "surplus: unknown key"),
    ],
)
async def test_a_session_that_it_cannot_serve_is_refused(
    autojump_clock: MockClock, changes: dict[str, Any], detail: str
) -> None:
    """AGT-8."""
    async with open_rig(agent=SETTINGS, scripted=Outside().scripted) as rig:
        reply: Any = (await Session(rig).open(**changes)).json()
    assert reply["error"]["code"] == "invalid_request"
    assert detail in reply["error"]["detail"]


@pytest.mark.parametrize(
    "params", [[], {"input": None}, {"input": ["x"]}, {"input": "x", "stream": True}]
)
async def test_a_request_that_it_cannot_serve_is_refused(
    autojump_clock: MockClock, params: Any
) -> None:
    """AGT-8."""
    async with open_rig(agent=SETTINGS, scripted=Outside().scripted) as rig:
        session = Session(rig)
        await session.open()
        assert error_of(await session.ask(params)) == (422, "invalid_request")


async def test_a_session_of_another_episode_is_not_served(autojump_clock: MockClock) -> None:
    """I11."""
    async with open_rig(agent=SETTINGS, scripted=Outside().scripted) as rig:
        session = Session(rig)
        await session.open()
        assert error_of(await session.ask(episode_id=R1)) == (409, "session_conflict")
        assert error_of(await session.open(R1)) == (409, "session_conflict")


@pytest.mark.parametrize(
    ("settings", "detail"),
    [
        ({"num_workers": 3}, "one process"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
        ({"modle": "x"}, "did you mean 'model'"),
        ({"preambles": {"t": "/nowhere/x.jsonl"}}, r"preambles\.t: /nowhere/x\.jsonl"),
    ],
)
async def test_settings_that_do_not_fit_are_refused_at_start(
    settings: dict[str, object], detail: str
) -> None:
    """AGT-9, SET-1."""
    with pytest.raises(SettingsError, match=detail):
        async with open_rig(agent=settings, scripted=Outside().scripted):
            pytest.fail("it opened")


# -- checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize("answered", [0, 1, 2, 3])
async def test_a_crash_while_the_model_is_asked_asks_it_the_same_again(
    autojump_clock: MockClock, answered: int
) -> None:
    """AGT-8, I5, I6, CUT-4: the identical request, no tool call twice, the same reply."""
    outside, archive = Outside(calls=3), MemoryArchive()
    async with open_rig(agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        uncut: Any = (await session.ask()).json()
    outside = Outside(calls=3)
    play = outside.policy.answers[MODEL]

    def until(call: Call) -> Any:
        if len(outside.policy.calls) == answered:
            outside.policy.door(MODEL).shut()
        return play(call)

    outside.policy.answers[MODEL] = until
    if answered == 0:
        outside.policy.door(MODEL).shut()
    async with open_rig(archive, agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        session.start_asking(index=0)
        await wait_all_tasks_blocked()
        assert len(outside.policy.calls) == answered + 1
        exported = await rig.checkpoint("d", R0)
        assert exported["agent"] == ["r"]
    outside.policy.door(MODEL).let_go()
    outside.policy.answers[MODEL] = play
    async with open_rig(archive, agent=SETTINGS, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        again = Session(rig)
        again.cookies = session.cookies
        assert error_of(await again.ask(index=0)) == (409, "stale_attempt")
        reply: Any = (await again.ask(episode_id=R1, index=0)).json()
        receipt = await again.close(R1)
    assert reply == uncut
    asked = [json.dumps(call.body) for call in outside.policy.calls]
    assert asked[answered] == asked[answered + 1]
    assert len(asked) == 5
    assert [call.body["n"] for call in outside.tools.calls] == [0, 1, 2]
    types = [record["type"] for record in receipt["agent_observations"]["records"]]
    assert types == ["model_call", "tool_call"] * 3 + ["model_call"]


async def test_a_tool_call_under_way_is_waited_for_and_not_repeated(
    autojump_clock: MockClock,
) -> None:
    """AGT-1, I5: its output is in the boundary after it."""
    outside, archive = Outside(calls=1), MemoryArchive()
    outside.tools.door(ADD).shut()
    async with open_rig(archive, agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        session.start_asking()
        await outside.tools.door(ADD).reached.wait()
        missed = await rig.control("agent", "prepare", "d", timeout_s=1)
        assert missed["report"]["details"][0]["doing"] == "in a wait step: tool add"
        outside.tools.door(ADD).let_go()
        await rig.checkpoint("d", R0)
        await wait_all_tasks_blocked()
        assert len(outside.policy.calls) == 1
    async with open_rig(archive, agent=SETTINGS, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        again = Session(rig)
        again.cookies = session.cookies
        assert (await again.ask(episode_id=R1)).status == 200
    assert len(outside.tools.calls) == 1
    assert len(outside.policy.calls) == 2


async def test_calls_of_one_response_are_told_apart_by_a_crash(autojump_clock: MockClock) -> None:
    """AGT-8: of three parallel calls the second is under way; only the third is left to do."""
    outside, archive = Outside(), MemoryArchive()
    outputs = [[function_call(n) for n in (1, 2, 3)], [MESSAGE]]
    outside.policy.answers[MODEL] = lambda call: {"id": "x", "output": outputs.pop(0)}

    def answer(call: Call) -> Any:
        if call.body["n"] == 1:
            outside.tools.door(ADD).shut()
        return {"added": call.body["n"]}

    outside.tools.answers[ADD] = answer
    async with open_rig(archive, agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        session.start_asking()
        await wait_all_tasks_blocked()
        assert (await rig.control("agent", "prepare", "d", timeout_s=1))["phase"] == "preparing"
        outside.tools.door(ADD).let_go()
        await rig.checkpoint("d", R0)
    async with open_rig(archive, agent=SETTINGS, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        again = Session(rig)
        again.cookies = session.cookies
        reply: Any = (await again.ask(episode_id=R1)).json()
    assert [call.body["n"] for call in outside.tools.calls] == [1, 2, 3]
    assert [item["type"] for item in reply["output"]] == [
        *["function_call"] * 3,
        *["function_call_output"] * 3,
        "message",
    ]


async def test_a_model_that_fails_under_a_checkpoint_is_asked_again_after_a_crash(
    autojump_clock: MockClock,
) -> None:
    """STEP-4, POL-3: the call left nothing behind, so the activation keeps its boundary."""
    outside, archive = Outside(calls=1), MemoryArchive()
    play = outside.policy.answers[MODEL]
    async with open_rig(archive, agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        outside.policy.answers[MODEL] = lambda call: (
            outside.policy.door(MODEL).shut() or play(call)
            if len(outside.policy.calls) == 1
            else json_response({}, 500)
        )
        replies = session.start_asking()
        await wait_all_tasks_blocked()
        assert (await rig.control("agent", "prepare", "d"))["phase"] == "prepared"
        outside.policy.door(MODEL).let_go()
        await wait_all_tasks_blocked()
        assert replies == []
        await rig.control("agent", "commit", "d", checkpoint_dir="d", episode_ids=(R0,))
    outside.policy.answers[MODEL] = play
    async with open_rig(archive, agent=SETTINGS, scripted=outside.scripted) as rig:
        await rig.control("agent", "restore", "x1", checkpoint_dir="d", episode_ids=(R0,))
        await rig.control("agent", "resume", "x1")
        again = Session(rig)
        again.cookies = session.cookies
        assert (await again.ask(episode_id=R1)).status == 200
    assert len(outside.tools.calls) == 1


async def test_a_cookie_outlives_the_process(autojump_clock: MockClock) -> None:
    """RES-6, AGT-5: and a second crash before anybody used it."""
    outside, archive = Outside(calls=1), MemoryArchive()
    async with open_rig(archive, agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        await rig.checkpoint("d", R0)
    async with open_rig(archive, agent=SETTINGS, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        assert (await rig.checkpoint("d2", R1))["agent"] == ["r-a1"]
    async with open_rig(archive, agent=SETTINGS, scripted=outside.scripted) as rig:
        await rig.restore("d2", R1)
        again = Session(rig)
        again.cookies = session.cookies
        assert (await again.ask(episode_id=R2, index=0)).status == 200


async def test_close_stops_the_activation_at_once(autojump_clock: MockClock) -> None:
    """AGT-7: no more model calls; who asked is told why."""
    outside = Outside()
    outside.policy.door(MODEL).shut()
    async with open_rig(agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        replies = session.start_asking()
        await outside.policy.door(MODEL).reached.wait()
        receipt = await session.close()
        await wait_all_tasks_blocked()
    assert receipt["agent_session_id"] == "s1"
    assert outside.policy.left == [MODEL]
    assert [reply["error"]["code"] for reply in replies] == ["session_conflict"]


async def test_a_caller_that_leaves_stops_its_activation(autojump_clock: MockClock) -> None:
    """SRV-3, STEP-1."""
    outside = Outside()
    outside.policy.door(MODEL).shut()
    async with open_rig(agent=SETTINGS, scripted=outside.scripted) as rig:
        session = Session(rig)
        await session.open()
        with trio.move_on_after(3):
            await session.ask()
        await wait_all_tasks_blocked()
        assert outside.policy.left == [MODEL]
        assert (await rig.status("agent"))["report"]["counts"]["live"] == 0


async def test_sessions_of_another_agent_are_not_restored(autojump_clock: MockClock) -> None:
    """AGT-2: all or nothing; 422 with the session and the field."""
    archive = MemoryArchive()
    other = ScriptedAgent()
    participant = AgentParticipant("agent", other)
    async with open_controlled(participant, archive) as plane:
        await participant.sessions.seed(R0, "s1", lambda: other.build("s1"))
        await checkpoint(plane, "d")
    async with open_rig(archive, agent=SETTINGS, scripted=Outside().scripted) as rig:
        with pytest.raises(PeerRefused) as refused:
            await rig.control("agent", "restore", "x1", checkpoint_dir="d", episode_ids=(R0,))
        assert refused.value.code == "invalid_checkpoint_state"
        assert "session s1: count: unknown key" in refused.value.detail
        assert (await rig.status("agent"))["report"]["counts"]["sessions"] == 0
