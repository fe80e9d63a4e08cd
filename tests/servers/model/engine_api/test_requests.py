from __future__ import annotations

from typing import Any

import pytest

from gymtrio.capture.replies import Route
from gymtrio.errors import InvalidRequest
from servers.model.engine_api.requests import ITEMS_MAX, ModelCall, parse_call

MESSAGES = [{"role": "user", "content": "hi"}]
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add"}}


def chat(**more: Any) -> ModelCall:
    return parse_call(Route.CHAT, {"messages": MESSAGES, **more})


def responses(**more: Any) -> ModelCall:
    return parse_call(Route.RESPONSES, {"input": "hi", **more})


def test_what_is_absent_has_the_defaults_of_the_api() -> None:
    for call in (chat(), responses()):
        assert (call.sampling.temperature, call.sampling.top_p, call.sampling.top_k) == (1, 1, 0)
        assert not call.seeded
        assert call.output_tokens_max is None
        assert (call.choices, call.stream, call.log_probs, call.token_ids) == (
            1,
            False,
            False,
            False,
        )
        assert call.stop == ()
        assert [turn.text for turn in call.turns] == ["hi"]


def test_what_is_asked_is_read() -> None:
    call = chat(
        model="any",
        temperature=0,
        top_p=0.5,
        top_k=-1,
        seed=-5,
        n=3,
        stop="END",
        logprobs=True,
        top_logprobs=0,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
        stream=True,
        stream_options={"include_usage": True},
        tools=[ADD],
    )
    assert call.sampling.temperature == 0
    assert (call.sampling.top_p, call.sampling.top_k, call.sampling.seed) == (0.5, 0, -5)
    assert call.seeded
    assert (call.choices, call.stop) == (3, ("END",))
    assert call.log_probs
    assert call.token_ids
    assert call.tokens_as_ids
    assert call.stream
    assert call.stream_usage
    assert [tool.name for tool in call.tools] == ["add"]


def test_a_seed_of_zero_is_a_seed() -> None:
    assert chat(seed=0).seeded
    assert responses(seed=0).seeded


def test_the_newer_limit_counts() -> None:
    assert chat(max_tokens=5).output_tokens_max == 5
    assert chat(max_tokens=5, max_completion_tokens=7).output_tokens_max == 7
    assert responses(max_output_tokens=9).output_tokens_max == 9


def test_tools_that_may_not_be_called_are_none() -> None:
    assert chat(tools=[ADD], tool_choice="none").tools == ()
    assert len(chat(tools=[ADD], tool_choice="auto").tools) == 1


def test_log_probs_of_a_response_are_asked_for_by_include() -> None:
    assert responses(include=["message.output_text.logprobs"]).log_probs
    assert not responses(include=["reasoning.encrypted_content"]).log_probs


def test_instructions_are_the_first_turn() -> None:
    first, second = responses(instructions="be brief").turns
    assert (first.role, first.text) == ("system", "be brief")
    assert second.role == "user"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}] * (ITEMS_MAX + 1)}, "messages"),
        ({"model": 5}, "model"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"stream_options": {"include_usage": "yes"}}, "include_usage"),
        ({"stream_options": True}, "stream_options"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"n": 0}, "n"),
        ({"stop": [None]}, "stop"),
    ],
)
def test_what_is_wrong_is_named(more: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}"):
        parse_call(Route.CHAT, {"messages": MESSAGES} | more)
