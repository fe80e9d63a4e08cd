"""Where tokens stand in replies."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import pytest

from gymtrio.capture.cuts import ReplyExtension, TerminalReason
from gymtrio.capture.replies import (
    CallTokens,
    MalformedReply,
    Route,
    put_extension,
    read_tokens,
    take_extension,
    token_carrier,
    write_tokens,
)

TOKENS = CallTokens(prompt_token_ids=(1, 2), token_ids=(3, 4), log_probs=(-0.25, -1e-300))
SAID = ReplyExtension(
    model_call_id="m",
    policy_version=2,
    engine_digest="e",
    finish_reason=TerminalReason.STOP,
    effective_output_limit=9,
)


def chat() -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": "x"}}]}


def response() -> dict[str, Any]:
    return {"output": [{"type": "reasoning"}, {"type": "function_call", "name": "f"}]}


@pytest.mark.parametrize(("route", "make"), [(Route.CHAT, chat), (Route.RESPONSES, response)])
def test_tokens_are_read_where_they_were_written(route: Route, make: Any) -> None:
    """I25: chat: the message; responses: the last output item, whatever it is."""
    reply = make()
    write_tokens(route, reply, TOKENS)
    assert read_tokens(route, reply) == TOKENS
    if route is Route.RESPONSES:
        assert "generation_token_ids" not in reply["output"][0]


@pytest.mark.parametrize(
    ("route", "reply"),
    [
        (Route.CHAT, {}),
        (Route.CHAT, {"choices": []}),
        (Route.CHAT, {"choices": [chat()["choices"][0]] * 2}),
        (Route.CHAT, {"choices": [{"message": None}]}),
        (Route.RESPONSES, {"output": []}),
        (Route.RESPONSES, {"output": ["x"]}),
        (Route.MESSAGES, {"content": []}),
    ],
)
def test_a_reply_without_one_message_carries_no_tokens(route: Route, reply: Any) -> None:
    with pytest.raises(MalformedReply):
        token_carrier(route, reply)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": None},
        {"generation_token_ids": [3]},
        {"generation_log_probs": [-0.25]},
        {"generation_log_probs": [-0.25, float("nan")]},
        {"generation_log_probs": [-0.25, None]},
        {"generation_log_probs": [-0.25, -(10**400)]},
        {"generation_token_ids": [3, "4"]},
        {"generation_token_ids": [3, 4.5]},
        {"generation_token_ids": [3, True]},
        {"generation_token_ids": [3, -1]},
        {"generation_token_ids": [3, 2**32]},
        {"prompt_token_ids": [2**70]},
    ],
)
def test_tokens_that_are_not_aligned_numbers_are_refused(changes: dict[str, Any]) -> None:
    """I25: an entry that is missing would shift all behind it."""
    reply = chat()
    write_tokens(Route.CHAT, reply, TOKENS)
    reply["choices"][0]["message"] |= changes
    with pytest.raises(MalformedReply):
        read_tokens(Route.CHAT, reply)


def test_the_extension_is_taken_out() -> None:
    reply = chat()
    plain = copy.deepcopy(reply)
    put_extension(reply, SAID)
    assert take_extension(reply) == SAID
    assert reply == plain
    with pytest.raises(MalformedReply, match="not a native one"):
        take_extension(reply)
    with pytest.raises(MalformedReply, match="gymtrio.policy_version"):
        take_extension({"gymtrio": {"policy_version": "2"}})


@pytest.mark.parametrize(
    "changes",
    [
        {"policy_version": 2**63},
        {"policy_version": -1},
        {"effective_output_limit": 2**70},
        {"effective_output_limit": 0},
        {"continued_token_count": -1},
        {"engine_digest": "\ud800"},
        {"stop_reason": "\udfff"},
    ],
)
def test_an_extension_that_no_checkpoint_can_hold_is_refused(changes: dict[str, Any]) -> None:
    """CUT-7: else it would fail the commit, which is everybody's."""
    reply = chat()
    put_extension(reply, attrs.evolve(SAID, **changes))
    with pytest.raises(MalformedReply, match=next(iter(changes))):
        take_extension(reply)
