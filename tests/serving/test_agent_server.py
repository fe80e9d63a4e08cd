"""What is around an agent, whatever the agent: here one without hooks, and one that misbehaves."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gymtrio.context import RolloutContext, current_episode
from gymtrio.errors import InvalidRequest, NotFound, RolloutIdRequired
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.participants.agent.participant import AgentParticipant
from gymtrio.serving.agent_server import ActivationRun, AgentServer
from gymtrio.serving.cookies import SESSION_COOKIE, SessionCookies
from gymtrio.serving.http import Request, Response, cookie_header, cookies_set_by
from gymtrio.settings import Secret
from gymtrio.wire.native import AgentCloseReply, AgentSessionRequest
from tests.helpers.controlled import open_controlled
from tests.helpers.memory_archive import MemoryArchive

R0 = EpisodeId(RolloutId("r"))
COOKIES = SessionCookies(Secret("s" * 32), "agent")


class Echo:
    """Implements `Agent`: answers who it thinks is asking."""

    def __init__(self) -> None:
        self.sessions: set[str] = set()
        self.fault: Exception | None = None

    async def open_session(self, request: AgentSessionRequest) -> None:
        self.sessions.add(request.agent_session_id)

    async def respond(self, run: ActivationRun) -> dict[str, object]:
        if self.fault is not None:
            raise self.fault
        return {"episode": str(current_episode()), "index": run.index, "asked": run.params}

    async def close_session(self, session_id: str) -> AgentCloseReply:
        self.sessions.remove(session_id)
        return AgentCloseReply(agent_session_id=session_id)


def session_request(path: str, context: RolloutContext | None = None) -> Request:
    body: dict[str, Any] = {"agent_session_id": "s", "episode_id": {"rollout_id": "r"}}
    if path == "/v1/agent_sessions":
        body["task_id"] = {"taskset": "t", "task_id": "1"}
    return Request("POST", path, body=json.dumps(body).encode(), context=context)


ON_BEHALF = RolloutContext(R0)


def ask(context: RolloutContext | None = ON_BEHALF, body: bytes = b'{"a": 1}') -> Request:
    cookie = cookie_header({SESSION_COOKIE: COOKIES.issue("s")})
    return Request("POST", "/v1/responses", headers=(cookie,), body=body, context=context)


def answer_of(response: Response) -> Any:
    if response.on_done is not None:
        response.on_done(True)
    return json.loads(response.body)


async def test_a_session_from_open_to_close(autojump_clock: MockClock) -> None:
    """AGT-1: the cookie finds it; the activation runs on behalf of its episode."""
    agent = Echo()
    participant = AgentParticipant("agent", agent)
    server = AgentServer(agent, COOKIES, "agent", participant)
    opened = await server.open(session_request("/v1/agent_sessions"))
    assert cookies_set_by(opened.headers) == {SESSION_COOKIE: COOKIES.issue("s")}
    response = await server.respond(ask())
    assert not participant.ready()
    # Without hooks its session blocks also when the reply is out (AGT-4).
    assert answer_of(response) == {"episode": "r", "index": 0, "asked": {"a": 1}}
    assert not participant.ready()
    closed = await server.close(session_request("/v1/agent_sessions/close"))
    assert answer_of(closed)["agent_session_id"] == "s"
    assert participant.ready()
    again = await server.close(session_request("/v1/agent_sessions/close"))
    assert again.status == 200


async def test_an_agent_without_hooks_is_reported_and_its_session_closed_by_a_retirement(
    autojump_clock: MockClock,
) -> None:
    """AGT-4: restart-only."""
    agent = Echo()
    participant = AgentParticipant("agent", agent)
    server = AgentServer(agent, COOKIES, "agent", participant)
    async with open_controlled(participant, MemoryArchive()) as plane:
        await server.open(session_request("/v1/agent_sessions"))
        reply = await plane.prepare("c1", timeout_s=1)
        assert reply.report.details[0].doing == "cannot be exported: session s"
        await plane.retire(R0)
        assert agent.sessions == set()
        assert (await plane.prepare("c1")).phase == "prepared"


async def test_with_checkpointing_off_the_same_routes_serve(autojump_clock: MockClock) -> None:
    """SET-1: no participant; an activation without rollout context is its session's episode's."""
    agent = Echo()
    server = AgentServer(agent, COOKIES, "agent", None)
    await server.open(session_request("/v1/agent_sessions"))
    assert answer_of(await server.respond(ask(context=None)))["episode"] == "r"
    await server.close(session_request("/v1/agent_sessions/close"))
    with pytest.raises(NotFound):
        await server.respond(ask(context=None))


async def test_with_checkpointing_on_it_needs_the_context(autojump_clock: MockClock) -> None:
    """ID-7."""
    agent = Echo()
    server = AgentServer(agent, COOKIES, "agent", AgentParticipant("agent", agent))
    await server.open(session_request("/v1/agent_sessions"))
    with pytest.raises(RolloutIdRequired):
        await server.respond(ask(context=None))


@pytest.mark.parametrize("path", ["/v1/agent_sessions", "/v1/agent_sessions/close"])
async def test_path_and_body_must_name_one_episode(autojump_clock: MockClock, path: str) -> None:
    """ID-4."""
    agent = Echo()
    server = AgentServer(agent, COOKIES, "agent", AgentParticipant("agent", agent))
    request = session_request(path, RolloutContext(R0.next_attempt()))
    with pytest.raises(InvalidRequest, match="the path names episode r-a1, the body r"):
        await server.routes["POST", path](request)


async def test_a_fault_of_an_agent_blocks_nothing(autojump_clock: MockClock) -> None:
    """I34: the application answers 500; the session is still there."""

    class Exporting(Echo):
        async def export_agent_sessions(self, keys: object) -> object:
            return {}

        async def restore_agent_sessions(self, sessions: object) -> None:
            pass

        async def retire_agent_session(self, key: str) -> None:
            pass

    agent = Exporting()
    participant = AgentParticipant("agent", agent)
    server = AgentServer(agent, COOKIES, "agent", participant)
    await server.open(session_request("/v1/agent_sessions"))
    agent.fault = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        await server.respond(ask())
    assert participant.ready()
    agent.fault = None
    assert answer_of(await server.respond(ask()))["index"] == 0


async def test_a_body_that_is_no_object_is_refused(autojump_clock: MockClock) -> None:
    """CTL-17."""
    agent = Echo()
    server = AgentServer(agent, COOKIES, "agent", AgentParticipant("agent", agent))
    await server.open(session_request("/v1/agent_sessions"))
    with pytest.raises(InvalidRequest):
        await server.respond(ask(body=b"[1]"))


async def test_a_caller_that_leaves_takes_its_activation_with_it(
    autojump_clock: MockClock,
) -> None:
    """SRV-3."""

    class Slow(Echo):
        async def respond(self, run: ActivationRun) -> dict[str, object]:
            await trio.sleep_forever()
            raise AssertionError

    agent = Slow()
    participant = AgentParticipant("agent", agent)
    server = AgentServer(agent, COOKIES, "agent", participant)
    await server.open(session_request("/v1/agent_sessions"))
    with trio.move_on_after(1) as scope:
        await server.respond(ask())
    assert scope.cancelled_caught
    assert not participant.sessions.episodes.live
    assert len(participant.sessions.deliveries.tickets) == 0
