"""Which of a server's handlers takes a request, and the one way in which they are run.

In front of the framework, because the hot routes carry nearly all requests. Our own carriers ask
`take`; foreign ASGI servers call the dispatcher, which asks the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

import attrs
import trio

from gymtrio.context import (
    ROLLOUT_PREFIX,
    AsgiApp,
    Message,
    Receive,
    RolloutContext,
    Scope,
    Send,
    rollout_context,
    rollout_of_scope,
    split_rollout_path,
)
from gymtrio.episodes.admission import Admission
from gymtrio.errors import Refusal, Unavailable
from gymtrio.serving.asgi import ForeignExchange, refuse_foreign, serve_foreign, uninterrupted
from gymtrio.serving.draining import Cancellable, InWork
from gymtrio.serving.exchange import Exchange, send_answer
from gymtrio.serving.http import (
    Answer,
    BadRequest,
    Handler,
    Headers,
    MethodNotAllowed,
    Request,
    Response,
    epoch_of,
    internal_error,
    refusal_response,
)
from gymtrio.serving.metrics import FALLBACK_ROUTE, NO_ROUTE, ServerMetrics
from gymtrio.wire.channel import Handler as CallHandler

_STOPPING: Final = "this server is shutting down"

_log = logging.getLogger(__name__)


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

    @methods.default
    def _methods_of_table(self) -> dict[str, set[str]]:
        methods: dict[str, set[str]] = {}
        for method, path in self.table:
            methods.setdefault(path, set()).add(method)
        return methods

    def handler(self, method: str, path: str) -> Handler | None:
        """The handler of a data route; None: the framework takes it.

        Raises:
            MethodNotAllowed: the path is a hot route under other methods only.
        """
        handler = self.table.get((method, path))
        if handler is not None:
            return handler
        if self.framework_takes(method, path):
            return None
        if path in self.methods:
            raise MethodNotAllowed(path, sorted(self.methods[path]))
        return self.fallback


@attrs.define
class _Taken:
    """A request that a hot route takes (`gymtrio.serving.asgi.Taken`)."""

    dispatcher: Dispatcher
    route: str
    """For metrics: a path of the server's own, or `FALLBACK_ROUTE`."""
    handler: Handler
    method: str
    path: str
    query: str
    headers: Headers
    context: RolloutContext | None

    async def answer(self, body: bytes, work: Cancellable | None) -> Answer:
        request = Request(self.method, self.path, self.query, self.headers, body, self.context)
        in_work, status = self.dispatcher.in_work, 0
        scope = None
        if work is None:
            work = scope = trio.CancelScope()
        in_work.enter(work)
        try:
            if scope is not None:
                with scope:
                    answer = await self._run(request)
                if scope.cancelled_caught:
                    answer = refusal_response(_stopping())
            else:
                try:
                    answer = await self._run(request)
                except BaseException as error:
                    # What a drain cancels ends here: the task goes on to send the answer.
                    if not in_work.drained or not _is_cancelled(error):
                        raise
                    answer = refusal_response(_stopping())
            status = answer.status
            return answer
        finally:
            in_work.leave(work)
            self.dispatcher.metrics.request_ended(self.route, status)

    async def _run(self, request: Request) -> Answer:
        if self.context is None:
            return await _answer_of(self.handler, request)
        with rollout_context(self.context):
            return await _answer_of(self.handler, request)


class Dispatcher:
    """Serves the requests of one running server: directly, and as an ASGI application.

    Args:
        gate: of the server's participant, if it has one.
        calls: families of calls that are no requests, for frames.
    """

    def __init__(
        self,
        routes: Routes,
        *,
        metrics: ServerMetrics | None = None,
        gate: Admission | None = None,
        in_work: InWork | None = None,
        calls: Mapping[str, CallHandler] | None = None,
    ) -> None:
        self._routes = routes
        self.calls = calls or {}
        self._gate = gate
        self.metrics = metrics or ServerMetrics(kind="", instance="")
        self.in_work = in_work or InWork()
        self.accepting = True
        """Becomes False when the server begins to stop: new work is answered 503 (SRV-2)."""

    def stop_accepting(self) -> None:
        """Refuse new work from now on, and what waits at the gate; what runs goes on."""
        self.accepting = False
        if self._gate is not None:
            self._gate.end(_STOPPING)

    async def drain(self) -> None:
        """End what runs and answer it 503; return when all of it has ended."""
        await self.in_work.drain()

    def take(self, exchange: Exchange) -> _Taken | None:
        """See `gymtrio.serving.asgi.DirectApp`."""
        method, path, headers = exchange.method, exchange.path, exchange.headers
        context = None
        try:
            if not path.startswith("/"):
                raise BadRequest("a request target is a path and starts with a slash")
            if path.startswith(ROLLOUT_PREFIX):
                context, path = split_rollout_path(path)
                assert context is not None
                context = attrs.evolve(context, epoch=epoch_of(headers))
            handler = self._routes.handler(method, path)
            if handler is None:
                return None
            if not self.accepting:
                raise _stopping()
        except Refusal as refusal:
            self.metrics.request_ended(NO_ROUTE, refusal.status)
            raise
        query = exchange.query.decode("latin-1")
        route = path if path in self._routes.methods else FALLBACK_ROUTE
        return _Taken(self, route, handler, method, path, query, headers, context)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # A websocket is refused before it is accepted.
            await send({"type": f"{scope['type']}.close"})
            return
        exchange = ForeignExchange(scope, receive, send)
        try:
            taken = self.take(exchange)
        except Refusal as refusal:
            await refuse_foreign(refusal, exchange)
            return
        if taken is not None:
            await serve_foreign(taken, exchange)
            return
        context, scope = rollout_of_scope(scope)
        if context is not None:
            context = attrs.evolve(context, epoch=epoch_of(exchange.headers))
        await self._run_framework(scope, context, receive, send)

    async def _run_framework(
        self, scope: Scope, context: RolloutContext | None, receive: Receive, send: Send
    ) -> None:
        sending = _Sending(send)
        work = trio.CancelScope()
        self.in_work.enter(work)
        began = trio.current_time()
        try:
            with work, rollout_context(context):
                await self._routes.framework(scope, receive, uninterrupted(sending))
            if work.cancelled_caught and not sending.status:
                await send_answer(
                    ForeignExchange(scope, receive, sending), refusal_response(_stopping())
                )
        finally:
            self.in_work.leave(work)
            took_s = trio.current_time() - began
            self.metrics.framework_ended(scope["path"], sending.status, took_s)


class _Sending:
    """Passes messages on, and keeps the status; 0: none was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        await self._send(message)


def _stopping() -> Unavailable:
    return Unavailable(_STOPPING)


def _is_cancelled(error: BaseException) -> bool:
    """Nothing but cancellation, also out of nurseries."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)


async def _answer_of(handler: Handler, request: Request) -> Answer:
    try:
        return await handler(request)
    except Refusal as refusal:
        return refusal_response(refusal)
    except ExceptionGroup as group:
        leaf = _only_leaf(group)
        if isinstance(leaf, Refusal):
            return refusal_response(leaf)
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
