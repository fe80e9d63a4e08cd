"""Servers for tests: an application from handlers, served over sockets or in process."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import attrs
import hypercorn.trio
import trio
from hypercorn.config import Config
from quart_trio import QuartTrio

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
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.http import Handler
from gymtrio.serving.inprocess import open_network
from gymtrio.serving.launch import bind_socket, bound_to, serve_app, to_listener
from gymtrio.serving.pool import Pool, open_pool
from gymtrio.wire.control import Kind

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


Transported: TypeAlias = Callable[..., AbstractAsyncContextManager[ServerClient]]
TRANSPORTS: dict[str, Transported] = {
    "sockets": over_sockets,
    "plain hypercorn": over_plain_hypercorn,
    "in process": in_process,
}
