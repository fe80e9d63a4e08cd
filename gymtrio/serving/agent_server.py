"""What agent servers share: sessions over HTTP, around an agent that answers activations (AGT).

    POST /v1/agent_sessions          open a session; idempotent for the same id and attempt
    POST /v1/responses               one activation of the session whose cookie is sent
    POST /v1/agent_sessions/close    stop its activation, free it, give the receipt

An agent that has the hooks of `gymtrio.participants.agent.hooks` takes part in checkpoints with its
sessions; one without is restart-only (AGT-4).
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Protocol, TypeVar

import attrs

from gymtrio.context import rollout_context
from gymtrio.episodes.admission import Admission
from gymtrio.episodes.episode import Episode
from gymtrio.episodes.signal import Signal
from gymtrio.episodes.steps import Steps
from gymtrio.errors import InvalidRequest, RolloutIdRequired
from gymtrio.ids import EpisodeId
from gymtrio.participants.agent.hooks import Hooks
from gymtrio.participants.agent.participant import AgentParticipant
from gymtrio.participants.agent.sessions import AgentSessions
from gymtrio.participants.digest import json_digest
from gymtrio.serving.cookies import SESSION_COOKIE, SessionCookies
from gymtrio.serving.http import Handler, Request, Response, json_response
from gymtrio.serving.relayed import delivering
from gymtrio.serving.workers import only_one_worker
from gymtrio.strict import MalformedValue, structure, unstructure
from gymtrio.wire.native import (
    ACTIVATION_HEADER,
    ADMISSION_HEADER,
    ONLY_SESSION_HEADER,
    AgentCloseReply,
    AgentCloseRequest,
    AgentSessionReply,
    AgentSessionRequest,
)

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class AgentSettings:
    """What every agent server can be told."""

    num_workers: int = attrs.field(default=1, validator=only_one_worker)
    """More than one is refused (AGT-9)."""


@attrs.frozen(kw_only=True)
class ActivationRun:
    """One activation, as its agent sees it. The current context is that of its episode."""

    session_id: str
    episode_id: EpisodeId
    index: int
    """How many activations of the session came before."""
    params: dict[str, object]
    """The request, as the Responses API takes it."""
    steps: Steps


class Agent(Protocol):
    """What an author provides, besides the hooks for checkpoints."""

    async def open_session(self, request: AgentSessionRequest) -> None:
        """Make a session under `request.agent_session_id`; it is not there yet.

        Raises:
            Refusal: it cannot be made. Then, and when cancelled, nothing of it is left.
        """
        ...

    async def respond(self, run: ActivationRun) -> dict[str, object]:
        """Answer one activation; continues at `run.steps.continuation` when that is not None.

        Returns:
            A response, as the Responses API gives it.

        Raises:
            Refusal: the activation failed; its caller is told so.
        """
        ...

    async def close_session(self, session_id: str) -> AgentCloseReply:
        """Free a session, of which nothing runs any more, and say what there is to say of it."""
        ...


class AgentServer:
    """The routes of an agent server.

    Args:
        participant: None: checkpointing is off. The sessions are there all the same.
    """

    def __init__(
        self,
        agent: Agent,
        cookies: SessionCookies,
        instance: str,
        participant: AgentParticipant | None,
    ) -> None:
        self.participant = participant
        if participant is not None:
            self.sessions = participant.sessions
        else:
            self.sessions = AgentSessions(Admission(), Signal(), Hooks(instance, agent).retire)
        self._agent = agent
        self._cookies = cookies

    @property
    def routes(self) -> dict[tuple[str, str], Handler]:
        return {
            ("POST", "/v1/agent_sessions"): self.open,
            ("POST", "/v1/responses"): self.respond,
            ("POST", "/v1/agent_sessions/close"): self.close,
        }

    async def open(self, request: Request) -> Response:
        message = _read(AgentSessionRequest, request)
        _check_context(request, message.episode_id)
        session_id = message.agent_session_id
        try:
            cookie = self._cookies.issue(session_id)
        except ValueError as error:
            raise InvalidRequest(f"agent_session_id: {error}") from None
        context = request.context_of(message.episode_id)
        with rollout_context(context):
            await self.sessions.seed(
                message.episode_id,
                session_id,
                partial(self._agent.open_session, message),
                only=request.header(ONLY_SESSION_HEADER) == "1",
                epoch=context.epoch,
                refuse=_refuses(request),
            )
        reply = AgentSessionReply(agent_session_id=session_id)
        return json_response(unstructure(reply), cookies={SESSION_COOKIE: cookie})

    async def respond(self, request: Request) -> Response:
        if request.context is None and self.participant is not None:
            raise RolloutIdRequired(
                "with checkpointing on, an activation is asked for under /ng-rollout/<capture key>"
            )
        session_id = self._session_of(request)
        params = request.json()
        if not isinstance(params, dict):
            raise InvalidRequest("the body is a JSON object")
        if request.context is not None:
            episode_id = request.context.episode_id
        else:
            episode_id = self.sessions.owner(session_id)
        context = request.context_of(episode_id)

        def work(episode: Episode, index: int) -> Awaitable[dict[str, object]]:
            return self._agent.respond(
                ActivationRun(
                    session_id=session_id,
                    episode_id=episode_id,
                    index=index,
                    params=params,
                    steps=episode,
                )
            )

        async def activation() -> Response:
            with rollout_context(context):
                reply = await self.sessions.activate(
                    episode_id,
                    session_id,
                    work,
                    index=_index_of(request),
                    request_digest=json_digest(params),
                    epoch=context.epoch,
                    refuse=_refuses(request),
                )
            return json_response(reply)

        return await delivering(activation, partial(self.sessions.deliveries.deliver, session_id))

    async def close(self, request: Request) -> Response:
        message = _read(AgentCloseRequest, request)
        _check_context(request, message.episode_id)
        session_id = message.agent_session_id

        async def finish() -> dict[str, object]:
            reply: dict[str, object] = unstructure(await self._agent.close_session(session_id))
            return reply

        context = request.context_of(message.episode_id)
        with rollout_context(context):
            receipt = await self.sessions.close(
                message.episode_id,
                session_id,
                finish,
                epoch=context.epoch,
                refuse=_refuses(request),
            )
        return json_response(receipt or unstructure(AgentCloseReply(agent_session_id=session_id)))

    def _session_of(self, request: Request) -> str:
        cookie = request.cookies().get(SESSION_COOKIE)
        session_id = None if cookie is None else self._cookies.read(cookie)
        if session_id is None:
            raise InvalidRequest(
                "an activation needs a session: open one at /v1/agent_sessions and send its cookie"
            )
        return session_id


def _read(cls: type[T], request: Request) -> T:
    try:
        return structure(cls, request.json())
    except MalformedValue as error:
        raise InvalidRequest(str(error)) from None


def _check_context(request: Request, episode_id: EpisodeId) -> None:
    if request.context is not None and request.context.episode_id != episode_id:
        raise InvalidRequest(
            f"the path names episode {request.context.episode_id}, the body {episode_id}"
        )


def _refuses(request: Request) -> bool:
    return request.header(ADMISSION_HEADER) == "refuse"


def _index_of(request: Request) -> int | None:
    text = request.header(ACTIVATION_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise InvalidRequest(f"{ACTIVATION_HEADER}: expected a count, got {text[:20]!r}")
    return int(text)
