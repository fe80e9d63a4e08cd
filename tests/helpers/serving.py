"""Servers for tests: an application from handlers, served over sockets or in process."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import attrs
import hypercorn.trio
import trio
from hypercorn.config import Config
from quart_trio import QuartTrio

from gymtrio.background import open_background
from gymtrio.checkpoint.participant import Participant
from gymtrio.context import AsgiApp
from gymtrio.serving.app import ServerApp, open_asgi
from gymtrio.serving.client import ClientSettings, ServerClient, peer_of_url
from gymtrio.serving.connection import HttpLimits
from gymtrio.serving.deployment import (
    Bind,
    Deployment,
    DeploymentDirectory,
    ServerEntry,
)
from gymtrio.serving.frames_server import FramesServer
from gymtrio.serving.frames_transport import open_frames
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.http import Handler
from gymtrio.serving.inprocess import open_network
from gymtrio.serving.launch import bind_socket, bound_to, serve_app, to_listener
from gymtrio.serving.pool import Pool, open_pool
from gymtrio.wire.control import Kind
from gymtrio.wire.messages import Hello
from gymtrio.wire.unix import open_unix_listener, runtime_directory

LOOPBACK = Bind("127.0.0.1", 0)


@attrs.frozen
class NoSettings:
    """A server without settings."""


def make_app(
    routes: Mapping[tuple[str, str], Handler],
    *,
    fallback: Handler | None = None,
    participant: Participant | None = None,
    add_routes: Callable[[QuartTrio], None] | None = None,
    background: Callable[[], Any] | None = None,
    kind: Kind = Kind.RESOURCES,
    name: str = "peer",
) -> ServerApp[NoSettings]:
    """An application that serves these handlers."""

    @asynccontextmanager
    async def open_service(host: ServiceHost[NoSettings]) -> AsyncIterator[Service]:
        if background is not None:
            host.nursery.start_soon(background)
        yield Service(
            routes=routes, fallback=fallback, participant=participant, add_routes=add_routes
        )

    return ServerApp(
        kind=kind, default_instance=name, settings_class=NoSettings, open_service=open_service
    )


@asynccontextmanager
async def serve_on_sockets(app: AsgiApp, limits: HttpLimits | None = None) -> AsyncIterator[Bind]:
    """Serve an application on a free port of this machine."""
    sock = bind_socket(LOOPBACK, "peer")
    bind = bound_to(sock)
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        listeners = [to_listener(sock)]
        await nursery.start(partial(serve_app, app, listeners, stop=stop, limits=limits))
        yield bind
        stop.set()


@asynccontextmanager
async def over_sockets(
    app: ServerApp[Any], settings: ClientSettings | None = None
) -> AsyncIterator[ServerClient]:
    """A client of `app`, which is called `peer`, over real connections."""
    async with serve_on_sockets(app) as bind, open_pool(settings) as pool:
        yield client_of(pool, bind, app.kind, settings)


def client_of(
    pool: Pool, bind: Bind, kind: Kind = Kind.RESOURCES, settings: ClientSettings | None = None
) -> ServerClient:
    entry = ServerEntry(url=bind.url, kind=kind)
    directory = DeploymentDirectory(Deployment(servers={"peer": entry}))
    return ServerClient(directory, pool, settings)


@asynccontextmanager
async def over_plain_hypercorn(
    app: ServerApp[Any], settings: ClientSettings | None = None
) -> AsyncIterator[ServerClient]:
    """A client of `app`, which is called `peer`, that Hypercorn serves by itself."""
    sock = bind_socket(LOOPBACK, "peer")
    bind = bound_to(sock)
    config = Config()
    config.bind = [f"fd://{sock.detach()}"]
    config.errorlog = logging.getLogger("hypercorn.under.test")
    framework: Any = app
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        serving = partial(hypercorn.trio.serve, framework, config, shutdown_trigger=stop.wait)
        await nursery.start(serving)
        async with open_pool(settings) as pool:
            yield client_of(pool, bind, app.kind, settings)
        stop.set()


@asynccontextmanager
async def in_process(
    app: ServerApp[Any], settings: ClientSettings | None = None
) -> AsyncIterator[ServerClient]:
    """A client of `app`, which is called `peer`, without sockets."""
    entry = ServerEntry(url="http://peer", kind=app.kind)
    directory = DeploymentDirectory(Deployment(servers={"peer": entry}))
    async with open_network() as network, open_asgi(app) as asgi:
        with network.serving(peer_of_url("http://peer").origin.host, asgi):
            yield ServerClient(directory, network, settings)


@asynccontextmanager
async def over_frames(
    app: ServerApp[Any], settings: ClientSettings | None = None
) -> AsyncIterator[ServerClient]:
    """A client of `app`, which is called `peer`, over a socket file; other origins are over HTTP."""
    entry = ServerEntry(url="http://peer", kind=app.kind)
    directory = DeploymentDirectory(Deployment(servers={"peer": entry}))
    origin = peer_of_url("http://peer").origin
    with runtime_directory() as sockets:
        path = sockets / "peer"
        async with AsyncExitStack() as stack:
            asgi = await stack.enter_async_context(open_asgi(app))
            listener = await stack.enter_async_context(open_unix_listener(path))
            nursery = await stack.enter_async_context(open_background())
            me = Hello(role="server", name="peer", instance="1")
            await nursery.start(FramesServer(asgi, me).serve, listener)
            http = await stack.enter_async_context(open_pool(settings))
            caller = Hello(role="server", name="caller", instance="1")
            frames = await stack.enter_async_context(
                open_frames({origin: (str(path),)}, http, me=caller, settings=settings)
            )
            yield ServerClient(directory, frames, settings)


Transported: TypeAlias = Callable[..., AbstractAsyncContextManager[ServerClient]]
TRANSPORTS: dict[str, Transported] = {
    "sockets": over_sockets,
    "plain hypercorn": over_plain_hypercorn,
    "in process": in_process,
    "frames": over_frames,
}
