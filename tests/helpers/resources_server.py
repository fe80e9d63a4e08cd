"""A resources server for tests, in process: callers with a cookie jar, and a controller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from gymtrio.context import AsgiApp, RolloutContext
from gymtrio.ids import EpisodeId
from gymtrio.serving.app import ServerApp, open_asgi
from gymtrio.serving.client import Reply, ServerClient
from gymtrio.serving.deployment import DeploymentDirectory, parse_deployment
from gymtrio.serving.host import HostPorts
from gymtrio.serving.inprocess import open_network
from gymtrio.strict import unstructure
from gymtrio.wire.control import CONTROL_PREFIX
from gymtrio.wire.native import CloseSessionRequest, SeedSessionRequest, TaskId
from tests.helpers.clocks import FollowingClock
from tests.helpers.memory_archive import MemoryArchive

TOKEN = "0123456789abcdef-token"


class ResourcesClient:
    """Calls one server, as its callers and its controller do."""

    def __init__(self, client: ServerClient, clock: FollowingClock) -> None:
        self.client = client
        self.clock = clock
        self.cookies: dict[str, str] = {}
        """Sent with every call, and replaced by what a reply sets."""

    async def call(
        self, path: str, json: object = None, episode_id: EpisodeId | None = None, **more: Any
    ) -> Reply:
        """POST, with the cookies of the jar."""
        context = None if episode_id is None else RolloutContext(episode_id)
        reply = await self.client.request(
            "peer", "POST", path, json=json, cookies=dict(self.cookies), context=context, **more
        )
        self.cookies.update(reply.cookies())
        return reply

    async def json(self, path: str, json: object = None, **more: Any) -> Any:
        """The body of a reply that must be 2xx."""
        reply = await self.call(path, json, **more)
        return reply.raise_for_status().json()

    async def seed(self, session_id: str, episode_id: EpisodeId, **task_data: Any) -> Reply:
        """Seed as the native protocol does."""
        request = SeedSessionRequest(
            resources_session_id=session_id,
            episode_id=episode_id,
            task_id=TaskId(taskset="t", task_id="1"),
            task_data=task_data,
        )
        reply = await self.call("/seed_session", unstructure(request), episode_id)
        return reply.raise_for_status()

    async def close(self, session_id: str, episode_id: EpisodeId) -> Reply:
        request = CloseSessionRequest(resources_session_id=session_id, episode_id=episode_id)
        return await self.call("/close_session", unstructure(request), episode_id)

    async def control(self, operation: str, checkpoint_id: str = "c1", **fields: Any) -> Any:
        """Perform an operation that must succeed."""
        body = {
            "checkpoint_id": checkpoint_id,
            "deadline_ts": self.clock.now_s() + 10,
            **fields,
        }
        status = operation == "status"
        reply = await self.client.request(
            "peer",
            "GET" if status else "POST",
            f"{CONTROL_PREFIX}/{operation}",
            json=None if status else body,
            headers=[("authorization", f"Bearer {TOKEN}")],
            context=None,
            control=True,
        )
        return reply.raise_for_status().json()

    async def checkpoint(self, name: str = "c1") -> list[str]:
        """Prepare and commit everything; what was in it."""
        assert (await self.control("prepare", name))["phase"] == "prepared"
        reply = await self.control("commit", name, checkpoint_dir=f"/c/{name}")
        keys: list[str] = reply["episode_ids"]
        return keys

    async def restore(self, *episode_ids: EpisodeId, name: str = "c1") -> None:
        await self.control(
            "restore",
            "x1",
            checkpoint_dir=f"/c/{name}",
            episode_ids=[unstructure(e) for e in episode_ids],
        )


@asynccontextmanager
async def open_resources_server(
    app: ServerApp[Any],
    *,
    archive: MemoryArchive | None = None,
    settings: dict[str, object] | None = None,
    checkpointing: bool = True,
    recover: bool = False,
    around: Callable[[AsgiApp], AsgiApp] = lambda asgi: asgi,
) -> AsyncIterator[ResourcesClient]:
    """Serve `app` as `peer`; leaving the block is its crash.

    Args:
        around: puts something between the server and its callers, such as a slow connection.
    """
    checkpoint: dict[str, object] = {"control_auth_token": TOKEN, "root": "/c"}
    if checkpointing:
        checkpoint |= {"enabled": True, "recover": recover}
    server = {"url": "http://peer", "kind": "resources"}
    known = parse_deployment({"servers": {"peer": server}})
    entry = {"app": "x:y", "kind": "resources", "settings": settings or {}}
    deployment = parse_deployment({"checkpoint": checkpoint, "servers": {"peer": entry}})
    clock = FollowingClock()
    async with open_network() as network:
        directory = DeploymentDirectory(known)
        ports = HostPorts(
            wall_clock=clock,
            archive=archive or MemoryArchive(),
            transport=network,
            directory=directory,
        )
        async with open_asgi(app, deployment=deployment, name="peer", ports=ports) as asgi:
            with network.serving("peer", around(asgi)):
                yield ResourcesClient(ServerClient(directory, network), clock)
