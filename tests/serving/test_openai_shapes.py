"""Replies of engines, completed."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from gymtrio.capture.replies import Route
from gymtrio.serving.openai_shapes import complete_reply

BARE_CHAT: dict[str, Any] = {
    "id": "c",
    "choices": [{"message": {"role": "assistant", "content": "x"}}],
}
BARE_RESPONSE: dict[str, Any] = {
    "id": "r",
    "output": [
        {"type": "reasoning", "id": "1", "summary": []},
        {
            "type": "message",
            "id": "2",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "x"}],
        },
    ],
    "usage": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
}


def test_a_bare_chat_reply_satisfies_a_validating_client() -> None:
    """POL-1: strictly, field by field."""
    reply = {**BARE_CHAT, "choices": [dict(BARE_CHAT["choices"][0])]}
    complete_reply(Route.CHAT, {}, reply, "tiny")
    assert ChatCompletion.model_validate(reply).model == "tiny"


@pytest.mark.parametrize(
    "usage",
    [
        None,
        BARE_RESPONSE["usage"],
        {**BARE_RESPONSE["usage"], "input_tokens_details": {"cached_tokens": 1}},
    ],
)
def test_a_bare_response_satisfies_a_validating_client(usage: Any) -> None:
    """POL-1: with what the request said of tools."""
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": False}
    reply: dict[str, Any] = {**BARE_RESPONSE, "usage": usage and dict(usage)}
    complete_reply(Route.RESPONSES, {"tools": [tool], "tool_choice": "none"}, reply, "tiny")
    response = Response.model_validate(reply)
    assert response.output_text == "x"
    assert response.tool_choice == "none"
    assert [tool.name for tool in response.tools if tool.type == "function"] == ["f"]


def test_what_an_engine_said_stays() -> None:
    said: dict[str, Any] = {
        **BARE_RESPONSE,
        "model": "its own",
        "created_at": 7,
        "status": "incomplete",
        "parallel_tool_calls": False,
        "tool_choice": "required",
        "tools": [],
    }
    before = dict(said)
    complete_reply(Route.RESPONSES, {"tools": [{"type": "x"}]}, said, "tiny")
    assert {name: said[name] for name in before if name != "tools"} == {
        name: value for name, value in before.items() if name != "tools"
    }
