"""Which call is the same call, and which call followed which. Pure.

Two questions, two digests:

- *Is this the call that was cut?* `request_digest` covers the route, the conversation and everything
  that influences the generation, and nothing that changes between two sendings of the same request.
- *Which earlier call does this one continue?* `conversation_chain` gives a digest for each prefix of a
  conversation. A call's own end is conversation plus output; its child's conversation begins with that.

Both read the conversation as *turns*, in which the dialects agree: a message with its role and text, a
tool call, a tool result. What a server makes up anew each time (`id`, `status`, token fields) is left
out. Call ids only tie a result to its call, so they are numbered in order of appearance: an agent that
ran the same tool again under another id sends the same request.

Equal digests need not mean equal prompts (a chat template may print call ids): whoever continues a
prefix compares prompt tokens.

Every function raises `InvalidRequest` for a conversation that nests too deeply to be read.

Invariant F1: the digest of a turn depends on it and the turns before it only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from gymtrio.capture.replies import TOKEN_FIELDS, Route
from gymtrio.errors import InvalidRequest

Turn: TypeAlias = dict[str, object]

FINGERPRINT_VERSION: Final = 1
"""Goes into every digest: another way to read a conversation gives other digests."""

NOT_OF_THE_GENERATION: Final = frozenset(
    {
        "background",
        "gymtrio",
        "include",
        "logprobs",
        "metadata",
        "prompt_cache_key",
        "return_token_ids",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "top_logprobs",
        "user",
    }
)
"""Fields of a request that say how it is answered, kept or billed, not what is generated. A field that
is not here counts, also one that nobody has heard of."""

_MADE_BY_SERVERS: Final = frozenset({"id", "status", *TOKEN_FIELDS})
_TEXT_PARTS: Final = ("input_text", "output_text", "text")
"""Not a set: what is looked for may be anything, also what has no hash."""
_REASONING: Final = ("reasoning", "reasoning_content")
_CONVERSATION_FIELDS: Final = frozenset({"input", "messages", "instructions"})


def request_digest(route: Route, body: Mapping[str, object]) -> str:
    """SHA-256 in hex over what determines the generation of a call.

    Args:
        body: as JSON gave it, of the caller.
    """
    settings = {
        name: value
        for name, value in body.items()
        if value is not None and name not in NOT_OF_THE_GENERATION | _CONVERSATION_FIELDS
    }
    turns = _numbered(_turns_of_items(_items(route, body), with_reasoning=True))
    return _digest(["request", FINGERPRINT_VERSION, route.value, settings, list(turns)])


def conversation_chain(route: Route, body: Mapping[str, object]) -> list[str]:
    """A digest for each prefix of a call's conversation, the empty one first."""
    return _chain(_turns_of_items(_items(route, body)))


def conversation_end(route: Route, body: Mapping[str, object], reply: Mapping[str, object]) -> str:
    """The digest of conversation and output: what the conversation of a call's child begins with."""
    items = [*_items(route, body), *_output_items(route, reply)]
    return _chain(_turns_of_items(items))[-1]


def _chain(turns: Iterable[Turn]) -> list[str]:
    chain = [_digest(["conversation", FINGERPRINT_VERSION])]
    for turn in _numbered(turns):
        chain.append(_digest([chain[-1], turn]))
    return chain


def _items(route: Route, body: Mapping[str, object]) -> list[object]:
    """The conversation of a request, instructions first."""
    given = body.get("messages" if route is not Route.RESPONSES else "input")
    items: list[object] = list(given) if isinstance(given, list) else []
    if isinstance(given, str):
        items = [{"role": "user", "content": given}]
    instructions = body.get("instructions")
    if instructions is not None:
        items.insert(0, {"role": "system", "content": instructions})
    return items


def _output_items(route: Route, reply: Mapping[str, object]) -> list[object]:
    if route is Route.RESPONSES:
        output = reply.get("output")
        return list(output) if isinstance(output, list) else []
    choices = reply.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return [first.get("message")] if isinstance(first, dict) else []


def _turns_of_items(items: Sequence[object], *, with_reasoning: bool = False) -> Iterator[Turn]:
    """
    Args:
        with_reasoning: agents may drop reasoning from what they send back, so lineage leaves it out.
    """
    for item in items:
        if not isinstance(item, dict):
            yield {"turn": "other", "value": item}
            continue
        kind = item.get("type") or "message"
        if kind == "reasoning":
            if with_reasoning:
                yield {"turn": "reasoning", **_rest(item, "type")}
        elif kind == "function_call":
            yield _tool_call(item.get("call_id"), item.get("name"), item.get("arguments"))
        elif kind == "function_call_output":
            yield _tool_result(item.get("call_id"), item.get("output"))
        elif kind != "message":
            yield {"turn": "other", "value": _rest(item)}
        elif item.get("role") == "tool":
            yield _tool_result(item.get("tool_call_id"), item.get("content"))
        else:
            yield from _message(item, () if with_reasoning else _REASONING)


def _message(item: Mapping[str, object], left_out: Sequence[str]) -> Iterator[Turn]:
    calls = item.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    rest = _rest(item, "type", "role", "content", "tool_calls", *left_out)
    content = _content(item.get("content"))
    if content or rest or not calls:
        yield {"turn": "message", "role": item.get("role"), "content": content, **rest}
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield _tool_call(call.get("id"), function.get("name"), function.get("arguments"))
        else:
            yield {"turn": "other", "value": call}


def _tool_call(call_id: object, name: object, arguments: object) -> Turn:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass
    return {"turn": "tool_call", "call_id": call_id, "name": name, "arguments": arguments}


def _tool_result(call_id: object, output: object) -> Turn:
    return {"turn": "tool_result", "call_id": call_id, "output": _content(output)}


def _content(content: object) -> list[object]:
    """Content as a list of parts, text parts as text."""
    if content is None or content == "":
        return []
    if not isinstance(content, list):
        return [content]
    parts = [
        part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else part
        for part in content
    ]
    return [part for part in parts if part not in (None, "")]


def _rest(item: Mapping[str, object], *known: str) -> dict[str, object]:
    """What an item says besides, without what is empty or made by a server."""
    return {
        name: value
        for name, value in item.items()
        if name not in _MADE_BY_SERVERS and name not in known and value not in (None, [], {})
    }


def _numbered(turns: Iterable[Turn]) -> Iterator[Turn]:
    numbers: dict[str, int] = {}
    for turn in turns:
        call_id = turn.get("call_id")
        if isinstance(call_id, str):
            turn["call_id"] = numbers.setdefault(call_id, len(numbers))
        yield turn


def _digest(value: object) -> str:
    try:
        text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise InvalidRequest("the conversation nests too deeply") from None
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _plain(value: object) -> object:
    """Make 1 and 1.0 one number, as they are to whoever reads the request."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value
