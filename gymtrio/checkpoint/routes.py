"""The control plane over HTTP (CTL-1, CTL-2).

The token is checked before anything else is looked at, on every path below the prefix, also those
that do not exist: who has no token learns nothing, not even which routes there are, and changes
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from quart import Blueprint, Response, request

from gymtrio.checkpoint.access import presents_token
from gymtrio.checkpoint.control import Control
from gymtrio.checkpoint.dispatch import perform, read_request
from gymtrio.errors import NotFound, Refusal, TooLarge, Unauthorized
from gymtrio.limits import CONTROL_BODY_BYTES_MAX
from gymtrio.wire.control import CONTROL_PREFIX, reply_to_plain


def control_blueprint(control: Control, is_token: Callable[[str], bool]) -> Blueprint:
    """Make the routes of one participant.

    Args:
        is_token: compares a presented token with the configured one in constant time.
    """
    blueprint = Blueprint("gymtrio_control", __name__, url_prefix=CONTROL_PREFIX)

    @blueprint.before_request
    async def authorize() -> Response | None:
        if presents_token(request.headers.getlist("authorization"), is_token):
            return None
        return refuse(Unauthorized())

    @blueprint.get("/status")
    async def status() -> Response:
        return _json(reply_to_plain(control.status()))

    @blueprint.post("/<operation>")
    async def operate(operation: str) -> Response:
        try:
            message = await read_request(operation, await read_control_body())
            return _json(reply_to_plain(await perform(control, operation, message)))
        except Refusal as refusal:
            return refuse(refusal)

    @blueprint.route(
        "/<path:unknown>", methods=["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    )
    async def missing(unknown: str) -> Response:
        return refuse(NotFound(f"no control route {request.method} {unknown[:80]!r}"))

    return blueprint


async def read_control_body() -> bytes:
    """Read the body of the current control request, bounded.

    Raises:
        TooLarge: it is over the limit; it was not read.
    """
    request.max_content_length = CONTROL_BODY_BYTES_MAX
    announced = request.content_length
    if announced is not None and announced > CONTROL_BODY_BYTES_MAX:
        raise TooLarge(f"control body of {announced} bytes, limit {CONTROL_BODY_BYTES_MAX}")
    body = await request.get_data(as_text=False)
    assert isinstance(body, bytes)
    return body


def refuse(refusal: Refusal) -> Response:
    return _json(refusal.body(), refusal.status)


def _json(value: object, status: int = 200) -> Response:
    # Not Quart's provider: it sorts keys and may emit what is not ASCII.
    return Response(
        json.dumps(value, separators=(",", ":")), status=status, content_type="application/json"
    )
