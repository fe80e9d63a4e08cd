"""The control routes of an engine, behind the control token (CUT-1, CTL-2).

The token is checked before anything else is looked at: who has none learns and changes nothing, and
his body is not read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from quart import Blueprint, Response, request

from gymtrio.capture.cuts import (
    CUT_ROUTE,
    ENGINE_ROUTE,
    CutInventory,
    CutReceipt,
    EngineDescription,
)
from gymtrio.checkpoint.access import presents_token
from gymtrio.checkpoint.routes import read_control_body
from gymtrio.errors import InvalidRequest, Refusal, Unauthorized
from gymtrio.serving.framework import to_quart
from gymtrio.serving.http import json_response, refusal_response
from gymtrio.strict import MalformedValue, unstructure
from gymtrio.wire.codec import from_json

T = TypeVar("T")


def engine_control(
    *,
    is_token: Callable[[str], bool],
    cut: Callable[[CutInventory], Awaitable[CutReceipt]],
    description: EngineDescription,
) -> Blueprint:
    """Make the routes.

    Args:
        is_token: compares a presented token with the configured one in constant time.
    """
    blueprint = Blueprint("engine_control", __name__)

    @blueprint.before_request
    async def authorize() -> Response | None:
        if presents_token(request.headers.getlist("authorization"), is_token):
            return None
        return to_quart(refusal_response(Unauthorized()))

    @blueprint.get(ENGINE_ROUTE)
    async def describe() -> Response:
        return to_quart(json_response(unstructure(description)))

    @blueprint.post(CUT_ROUTE)
    async def generation_cut() -> Response:
        try:
            receipt = await cut(_parse(CutInventory, await read_control_body()))
        except Refusal as refusal:
            return to_quart(refusal_response(refusal))
        return to_quart(json_response(unstructure(receipt)))

    return blueprint


def _parse(cls: type[T], body: bytes) -> T:
    try:
        return from_json(cls, body)
    except MalformedValue as error:
        raise InvalidRequest(str(error)) from None
