"""How the servers of a deployment reach each other: over frames where both ends can, else over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final

from gymtrio.background import open_background
from gymtrio.context import AsgiApp
from gymtrio.errors import SettingsError
from gymtrio.ports import HostRandomness, Randomness
from gymtrio.serving.client import Transport, peer_of_url
from gymtrio.serving.deployment import TCP_SCHEME, Deployment, parse_bind
from gymtrio.serving.frames_server import SERVER_ROLE, CallHandler, FramesServer
from gymtrio.serving.frames_transport import open_frames
from gymtrio.serving.pool import open_pool
from gymtrio.wire.messages import Hello
from gymtrio.wire.tcp import open_tcp_listener
from gymtrio.wire.unix import open_unix_listener

_NONCE_BYTES: Final = 8


@asynccontextmanager
async def open_transport(
    deployment: Deployment, name: str, randomness: Randomness | None = None
) -> AsyncIterator[Transport]:
    """Open what carries the calls of one process to the servers of a deployment, and to others.

    Args:
        name: of whoever calls, for the logs of the called.
    """
    addresses = {
        peer_of_url(deployment.url(server)).origin: several
        for server, entry in deployment.servers.items()
        if not entry.is_unbound and (several := deployment.frames_addresses(server))
    }
    async with open_pool(deployment.client) as pool:
        if not addresses:
            yield pool
            return
        async with open_frames(
            addresses,
            pool,
            me=_hello(name, randomness),
            token=deployment.checkpoint.control_auth_token,
            settings=deployment.client,
        ) as frames:
            yield frames


@asynccontextmanager
async def open_frames_server(
    app: AsgiApp,
    deployment: Deployment,
    name: str,
    randomness: Randomness | None = None,
    *,
    calls: Mapping[str, CallHandler] | None = None,
    worker: str | None = None,
) -> AsyncIterator[FramesServer]:
    """Serve an application over frames wherever its deployment says; perhaps nowhere.

    Args:
        calls: see `FramesServer`.
        worker: the number of this process, if the server has several.

    Raises:
        HostError: it cannot listen there.
        SettingsError: it is to listen for other hosts, and there is no token to tell them by.

    When the block is left, what was answered leaves first; connections are closed, handlers cancelled.

    Cancelled: the same, without waiting for answers to leave.
    """
    server = FramesServer(app, _hello(name, randomness), calls)
    token = deployment.checkpoint.control_auth_token
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(open_background())
        path = deployment.socket_path(name, worker)
        if path is not None:
            files = await stack.enter_async_context(open_unix_listener(path))
            # Who calls for data needs no token here; who presents one may control.
            await nursery.start(partial(server.serve, token_required=False), files, token)
        entry = deployment.servers.get(name)
        if entry is not None and entry.frames is not None and deployment.transport == "frames":
            if token is None:
                raise SettingsError(f"servers.{name}.frames: needs checkpoint.control_auth_token")
            bind = parse_bind(entry.frames.removeprefix(TCP_SCHEME))
            remote = await stack.enter_async_context(open_tcp_listener(bind.host, bind.port))
            await nursery.start(server.serve, remote, token)
        yield server
        await server.flush()


def _hello(name: str, randomness: Randomness | None) -> Hello:
    nonce = (randomness or HostRandomness()).hex(_NONCE_BYTES)
    return Hello(role=SERVER_ROLE, name=name, instance=nonce)
