"""The data path of a server: from an ASGI scope to a handler, and its answer back.

Bare ASGI in front of the framework, because the hot routes carry nearly all requests. A handler runs
as long as its caller is there: it is raced against `http.disconnect` and cancelled with it (SRV-3).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from gymtrio.context import (
    AsgiApp,
    Receive,
    RolloutContext,
    Scope,
    Send,
    rollout_context,
    rollout_of_scope,
)
from gymtrio.errors import Refusal, TooLarge, Unavailable
from gymtrio.limits import DATA_BODY_BYTES_MAX
from gymtrio.serving.http import (
    Answer,
    BadRequest,
    ClientGone,
    Handler,
    Headers,
    MethodNotAllowed,
    Request,
    RequestTimedOut,
    Response,
    StreamingResponse,
    epoch_of,
    json_response,
    refusal_response,
)

BODY_TIMEOUT_S: Final = 60.0
"""From the head of a request to the end of its body."""

RETRY_AFTER_S: Final = 1

_log = logging.getLogger(__name__)


class _Left(Exception):
    """The caller left before its request was whole."""


@attrs.frozen
class Routes:
    """Which handler takes a request."""

    table: Mapping[tuple[str, str], Handler]
    fallback: Handler | None
    framework: AsgiApp
    framework_takes: Callable[[str, str], bool]
    """Whether the framework has a route for this method and path."""
    methods: dict[str, set[str]] = attrs.field(init=False)
    """Path to the methods under which the table has it."""

    def __attrs_post_init__(self) -> None:
        for method, path in self.table:
            self.methods.setdefault(path, set()).add(method)

    @methods.default
    def _no_methods(self) -> dict[str, set[str]]:
        return {}

    def handler(self, method: str, path: str) -> Handler | None:
        """The handler of a data route; None: the framework takes it.

        Raises:
            MethodNotAllowed: the path is a hot route under other methods only.
        """
        handler = self.table.get((method, path))
        if handler is not None:
            return handler
        if path in self.methods and not self.framework_takes(method, path):
            raise MethodNotAllowed(path, sorted(self.methods[path]))
        if self.fallback is not None and not self.framework_takes(method, path):
            return self.fallback
        return None


class Dispatcher:
    """Serves the requests of one running server; an ASGI application for `http` scopes."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self.accepting = True
        """Becomes False when the server begins to stop: new work is answered 503 (SRV-2)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await answer_refusal(_only_http(), scope, receive, send)
            return
        method: str = scope["method"]
        try:
            context, scope = self._context(scope)
            handler = self._routes.handler(method, scope["path"])
            if handler is None:
                with rollout_context(context):
                    await self._routes.framework(scope, receive, _uninterrupted(send))
                return
            if not self.accepting:
                raise Unavailable("this server is shutting down")
            request = await read_request(scope, receive, context)
        except Refusal as refusal:
            await answer_refusal(refusal, scope, receive, send)
        except _Left:
            return
        else:
            await serve(handler, request, receive, send)

    @staticmethod
    def _context(scope: Scope) -> tuple[RolloutContext | None, Scope]:
        path: str = scope["path"]
        if not path.startswith("/"):
            raise BadRequest("a request target is a path and starts with a slash")
        context, scope = rollout_of_scope(scope)
        if context is not None:
            context = attrs.evolve(context, epoch=epoch_of(_headers_of(scope)))
        return context, scope


def _headers_of(scope: Scope) -> Headers:
    return tuple((bytes(name).lower(), bytes(value)) for name, value in scope["headers"])


def _uninterrupted(send: Send) -> Send:
    # hypercorn announces a disconnect in the middle of the last send; a framework that cancels on it
    # would cut that send short and the connection's idle timer would never start.
    async def shielded(message: object) -> None:
        try:
            with trio.CancelScope(shield=True):
                await send(message)  # type: ignore[arg-type]
        except ClientGone:
            pass

    return shielded


def _only_http() -> Refusal:
    return BadRequest("this server speaks HTTP only")


def _refused(refusal: Refusal) -> Response:
    response = refusal_response(refusal)
    more: Headers = ()
    if refusal.status == 503:
        more = ((b"retry-after", b"%d" % RETRY_AFTER_S),)
    elif isinstance(refusal, MethodNotAllowed):
        more = ((b"allow", ", ".join(refusal.allowed).encode("ascii")),)
    return attrs.evolve(response, headers=(*response.headers, *more)) if more else response


async def read_request(
    scope: Scope,
    receive: Receive,
    context: RolloutContext | None,
    *,
    body_bytes_max: int = DATA_BODY_BYTES_MAX,
) -> Request:
    """Read the body of a request whole.

    Raises:
        TooLarge: it is over the limit; nothing beyond the limit was kept.
        RequestTimedOut: it did not arrive within `BODY_TIMEOUT_S`.
        _Left: the caller did.
    """
    headers = _headers_of(scope)
    declared = next((value for name, value in headers if name == b"content-length"), b"0")
    if declared.isdigit() and int(declared) > body_bytes_max:
        raise TooLarge(f"body of {int(declared)} bytes, limit {body_bytes_max}")
    with trio.move_on_after(BODY_TIMEOUT_S) as timer:
        body = await _read_body(receive, body_bytes_max)
    if timer.cancelled_caught:
        raise RequestTimedOut(f"body not received within {BODY_TIMEOUT_S:g} s")
    return Request(
        method=scope["method"],
        path=scope["path"],
        query=scope["query_string"].decode("latin-1"),
        headers=headers,
        body=body,
        context=context,
    )


async def _read_body(receive: Receive, bytes_max: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Left
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > bytes_max:
            raise TooLarge(f"body over the limit of {bytes_max} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def serve(handler: Handler, request: Request, receive: Receive, send: Send) -> None:
    """Run a handler on behalf of its caller and send its answer.

    A caller that leaves cancels the handler, or the stream that it answered with. What must complete
    regardless is owned by the service's nursery, not by the handler.

    Cancelled: the handler is; whatever was sent before stays sent.
    """
    caller = _Caller()
    answer: Answer | None = None
    delivered = False
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller.watch, receive, nursery.cancel_scope)
            with rollout_context(request.context):
                answer = await _answer_of(handler, request)
                if isinstance(answer, StreamingResponse):
                    await _send_chunks(answer, caller, send)
            nursery.cancel_scope.cancel()
        # Outside the race: servers announce a disconnect while they finish a request.
        if not caller.left:
            await _send_rest(answer, request.method, send)
            delivered = True
    except ClientGone:
        pass
    finally:
        if answer is not None and answer.on_done is not None:
            answer.on_done(delivered)


async def _send_rest(answer: Answer, method: str, send: Send) -> None:
    if isinstance(answer, Response):
        await _send_whole(answer, method, send)
    else:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Caller:
    """Whether the caller of a request is still there."""

    def __init__(self) -> None:
        self.left = False

    async def watch(self, receive: Receive, scope: trio.CancelScope) -> None:
        """Cancel the work when the caller leaves; drops what it sends besides."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left = True
        scope.cancel()


async def _answer_of(handler: Handler, request: Request) -> Answer:
    try:
        return await handler(request)
    except Refusal as refusal:
        return _refused(refusal)
    except ExceptionGroup as group:
        leaf = _only_leaf(group)
        if isinstance(leaf, Refusal):
            return _refused(leaf)
        return _failed(request, group)
    except Exception as error:  # noqa: BLE001 - the edge: one request fails, the server goes on
        return _failed(request, error)


def _only_leaf(group: ExceptionGroup[Exception]) -> Exception:
    # A handler that opened a nursery raises its refusal wrapped.
    error: Exception = group
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _failed(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.path, exc_info=error)
    return internal_error()


def internal_error() -> Response:
    """What a caller is told about a fault of ours: nothing but that there was one."""
    return json_response(
        {"error": {"code": "internal_error", "detail": "see the server's log"}}, 500
    )


def _head(answer: Answer, length: int | None) -> dict[str, object]:
    headers = [(b"content-type", answer.content_type.encode("latin-1")), *answer.headers]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


async def _send_whole(response: Response, method: str, send: Send) -> None:
    await send(_head(response, len(response.body)))
    body = b"" if method == "HEAD" else response.body
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def answer_refusal(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer before the body was read: what comes of it is dropped, so that nothing is held up."""
    if scope["type"] != "http":
        # A websocket is refused before it is accepted.
        await send({"type": f"{scope['type']}.close"})
        return
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_Caller().watch, receive, trio.CancelScope())
        try:
            await _send_whole(_refused(refusal), scope["method"], send)
        except ClientGone:
            pass
        nursery.cancel_scope.cancel()


async def _send_chunks(answer: StreamingResponse, caller: _Caller, send: Send) -> None:
    """Send a stream but for its last, empty message."""
    try:
        await send(_head(answer, None))
        async with _closing(answer.chunks) as chunks:
            async for chunk in chunks:
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except ClientGone:
        caller.left = True


@asynccontextmanager
async def _closing(chunks: AsyncIterator[bytes]) -> AsyncIterator[AsyncIterator[bytes]]:
    try:
        yield chunks
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()
