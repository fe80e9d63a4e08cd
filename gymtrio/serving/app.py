"""A server's ASGI application: opens its service when the ASGI server starts it, and serves it.

Importing a server module makes a `ServerApp` and does nothing else: settings are read, files and
sockets opened, at lifespan startup. The same application runs under plain Hypercorn, under our own
launcher, and embedded in somebody's nursery (SET-2, SET-3).
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic

import trio
from hypercorn.utils import LifespanFailureError

from gymtrio.background import open_background
from gymtrio.checkpoint.routes import serve_control
from gymtrio.context import Receive, Scope, Send
from gymtrio.errors import GymtrioError, SettingsError, Unavailable
from gymtrio.serving.asgi import ForeignExchange, Taken, refuse_foreign
from gymtrio.serving.client import ServerClient
from gymtrio.serving.connection import HttpLimits
from gymtrio.serving.control_frames_server import CONTROL_FAMILY, control_handler
from gymtrio.serving.controlplane import add_control_routes, open_control_plane
from gymtrio.serving.deployment import (
    DEPLOYMENT_VARIABLE,
    SERVER_VARIABLE,
    Deployment,
    DeploymentDirectory,
    load_deployment,
    parse_deployment,
)
from gymtrio.serving.dispatch import Dispatcher, Routes
from gymtrio.serving.draining import InWork
from gymtrio.serving.exchange import Exchange
from gymtrio.serving.framework import Identity, build_framework, framework_takes
from gymtrio.serving.host import HostPorts, OpenService, S, ServiceHost
from gymtrio.serving.lifespan import open_lifespan
from gymtrio.serving.metrics import ServerMetrics
from gymtrio.serving.transports import open_frames_server, open_transport
from gymtrio.serving.workers import WORKER_VARIABLE
from gymtrio.settings import Secret, load_settings
from gymtrio.wire.control import Kind

STATE_DIR_DEFAULT: Final = ".gymtrio/state"
_SECRET_BYTES: Final = 32

_log = logging.getLogger(__name__)


class ServerApp(Generic[S]):
    """The ASGI application that a server module exports as `app`.

    Args:
        kind: what sort of server it is.
        default_instance: its name when no deployment gives it one.
        settings_class: frozen attrs class of the server's own settings.
        open_service: opens what answers requests; left when the server stops.
    """

    def __init__(
        self,
        *,
        kind: Kind | str,
        default_instance: str,
        settings_class: type[S],
        open_service: OpenService[S],
    ) -> None:
        self.kind = Kind(kind)
        self.default_instance = default_instance
        self.settings_class = settings_class
        self.open_service = open_service
        self._running: Dispatcher | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif self._running is not None:
            await self._running(scope, receive, send)
        elif scope["type"] == "http":
            await refuse_foreign(_not_started(), ForeignExchange(scope, receive, send))

    def take(self, exchange: Exchange) -> Taken | None:
        """See `gymtrio.serving.asgi.DirectApp`."""
        if self._running is None:
            raise _not_started()
        return self._running.take(exchange)

    def stop_accepting(self) -> None:
        """Refuse new work from now on; what runs goes on, `/ready` says so."""
        if self._running is not None:
            self._running.stop_accepting()

    async def drain(self) -> None:
        """End what runs and answer it 503; return when all of it has ended."""
        if self._running is not None:
            await self._running.drain()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """Keep the service open between the server's startup and shutdown messages.

        Raises:
            LifespanFailureError: the service failed. The one error that Hypercorn does not take for
                an application without lifespan support: it ends the server.
        """
        await receive()
        started = False
        failure: ExceptionGroup[Exception] | None = None
        try:
            deployment, name = _deployment_of_environment(self.default_instance)
            async with (
                open_asgi(self, deployment=deployment, name=name) as running,
                open_frames_server(
                    running,
                    deployment,
                    name,
                    calls=running.calls,
                    worker=os.environ.get(WORKER_VARIABLE),
                ) as frames,
            ):
                self._running = running
                await send({"type": "lifespan.startup.complete"})
                started = True
                await receive()
                running.stop_accepting()
                with trio.move_on_after(HttpLimits().grace_s):
                    await frames.finished()
                await running.drain()
        except* Exception as errors:  # noqa: BLE001 - the edge: whatever it is ends the server
            failure = errors
        finally:
            self._running = None
        if failure is None:
            await send({"type": "lifespan.shutdown.complete"})
            return
        what = _first_line(failure)
        _log.critical("%s: %s", self.default_instance, what, exc_info=_unexpected(failure))
        if started:
            raise LifespanFailureError("service", what) from failure
        await send({"type": "lifespan.startup.failed", "message": what})


@asynccontextmanager
async def open_asgi(
    server_app: ServerApp[Any],
    *,
    deployment: Deployment | None = None,
    name: str | None = None,
    ports: HostPorts | None = None,
) -> AsyncIterator[Dispatcher]:
    """Open a server without sockets: the path that every way of serving takes (SET-3).

    Args:
        server_app: may be open several times in one process, under different names.
        deployment: None: no other servers, checkpointing off.
        name: the server's entry in the deployment; None: the kind's default name.
        ports: None: those of this machine.

    Yields:
        The ready ASGI application (for `http` scopes).

    Raises:
        SettingsError: the deployment and the server's own settings do not fit.
        ExceptionGroup: a background task of the service failed; the block was cancelled for it.
    """
    deployment = deployment or Deployment()
    ports = ports or HostPorts()
    name = name or server_app.default_instance
    settings = _settings_of(server_app, deployment, name)
    async with AsyncExitStack() as stack:
        transport = ports.transport
        if transport is None:
            transport = await stack.enter_async_context(
                open_transport(deployment, name, ports.randomness)
            )
        directory = ports.directory or DeploymentDirectory(deployment)
        secret = (
            deployment.session_secret
            or deployment.checkpoint.control_auth_token
            or Secret(ports.randomness.hex(_SECRET_BYTES))
        )
        host = ServiceHost(
            nursery=await stack.enter_async_context(open_background()),
            settings=settings,
            instance=name,
            client=ServerClient(directory, transport, deployment.client),
            wall_clock=ports.wall_clock,
            randomness=ports.randomness,
            disk=ports.disk,
            checkpoint=deployment.checkpoint,
            session_secret=secret,
            state_dir=Path(deployment.state_dir or STATE_DIR_DEFAULT) / name,
            deployment=deployment,
        )
        service = await stack.enter_async_context(server_app.open_service(host))
        control = await stack.enter_async_context(
            open_control_plane(service.participant, deployment.checkpoint, ports, host.state_dir)
        )

        def not_ready() -> str | None:
            if not dispatcher.accepting:
                return "shutting down"
            if control is not None and control.awaiting_restore:
                return "waiting to be restored"
            return None if service.not_ready is None else service.not_ready()

        gate = service.gate
        if control is not None and service.participant is not None:
            gate = service.participant.admission
        in_work = InWork()
        metrics = ServerMetrics(
            kind=server_app.kind.value,
            instance=name,
            control=control,
            admission=gate,
            pool=getattr(transport, "statistics", None),
            in_work=in_work,
        )
        identity = Identity(kind=server_app.kind.value, instance=name)
        shown = metrics if deployment.metrics else None
        framework: Any = build_framework(identity, not_ready, shown, service.more_metrics)
        serve = service.control_elsewhere if control is None else partial(serve_control, control)
        if serve is not None:
            add_control_routes(framework, serve, deployment.checkpoint)
        if service.add_routes is not None:
            service.add_routes(framework)
        takes = framework_takes(framework, service.add_routes is not None)
        routes = Routes(service.routes, service.fallback, framework, takes)
        calls = {CONTROL_FAMILY: control_handler(control, service.control_elsewhere)}
        dispatcher = Dispatcher(routes, metrics=metrics, gate=gate, in_work=in_work, calls=calls)
        await stack.enter_async_context(open_lifespan(framework))
        yield dispatcher


def _not_started() -> Unavailable:
    return Unavailable("this server has not started")


def _settings_of(server_app: ServerApp[S], deployment: Deployment, name: str) -> S:
    where = f"servers.{name}"
    if name not in deployment.servers:
        if deployment.servers:
            deployment.entry(name)
        return load_settings(server_app.settings_class, {}, f"{where}.settings")
    entry = deployment.servers[name]
    if entry.known_kind is not server_app.kind:
        known = entry.known_kind.value if entry.known_kind is not None else "unknown"
        raise SettingsError(
            f"{where}: its kind is {known}, but {entry.app} is of kind {server_app.kind.value}"
        )
    return load_settings(server_app.settings_class, entry.settings, f"{where}.settings")


def _deployment_of_environment(default_name: str) -> tuple[Deployment, str]:
    path = os.environ.get(DEPLOYMENT_VARIABLE)
    name = os.environ.get(SERVER_VARIABLE, default_name)
    if path is None:
        return parse_deployment({}, where="environment", environment=os.environ), name
    return load_deployment(path, os.environ), name


def _unexpected(errors: BaseExceptionGroup[Any]) -> BaseException | None:
    """What deserves a traceback: a wrong setting is told in one line."""
    return errors.split(GymtrioError)[1]


def _first_line(errors: BaseException) -> str:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    text = str(errors) or type(errors).__name__
    if not isinstance(errors, GymtrioError):
        text = f"{type(errors).__name__}: {text}"
    return text
