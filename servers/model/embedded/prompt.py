"""What the model reads: conversations of the two APIs as turns, and turns as tokens.

The model's template is ChatML, `<|im_start|>role\\ncontent<|im_end|>\\n` for each turn. It knows the
roles system, user and assistant, and no tools; a conversation teaches the form of a call by example:
a function call is an assistant turn `{"name": ..., "arguments": {...}}`, its output a user turn.

Invariant: no content can begin or end a turn, since control tokens are put between contents that
were tokenised as plain text. Where no content contains their names, the tokens are those of the
whole text under the template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, TypeAlias

import attrs

from gymtrio.errors import InvalidRequest
from servers.model.embedded.vocabulary import Vocabulary

Role: TypeAlias = Literal["system", "user", "assistant"]

TEMPLATE_SYSTEM_TEXT: Final = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What the model's template puts first where a conversation has no system turn."""

_ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_TEXT_PARTS: Final[Mapping[str, str]] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Type of a content part, and the field that has its text."""


@attrs.frozen
class Turn:
    role: Role
    text: str
    kind: Literal["message", "call", "output"] = "message"


def turns_of_responses(items: object, instructions: object = None) -> tuple[Turn, ...]:
    """Read `input` and `instructions` of a Responses request.

    Raises:
        InvalidRequest: an item or a content part is none that a text model takes; says which.
    """
    turns = [] if instructions is None else [Turn("system", _text(instructions, "instructions"))]
    if isinstance(items, str):
        return (*turns, Turn("user", items))
    for where, item in _objects(items, "input"):
        turns += _responses_item(item, where)
    return _joined(turns)


def turns_of_chat(messages: object) -> tuple[Turn, ...]:
    """Read `messages` of a chat completions request.

    Raises:
        InvalidRequest: as for `turns_of_responses`.
    """
    turns: list[Turn] = []
    for where, message in _objects(messages, "messages"):
        turns += _chat_message(message, where)
    return _joined(turns)


def with_system(turns: tuple[Turn, ...], text: str) -> tuple[Turn, ...]:
    """Put a system turn first where the conversation begins without one, as the template does."""
    if turns and turns[0].role == "system":
        return turns
    return (Turn("system", text), *turns)


def encode_turns(turns: Iterable[Turn], vocabulary: Vocabulary, tokens_max: int) -> tuple[int, ...]:
    """Render turns for the model, and begin the assistant's next.

    Raises:
        InvalidRequest: there is no turn, or there are more than `tokens_max` tokens.
    """
    begin, end = vocabulary.control_ids["<|im_start|>"], vocabulary.control_ids["<|im_end|>"]
    between = vocabulary.encode("\n", tokens_max)
    ids: list[int] = []
    for turn in turns:
        ids.append(begin)
        ids += vocabulary.encode(f"{turn.role}\n{turn.text}", tokens_max)
        ids.append(end)
        ids += between
    if not ids:
        raise InvalidRequest("the conversation is empty")
    ids.append(begin)
    ids += vocabulary.encode("assistant\n", tokens_max)
    if len(ids) > tokens_max:
        raise InvalidRequest(f"the conversation has {len(ids)} tokens, over {tokens_max}")
    return tuple(ids)


def _responses_item(item: Mapping[str, object], where: str) -> list[Turn]:
    kind = item.get("type", "message")
    if kind == "message":
        return [Turn(_role(item, where), _text(item.get("content"), f"{where}.content"))]
    if kind == "function_call":
        return [_call(item, where)]
    if kind == "function_call_output":
        return [Turn("user", _text(item.get("output"), f"{where}.output"), "output")]
    if kind == "reasoning":
        # Never shown to the model again, and this one writes none.
        return []
    raise InvalidRequest(f"{where}: items of type {kind!r} are not supported by this engine")


def _chat_message(message: Mapping[str, object], where: str) -> list[Turn]:
    content = message.get("content")
    if message.get("role") in ("tool", "function"):
        return [Turn("user", _text(content, f"{where}.content"), "output")]
    role = _role(message, where)
    calls = message.get("tool_calls") if role == "assistant" else None
    if calls is None:
        return [Turn(role, _text(content, f"{where}.content"))]
    turns = [
        _call(_function(call, place), place)
        for place, call in _objects(calls, f"{where}.tool_calls")
    ]
    if content is not None and content != "":
        turns.insert(0, Turn(role, _text(content, f"{where}.content")))
    return turns


def _function(call: Mapping[str, object], where: str) -> Mapping[str, object]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{where}: only calls of functions are supported by this engine")
    return function


def _call(call: Mapping[str, object], where: str) -> Turn:
    """A call in the form in which the model writes one, whatever the spacing of its arguments."""
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise InvalidRequest(f"{where}: name and arguments of a function call are texts")
    try:
        text = _written(name, json.loads(arguments))
    except (ValueError, RecursionError):
        # No JSON, or too deep to be read: shown as the text it is.
        text = _written(name, arguments)
    return Turn("assistant", text, "call")


def _written(name: str, arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _role(item: Mapping[str, object], where: str) -> Role:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}.role is {role!r}, expected one of {', '.join(_ROLES)}")
    return _ROLES[role]


def _text(content: object, where: str) -> str:
    """The text of a content: a string, or a list of parts that are text."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, part in _objects(content, where):
        kind = part.get("type")
        text = part.get(_TEXT_PARTS.get(kind, "")) if isinstance(kind, str) else None
        if not isinstance(text, str):
            raise InvalidRequest(f"{place}: parts of type {kind!r} are not supported, only text")
        texts.append(text)
    return "".join(texts)


def _objects(value: object, where: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The members of a list of objects, each with where it is."""
    if not isinstance(value, list):
        raise InvalidRequest(f"{where}: expected a text or a list")
    for index, member in enumerate(value):
        if not isinstance(member, Mapping):
            raise InvalidRequest(f"{where}[{index}]: expected an object")
        yield f"{where}[{index}]", member


def _joined(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Join neighbouring calls, and neighbouring outputs: to the model they are one turn."""
    joined: list[Turn] = []
    for turn in turns:
        last = joined[-1] if joined else None
        if last is not None and turn.kind == last.kind != "message":
            joined[-1] = attrs.evolve(last, text=f"{last.text}\n{turn.text}")
        else:
            joined.append(turn)
    return tuple(joined)
