"""Replies of the Responses API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

from gymtrio.capture.replies import LOG_PROBS, PROMPT_IDS, TOKEN_IDS
from servers.model.embedded.generation import Generated
from servers.model.embedded.toolcalls import FunctionCall
from servers.model.engine_api.outputs import Envelope, Output, Usage, read_output, usage_of
from servers.model.engine_api.requests import ModelCall

Status: TypeAlias = Literal["completed", "incomplete", "in_progress", "failed"]

_REPEATED: Final[Mapping[str, object]] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""Fields of the request that its reply repeats, and what stands there for an absent one."""

_UNSAID_OF_TOOLS: Final[Mapping[str, object]] = {"parameters": None, "strict": None}
"""What validating clients want to see of a function."""


def responses_reply(
    call: ModelCall, envelope: Envelope, prompt_ids: Sequence[int], generated: Generated
) -> dict[str, object]:
    """Write a whole reply.

    Args:
        generated: ended.
    """
    output = read_output(call, generated)
    reply = response_object(call, envelope, status_of(output))
    item = output_item(call, envelope, output)
    if call.token_ids:
        item |= {
            PROMPT_IDS: list(prompt_ids),
            TOKEN_IDS: list(generated.token_ids),
            LOG_PROBS: list(generated.logprobs),
        }
    reply["output"] = [item]
    reply["usage"] = usage_object(usage_of(prompt_ids, [generated]))
    return reply


def response_object(call: ModelCall, envelope: Envelope, status: Status) -> dict[str, object]:
    """A response without output and usage."""
    cut_short = {"reason": "max_output_tokens"} if status == "incomplete" else None
    asked = {
        name: default if call.asked.get(name) is None else call.asked[name]
        for name, default in _REPEATED.items()
    }
    return {
        "id": f"resp_{envelope.reply_id}",
        "object": "response",
        "created_at": envelope.created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": cut_short,
        "model": envelope.model,
        "output": [],
        **asked,
        "tools": [{**_UNSAID_OF_TOOLS, **tool} for tool in _objects(asked["tools"])],
        # Whatever was asked: nothing can be fetched later.
        "store": False,
        "usage": None,
    }


def status_of(output: Output) -> Status:
    return "incomplete" if output.finish == "length" and output.call is None else "completed"


def output_item(call: ModelCall, envelope: Envelope, output: Output) -> dict[str, object]:
    if output.call is not None:
        return call_item(envelope, output.call, "completed")
    generated = output.generated
    entries = entries_of(call, envelope, generated.token_ids, generated.logprobs)
    return message_item(envelope, [text_part(output.text, entries)], status_of(output))


def message_item(
    envelope: Envelope, content: list[dict[str, object]], status: Status
) -> dict[str, object]:
    return {
        "id": envelope.part_id("msg", 0),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def call_item(
    envelope: Envelope, function: FunctionCall, status: Status, *, arguments: str | None = None
) -> dict[str, object]:
    """
    Args:
        arguments: what of them is told so far; None: all.
    """
    return {
        "id": envelope.part_id("fc", 0),
        "type": "function_call",
        "call_id": envelope.part_id("call", 0),
        "name": function.name,
        "arguments": function.arguments if arguments is None else arguments,
        "status": status,
    }


def text_part(text: str, entries: list[dict[str, object]]) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}


def entries_of(
    call: ModelCall, envelope: Envelope, token_ids: Sequence[int], log_probs: Sequence[float]
) -> list[dict[str, object]]:
    return envelope.names.entries(token_ids, log_probs) if call.log_probs else []


def usage_object(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def _objects(value: object) -> list[Mapping[str, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
