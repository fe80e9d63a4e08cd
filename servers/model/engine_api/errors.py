"""Refusals in the form that clients of the OpenAI APIs read, beside our own (CTL-17)."""

from __future__ import annotations

from functools import wraps
from typing import Final

from gymtrio.errors import Refusal
from gymtrio.serving.http import Answer, Handler, Request, Response, json_response

RETRY_AFTER_S: Final = 1


def error_object(refusal: Refusal) -> dict[str, object]:
    """The `error` of a reply or of a stream: `message` and `type` as OpenAI has them, `detail` ours."""
    return {
        "code": refusal.code,
        "detail": refusal.detail,
        "message": refusal.detail,
        "type": "server_error" if refusal.status >= 500 else "invalid_request_error",
        "param": None,
    }


def error_response(refusal: Refusal) -> Response:
    headers = [("retry-after", str(RETRY_AFTER_S))] if refusal.status == 503 else []
    return json_response({"error": error_object(refusal)}, refusal.status, headers)


def answering_refusals(handler: Handler) -> Handler:
    """A handler whose refusals are answers of this form."""

    @wraps(handler)
    async def answer(request: Request) -> Answer:
        try:
            return await handler(request)
        except Refusal as refusal:
            return error_response(refusal)

    return answer
