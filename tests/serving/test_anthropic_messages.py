"""The Messages API as a dialect of chat completions."""

from __future__ import annotations

from typing import Any

import pytest

from gymtrio.errors import InvalidRequest
from gymtrio.serving.anthropic_messages import chat_of_messages, message_of_chat

BODY: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": []}


def test_a_conversation_with_tools_is_the_chat_it_stands_for() -> None:
    """POL-1"""
    chat = chat_of_messages(
        BODY
        | {
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": "Add 3."},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "Yes."},
                        {"type": "tool_use", "id": "t1", "name": "add", "input": {"n": 3}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t1",
                            "content": [{"type": "text", "text": "3"}],
                        },
                        {"type": "text", "text": "Again."},
                    ],
                },
            ],
            "tools": [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any"},
            "stop_sequences": ["END"],
            "temperature": 0.5,
            "min_p": 0.1,
        }
    )
    assert chat == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0.5,
        "min_p": 0.1,
        "stop": ["END"],
        "tool_choice": "required",
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "add",
                    "description": "adds",
                    "parameters": {"type": "object"},
                },
            }
        ],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Add 3."},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "Yes."}],
                "tool_calls": [
                    {
                        "id": "t1",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"n":3}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "3"},
            {"role": "user", "content": [{"type": "text", "text": "Again."}]},
        ],
    }


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": "hi"}, "messages: expected a list"),
        ({"messages": [{"role": "system", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": []}}, "tool_choice"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only custom tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ],
)
def test_what_has_no_place_in_a_chat_is_refused_by_name(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        chat_of_messages(BODY | changed)


@pytest.mark.parametrize(
    ("arguments", "read"),
    [('{"n":3}', {"n": 3}), ("not json", {"arguments": "not json"}), ("[1]", {"arguments": "[1]"})],
)
def test_a_reply_with_a_tool_call(arguments: str, read: object) -> None:
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        ],
        "generation_token_ids": [1],
    }
    told: Any = message_of_chat(
        {
            "id": "chatcmpl-1a",
            "model": "m",
            "choices": [{"message": message, "finish_reason": "tool_calls"}],
            "usage": {"prompt_tokens": 2, "completion_tokens": 1},
        }
    )
    assert told["id"] == "msg_1a"
    assert told["content"] == [{"type": "tool_use", "id": "c1", "name": "add", "input": read}]
    assert told["stop_reason"] == "tool_use"
    assert told["generation_token_ids"] == [1]
    assert told["usage"] == {"input_tokens": 2, "output_tokens": 1}
