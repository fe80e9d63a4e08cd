"""Native episodes in one process: real environment and agent servers, other servers of a test's choice.

A crash is leaving the block of a `Rig`; the next block with the same archive is the next incarnation.
What survives a crash in real life (a model behind its URL, a foreign resources server) is a `Scripted`
server, which a test passes to both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from gymtrio.context import RolloutContext
from gymtrio.errors import PeerRefused
from gymtrio.ids import EpisodeId
from gymtrio.serving.app import ServerApp
from gymtrio.serving.client import ServerClient
from gymtrio.serving.controlchannel import HttpControlChannel
from gymtrio.serving.deployment import parse_deployment
from gymtrio.serving.embedded import open_embedded
from gymtrio.serving.host import HostPorts
from gymtrio.serving.http import Request, Response, json_response
from gymtrio.settings import Secret
from gymtrio.strict import unstructure
from gymtrio.wire.control import REQUESTS, Kind
from tests.helpers.clocks import FollowingClock
from tests.helpers.memory_archive import Door, MemoryArchive
from tests.helpers.serving import NoSettings, make_app

TOKEN: Final = "0123456789abcdef-token"
ENV_APP: Final = "servers.environment.single_agent_turn:app"
AGENT_APP: Final = "servers.agent.simple_agent:app"


@attrs.frozen
class Call:
    """One request that a scripted server was sent."""

    path: str
    body: Any
    episode: str | None
    """Capture key of the rollout prefix."""
    cookies: dict[str, str]
    headers: dict[str, str]
    captures_tokens: bool


class Scripted:
    """A server that answers as it is told, and keeps every request; one `Door` per path."""

    def __init__(self, kind: Kind, answers: Mapping[str, Any]) -> None:
        self.kind = kind
        self.answers = dict(answers)
        """Path to a JSON value, a `Response`, or a function from a `Call` to either."""
        self.calls: list[Call] = []
        self.doors: dict[str, Door] = {}
        self.left: list[str] = []
        """Paths of calls whose caller left before the answer."""

    def door(self, path: str) -> Door:
        return self.doors.setdefault(path, Door())

    def paths(self) -> list[str]:
        return [call.path for call in self.calls]

    def app(self, name: str) -> ServerApp[NoSettings]:
        return make_app({}, fallback=self._serve, kind=self.kind, name=name)

    async def _serve(self, request: Request) -> Response:
        context = request.context
        call = Call(
            path=request.path,
            body=request.json(),
            episode=None if context is None else str(context.episode_id),
            cookies=request.cookies(),
            headers={k.decode(): v.decode() for k, v in request.headers},
            captures_tokens=context is not None and context.capture_tokens,
        )
        self.calls.append(call)
        try:
            await self.door(request.path).pass_through()
        except trio.Cancelled:
            self.left.append(request.path)
            raise
        answer = self.answers[request.path]
        if callable(answer):
            answer = answer(call)
        return answer if isinstance(answer, Response) else json_response(answer)


class Rig:
    """One incarnation of a deployment, and the controller's side of it."""

    def __init__(self, client: ServerClient, clock: FollowingClock, nursery: trio.Nursery) -> None:
        self.client = client
        self.nursery = nursery
        self._clock = clock
        self._channel = HttpControlChannel(client, Secret(TOKEN))

    async def run(
        self,
        episode_id: EpisodeId,
        task_input: Mapping[str, object],
        *,
        taskset: str = "tasks",
        headers: Any = (),
        context: RolloutContext | None = None,
    ) -> Any:
        """A `/run`, and its reply whatever its status."""
        path = "/run" if context is None else context.path("/run")
        reply = await self.client.request(
            "env",
            "POST",
            path,
            json={
                "episode_id": unstructure(episode_id),
                "task": {
                    "task_id": {"taskset": taskset, "task_id": "1"},
                    "task_input": dict(task_input),
                },
            },
            headers=headers,
            context=None,
        )
        return reply.json()

    async def acknowledge(self, episode_id: EpisodeId, headers: Any = ()) -> Any:
        reply = await self.client.request(
            "env",
            "POST",
            "/run/ack",
            json={"episode_id": unstructure(episode_id)},
            headers=headers,
            context=None,
        )
        return reply.json()

    def start_run(self, *arguments: Any, **options: Any) -> list[Any]:
        """A `/run` in the background; its reply appears in the list."""
        replies: list[Any] = []

        async def call() -> None:
            replies.append(await self.run(*arguments, **options))

        self.nursery.start_soon(call)
        return replies

    async def control(
        self, server: str, operation: str, name: str = "c1", timeout_s: float = 10, **fields: Any
    ) -> Any:
        request = REQUESTS[operation](
            checkpoint_id=name,  # type: ignore[arg-type]
            deadline_ts=self._clock.now_s() + timeout_s,
            **fields,
        )
        deadline = trio.current_time() + timeout_s + 5
        return await self._channel.call(server, operation, request, deadline)

    async def status(self, server: str) -> Any:
        return await self._channel.call(server, "status", None, trio.current_time() + 5)

    async def participants(self) -> list[str]:
        """Those of `env`, `agent` and `tools` that take part, in the order of a prepare."""
        found = []
        for server in ("env", "agent", "tools"):
            try:
                await self.status(server)
            except PeerRefused as error:
                if error.status != 404:
                    raise
            else:
                found.append(server)
        return found

    async def checkpoint(self, name: str, *scope: EpisodeId, directory: str | None = None) -> Any:
        """Prepare in order and commit everywhere; it stays open.

        Returns:
            The capture keys that each server exported.
        """
        servers = await self.participants()
        for server in servers:
            reply = await self.control(server, "prepare", name)
            assert reply["phase"] == "prepared", (server, reply)
        exported = {}
        for server in servers:
            reply = await self.control(
                server, "commit", name, checkpoint_dir=directory or name, episode_ids=scope
            )
            exported[server] = reply["episode_ids"]
        return exported

    async def resume(self, name: str) -> None:
        for server in reversed(await self.participants()):
            await self.control(server, "resume", name)

    async def restore(
        self,
        directory: str,
        *scope: EpisodeId,
        skipping: str = "",
        epoch: str | None = None,
        name: str = "x1",
    ) -> None:
        """Restore everywhere but at `skipping`, and resume."""
        servers = await self.participants()
        fields: dict[str, Any] = {} if epoch is None else {"execution_epoch": epoch}
        for server in servers:
            if server != skipping:
                await self.control(
                    server, "restore", name, checkpoint_dir=directory, episode_ids=scope, **fields
                )
        for server in reversed(servers):
            await self.control(server, "resume", name)

    async def retire(self, *scope: EpisodeId, name: str = "c1") -> None:
        """Callers first."""
        for server in await self.participants():
            await self.control(server, "retire", name, timeout_s=30, episode_ids=scope)


@asynccontextmanager
async def open_rig(
    archive: MemoryArchive | None = None,
    *,
    env: Mapping[str, object] | None = None,
    agent: Mapping[str, object] | None = None,
    scripted: Mapping[str, Scripted] | None = None,
    apps: Mapping[str, str] | None = None,
    checkpointing: bool = True,
    clock_of: Callable[[], FollowingClock] = FollowingClock,
) -> AsyncIterator[Rig]:
    """Run a deployment of `env`, and whatever else is named, for as long as the block runs.

    Args:
        env: settings of the environment server; by default it serves everything by `tools`, `agent`.
        agent: settings of the Simple Agent; None: it is scripted, or not there.
        scripted: servers by name.
        apps: real servers by name, such as `{"tools": "servers.resources.counter:app"}`.
    """
    default = {"default": {"resources": "tools", "agent": "agent"}}
    servers: dict[str, object] = {"env": {"app": ENV_APP, "settings": default | dict(env or {})}}
    if agent is not None:
        servers["agent"] = {"app": AGENT_APP, "settings": dict(agent)}
    for name, server in (scripted or {}).items():
        servers[name] = {"app": "scripted:app", "kind": server.kind.value}
    for name, app in (apps or {}).items():
        servers[name] = {"app": app}
    block: dict[str, object] = {"servers": servers, "session_secret": "s" * 32}
    if checkpointing:
        block["checkpoint"] = {"enabled": True, "control_auth_token": TOKEN, "root": "/c"}
    clock = clock_of()
    ports = HostPorts(wall_clock=clock, archive=archive or MemoryArchive())
    apps_given = {name: server.app(name) for name, server in (scripted or {}).items()}
    async with open_embedded(parse_deployment(block), apps=apps_given, ports=ports) as embedded:
        async with trio.open_nursery() as nursery:
            yield Rig(embedded.client, clock, nursery)
            nursery.cancel_scope.cancel()
