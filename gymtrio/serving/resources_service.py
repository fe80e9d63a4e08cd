"""The routes of a resources server: seed, tools, verify and close, by cookie (RES-3..6).

    @asynccontextmanager
    async def open_counter(host: ServiceHost[NoSettings]) -> AsyncIterator[Service]:
        yield resources_service(Counter(), host)

Two callers are served alike. The native one names its session in seed and close; one of the one-call
protocol seeds with its whole row, is given a session, and never closes. Whoever presents the cookie of
a session, also one issued before a crash, means that session.

While a request waits at the gate nothing of it is looked at but its session: the answer to a wrong one
is an answer, too, and none may leave while a checkpoint is prepared (I2).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from typing import Any, Final, TypeVar

import attrs
import trio

from gymtrio.episodes.episode import StepMode
from gymtrio.errors import InvalidRequest, NotFound, Refusal, SessionConflict, SettingsError
from gymtrio.ids import EpisodeId
from gymtrio.limits import CLEANUP_S_MAX, ID_CHARACTERS_MAX
from gymtrio.participants.resources import (
    Admitted,
    Mode,
    RequestKind,
    ResourcesParticipant,
    SessionId,
)
from gymtrio.ports import Randomness
from gymtrio.serving.cookies import SESSION_COOKIE, SessionCookies
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.http import (
    Handler,
    Request,
    Response,
    json_response,
    refusal_response,
    set_cookie,
)
from gymtrio.serving.resources_server import ResourcesServer, Verdict
from gymtrio.serving.resources_tools import Tool, object_of, structured
from gymtrio.strict import nearest_name, unstructure
from gymtrio.wire.native import (
    ADMISSION_HEADER,
    ONLY_SESSION_HEADER,
    VERIFY_HEADER,
    CloseSessionReply,
    CloseSessionRequest,
    SeedSessionReply,
    SeedSessionRequest,
)

E = TypeVar("E", bound=Enum)

CLOSED_SESSIONS_REMEMBERED_MAX: Final = 16_384
"""A seed that its own close has overtaken comes within seconds; this is minutes of the largest load."""

_SESSION_ID_BYTES: Final = 16
_NO_SESSION: Final = SessionId("")
_NATIVE_KEY: Final = "resources_session_id"
_RESERVED: Final = frozenset({"seed_session", "verify", "close_session", "health", "ready", "mcp"})

Work = Callable[[Admitted | None], Awaitable[Response]]
"""What answers a request once it is admitted; None: checkpointing is off."""


def resources_service(server: ResourcesServer, host: ServiceHost[Any]) -> Service:
    """Wire a server to its routes and, when checkpointing is on, to its participant.

    An author who serves more than tools adds to the result: `attrs.evolve(service, add_routes=...)`.

    Raises:
        SettingsError: the server declares a mode that there is not, lacks the hooks of its mode, or
            has a tool that is named like a route.
    """
    mode = _declared(server, "checkpoint_mode", Mode)
    verify = _declared(server, "checkpoint_verify", StepMode)
    if host.checkpoint.enabled:
        server.participant = ResourcesParticipant(
            host.instance, mode=mode, verify=verify, server=server
        )
    routes = ResourcesRoutes(
        server,
        participant=server.participant,
        needs_session=mode is not Mode.STATELESS,
        cookies=SessionCookies(host.session_secret, host.instance),
        cookie_name=f"{SESSION_COOKIE}-{host.instance}",
        randomness=host.randomness,
    )
    return Service(routes=routes.table(), fallback=routes.unknown, participant=server.participant)


def _declared(server: ResourcesServer, name: str, choices: type[E]) -> E:
    declared: object = getattr(server, name)
    for choice in choices:
        if declared in (choice, choice.value):
            return choice
    known = [str(choice.value) for choice in choices]
    raise SettingsError(
        f"{type(server).__name__}.{name} is {declared!r}{nearest_name(str(declared), known)}"
    )


@attrs.frozen
class _Target:
    """Which session a request means."""

    session_id: SessionId
    """Empty: none; only a stateless server takes that."""
    episode_id: EpisodeId | None
    """On whose behalf it comes, as far as the request says."""


class ResourcesRoutes:
    """Handlers around one server.

    Args:
        participant: None: checkpointing is off.
        needs_session: a request without a session is refused.
        cookie_name: one server's own, since a caller may keep those of several in one jar.
    """

    def __init__(
        self,
        server: ResourcesServer,
        *,
        participant: ResourcesParticipant | None,
        needs_session: bool,
        cookies: SessionCookies,
        cookie_name: str,
        randomness: Randomness,
    ) -> None:
        self._server = server
        self._participant = participant
        self._needs_session = needs_session
        self._cookies = cookies
        self._cookie_name = cookie_name
        self._randomness = randomness
        self._tools = {tool.name: tool for tool in server.tools()}
        self._closed: dict[_Target, None] = {}
        """Oldest first. With the episode, because a restored attempt may go on with the session."""
        taken = _RESERVED & self._tools.keys()
        if taken:
            raise SettingsError(
                f"{type(server).__name__} has tools named {', '.join(sorted(taken))}"
            )

    def table(self) -> dict[tuple[str, str], Handler]:
        """The routes, as `Service.routes` has them."""
        tools = {
            ("POST", f"/{name}"): partial(self.use, tool) for name, tool in self._tools.items()
        }
        return {
            **tools,
            ("POST", "/seed_session"): self.seed,
            ("POST", "/verify"): self.verify,
            ("POST", "/close_session"): self.close,
        }

    # -- seed ---------------------------------------------------------------------------------

    async def seed(self, request: Request) -> Response:
        body = object_of(request)
        if _NATIVE_KEY in body:
            native = structured(SeedSessionRequest, body)
            session_id = _checked(native.resources_session_id)
            target = _Target(session_id, _same_episode(request, native.episode_id))
            reply = unstructure(SeedSessionReply(resources_session_id=session_id))
            task_data = native.task_data
        else:
            # Never that of a cookie: who keeps a jar over several rows begins a session for each.
            target = _Target(self._new_session(), _episode(request))
            reply, task_data = {}, body

        async def work(admitted: Admitted | None) -> Response:
            if admitted is None or not admitted.already_seeded:
                await self._begin(target, task_data)
            return json_response(reply)

        response = await self._serve(RequestKind.SEED, request, target, work)
        if self._participant is None:
            return response
        header = (VERIFY_HEADER.encode(), self._participant.verify.value.encode())
        return attrs.evolve(response, headers=(*response.headers, header))

    async def _begin(self, target: _Target, task_data: dict[str, object]) -> None:
        self._refuse_closed(target)
        await self._server.seed(target.session_id, task_data)
        try:
            self._refuse_closed(target)
        except SessionConflict:
            await self._free(target.session_id)
            raise

    def _refuse_closed(self, target: _Target) -> None:
        if target in self._closed:
            raise SessionConflict(f"session {target.session_id!r} was closed already")

    # -- tools --------------------------------------------------------------------------------

    async def use(self, tool: Tool, request: Request) -> Response:
        target = self._required(request)

        async def work(admitted: Admitted | None) -> Response:
            return json_response(await tool.run(target.session_id, request))

        return await self._serve(RequestKind.TOOL, request, target, work, doing=tool.name)

    async def unknown(self, request: Request) -> Response:
        """A path that nobody serves: for whoever has a session, a tool that a model made up."""
        if request.method != "POST" or self._session(request) is None:
            raise NotFound(f"no route {request.method} {request.path}")
        name = request.path.removeprefix("/")[:ID_CHARACTERS_MAX]

        async def work(admitted: Admitted | None) -> Response:
            raise InvalidRequest(f"no tool named {name!r}{nearest_name(name, list(self._tools))}")

        return await self._serve(RequestKind.TOOL, request, self._required(request), work)

    # -- verify and close ---------------------------------------------------------------------

    async def verify(self, request: Request) -> Response:
        target = self._required(request)

        async def work(admitted: Admitted | None) -> Response:
            body = object_of(request)
            verdict = await self._server.verify(target.session_id, body)
            response = json_response({**body, **_reply_of(verdict)})
            if admitted is None:
                # There is no participant to do it, and a legacy caller never closes.
                deadline = trio.current_time() + CLEANUP_S_MAX
                with trio.CancelScope(shield=True, deadline=deadline):
                    await self._free(target.session_id)
            return response

        return await self._serve(RequestKind.VERIFY, request, target, work)

    async def close(self, request: Request) -> Response:
        body = object_of(request)
        named = _NATIVE_KEY in body
        if named:
            native = structured(CloseSessionRequest, body)
            session_id = _checked(native.resources_session_id)
            target = _Target(session_id, _same_episode(request, native.episode_id))
            reply = unstructure(CloseSessionReply(resources_session_id=session_id))
        else:
            target, reply = self._required(request), {}

        async def work(admitted: Admitted | None) -> Response:
            if admitted is None or not admitted.stale:
                if named:
                    self._remember_closed(target)
                await self._free(target.session_id)
            return json_response(reply)

        return await self._serve(RequestKind.CLOSE, request, target, work)

    def _remember_closed(self, target: _Target) -> None:
        self._closed[target] = None
        while len(self._closed) > CLOSED_SESSIONS_REMEMBERED_MAX:
            del self._closed[next(iter(self._closed))]

    async def _free(self, session_id: SessionId) -> None:
        free: Callable[[SessionId], Awaitable[None]] | None
        free = getattr(self._server, "retire_session_state", None)
        if free is not None:
            await free(session_id)

    # -- shared -------------------------------------------------------------------------------

    async def _serve(
        self,
        kind: RequestKind,
        request: Request,
        target: _Target,
        work: Work,
        doing: str | None = None,
    ) -> Response:
        if self._participant is None:
            return self._with_cookie(await work(None), target.session_id)
        async with self._participant.request(
            kind,
            session_id=target.session_id or None,
            episode_id=target.episode_id,
            doing=doing,
            epoch=request.epoch,
            refuse=request.header(ADMISSION_HEADER) == "refuse",
            only_session=request.header(ONLY_SESSION_HEADER) == "1",
        ) as admitted:
            try:
                response = await work(admitted)
            except Refusal as refusal:
                response = refusal_response(refusal)
            else:
                admitted.succeeded()
            response = self._with_cookie(response, target.session_id)
            return attrs.evolve(response, on_done=admitted.until_sent())

    def _with_cookie(self, response: Response, session_id: SessionId) -> Response:
        """Clients of the one-call protocol keep only what the last reply set."""
        if not session_id:
            return response
        header = set_cookie(self._cookie_name, self._cookies.issue(session_id))
        return attrs.evolve(response, headers=(*response.headers, header))

    def _session(self, request: Request) -> SessionId | None:
        cookie = request.cookies().get(self._cookie_name)
        session_id = None if cookie is None else self._cookies.read(cookie)
        return None if session_id is None else SessionId(session_id)

    def _required(self, request: Request) -> _Target:
        session_id = self._session(request)
        if session_id is None and self._needs_session:
            raise NotFound(f"{request.path}: no cookie of a session; seed one first")
        return _Target(session_id or _NO_SESSION, _episode(request))

    def _new_session(self) -> SessionId:
        return SessionId(f"session-{self._randomness.hex(_SESSION_ID_BYTES)}")


def _episode(request: Request) -> EpisodeId | None:
    return None if request.context is None else request.context.episode_id


def _same_episode(request: Request, episode_id: EpisodeId) -> EpisodeId:
    in_path = _episode(request)
    if in_path not in {None, episode_id}:
        raise InvalidRequest(f"episode_id: {episode_id} is not {in_path}, which the path names")
    return episode_id


def _checked(session_id: str) -> SessionId:
    if len(session_id) > ID_CHARACTERS_MAX or not session_id.isprintable():
        raise InvalidRequest(
            f"{_NATIVE_KEY}: at most {ID_CHARACTERS_MAX} printable characters are allowed"
        )
    return SessionId(session_id)


def _reply_of(verdict: Verdict) -> dict[str, object]:
    return {"reward": verdict} if isinstance(verdict, float | int) else dict(verdict)
