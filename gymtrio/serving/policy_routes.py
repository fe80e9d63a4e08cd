"""The routes of a policy model, in the dialects that its callers speak (POL-1).

Every route is one call of the participant and one answer. A call of `/v1/messages` is a chat completion
in another dialect; a call with `stream: true` gets its whole reply told as events.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from gymtrio.capture.replies import Route
from gymtrio.errors import BackendFailed, InvalidRequest, Refusal
from gymtrio.participants.policy.calls import Policy, PolicyCall, PolicyReply
from gymtrio.serving.anthropic_messages import (
    chat_of_messages,
    error_of_messages,
    message_of_chat,
)
from gymtrio.serving.http import Handler, Request, Response, json_response
from gymtrio.serving.openai_shapes import complete_reply
from gymtrio.serving.reply_streams import stream_of_reply
from gymtrio.wire.native import ADMISSION_HEADER

_WRONG_SHAPE: Final = (AttributeError, IndexError, KeyError, TypeError)
"""What reading an engine's reply as the reply of its route raises when it is none."""


def policy_routes(policy: Policy, model: str) -> dict[tuple[str, str], Handler]:
    """
    Args:
        model: what this server calls its model.
    """
    routes: dict[tuple[str, str], Handler] = {
        ("POST", route.value): partial(_answer, policy, route, model) for route in Route
    }
    return routes | {("GET", "/v1/models"): partial(_list_models, model)}


async def _answer(policy: Policy, route: Route, model: str, request: Request) -> Response:
    try:
        return await _serve(policy, route, model, request)
    except Refusal as refusal:
        return _refuse(route, refusal)


def _refuse(
    route: Route, refusal: Refusal, on_done: Callable[[bool], None] | None = None
) -> Response:
    # Clients of these APIs show `message` and nothing else of an error.
    error: dict[str, object] = {
        **refusal.body()["error"],
        "message": refusal.detail,
        "type": refusal.code,
    }
    body = error_of_messages(error) if route is Route.MESSAGES else {"error": error}
    headers = (("retry-after", "1"),) if refusal.status == 503 else ()
    return json_response(body, refusal.status, headers, on_done=on_done)


async def _serve(policy: Policy, route: Route, model: str, request: Request) -> Response:
    """Serve one call; from the reply to the answer there is no suspension (POL-2)."""
    asked = request.json()
    if not isinstance(asked, dict):
        raise InvalidRequest("the body of a model call is a JSON object")
    stream, include_usage = _stream_options(asked)
    body = {n: v for n, v in asked.items() if n not in {"stream", "stream_options"}}
    context = request.context
    reply = await policy.call(
        None if context is None else context.episode_id,
        PolicyCall(
            route=Route.CHAT if route is Route.MESSAGES else route,
            body=chat_of_messages(body) if route is Route.MESSAGES else body,
            capture_tokens=context is not None and context.capture_tokens,
            refuse_when_closed=request.header(ADMISSION_HEADER) == "refuse",
            epoch=request.epoch,
        ),
    )
    answer: Response | None = None
    try:
        if reply.refusal is not None:
            answer = _refuse(route, reply.refusal, reply.done)
        elif reply.status != 200:
            answer = json_response(_failure(route, reply.body), reply.status, on_done=reply.done)
        else:
            answer = _told(route, model, body, reply, stream, include_usage)
    except _WRONG_SHAPE as error:
        what = f"{type(error).__name__}: {error}"
        raise BackendFailed(f"the engine's reply is not what its route answers: {what}") from error
    finally:
        if answer is None:
            reply.done(False)
    return answer


def _failure(route: Route, body: dict[str, object]) -> dict[str, object]:
    """What an engine said of a failure, in the form of the caller's dialect."""
    if route is not Route.MESSAGES:
        return body
    error = body.get("error")
    return error_of_messages(error if isinstance(error, dict) else {"message": str(error or body)})


def _stream_options(asked: dict[str, object]) -> tuple[bool, bool]:
    stream, options = asked.get("stream"), asked.get("stream_options")
    if stream is not None and type(stream) is not bool:
        raise InvalidRequest("stream: expected true or false")
    if options is not None and not isinstance(options, dict):
        raise InvalidRequest("stream_options: expected an object")
    return stream is True, bool(options and options.get("include_usage"))


def _told(
    route: Route,
    model: str,
    asked: dict[str, object],
    reply: PolicyReply,
    stream: bool,
    include_usage: bool,
) -> Response:
    complete_reply(Route.CHAT if route is Route.MESSAGES else route, asked, reply.body, model)
    body: dict[str, Any] = reply.body
    if route is Route.MESSAGES:
        body = message_of_chat(body)
    if not stream:
        return json_response(body, on_done=reply.done)
    # One piece, although it is read as a stream: a caller that leaves after the last event has all of
    # it, and would seem to have left before the end of a chunked body.
    return Response(
        200,
        b"".join(stream_of_reply(route, body, include_usage=include_usage)),
        [("cache-control", "no-cache")],
        "text/event-stream",
        on_done=reply.done,
    )


async def _list_models(model: str, request: Request) -> Response:
    entry = {"id": model, "object": "model", "created": 0, "owned_by": "gymtrio"}
    return json_response({"object": "list", "data": [entry]})
