"""One turn of one agent, then verification: the native single-agent protocol (ENV-5).

    stage         step                  what it leaves in the boundary after it
    seed          replay                resources cookies, how verification may be repeated
    open_agent    replay                agent cookies
    invoke_agent  replay                the agent's response
    close_agent   wait                  observations, the resources cookies as the agent left them
    verify        as the seed reported  the result
    return        -

A boundary stands before every stage, so that none is repeated once it was completed. The last one holds
what is answered and is recorded by the environment server, whatever the protocol. Session ids are
chosen here and stand in the first boundary: a seed that is repeated after a crash finds the session of
the first, and a close reaches a session whose seed was never answered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from enum import Enum
from functools import partial
from typing import Final

import attrs

from gymtrio.episodes.steps import StepMode
from gymtrio.errors import InvalidCheckpointState, InvalidRequest, TransportError
from gymtrio.participants.environment import EnvironmentParticipant
from gymtrio.ports import Randomness
from gymtrio.serving.app import ServerApp
from gymtrio.serving.client import Reply, ServerClient
from gymtrio.serving.environment_server import (
    FIRST_EPOCH_BYTES,
    EnvironmentServer,
    EnvironmentSettings,
    EpisodeRun,
    failing_as,
)
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.strict import MalformedValue, nearest_name, structure, unstructure
from gymtrio.wire.control import Kind
from gymtrio.wire.native import (
    ACTIVATION_HEADER,
    ONLY_SESSION_HEADER,
    VERIFY_HEADER,
    AgentCloseReply,
    AgentCloseRequest,
    AgentSessionReply,
    AgentSessionRequest,
    CloseSessionRequest,
    SeedSessionReply,
    SeedSessionRequest,
    ToolAccess,
)

SESSION_ID_BYTES: Final = 16


@attrs.frozen(kw_only=True)
class Servers:
    """Who serves a taskset: names of the deployment, or base URLs."""

    resources: str
    agent: str


@attrs.frozen(kw_only=True)
class SingleAgentTurnSettings(EnvironmentSettings):
    tasksets: dict[str, Servers] = attrs.field(factory=dict)
    default: Servers | None = None
    """For tasksets that are not named; None: those are refused."""

    def serving(self, taskset: str) -> Servers:
        """
        Raises:
            InvalidRequest: nobody serves this taskset.
        """
        servers = self.tasksets.get(taskset, self.default)
        if servers is None:
            known = nearest_name(taskset, list(self.tasksets)) if self.tasksets else ""
            raise InvalidRequest(f"taskset {taskset!r} is not served here{known}")
        return servers


class Stage(Enum):
    """What is to be done next; names stand in checkpoints and are never reused."""

    SEED = "seed"
    OPEN_AGENT = "open_agent"
    INVOKE_AGENT = "invoke_agent"
    CLOSE_AGENT = "close_agent"
    VERIFY = "verify"
    RETURN = "return"


@attrs.frozen(kw_only=True)
class Handles:
    """What the episode holds at other servers."""

    resources_session_id: str
    agent_session_id: str
    resources_cookies: dict[str, str] = attrs.field(factory=dict)
    agent_cookies: dict[str, str] = attrs.field(factory=dict)
    verify: StepMode = StepMode.WAIT
    """As the seed reply reported it, so that a restored episode still knows (RES-4)."""
    sandbox_access: dict[str, object] | None = None


@attrs.frozen(kw_only=True)
class Turn:
    """Where the episode is: the whole of a boundary."""

    next: Stage
    handles: Handles
    response: dict[str, object] | None = None
    observations: dict[str, object] | None = None
    result: dict[str, object] | None = None

    def having(self, **changes: object) -> Handles:
        return attrs.evolve(self.handles, **changes)  # type: ignore[arg-type]


def begin(randomness: Randomness) -> Turn:
    """A turn from its input, its session ids chosen."""
    return Turn(
        next=Stage.SEED,
        handles=Handles(
            resources_session_id=f"resources-session-{randomness.hex(SESSION_ID_BYTES)}",
            agent_session_id=f"agent-session-{randomness.hex(SESSION_ID_BYTES)}",
        ),
    )


def verify_mode(header: str | None) -> StepMode:
    """Read what a resources server says of its verification: absent or unknown means wait."""
    return StepMode.REPLAY if header == StepMode.REPLAY.value else StepMode.WAIT


class TurnRunner:
    """Runs the stages of one episode.

    A stage reads `turn` and returns the next one; `turn` is replaced only when its step has ended.
    """

    def __init__(self, client: ServerClient, servers: Servers, run: EpisodeRun, turn: Turn) -> None:
        self.turn = turn
        self._client = client
        self._servers = servers
        self._run = run
        # Before the seed is sent: its reply may be lost, and the session made all the same.
        run.cleanups.register("the resources session", self._close_resources)
        self._agent_cleanup = run.cleanups.register("the agent session", self._close_agent)
        if turn.next in (Stage.VERIFY, Stage.RETURN):
            self._agent_cleanup.settle()

    async def run(self) -> dict[str, object]:
        steps = self._run.steps
        while self.turn.next is not Stage.RETURN:
            await steps.boundary(partial(unstructure, self.turn))
            stage = self.turn.next
            work, mode = STAGES[stage]
            with failing_as(stage.value):
                self.turn = await steps.step(
                    partial(work, self, self.turn),
                    mode=mode or self.turn.handles.verify,
                    doing=stage.value,
                )
            if stage is Stage.CLOSE_AGENT:
                self._agent_cleanup.settle()
        assert self.turn.result is not None
        return self.turn.result

    # -- stages -------------------------------------------------------------------------------

    async def seed(self, turn: Turn) -> Turn:
        session_id = turn.handles.resources_session_id
        request = self._run.request
        answer = await self._post(
            self._servers.resources,
            "/seed_session",
            SeedSessionRequest(
                resources_session_id=session_id,
                episode_id=request.episode_id,
                task_id=request.task.task_id,
                task_data=request.task.task_input.task_data,
            ),
            idempotency_key=f"seed-{session_id}",
            only_session=True,
        )
        seeded = structure(SeedSessionReply, answer.json())
        _check_session(answer, seeded.resources_session_id, session_id)
        handles = turn.having(
            resources_cookies=answer.cookies(),
            verify=verify_mode(answer.header(VERIFY_HEADER)),
            sandbox_access=seeded.sandbox_access,
        )
        return attrs.evolve(turn, next=Stage.OPEN_AGENT, handles=handles)

    async def open_agent(self, turn: Turn) -> Turn:
        session_id = turn.handles.agent_session_id
        request = self._run.request
        tools = ToolAccess(
            kind="direct_http",
            name=self._servers.resources,
            base_url=self._client.url_of(self._servers.resources),
            cookies=turn.handles.resources_cookies,
        )
        answer = await self._post(
            self._servers.agent,
            "/v1/agent_sessions",
            AgentSessionRequest(
                agent_session_id=session_id,
                episode_id=request.episode_id,
                task_id=request.task.task_id,
                tool_accesses=(tools,),
                sandbox_access=turn.handles.sandbox_access,
            ),
            idempotency_key=f"open-{session_id}",
            only_session=True,
        )
        opened = structure(AgentSessionReply, answer.json())
        _check_session(answer, opened.agent_session_id, session_id)
        handles = turn.having(agent_cookies=answer.cookies())
        return attrs.evolve(turn, next=Stage.INVOKE_AGENT, handles=handles)

    async def invoke_agent(self, turn: Turn) -> Turn:
        answer = await self._client.request(
            self._servers.agent,
            "POST",
            "/v1/responses",
            json=self._run.request.task.task_input.responses_create_params,
            cookies=turn.handles.agent_cookies,
            headers=[(ACTIVATION_HEADER, "0")],
            context=self._run.context,
        )
        response = _object(answer.raise_for_status())
        handles = turn.having(agent_cookies={**turn.handles.agent_cookies, **answer.cookies()})
        return attrs.evolve(turn, next=Stage.CLOSE_AGENT, handles=handles, response=response)

    async def close_agent(self, turn: Turn) -> Turn:
        answer = await self._close_agent()
        closed = structure(AgentCloseReply, answer.json())
        _check_session(answer, closed.agent_session_id, turn.handles.agent_session_id)
        handles = turn.handles
        if closed.resources_cookies is not None:
            handles = turn.having(resources_cookies=closed.resources_cookies)
        return attrs.evolve(
            turn, next=Stage.VERIFY, handles=handles, observations=closed.agent_observations
        )

    async def verify(self, turn: Turn) -> Turn:
        task_input = self._run.request.task.task_input
        answer = await self._client.request(
            self._servers.resources,
            "POST",
            "/verify",
            json={
                **task_input.task_data,
                "responses_create_params": task_input.responses_create_params,
                "response": turn.response,
            },
            cookies=turn.handles.resources_cookies,
            context=self._run.context,
        )
        result = _object(answer.raise_for_status())
        if turn.observations is not None:
            result["ng_agent_observations"] = turn.observations
        return attrs.evolve(turn, next=Stage.RETURN, result=result)

    # -- calls --------------------------------------------------------------------------------

    async def _post(
        self,
        server: str,
        path: str,
        message: object,
        *,
        idempotency_key: str,
        cookies: dict[str, str] | None = None,
        only_session: bool = False,
    ) -> Reply:
        reply = await self._client.request(
            server,
            "POST",
            path,
            json=unstructure(message),
            headers=[(ONLY_SESSION_HEADER, "1")] if only_session else (),
            cookies=cookies,
            context=self._run.context,
            idempotency_key=idempotency_key,
        )
        return reply.raise_for_status()

    async def _close_agent(self) -> Reply:
        handles = self.turn.handles
        return await self._post(
            self._servers.agent,
            "/v1/agent_sessions/close",
            AgentCloseRequest(
                agent_session_id=handles.agent_session_id, episode_id=self._run.request.episode_id
            ),
            cookies=handles.agent_cookies,
            idempotency_key=f"close-{handles.agent_session_id}",
        )

    async def _close_resources(self) -> Reply:
        handles = self.turn.handles
        return await self._post(
            self._servers.resources,
            "/close_session",
            CloseSessionRequest(
                resources_session_id=handles.resources_session_id,
                episode_id=self._run.request.episode_id,
            ),
            cookies=handles.resources_cookies,
            idempotency_key=f"close-{handles.resources_session_id}",
        )


STAGES: Final[
    dict[Stage, tuple[Callable[[TurnRunner, Turn], Awaitable[Turn]], StepMode | None]]
] = {
    Stage.SEED: (TurnRunner.seed, StepMode.REPLAY),
    Stage.OPEN_AGENT: (TurnRunner.open_agent, StepMode.REPLAY),
    Stage.INVOKE_AGENT: (TurnRunner.invoke_agent, StepMode.REPLAY),
    Stage.CLOSE_AGENT: (TurnRunner.close_agent, StepMode.WAIT),
    Stage.VERIFY: (TurnRunner.verify, None),
}
"""What each stage does and in which mode; None: the mode that the seed reply reported."""


def _check_session(answer: Reply, said: str, asked: str) -> None:
    if said != asked:
        raise MalformedValue("", f"{answer.where}: answered for session {said!r}, not {asked!r}")


def _object(answer: Reply) -> dict[str, object]:
    value = answer.json()
    if not isinstance(value, dict):
        raise TransportError(f"{answer.where}: the reply is not a JSON object")
    return value


def _continued(run: EpisodeRun) -> Turn:
    try:
        return structure(Turn, run.steps.continuation)
    except MalformedValue as error:
        raise InvalidCheckpointState(f"boundary of {run.request.episode_id}: {error}") from None


@asynccontextmanager
async def open_single_agent_turn(
    host: ServiceHost[SingleAgentTurnSettings],
) -> AsyncIterator[Service]:
    """Serve the protocol for as long as the block runs."""
    participant = EnvironmentParticipant(host.instance) if host.checkpoint.enabled else None

    async def protocol(run: EpisodeRun) -> dict[str, object]:
        servers = host.settings.serving(run.request.task.task_id.taskset)
        turn = begin(host.randomness) if run.steps.continuation is None else _continued(run)
        return await TurnRunner(host.client, servers, run, turn).run()

    server = EnvironmentServer(
        protocol, host.settings, participant, first_epoch=host.randomness.hex(FIRST_EPOCH_BYTES)
    )
    yield Service(routes=server.routes, participant=participant)


app = ServerApp(
    kind=Kind.ENVIRONMENT,
    default_instance="single_agent_turn",
    settings_class=SingleAgentTurnSettings,
    open_service=open_single_agent_turn,
)
