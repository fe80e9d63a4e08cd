"""The control plane over HTTP (CTL-1, CTL-2).

The token is checked before anything else is looked at, on every path below the prefix, also those
that do not exist: who has no token learns nothing, not even which routes there are, and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from quart import Blueprint, Response, request

from gymtrio.checkpoint.access import presents_token
from gymtrio.checkpoint.control import Control
from gymtrio.checkpoint.dispatch import perform, read_request
from gymtrio.errors import NotFound, Refusal, TooLarge, Unauthorized
from gymtrio.json_text import dump_finite_json
from gymtrio.limits import CONTROL_BODY_BYTES_MAX
from gymtrio.wire.control import CONTROL_PREFIX, STATUS, reply_to_plain

ServeControl: TypeAlias = Callable[[str, bytes], Awaitable[bytes]]
"""Operation (`status` too) and JSON body to the JSON of the reply; raises `Refusal`."""


async def serve_control(control: Control, operation: str, body: bytes) -> bytes:
    """Serve one control call; see `ServeControl`."""
    if operation == STATUS:
        return dump_finite_json(reply_to_plain(control.status()))
    message = await read_request(operation, body)
    return dump_finite_json(reply_to_plain(await perform(control, operation, message)))


def serving_blueprint(serve: ServeControl, is_token: Callable[[str], bool]) -> Blueprint:
    """Make the routes of a participant, wherever it is.

    Args:
        is_token: compares a presented token with the configured one in constant time.
    """
    blueprint = Blueprint("gymtrio_control", __name__, url_prefix=CONTROL_PREFIX)

    @blueprint.before_app_request
    async def authorize() -> Response | None:
        # Of the whole application: what no route takes is no blueprint's either.
        if not request.path.startswith(CONTROL_PREFIX):
            return None
        if presents_token(request.headers.getlist("authorization"), is_token):
            return None
        return refuse(Unauthorized())

    @blueprint.get("/status")
    async def status() -> Response:
        return await answer(STATUS, b"")

    @blueprint.post("/<operation>")
    async def operate(operation: str) -> Response:
        if operation == STATUS:
            return refuse(NotFound("no control route POST 'status'"))
        try:
            body = await read_control_body()
        except Refusal as refusal:
            return refuse(refusal)
        return await answer(operation, body)

    async def answer(operation: str, body: bytes) -> Response:
        try:
            return _respond(await serve(operation, body))
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
    return _respond(dump_finite_json(value), status)


def _respond(body: bytes, status: int = 200) -> Response:
    return Response(body, status=status, content_type="application/json")
