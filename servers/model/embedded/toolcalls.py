"""Function calls in a reply: the tools of a request, and what of them a text calls.

The engine samples freely. Where decoding would have to be constrained to keep a promise, the request
is refused instead of the promise being broken.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Final, NoReturn

import attrs

from gymtrio.errors import InvalidRequest

TOOLS_MAX: Final = 256
"""More do not fit any context of the model."""

_CONSTRAINTS: Final = (
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "structural_tag",
    "structured_outputs",
)


@attrs.frozen
class Tool:
    """A function that a request offers."""

    name: str
    definition: Mapping[str, object]
    """As the request has it: name, description, parameters."""


@attrs.frozen
class FunctionCall:
    name: str
    arguments: str
    """JSON text of an object, compact and ASCII."""


def tools_of(tools: object) -> tuple[Tool, ...]:
    """Read `tools` of a request, in the form of either API.

    Raises:
        InvalidRequest: one is no function with a name, or there are too many.
    """
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > TOOLS_MAX:
        raise InvalidRequest(f"tools: expected a list of at most {TOOLS_MAX}")
    return tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))


def refuse_constrained(body: Mapping[str, object]) -> None:
    """Refuse a request that asks for constrained decoding.

    Args:
        body: of a Responses or chat completions request.

    Raises:
        InvalidRequest: naming the field.
    """
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        _refuse("tool_choice", choice if isinstance(choice, str) else "an object")
    for field in ("response_format", "text"):
        wanted = body.get(field)
        wanted = wanted.get("format") if field == "text" and isinstance(wanted, Mapping) else wanted
        kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
        if kind not in (None, "text"):
            _refuse(field, kind)
    for field in _CONSTRAINTS:
        if body.get(field) is not None:
            _refuse(field, "set")


def tools_text(tools: Collection[Tool]) -> str:
    """Describe tools to a model whose template has no place for them; for a system turn.

    Spends a good part of a small context: examples in the conversation teach this model more.
    """
    lines = [json.dumps(tool.definition, ensure_ascii=False) for tool in tools]
    form = '{"name": "<function>", "arguments": {...}}'
    return "\n".join([f"To call a function, reply with {form} only. Functions:", *lines])


def parse_call(text: str, tools: Collection[Tool]) -> FunctionCall | None:
    """Read a reply: total and strict, since what follows runs tools on it.

    Args:
        text: what the model wrote.
        tools: those that it may call; none if the request says `tool_choice: "none"`.

    Returns:
        The call, if the text is one JSON object with exactly the fields `name`, of a tool, and
        `arguments`, an object, without a repeated key; None if it is anything else, a message.
    """
    try:
        value = _parse(text)
        if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
            return None
        name, arguments = value["name"], value["arguments"]
        if not isinstance(arguments, dict) or not any(name == tool.name for tool in tools):
            return None
        return FunctionCall(name, json.dumps(arguments, separators=(",", ":")))
    except (ValueError, RecursionError):
        return None


def _tool(tool: object, where: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InvalidRequest(f"{where}: only tools of type 'function' are supported by this engine")
    nested = tool.get("function")
    definition = nested if isinstance(nested, Mapping) else tool
    name = definition.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}: a function has a name")
    shown = ("name", "description", "parameters")
    return Tool(name, {key: definition[key] for key in shown if key in definition})


def _refuse(field: str, value: object) -> NoReturn:
    raise InvalidRequest(
        f"{field} ({value}) needs constrained decoding, which this engine does not support"
    )


def _parse(text: str) -> object:
    """Parse JSON as its standard has it: no NaN, no number beyond a float, no repeated key."""
    value: object = json.loads(
        text, object_pairs_hook=_unrepeated, parse_float=_finite, parse_constant=_finite
    )
    return value


def _unrepeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is repeated")
    return value


def _finite(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value
