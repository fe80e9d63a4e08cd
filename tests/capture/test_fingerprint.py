"""Which call is the same call, and which followed which."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.capture.fingerprint import (
    conversation_chain,
    conversation_end,
    request_digest,
)
from gymtrio.capture.replies import Route
from gymtrio.errors import InvalidRequest

CHAT, RESPONSES = Route.CHAT, Route.RESPONSES

CALL: dict[str, Any] = {
    "model": "policy",
    "input": [
        {"role": "user", "content": "count"},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "add",
            "arguments": '{"n": 1}',
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": '{"count": 1}'},
    ],
    "tools": [{"type": "function", "name": "add", "parameters": {}, "strict": True}],
    "temperature": 0.7,
    "max_output_tokens": 64,
}


def digest(body: dict[str, Any]) -> str:
    return request_digest(RESPONSES, body)


def changed(**fields: Any) -> dict[str, Any]:
    return copy.deepcopy(CALL) | fields


def with_item(index: int, **fields: Any) -> dict[str, Any]:
    body = changed()
    body["input"][index] |= fields
    return body


@pytest.mark.parametrize(
    "same",
    [
        changed(metadata={"try": "2"}, user="u", store=False, service_tier="flex"),
        changed(stream=False, stream_options=None, include=["x"], prompt_cache_key="k"),
        changed(gymtrio={"model_call_id": "m"}),
        changed(top_p=None, stop=None, instructions=None),
        changed(temperature=0.70),
        changed(max_output_tokens=64.0),
        with_item(0, type="message"),
        with_item(0, content=[{"type": "input_text", "text": "count"}]),
        with_item(1, id="fc_2", status=None),
        with_item(1, arguments='{ "n" : 1 }'),
        with_item(1, prompt_token_ids=[1], generation_token_ids=[2], generation_log_probs=[-0.1]),
        with_item(2, id=None, status=None),
    ],
)
def test_sending_a_request_again_is_the_same_request(same: dict[str, Any]) -> None:
    """CUT-4: what server, client or serialiser make up anew does not count."""
    assert digest(same) == digest(CALL)


@pytest.mark.parametrize(
    "other",
    [
        changed(model="judge"),
        changed(temperature=0.8),
        changed(max_output_tokens=65),
        changed(stop=["x"]),
        changed(seed=1),
        changed(top_k=5),
        changed(tools=[]),
        changed(instructions="be brief"),
        changed(reasoning={"effort": "low"}),
        changed(a_field_nobody_has_heard_of=1),
        changed(input=CALL["input"][:2]),
        changed(input=[*CALL["input"], {"role": "user", "content": ""}]),
        changed(input=[{"type": "reasoning", "summary": [{"text": "hm"}]}, *CALL["input"]]),
        with_item(0, content="count!"),
        with_item(0, role="system"),
        with_item(1, name="sub"),
        with_item(1, arguments='{"n": 2}'),
        with_item(1, arguments="not json"),
        with_item(2, output='{"count": 2}'),
        with_item(2, call_id="call_9"),
    ],
)
def test_what_influences_the_generation_makes_another_request(other: dict[str, Any]) -> None:
    """CUT-5."""
    assert digest(other) != digest(CALL)


def test_the_route_counts() -> None:
    assert request_digest(CHAT, {"messages": []}) != request_digest(RESPONSES, {"input": []})


def test_call_ids_are_names_only() -> None:
    """CUT-4: a tool that was called anew after a restore has another id, and the same meaning."""
    renamed = with_item(1, call_id="call_x")
    renamed["input"][2]["call_id"] = "call_x"
    assert digest(renamed) == digest(CALL)


def test_results_belong_to_their_calls() -> None:
    """Two calls whose results are swapped are another conversation."""

    def body(first: str, second: str) -> dict[str, Any]:
        call = {"type": "function_call", "name": "add", "arguments": "{}"}
        result = {"type": "function_call_output", "output": "1"}
        return {
            "input": [
                {**call, "call_id": "a"},
                {**call, "call_id": "b"},
                {**result, "call_id": first},
                {**result, "call_id": second},
            ]
        }

    assert digest(body("a", "b")) != digest(body("b", "a"))


def test_a_text_input_is_a_user_message() -> None:
    assert digest({"input": "hi"}) == digest({"input": [{"role": "user", "content": "hi"}]})


def chat_reply(message: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"message": message}]}


def test_a_conversation_goes_on_from_the_call_that_it_contains() -> None:
    """POL-7: the output comes back as the agent kept it: ids gone, text as a string."""
    asked = {"messages": [{"role": "user", "content": "a"}]}
    message = {
        "role": "assistant",
        "content": "b",
        "refusal": None,
        "annotations": [],
        "reasoning_content": "because",
        "generation_token_ids": [1],
    }
    end = conversation_end(CHAT, asked, chat_reply(message))
    goes_on = [*asked["messages"], {"role": "assistant", "content": "b"}]
    chain = conversation_chain(CHAT, {"messages": [*goes_on, {"role": "user", "content": "c"}]})
    assert chain.index(end) == 2
    elsewhere = [{"role": "user", "content": "other"}, *goes_on[1:]]
    assert end not in conversation_chain(CHAT, {"messages": elsewhere})


def test_the_dialects_agree_on_a_conversation() -> None:
    """POL-7: an agent may ask by one route and go on by the other."""
    asked = {"instructions": "be brief", "input": "a"}
    output = [
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "so", "annotations": []}],
        },
        {"type": "function_call", "id": "f", "call_id": "x", "name": "add", "arguments": "{}"},
    ]
    end = conversation_end(RESPONSES, asked, {"output": output})
    call = {"id": "call_77", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    chat = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "so", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_77", "content": "1"},
        ]
    }
    chain = conversation_chain(CHAT, chat)
    assert chain[-2] == end
    result = {"type": "function_call_output", "call_id": "x", "output": "1"}
    goes_on = {**asked, "input": [{"role": "user", "content": "a"}, *output[1:], result]}
    assert conversation_chain(RESPONSES, goes_on) == chain


def test_what_is_not_understood_still_counts() -> None:
    """Items of a kind that is not known, or that are no objects, are compared as they are."""
    known = {"input": [{"type": "web_search_call", "id": "1", "action": {"query": "a"}}, 7]}
    again = {"input": [{"type": "web_search_call", "id": "2", "action": {"query": "a"}}, 7]}
    other = {"input": [{"type": "web_search_call", "id": "1", "action": {"query": "b"}}, 7]}
    assert digest(known) == digest(again)
    assert digest(known) != digest(other)


def test_a_part_whose_type_is_no_text_counts_as_it_is() -> None:
    """SRV-1"""

    def body(kind: object) -> dict[str, Any]:
        return {"input": [{"role": "user", "content": [{"type": kind, "text": "a"}]}]}

    assert len({digest(body(kind)) for kind in ([], {}, ["text"], "text")}) == 4


def test_images_count() -> None:
    def body(url: str) -> dict[str, Any]:
        return {"input": [{"role": "user", "content": [{"type": "input_image", "url": url}]}]}

    assert digest(body("a")) != digest(body("b"))


def test_lone_surrogates_and_numbers_beyond_json_are_taken() -> None:
    assert digest({"input": "\ud800"}) != digest({"input": "\udc00"})
    assert digest({"input": [], "x": float("nan")}) == digest({"input": [], "x": float("nan")})
    assert digest({"input": [], "x": 2**70}) != digest({"input": [], "x": 2**70 + 1})


def test_a_conversation_that_nests_too_deeply_is_refused() -> None:
    """I36: not a crash."""
    deep: Any = "x"
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="deeply"):
        digest({"input": [{"role": "user", "content": deep}]})
    nested = "[" * 100_000
    assert digest(with_item(1, arguments=nested)) != digest(CALL)


TURN = st.sampled_from(
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
    ]
)


@given(st.lists(TURN, max_size=8), st.lists(TURN, max_size=8))
def test_chains_agree_exactly_as_far_as_conversations_do(
    one: list[dict[str, Any]], two: list[dict[str, Any]]
) -> None:
    """F1: a digest depends on its turn and those before it, call ids by their order only."""

    def numbered(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        ids: dict[str, int] = {}
        return [
            item | {"call_id": ids.setdefault(item["call_id"], len(ids))}
            if "call_id" in item
            else item
            for item in items
        ]

    first, second = numbered(one), numbered(two)
    common = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(one), len(two)),
    )
    chain_one = conversation_chain(RESPONSES, {"input": one})
    chain_two = conversation_chain(RESPONSES, {"input": two})
    assert chain_one[: common + 1] == chain_two[: common + 1]
    assert not set(chain_one[common + 1 :]) & set(chain_two[common + 1 :])
    assert len(set(chain_one)) == len(one) + 1
