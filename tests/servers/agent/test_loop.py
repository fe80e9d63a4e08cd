"""The turn loop without I/O."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.errors import BackendFailed
from gymtrio.ids import RolloutId
from gymtrio.storage.opaque import decode, encode
from gymtrio.strict import structure, unstructure
from servers.agent.loop import (
    LoopState,
    Sampling,
    ToolAnswer,
    call_seed,
    offered_tools,
    tool_request,
)

MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text"}]}


def call(name: str = "add", arguments: object = '{"n": 1}', call_id: str = "c1") -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id}


def response(*output: object, **more: object) -> dict[str, object]:
    return {"id": "resp", "output": list(output), **more}


def test_the_request_is_preamble_then_task_then_what_came_since() -> None:
    """AGT-8."""
    state = LoopState()
    state.model_answered(response(call()), {})
    state.tool_answered(ToolAnswer("3"))
    preamble = ({"role": "system", "content": "count"},)
    body = state.request({"input": "add 1", "tools": []}, preamble, Sampling(), None)
    assert body == {
        "input": [
            {"role": "system", "content": "count"},
            {"role": "user", "content": "add 1"},
            call(),
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
        ],
        "tools": [],
    }


def test_what_the_task_says_of_sampling_stands() -> None:
    """AGT-8: settings fill in what the task leaves open."""
    sampling = Sampling(temperature=0.8, max_output_tokens=40)
    state = LoopState()
    body = state.request(
        {"input": [], "temperature": 0.0, "max_output_tokens": None}, (), sampling, 9
    )
    assert body == {"input": [], "temperature": 0.0, "max_output_tokens": 40, "seed": 9}


@given(st.integers(0, 2**40), st.integers(0, 5), st.integers(0, 50))
def test_a_seed_is_63_bits_and_of_one_call_only(seed: int, activation: int, number: int) -> None:
    """AGT-8: derived from seed, rollout, activation and call; the attempt is not in it."""
    rollout = RolloutId("r")
    made = call_seed(seed, rollout, activation, number)
    assert 0 <= made < 2**63
    assert made == call_seed(seed, rollout, activation, number)
    others = {
        call_seed(seed + 1, rollout, activation, number),
        call_seed(seed, RolloutId("s"), activation, number),
        call_seed(seed, rollout, activation + 1, number),
        call_seed(seed, rollout, activation, number + 1),
    }
    assert made not in others


def test_a_seed_does_not_change_between_releases() -> None:
    """AGT-8: a checkpoint of one release continues under the next; SHA-256 of a JSON list."""
    assert call_seed(7, RolloutId("r"), 0, 0) == 8932889578376454226


def test_a_response_without_calls_ends_the_loop() -> None:
    """AGT-8."""
    state = LoopState()
    assert not state.is_over(None)
    state.model_answered(response(MESSAGE, usage={"input_tokens": 3, "details": {"cached": 1}}), {})
    assert state.is_over(None)
    reply = state.reply()
    assert reply == {
        "id": "resp",
        "output": [MESSAGE],
        "usage": {"input_tokens": 3, "details": {"cached": 1}},
    }


def test_an_empty_response_ends_the_loop_too() -> None:
    """AGT-8: also right after a tool's output; asking again would never end."""
    state = LoopState()
    state.model_answered(response(call()), {})
    state.tool_answered(ToolAnswer("3"))
    state.model_answered(response(), {})
    assert state.is_over(None)


def test_a_response_that_was_cut_short_executes_nothing() -> None:
    """AGT-8: its call may be half a call."""
    state = LoopState()
    state.model_answered(response(call(), incomplete_details={"reason": "max_output_tokens"}), {})
    assert state.pending == []
    assert state.is_over(None)
    assert state.reply()["incomplete_details"] == {"reason": "max_output_tokens"}


def test_steps_are_bounded_and_usage_is_summed() -> None:
    """AGT-8: the outputs of the last calls are still in the reply."""
    state = LoopState()
    for number in range(3):
        usage = {"input_tokens": 10, "details": {"cached": number}, "note": "x"}
        state.model_answered(response(call(call_id=f"c{number}"), usage=usage), {"m": str(number)})
        state.tool_answered(ToolAnswer(str(number), {"t": str(number)}))
    assert state.is_over(3)
    assert not state.is_over(4)
    reply: Any = state.reply()
    assert reply["usage"] == {"input_tokens": 30, "details": {"cached": 3}}
    assert [item["type"] for item in reply["output"]] == [
        "function_call",
        "function_call_output",
    ] * 3
    assert (state.model_cookies, state.resources_cookies) == ({"m": "2"}, {"t": "2"})


def test_what_was_done_is_recorded_in_order() -> None:
    """AGT-8: model calls by response id; tool calls with name, arguments and output."""
    state = LoopState()
    state.model_answered(response(call(), call("get", "{}", "c2")), {})
    state.tool_answered(ToolAnswer("ok"))
    state.tool_answered(ToolAnswer("7"))
    assert state.records == [
        {"type": "model_call", "response_id": "resp"},
        {
            "type": "tool_call",
            "call_id": "c1",
            "name": "add",
            "arguments": '{"n": 1}',
            "output": "ok",
        },
        {"type": "tool_call", "call_id": "c2", "name": "get", "arguments": "{}", "output": "7"},
    ]


@pytest.mark.parametrize("broken", [{}, {"output": "text"}, {"output": ["text"]}])
def test_what_is_no_response_is_told(broken: dict[str, object]) -> None:
    """AGT-8."""
    with pytest.raises(BackendFailed):
        LoopState().model_answered(broken, {})


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (call("sub"), "unknown tool: sub; known: add"),
        (call("../verify"), "unknown tool"),
        (call(arguments="{"), "not JSON"),
        (call(arguments="[1]"), "not a JSON object"),
        (call(arguments=None), "not a JSON object"),
        ({"type": "function_call"}, "unknown tool: None"),
    ],
)
def test_a_wrong_call_is_told_to_the_model(asked: dict[str, Any], error: str) -> None:
    """AGT-8: it is a tool output like others, and reaches no server."""
    answer = tool_request(asked, {"add"})
    assert isinstance(answer, ToolAnswer)
    assert error in json.loads(answer.output)["error"]


def test_a_tool_is_called_by_its_name_only() -> None:
    """I35: a name that the task offers but that is no path segment reaches no route."""
    assert isinstance(tool_request(call("a/b"), {"a/b"}), ToolAnswer)
    assert tool_request(call("add"), {"add"}) == {"n": 1}


def test_the_tools_that_a_task_offers() -> None:
    """AGT-8."""
    tools = [
        {"type": "function", "name": "add"},
        {"type": "web_search"},
        {"type": "function", "name": None},
        "junk",
    ]
    assert offered_tools({"tools": tools}) == {"add"}
    assert offered_tools({"tools": None}) == offered_tools({}) == frozenset()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.lists(st.dictionaries(st.text(), _JSON, max_size=3), max_size=4),
    st.lists(st.text(), min_size=1, max_size=4),
)
def test_a_state_that_was_exported_asks_the_same(items: list[Any], outputs: list[str]) -> None:
    """AGT-8, CUT-4: the request after a restore is the same to the byte."""
    state = LoopState(resources_cookies={"a": "b"})
    state.model_answered(response(*items, *[call(call_id=str(i)) for i in range(len(outputs))]), {})
    for output in outputs:
        if state.pending:
            state.tool_answered(ToolAnswer(output))
    restored = structure(LoopState, decode(encode(unstructure(state), "state")))
    assert restored == state
    asked: dict[str, object] = {"input": "x", "tools": []}
    before = state.request(asked, (), Sampling(temperature=0.5), 3)
    assert json.dumps(restored.request(asked, (), Sampling(temperature=0.5), 3)) == json.dumps(
        before
    )
