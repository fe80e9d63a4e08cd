"""The note's tables of control messages against the classes that define them (WIRE-1)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, NewType, Union, get_args, get_origin, get_type_hints

import attrs
import pytest

import gymtrio.wire
from gymtrio.ids import EpisodeId
from gymtrio.wire.control import (
    REPLIES,
    REQUESTS,
    BlockerDetail,
    ControlRequest,
    Kind,
    Phase,
    Report,
)

NOTE: Final = (Path(gymtrio.wire.__file__).parent / "DESIGN.md").read_text()

PLAIN: Final = {str: "text", bool: "bool", int: "int", float: "number", object: "any"}
PARTS: Final[dict[str, type]] = {
    "episode": EpisodeId,
    "report": Report,
    "blocker": BlockerDetail,
}
EVERY: Final = "every request"


def shown(kind: Any) -> str:
    """How the note names the type of a field."""
    while isinstance(kind, NewType):
        kind = kind.__supertype__
    arguments = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        (inner,) = (argument for argument in arguments if argument is not NoneType)
        return f"{shown(inner)} or nil"
    if get_origin(kind) is tuple:
        return f"array of {shown(arguments[0])}"
    if get_origin(kind) is dict:
        inner = shown(arguments[1])
        return "map" if inner == "any" else f"map of {inner}"
    for name, part in PARTS.items():
        if kind is part:
            return name
    return PLAIN[kind]


def default_of(field: attrs.Attribute[Any]) -> str:
    default: Any = field.default
    if default is attrs.NOTHING:
        return "required"
    # What is made for each message has a maker.
    default = getattr(default, "factory", lambda: default)()
    return "nil" if default is None else f"`{json.dumps(default)}`"


def fields_of(cls: type, *, but: type | None = None) -> list[tuple[str, str, str]]:
    """Name, type and default of what a message has on the wire."""
    hints = get_type_hints(cls)
    inherited = {field.name for field in attrs.fields(but)} if but is not None else set()
    return [
        (field.name, shown(hints[field.name]), default_of(field))
        for field in attrs.fields(cls)
        if field.init and field.name not in inherited | {"extra"}
    ]


def documented(title: str) -> dict[str, list[tuple[str, str, str]]]:
    """The rows of a table of the note, by message."""
    section = NOTE.split(f"\n### {title}\n", 1)[1].split("\n#", 1)[0]
    found: dict[str, list[tuple[str, str, str]]] = {}
    message = ""
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or set(line) <= set("|- ") or cells[1] == "Field":
            continue
        assert len(cells) == 5, line
        assert cells[4] or cells[1] == "-", f"{line}: without a meaning"
        message = cells[0].strip("`") or message
        rows = found.setdefault(message, [])
        if cells[1] != "-":
            rows.append((cells[1].strip("`"), cells[2], cells[3]))
    return found


def test_requests_are_as_they_are_described() -> None:
    expected = {EVERY: fields_of(ControlRequest)}
    for operation, cls in REQUESTS.items():
        expected[operation] = fields_of(cls, but=ControlRequest)
    assert documented("Requests of the control protocol") == expected


def test_replies_are_as_they_are_described() -> None:
    expected = {operation: fields_of(cls) for operation, cls in REPLIES.items()}
    expected |= {part: fields_of(cls) for part, cls in PARTS.items()}
    assert documented("Replies of the control protocol, and their parts") == expected


@pytest.mark.parametrize("values", [Kind, Phase])
def test_what_a_field_may_say_is_listed(values: type[Kind] | type[Phase]) -> None:
    listed = ", ".join(f"`{value.value}`" for value in values)
    assert listed in re.sub(r"\s+", " ", NOTE)
