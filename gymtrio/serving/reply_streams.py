"""A whole reply told as the stream that its caller asked for. Pure.

A policy server streams a reply once it has it. A stream that had begun could be neither held nor left
out of a checkpoint, nor continued by a replacement attempt that needs its beginning again (POL-2,
POL-3); so a call that asks for a stream is held, cut and continued like any other, and a checkpoint
never waits for a generation. Each function gives the events in order, each whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from gymtrio.capture.replies import TOKEN_FIELDS, Route
from gymtrio.json_text import dump_json
from gymtrio.serving.sse import DONE, encode_event


def stream_of_reply(
    route: Route, reply: Mapping[str, Any], *, include_usage: bool = False
) -> Iterator[bytes]:
    """The events of a reply.

    Args:
        reply: whole and complete; tokens where `capture.replies` puts them go along on what ends the
            message or item.
        include_usage: a stream of chat chunks ends with one that tells the usage.
    """
    if route is Route.CHAT:
        return _chat(reply, include_usage)
    return _WRITERS[route](reply)


def _chat(reply: Mapping[str, Any], include_usage: bool) -> Iterator[bytes]:
    head = {
        name: value for name, value in reply.items() if name not in {"choices", "usage", "object"}
    }
    head["object"] = "chat.completion.chunk"
    if include_usage:
        # Where usage is asked for, every chunk has the field.
        head["usage"] = None
    for choice in reply["choices"]:
        index, message = choice.get("index", 0), choice["message"]
        tokens = {name: message[name] for name in TOKEN_FIELDS if name in message}
        calls = [
            {"index": place, **call} for place, call in enumerate(message.get("tool_calls") or [])
        ]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if message.get("content"):
            deltas.append({"content": message["content"]})
        if calls:
            deltas.append({"tool_calls": calls})
        for delta in deltas:
            told = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            if delta.get("content"):
                told["logprobs"] = choice.get("logprobs")
            yield encode_event({**head, "choices": [told]})
        last = {
            "index": index,
            "delta": tokens,
            "logprobs": None,
            "finish_reason": choice.get("finish_reason"),
        }
        yield encode_event({**head, "choices": [last]})
    if include_usage:
        yield encode_event({**head, "choices": [], "usage": reply.get("usage")})
    yield DONE


class _Numbered:
    """Events of the Responses API, which count themselves."""

    def __init__(self) -> None:
        self._number = 0

    def event(self, kind: str, /, **fields: object) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return encode_event(event, kind)


def _responses(reply: Mapping[str, Any]) -> Iterator[bytes]:
    numbered = _Numbered()
    begun = {**reply, "status": "in_progress", "output": [], "usage": None}
    yield numbered.event("response.created", response=begun)
    yield numbered.event("response.in_progress", response=begun)
    for index, item in enumerate(reply["output"]):
        yield from _item(numbered, index, item)
    kind = "response.incomplete" if reply.get("status") == "incomplete" else "response.completed"
    yield numbered.event(kind, response=reply)


def _item(numbered: _Numbered, index: int, item: Mapping[str, Any]) -> Iterator[bytes]:
    kind = item.get("type") or "message"
    empty = {name: value for name, value in item.items() if name not in TOKEN_FIELDS}
    if kind == "message":
        empty |= {"status": "in_progress", "content": []}
    elif kind == "function_call":
        empty |= {"status": "in_progress", "arguments": ""}
    yield numbered.event("response.output_item.added", output_index=index, item=empty)
    place = {"item_id": item.get("id"), "output_index": index}
    if kind == "message":
        for number, part in enumerate(item.get("content") or []):
            yield from _part(numbered, {**place, "content_index": number}, part)
    elif kind == "function_call":
        arguments = item.get("arguments")
        yield numbered.event("response.function_call_arguments.delta", **place, delta=arguments)
        yield numbered.event(
            "response.function_call_arguments.done",
            **place,
            name=item.get("name"),
            arguments=arguments,
        )
    yield numbered.event("response.output_item.done", output_index=index, item=item)


def _part(
    numbered: _Numbered, place: Mapping[str, object], part: Mapping[str, Any]
) -> Iterator[bytes]:
    if part.get("type") != "output_text":
        yield numbered.event("response.content_part.added", **place, part=part)
        yield numbered.event("response.content_part.done", **place, part=part)
        return
    log_probs = part.get("logprobs") or []
    empty = {**part, "text": "", "logprobs": []}
    yield numbered.event("response.content_part.added", **place, part=empty)
    if part.get("text"):
        yield numbered.event(
            "response.output_text.delta", **place, delta=part["text"], logprobs=log_probs
        )
    yield numbered.event(
        "response.output_text.done", **place, text=part.get("text"), logprobs=log_probs
    )
    yield numbered.event("response.content_part.done", **place, part=part)


def _messages(reply: Mapping[str, Any]) -> Iterator[bytes]:
    usage = reply["usage"]
    begun = {
        **reply,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield _named("message_start", message=begun)
    for index, block in enumerate(reply["content"]):
        yield from _block(index, block)
    ended = {name: reply.get(name) for name in ("stop_reason", "stop_sequence")}
    yield _named(
        "message_delta", delta=ended, usage={"output_tokens": usage.get("output_tokens", 0)}
    )
    yield _named("message_stop")


def _block(index: int, block: Mapping[str, Any]) -> Iterator[bytes]:
    if block["type"] == "tool_use":
        empty = {**block, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": dump_json(block["input"]).decode()}
    else:
        empty = {**block, "text": ""}
        delta = {"type": "text_delta", "text": block["text"]}
    yield _named("content_block_start", index=index, content_block=empty)
    yield _named("content_block_delta", index=index, delta=delta)
    yield _named("content_block_stop", index=index)


def _named(kind: str, **fields: object) -> bytes:
    return encode_event({"type": kind, **fields}, kind)


_WRITERS: Final[dict[Route, Callable[[Mapping[str, Any]], Iterator[bytes]]]] = {
    Route.RESPONSES: _responses,
    Route.MESSAGES: _messages,
}
