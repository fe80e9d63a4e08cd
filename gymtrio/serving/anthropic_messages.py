"""The Messages API as a dialect of chat completions. Pure.

`/v1/messages` is served by asking for a chat completion: engines behind a policy server speak chat
completions, and a call is recorded, cut and continued under one form whatever its caller speaks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from gymtrio.capture.replies import TOKEN_FIELDS
from gymtrio.errors import InvalidRequest

_SAME_NAME: Final = ("model", "temperature", "top_p", "top_k", "metadata")
_RENAMED: Final = {"stop_sequences": "stop", "max_tokens": "max_tokens"}
_STOP_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_READ: Final = frozenset(
    {*_SAME_NAME, *_RENAMED, "messages", "system", "tools", "tool_choice", "stream", "thinking"}
)


def chat_of_messages(body: Mapping[str, Any]) -> dict[str, object]:
    """The chat completions request that a Messages request stands for.

    Fields that neither API's author would know go along, as everywhere.

    Raises:
        InvalidRequest: naming the field that has no place in a chat completion.
    """
    if type(body.get("max_tokens")) is not int:
        raise InvalidRequest("max_tokens: expected an integer")
    if body.get("thinking") not in (None, {"type": "disabled"}):
        raise InvalidRequest("thinking: not supported by this server, only disabled")
    chat: dict[str, object] = {
        name: value for name, value in body.items() if name not in _READ and value is not None
    }
    chat |= {name: body[name] for name in _SAME_NAME if body.get(name) is not None}
    chat |= {new: body[name] for name, new in _RENAMED.items() if body.get(name) is not None}
    messages: list[object] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"], "system")})
    for index, message in enumerate(_objects(body.get("messages"), "messages")):
        messages += _chat_messages(message, f"messages[{index}]")
    chat["messages"] = messages
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in _objects(body["tools"], "tools")]
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    return chat


def message_of_chat(reply: Mapping[str, Any]) -> dict[str, object]:
    """The Messages reply that a chat completion stands for; tokens stand on the message itself."""
    choice = reply["choices"][0]
    message = choice["message"]
    content: list[dict[str, object]] = []
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        content.append({"type": "text", "text": message.get("content") or "", "citations": None})
    content += [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": _input_of(call["function"].get("arguments")),
        }
        for call in calls
    ]
    usage = reply.get("usage") or {}
    told: dict[str, object] = {
        "id": f"msg_{str(reply.get('id', '')).removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": reply.get("model"),
        "content": content,
        "stop_reason": _STOP_REASONS.get(choice.get("finish_reason"), "end_turn"),
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage.get("prompt_tokens", 0),
            "output_tokens": usage.get("completion_tokens", 0),
        },
    }
    return told | {name: message[name] for name in TOKEN_FIELDS if name in message}


def error_of_messages(error: Mapping[str, object]) -> dict[str, object]:
    """The error body that clients of the Messages API read; ours stands beside it."""
    return {"type": "error", "error": error}


def _chat_messages(message: Mapping[str, Any], where: str) -> list[dict[str, object]]:
    role, content = message.get("role"), message.get("content")
    if role not in {"user", "assistant"}:
        raise InvalidRequest(f"{where}.role: expected user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    parts: list[dict[str, object]] = []
    calls: list[dict[str, object]] = []
    results: list[dict[str, object]] = []
    for number, block in enumerate(_objects(content, f"{where}.content")):
        place = f"{where}.content[{number}]"
        kind = block.get("type")
        if kind == "text":
            parts.append({"type": "text", "text": block.get("text")})
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block))
        elif kind == "tool_result" and role == "user":
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": _text(block.get("content") or "", place),
                }
            )
        else:
            raise InvalidRequest(f"{place}: blocks of type {str(kind)[:40]!r} are not supported")
    made = results
    if parts or calls or not results:
        said: dict[str, object] = {"role": role, "content": parts or None}
        made = [*results, said | ({"tool_calls": calls} if calls else {})]
    return made


def _call(block: Mapping[str, Any]) -> dict[str, object]:
    arguments = json.dumps(block.get("input") or {}, separators=(",", ":"))
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool(tool: Mapping[str, Any]) -> dict[str, object]:
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(f"tools: only custom tools are supported, not {tool['type']!r}")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _tool_choice(choice: object) -> object:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool" and isinstance(choice, dict):
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequest("tool_choice: expected an object of type auto, any, tool or none")
    return _CHOICES[kind]


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = [block.get("text") for block in _objects(content, where)]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{where}: only text blocks are supported here")
    return "".join(map(str, texts))


def _objects(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidRequest(f"{where}: expected a list of objects")
    return value


def _input_of(arguments: object) -> object:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = None
    # What a model wrote as arguments need not be an object; nothing of it is lost.
    return value if isinstance(value, dict) else {"arguments": arguments}
