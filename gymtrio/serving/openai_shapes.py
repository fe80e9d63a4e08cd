"""Completes replies of engines, so that strict clients of the OpenAI protocol can read them. Pure.

Engines leave out what their authors did not need; `openai` fills in nothing, and validating clients
refuse a reply that lacks a required field. What an engine said is never changed.
"""

from __future__ import annotations

from typing import Any, Final

from gymtrio.capture.replies import Route

_USAGE_DETAILS: Final[dict[str, dict[str, int]]] = {
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 0},
}


def complete_reply(
    route: Route, asked: dict[str, object], reply: dict[str, object], model: str
) -> None:
    """Add the required fields that a successful reply lacks.

    Args:
        asked: the body of the request.
        reply: changed in place.
        model: what this server calls its model.
    """
    if route is Route.CHAT:
        _set_missing(reply, object="chat.completion", created=0, model=model)
        for index, choice in enumerate(_objects(reply.get("choices"))):
            _set_missing(choice, index=index, finish_reason="stop")
        return
    _set_missing(
        reply,
        object="response",
        created_at=0,
        model=model,
        status="completed",
        output=[],
        parallel_tool_calls=asked.get("parallel_tool_calls") is not False,
        tool_choice=asked.get("tool_choice") or "auto",
        tools=asked.get("tools") or [],
    )
    for item in _objects(reply["output"]):
        for part in _objects(item.get("content")):
            if part.get("type") == "output_text":
                _set_missing(part, annotations=[])
    usage = reply.get("usage")
    if isinstance(usage, dict):
        for name, zeros in _USAGE_DETAILS.items():
            _set_missing(usage, **{name: {}})
            for details in _objects([usage[name]]):
                _set_missing(details, **zeros)


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _set_missing(target: dict[str, Any], **fields: object) -> None:
    for name, value in fields.items():
        if target.get(name) is None:
            target[name] = value
