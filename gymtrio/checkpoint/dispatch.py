"""From a control message to the operation that serves it: one table for HTTP and for frames."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from gymtrio.checkpoint.control import Control
from gymtrio.errors import InvalidRequest, NotFound
from gymtrio.strict import MalformedValue
from gymtrio.wire.codec import from_json
from gymtrio.wire.control import REQUESTS, ControlRequest, Reply

_OPERATIONS: Final[Mapping[str, Callable[[Control, Any], Awaitable[Reply]]]] = {
    "prepare": Control.prepare,
    "renew": Control.renew,
    "commit": Control.commit,
    "restore": Control.restore,
    "resume": Control.resume,
    "retire": Control.retire,
    "forget": Control.forget,
}
assert _OPERATIONS.keys() == REQUESTS.keys()


def parse_request(operation: str, body: bytes) -> ControlRequest:
    """Read a control body strictly.

    Raises:
        NotFound: no such operation.
        InvalidRequest: not JSON, an unknown or missing field, a wrong type; the detail has the
        path. InvalidRolloutId: an episode id outside the grammar.
    """
    cls = REQUESTS.get(operation)
    if cls is None:
        raise NotFound(f"no control operation {operation[:80]!r}")
    try:
        return from_json(cls, body)
    except MalformedValue as error:
        raise InvalidRequest(str(error)) from None


async def perform(control: Control, operation: str, request: ControlRequest) -> Reply:
    """Serve one operation.

    Raises:
        Refusal: what the operation raises.

    Cancelled: what outlives the call is owned by the participant, see each operation.
    """
    return await _OPERATIONS[operation](control, request)
