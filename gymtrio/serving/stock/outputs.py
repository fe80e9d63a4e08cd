"""From the text of a generation to the reply of a route: message or tool calls. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import Enum
from typing import Final

import attrs

from gymtrio.capture.cuts import TerminalReason
from gymtrio.capture.replies import Route

_HERMES: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class ToolCallFormat(Enum):
    """How the model writes tool calls."""

    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, after text."""
    JSON = "json"
    """The whole text is one such object."""
    NONE = "none"


@attrs.frozen(kw_only=True)
class Finished:
    """A generation that has ended."""

    reply_id: str
    model: str
    created_s: int
    text: str
    prompt_tokens: int
    output_tokens: int
    finish: TerminalReason


@attrs.frozen
class ToolCall:
    name: str
    arguments: str
    """JSON of an object."""


def write_reply(
    route: Route, finished: Finished, tools: Sequence[object], written: ToolCallFormat
) -> dict[str, object]:
    """Write the reply of a route; required fields that are constant are left to `openai_shapes`.

    Args:
        tools: that the call may use, in the form of chat completions.
    """
    text, calls = read_tool_calls(finished.text, tools, written)
    return _WRITERS[route](finished, text, calls)


def read_tool_calls(
    text: str, tools: Sequence[object], written: ToolCallFormat
) -> tuple[str, list[ToolCall]]:
    """Split an output into text and calls; what is not wholly a call of a known tool is text."""
    names = {name for tool in tools if (name := _name_of(tool)) is not None}
    if not names or written is ToolCallFormat.NONE:
        return text, []
    if written is ToolCallFormat.JSON:
        call = _tool_call(text, names)
        return (text, []) if call is None else ("", [call])
    found = [_tool_call(match.group(1), names) for match in _HERMES.finditer(text)]
    calls = [call for call in found if call is not None]
    if not calls or len(calls) != len(found):
        return text, []
    return _HERMES.sub("", text).strip(), calls


def _name_of(tool: object) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _tool_call(text: str, names: set[str]) -> ToolCall | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, separators=(",", ":")))


def _chat(finished: Finished, text: str, calls: Sequence[ToolCall]) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": text or None, "refusal": None}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{finished.reply_id}{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(calls)
        ]
    elif not text:
        message["content"] = ""
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": "tool_calls" if calls else finished.finish.value,
    }
    return {
        "id": f"chatcmpl-{finished.reply_id}",
        "object": "chat.completion",
        "created": finished.created_s,
        "model": finished.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": finished.prompt_tokens,
            "completion_tokens": finished.output_tokens,
            "total_tokens": finished.prompt_tokens + finished.output_tokens,
        },
    }


def _responses(finished: Finished, text: str, calls: Sequence[ToolCall]) -> dict[str, object]:
    status = "incomplete" if finished.finish is TerminalReason.LENGTH else "completed"
    output: list[dict[str, object]] = []
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        output.append(
            {
                "id": f"msg_{finished.reply_id}",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    output.extend(
        {
            "id": f"fc_{finished.reply_id}{index}",
            "type": "function_call",
            "call_id": f"call_{finished.reply_id}{index}",
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for index, call in enumerate(calls)
    )
    cut_short = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": f"resp_{finished.reply_id}",
        "object": "response",
        "created_at": finished.created_s,
        "status": status,
        "error": None,
        "incomplete_details": cut_short,
        "model": finished.model,
        "output": output,
        "usage": {
            "input_tokens": finished.prompt_tokens,
            "output_tokens": finished.output_tokens,
            "total_tokens": finished.prompt_tokens + finished.output_tokens,
        },
    }


_WRITERS: Final = {Route.CHAT: _chat, Route.RESPONSES: _responses}
