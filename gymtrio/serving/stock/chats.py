"""Model calls as conversations with settings, whichever OpenAI route they came by. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from gymtrio.capture.replies import Route
from gymtrio.errors import InvalidRequest

_NOT_SAMPLING: Final = frozenset(
    {
        "background",
        "chat_template_kwargs",
        "gymtrio",
        "include",
        "input",
        "instructions",
        "logprobs",
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "max_tool_calls",
        "messages",
        "metadata",
        "model",
        "n",
        "parallel_tool_calls",
        "prompt",
        "prompt_cache_key",
        "reasoning",
        "response_format",
        "return_token_ids",
        "safety_identifier",
        "seed",
        "service_tier",
        "stop",
        "store",
        "stream",
        "stream_options",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncation",
        "user",
    }
)
"""Fields that do not go to the engine as they are: read here, or only about the reply. Every other one
does, also one that nobody here has heard of."""


@attrs.frozen(kw_only=True)
class Chat:
    """One call."""

    messages: tuple[object, ...]
    """As chat completions has them."""
    tools: tuple[object, ...]
    """Those that the model may call, as chat completions has them."""
    template_kwargs: Mapping[str, object]
    output_tokens_max: int | None
    """None: what the context leaves."""
    stop: tuple[str, ...]
    seed: int | None
    sampling: Mapping[str, object]


def read_chat(route: Route, body: Mapping[str, object]) -> Chat:
    """Read the body of a call.

    Raises:
        InvalidRequest: naming the field that cannot be read.
    """
    if route is Route.CHAT:
        messages = _list(body, "messages")
        limits = ("max_completion_tokens", "max_tokens")
    else:
        messages = _messages_of_input(body)
        limits = ("max_output_tokens", "max_tokens")
    tools = [] if body.get("tool_choice") == "none" else _list(body, "tools")
    kwargs = body.get("chat_template_kwargs")
    given = [limit for name in limits if (limit := _integer(body, name)) is not None]
    if given and given[0] < 1:
        raise InvalidRequest(f"{limits[0]}: expected 1 or more, got {given[0]}")
    return Chat(
        messages=tuple(messages),
        tools=tuple(map(_chat_tool, tools)),
        template_kwargs=kwargs if isinstance(kwargs, dict) else {},
        output_tokens_max=given[0] if given else None,
        stop=_stops(body.get("stop")),
        seed=_integer(body, "seed"),
        sampling={
            name: value
            for name, value in body.items()
            if name not in _NOT_SAMPLING and value is not None
        },
    )


def _list(body: Mapping[str, object], name: str) -> list[object]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequest(f"{name}: expected a list")
    return value


def _integer(body: Mapping[str, object], name: str) -> int | None:
    value = body.get(name)
    if value is not None and type(value) is not int:
        raise InvalidRequest(f"{name}: expected an integer")
    return value


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise InvalidRequest("stop: expected a text or a list of texts, none empty")
    return tuple(stops)


def _chat_tool(tool: object) -> object:
    """A tool of either route as chat completions has it."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _messages_of_input(body: Mapping[str, object]) -> list[object]:
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _list(body, "input")
    messages: list[object] = []
    if body.get("instructions") is not None:
        messages.append({"role": "system", "content": body["instructions"]})
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise InvalidRequest(f"input[{index}]: expected an object")
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[object], item: Mapping[str, object], where: str) -> None:
    kind = item.get("type") or "message"
    if kind == "reasoning":
        # Templates of chat models have no place for it, and agents may leave it out.
        return
    if kind == "function_call_output":
        messages.append(
            {
                "role": "tool",
                "tool_call_id": item.get("call_id"),
                "content": _text_of(item.get("output")),
            }
        )
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        last = messages[-1] if messages else None
        if isinstance(last, dict) and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        messages.append({"role": role, "content": _text_of(item.get("content"))})
    else:
        raise InvalidRequest(f"{where}: items of type {str(kind)[:40]!r} cannot go to this engine")


def _text_of(content: object) -> object:
    """Text parts as chat completions has them; what is only text as text."""
    if not isinstance(content, list):
        return content
    parts = [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in ("input_text", "output_text", "text")
        else part
        for part in content
    ]
    if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return "".join(str(part["text"]) for part in parts)
    return parts
