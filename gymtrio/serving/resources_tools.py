"""Tools of a resources server: async methods that a model calls by name.

    class Increment: count: int                              a frozen attrs class

    @tool
    async def increment(self, session_id: SessionId, arguments: Increment) -> object: ...

Arguments are checked strictly before the method runs. What is wrong with them is told in a 422 reply
(`invalid_request`), which is meant for the model: it says what to do better. Every other error status
is meant for the agent.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar, get_type_hints

import attrs

from gymtrio.errors import InvalidRequest
from gymtrio.participants.resources import SessionId
from gymtrio.serving.http import Request, parse_json
from gymtrio.strict import MalformedValue, structure

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Awaitable[object]])

_DECLARED: Final = "gymtrio_tool"


def tool(method: F) -> F:
    """Declare a method of a `ResourcesServer` as a tool named like it."""
    method.__dict__[_DECLARED] = True
    return method


@attrs.frozen
class Tool:
    """One tool, bound to its server."""

    name: str
    call: Callable[..., Awaitable[object]]
    """Takes the session and, if there are any, the arguments; returns JSON."""
    arguments: type[Any] | None = None
    """A frozen attrs class; None: it takes none."""

    async def run(self, session_id: SessionId, request: Request) -> object:
        """
        Raises:
            InvalidRequest: the body is not what the tool takes.
            whatever the tool raises.
        """
        body = object_of(request)
        if self.arguments is None:
            if body:
                raise InvalidRequest(f"{self.name} takes no arguments, got {', '.join(body)}")
            return await self.call(session_id)
        return await self.call(session_id, structured(self.arguments, body))


def declared_tools(server: object) -> list[Tool]:
    """The tools of a server, by name.

    Raises:
        TypeError: a tool's signature is not that of a tool; a fault of its author.
    """
    found = []
    for name in sorted(dir(type(server))):
        function = inspect.getattr_static(type(server), name)
        if _DECLARED in getattr(function, "__dict__", {}):
            found.append(Tool(name, getattr(server, name), _arguments_of(function)))
    return found


def _arguments_of(function: Callable[..., object]) -> type[Any] | None:
    parameters = list(inspect.signature(function).parameters)[2:]
    if not parameters:
        return None
    arguments = get_type_hints(function).get(parameters[0])
    if len(parameters) > 1 or not (isinstance(arguments, type) and attrs.has(arguments)):
        raise TypeError(
            f"tool {function.__qualname__} takes a session id and at most one argument, annotated "
            "with an attrs class"
        )
    return arguments


def object_of(request: Request) -> dict[str, object]:
    """The body as a JSON object; none at all is an empty one.

    Raises:
        InvalidRequest: it is something else.
    """
    if not request.body:
        return {}
    value = parse_json(request.body, "request body")
    if not isinstance(value, dict):
        raise InvalidRequest("request body: expected a JSON object")
    return value


def structured(cls: type[T], value: object) -> T:
    """
    Raises:
        InvalidRequest: the value is not a `cls`; names the field.
    """
    try:
        return structure(cls, value)
    except MalformedValue as error:
        raise InvalidRequest(str(error)) from None


def read_task(cls: type[T], task_data: Mapping[str, object]) -> T:
    """Take from a task what `cls` declares; the row's other fields are somebody else's.

    Raises:
        InvalidRequest: a field is missing or has another type.
    """
    names = {field.alias for field in attrs.fields(cls)}  # type: ignore[arg-type]
    return structured(cls, {key: value for key, value in task_data.items() if key in names})
