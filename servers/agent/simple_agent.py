"""The Simple Agent: call the model, execute the functions it calls, until it calls none (AGT-8).

    boundary          replay step        boundary       wait step     boundary     replay step
    loop state   ->   model call    ->   its reply ->   tool call ->  its output -> model call ...

A model call that was not answered before a checkpoint is asked for again after a crash, with the same
request. A tool call that was answered is in the boundary after it and never repeated. The history is
serialised at export only, never for a step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import attrs

from gymtrio.episodes.steps import StepMode
from gymtrio.errors import (
    BackendFailed,
    GymtrioError,
    InvalidCheckpointState,
    InvalidRequest,
    PeerRefused,
    SettingsError,
)
from gymtrio.participants.agent.hooks import RestoredSession
from gymtrio.participants.agent.participant import AgentParticipant
from gymtrio.serving.agent_server import ActivationRun, AgentServer, AgentSettings
from gymtrio.serving.app import ServerApp
from gymtrio.serving.client import Reply, ServerClient
from gymtrio.serving.cookies import SessionCookies
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.relayed import checkpoint_refusal, relaying
from gymtrio.storage.disk import ThreadDisk
from gymtrio.storage.slices import LoopSlice
from gymtrio.strict import MalformedValue, structure, unstructure
from gymtrio.wire.control import Kind
from gymtrio.wire.native import AgentCloseReply, AgentSessionRequest, ToolAccess
from servers.agent.loop import (
    Item,
    LoopState,
    Sampling,
    ToolAnswer,
    call_seed,
    offered_tools,
    tool_request,
)
from servers.agent.preambles import Preamble, read_preambles

_UNAVAILABLE: Final = frozenset({502, 503, 504})
"""Answers of what stands before a tool, not of the tool."""


def _at_least_one(instance: object, attribute: attrs.Attribute[Any], value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{attribute.name} must be at least 1, got {value}")


@attrs.frozen(kw_only=True)
class SimpleAgentSettings(AgentSettings):
    model: str = "policy"
    """The policy server: a name of the deployment, or a base URL."""
    max_steps: int | None = attrs.field(default=None, validator=_at_least_one)
    """Model calls of one activation; None: no limit."""
    preambles: dict[str, str] = attrs.field(factory=dict)
    """Taskset to a file of few-shot input items, see `read_preambles`."""
    sampling: Sampling = attrs.field(factory=Sampling)


@attrs.define(kw_only=True)
class SimpleSession:
    """What a session is made of between activations."""

    taskset: str
    tools: ToolAccess | None = None
    resources_cookies: dict[str, str] = attrs.field(factory=dict)
    records: list[dict[str, object]] = attrs.field(factory=list)


class SimpleAgent:
    """Implements `Agent` and `AgentHooks`."""

    def __init__(
        self, client: ServerClient, settings: SimpleAgentSettings, preambles: Mapping[str, Preamble]
    ) -> None:
        self._client = client
        self._settings = settings
        self._preambles = preambles
        self.sessions: dict[str, SimpleSession] = {}

    # -- sessions -----------------------------------------------------------------------------

    async def open_session(self, request: AgentSessionRequest) -> None:
        if request.sandbox_access is not None:
            raise InvalidRequest("this agent does not use sandboxes")
        tools = _direct_access(request.tool_accesses)
        self.sessions[request.agent_session_id] = SimpleSession(
            taskset=request.task_id.taskset,
            tools=tools,
            resources_cookies={} if tools is None else dict(tools.cookies),
        )

    async def close_session(self, session_id: str) -> AgentCloseReply:
        session = self.sessions.pop(session_id)
        return AgentCloseReply(
            agent_session_id=session_id,
            agent_observations={"source": "simple_agent", "records": session.records},
            resources_cookies=session.resources_cookies,
        )

    async def export_agent_sessions(self, keys: Sequence[str]) -> Mapping[str, object]:
        exported: dict[str, object] = {}
        slices = LoopSlice()
        for key in keys:
            if key in self.sessions:
                exported[key] = unstructure(self.sessions[key])
                await slices.turn()
        return exported

    async def restore_agent_sessions(self, sessions: Sequence[RestoredSession]) -> None:
        made: dict[str, SimpleSession] = {}
        slices = LoopSlice()
        for session in sessions:
            try:
                made[session.key] = structure(SimpleSession, session.state)
            except MalformedValue as error:
                raise InvalidCheckpointState(f"session {session.key}: {error}") from None
            await slices.turn()
        self.sessions |= made

    async def retire_agent_session(self, key: str) -> None:
        self.sessions.pop(key, None)

    # -- activations --------------------------------------------------------------------------

    async def respond(self, run: ActivationRun) -> dict[str, object]:
        session = self.sessions[run.session_id]
        state = _state_of(run, session)
        offered = offered_tools(run.params)
        while True:
            while state.pending:
                await run.steps.boundary(partial(unstructure, state))
                call = state.pending[0]
                answer = await run.steps.step(
                    partial(self._tool, session, call, offered, state.resources_cookies),
                    mode=StepMode.WAIT,
                    doing=f"tool {call.get('name')}",
                )
                state.tool_answered(answer)
            if state.is_over(self._settings.max_steps):
                break
            await run.steps.boundary(partial(unstructure, state))
            response = await self._ask(run, session, state)
            state.model_answered(_object(response), response.cookies())
        session.resources_cookies = state.resources_cookies
        session.records = [*session.records, *state.records]
        return state.reply()

    async def _ask(self, run: ActivationRun, session: SimpleSession, state: LoopState) -> Reply:
        request = state.request(
            run.params,
            self._preambles.get(session.taskset, ()),
            self._settings.sampling,
            self._seed(run, state),
        )

        async def call() -> Reply | GymtrioError:
            # A failed call left nothing behind at the model, so it is an answer like others: were it
            # raised while a checkpoint is open, the activation would start from its input (STEP-4).
            try:
                with relaying("the model"):
                    reply = await self._client.request(
                        self._settings.model,
                        "POST",
                        "/v1/responses",
                        json=request,
                        cookies=state.model_cookies,
                    )
                    return reply.raise_for_status()
            except GymtrioError as error:
                return error

        answer = await run.steps.step(call, mode=StepMode.REPLAY, doing="awaiting the model")
        if isinstance(answer, GymtrioError):
            raise answer
        return answer

    def _seed(self, run: ActivationRun, state: LoopState) -> int | None:
        seed = self._settings.sampling.seed
        if seed is None:
            return None
        return call_seed(seed, run.episode_id.rollout_id, run.index, state.model_calls)

    async def _tool(
        self,
        session: SimpleSession,
        call: Item,
        offered: frozenset[str],
        cookies: Mapping[str, str],
    ) -> ToolAnswer:
        if session.tools is None:
            offered = frozenset()
        arguments = tool_request(call, offered)
        if isinstance(arguments, ToolAnswer):
            return arguments
        assert session.tools is not None
        with relaying(f"tool {call['name']}"):
            reply = await self._client.request(
                self._tool_server(session.tools),
                "POST",
                f"/{call['name']}",
                json=arguments,
                cookies=cookies,
                headers=[*session.tools.headers.items()],
            )
        _check_from_tool(reply)
        return ToolAnswer(reply.body.decode("utf-8", "replace"), reply.cookies())

    def _tool_server(self, tools: ToolAccess) -> str:
        """By name where the deployment knows it: after a restart its address may be another."""
        try:
            self._client.url_of(tools.name)
        except SettingsError:
            return tools.base_url
        return tools.name


def _check_from_tool(reply: Reply) -> None:
    """Tell a tool's answer, of whatever status, from what stands before it.

    Raises:
        Refusal: it is none; the model must not read it as one.
    """
    try:
        reply.raise_for_status()
    except PeerRefused as error:
        known = checkpoint_refusal(error.code, error.detail)
        if known is not None:
            raise known from error
        if reply.status in _UNAVAILABLE:
            raise BackendFailed(f"tool: {error}") from error


def _direct_access(accesses: Sequence[ToolAccess]) -> ToolAccess | None:
    unusable = [a.name for a in accesses if a.required and a.kind != "direct_http"]
    if unusable:
        raise InvalidRequest(f"this agent reaches tools by direct_http only: {', '.join(unusable)}")
    direct = [access for access in accesses if access.kind == "direct_http"]
    if len(direct) > 1:
        raise InvalidRequest("this agent takes one direct_http tool access, not several")
    return direct[0] if direct else None


def _state_of(run: ActivationRun, session: SimpleSession) -> LoopState:
    if run.steps.continuation is None:
        _check_params(run.params)
        return LoopState(resources_cookies=dict(session.resources_cookies))
    try:
        return structure(LoopState, run.steps.continuation)
    except MalformedValue as error:
        raise InvalidCheckpointState(f"boundary of session {run.session_id}: {error}") from None


def _check_params(params: Mapping[str, object]) -> None:
    asked = params.get("input")
    if not isinstance(asked, str | list) or (
        isinstance(asked, list) and not all(isinstance(item, dict) for item in asked)
    ):
        raise InvalidRequest("input: expected text, or a list of input items")
    if params.get("stream"):
        raise InvalidRequest("stream: an activation is answered whole")


def _object(reply: Reply) -> dict[str, object]:
    with relaying("the model"):
        value = reply.json()
    if not isinstance(value, dict):
        raise BackendFailed("the model's response is not a JSON object")
    return value


@asynccontextmanager
async def open_simple_agent(host: ServiceHost[SimpleAgentSettings]) -> AsyncIterator[Service]:
    """Serve the agent for as long as the block runs."""
    preambles = await read_preambles(host.settings.preambles, ThreadDisk())
    agent = SimpleAgent(host.client, host.settings, preambles)
    participant = AgentParticipant(host.instance, agent) if host.checkpoint.enabled else None
    cookies = SessionCookies(host.session_secret, host.instance)
    server = AgentServer(agent, cookies, host.instance, participant)
    yield Service(routes=server.routes, participant=participant)


app = ServerApp(
    kind=Kind.AGENT,
    default_instance="simple_agent",
    settings_class=SimpleAgentSettings,
    open_service=open_simple_agent,
)
