"""Calls of both routes as conversations, and texts as replies of both routes."""

from __future__ import annotations

from typing import Any

import pytest

from gymtrio.capture.cuts import TerminalReason
from gymtrio.capture.replies import Route
from gymtrio.errors import InvalidRequest
from gymtrio.serving.stock.chats import read_chat
from gymtrio.serving.stock.outputs import Finished, ToolCallFormat, read_tool_calls, write_reply

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"n": 3}}\n</tool_call>'


def test_both_routes_say_the_same_conversation() -> None:
    """CUT-2: what an agent sends by either route is one conversation for the engine's template."""
    chat = read_chat(
        Route.CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Add 3."},
                {"role": "assistant", "content": "Yes.", "tool_calls": [call("c1")]},
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
                {"role": "assistant", "content": None, "tool_calls": [call("c2"), call("c3")]},
            ],
            "tools": [TOOL],
            "max_tokens": 9,
        },
    )
    responses = read_chat(
        Route.RESPONSES,
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Add 3."}]},
                {"type": "reasoning", "summary": []},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Yes."}],
                },
                item("c1"),
                {"type": "function_call_output", "call_id": "c1", "output": "3"},
                item("c2"),
                item("c3"),
            ],
            "tools": [{"type": "function", "name": "add", "parameters": {}}],
            "max_output_tokens": 9,
        },
    )
    assert responses == chat


def call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": "{}"}}


def item(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": "{}"}


def test_settings_that_are_not_ours_go_to_the_engine() -> None:
    chat = read_chat(
        Route.CHAT,
        {
            "messages": [],
            "model": "m",
            "user": "u",
            "temperature": 0.5,
            "min_p": 0.1,
            "unheard_of": [1],
            "top_k": None,
            "stop": "END",
            "seed": 7,
        },
    )
    assert chat.sampling == {"temperature": 0.5, "min_p": 0.1, "unheard_of": [1]}
    assert (chat.stop, chat.seed, chat.output_tokens_max) == (("END",), 7, None)


def test_a_part_of_no_known_type_goes_to_the_engine_as_it_is() -> None:
    """SRV-1"""
    content: list[object] = [{"type": []}, {"type": "input_text", "text": "a"}]
    chat = read_chat(Route.RESPONSES, {"input": [{"role": "user", "content": content}]})
    told = [content[0], {"type": "text", "text": "a"}]
    assert chat.messages == ({"role": "user", "content": told},)


def test_a_call_that_may_use_no_tool_has_none() -> None:
    body = {"messages": [], "tools": [TOOL], "tool_choice": "none"}
    assert read_chat(Route.CHAT, body).tools == ()


@pytest.mark.parametrize(
    ("route", "body", "why"),
    [
        (Route.CHAT, {"messages": "hi"}, "messages: expected a list"),
        (Route.CHAT, {"max_tokens": 0}, "expected 1 or more"),
        (Route.CHAT, {"seed": "7"}, "seed: expected an integer"),
        (Route.CHAT, {"stop": [""]}, "stop"),
        (Route.RESPONSES, {"input": [7]}, r"input\[0\]"),
        (Route.RESPONSES, {"input": [{"type": "computer_call"}]}, "'computer_call'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    route: Route, body: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        read_chat(route, body)


@pytest.mark.parametrize(
    ("text", "written", "left", "names"),
    [
        (f"So: {CALL}{CALL}", ToolCallFormat.HERMES, "So:", ["add", "add"]),
        (CALL.replace("add", "unknown"), ToolCallFormat.HERMES, None, []),
        (CALL.replace("}}", "}"), ToolCallFormat.HERMES, None, []),
        (CALL, ToolCallFormat.NONE, None, []),
        (CALL, ToolCallFormat.JSON, None, []),
        ('{"name": "add", "arguments": {}}', ToolCallFormat.JSON, "", ["add"]),
        ('{"name": "add", "arguments": []}', ToolCallFormat.JSON, None, []),
        ('{"name": ["add"], "arguments": {}}', ToolCallFormat.JSON, None, []),
        ("[" * 100_000, ToolCallFormat.JSON, None, []),
    ],
)
def test_only_what_is_wholly_a_call_of_a_known_tool_is_one(
    text: str, written: ToolCallFormat, left: str | None, names: list[str]
) -> None:
    rest, calls = read_tool_calls(text, [TOOL], written)
    assert rest == (text if left is None else left)
    assert [call.name for call in calls] == names


@pytest.mark.parametrize("finish", list(TerminalReason))
def test_replies_of_both_routes(finish: TerminalReason) -> None:
    finished = Finished(
        reply_id="1a",
        model="m",
        created_s=1,
        text=f"So: {CALL}",
        prompt_tokens=2,
        output_tokens=3,
        finish=finish,
    )
    chat: Any = write_reply(Route.CHAT, finished, [TOOL], ToolCallFormat.HERMES)
    (choice,) = chat["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "So:"
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": '{"n":3}',
    }
    responses: Any = write_reply(Route.RESPONSES, finished, [TOOL], ToolCallFormat.HERMES)
    message, made = responses["output"]
    assert message["content"][0]["text"] == "So:"
    assert (made["type"], made["arguments"]) == ("function_call", '{"n":3}')
    assert responses["status"] == ("incomplete" if finish is TerminalReason.LENGTH else "completed")
    assert chat["usage"]["total_tokens"] == responses["usage"]["total_tokens"] == 5
    plain: Any = write_reply(Route.CHAT, finished, [], ToolCallFormat.HERMES)
    assert plain["choices"][0]["message"]["content"] == finished.text
    assert plain["choices"][0]["finish_reason"] == finish.value
