"""Replies of the chat completions API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from servers.model.embedded.generation import Generated
from servers.model.embedded.toolcalls import FunctionCall
from servers.model.engine_api.outputs import Envelope, Output, Usage, read_output, usage_of
from servers.model.engine_api.requests import ModelCall

TOKEN_IDS: Final = "token_ids"
PROMPT_IDS: Final = "prompt_token_ids"
"""Where vLLM puts ids for `return_token_ids`: on a choice, and on the reply itself."""


def chat_reply(
    call: ModelCall, envelope: Envelope, prompt_ids: Sequence[int], results: Sequence[Generated]
) -> dict[str, object]:
    """Write a whole reply.

    Args:
        results: one for each choice, ended.
    """
    choices = [_choice(call, envelope, index, result) for index, result in enumerate(results)]
    reply = {
        **chat_head(envelope, "chat.completion"),
        "choices": choices,
        "usage": usage_object(usage_of(prompt_ids, results)),
        "service_tier": None,
    }
    return reply | {PROMPT_IDS: list(prompt_ids)} if call.token_ids else reply


def chat_head(envelope: Envelope, kind: str) -> dict[str, object]:
    return {
        "id": f"chatcmpl-{envelope.reply_id}",
        "object": kind,
        "created": envelope.created_s,
        "model": envelope.model,
        "system_fingerprint": envelope.system_fingerprint,
    }


def finish_name(output: Output) -> str:
    return output.finish if output.call is None else "tool_calls"


def tool_call(envelope: Envelope, index: int, call: FunctionCall) -> dict[str, object]:
    return {
        "id": envelope.part_id("call", index),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def log_probs_object(
    call: ModelCall, envelope: Envelope, token_ids: Sequence[int], log_probs: Sequence[float]
) -> dict[str, object] | None:
    if not call.log_probs:
        return None
    entries = envelope.names.entries(token_ids, log_probs, as_ids=call.tokens_as_ids)
    return {"content": entries, "refusal": None}


def usage_object(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def _choice(
    call: ModelCall, envelope: Envelope, index: int, generated: Generated
) -> Mapping[str, object]:
    output = read_output(call, generated)
    message: dict[str, object] = {"role": "assistant", "content": output.text, "refusal": None}
    if output.call is not None:
        message["content"] = None
        message["tool_calls"] = [tool_call(envelope, index, output.call)]
    choice = {
        "index": index,
        "message": message,
        "logprobs": log_probs_object(call, envelope, generated.token_ids, generated.logprobs),
        "finish_reason": finish_name(output),
    }
    return choice | {TOKEN_IDS: list(generated.token_ids)} if call.token_ids else choice
