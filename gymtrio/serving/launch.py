"""Serve an application on sockets, in this process.

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_app, app, listeners, stop=stop))

`run_server` is the whole life of a server process: signals, garbage collection, exit.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, cast

import trio
from hypercorn.trio.worker_context import WorkerContext

from gymtrio.background import open_background
from gymtrio.context import AsgiApp
from gymtrio.errors import HostError, SettingsError
from gymtrio.serving.connection import Connection, HttpLimits, hypercorn_config
from gymtrio.serving.deployment import Bind
from gymtrio.serving.lifespan import StartFailed, open_lifespan

BACKLOG: Final = 4096
"""Connections that wait while the loop is busy; the kernel's own limit on Linux."""

GC_THRESHOLDS: Final = (100_000, 20, 100)
"""A full collection over thousands of parked requests stops the loop for seconds: make it rare."""

_PR_SET_PDEATHSIG: Final = 1

_log = logging.getLogger(__name__)


def bind_socket(bind: Bind, server: str) -> socket.socket:
    """Listen on an address; port 0 takes any free one.

    Args:
        server: its name, for messages.

    Raises:
        HostError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port whose last owner has just died must be bindable at once. Not SO_REUSEPORT: a second
        # server on the same port must fail.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((bind.host, bind.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise HostError(
            f"cannot listen on {bind} for server {server!r}: {error.strerror}"
        ) from None
    return sock


def bound_to(sock: socket.socket) -> Bind:
    """The address that a socket really has."""
    host, port = sock.getsockname()[:2]
    return Bind(host, port)


def to_listener(sock: socket.socket) -> trio.SocketListener:
    """Make a listening socket usable by trio; it now belongs to the listener."""
    return trio.SocketListener(trio.socket.from_stdlib_socket(sock))


async def serve_app(
    app: AsgiApp,
    listeners: Sequence[trio.abc.Listener[trio.abc.Stream]],
    *,
    stop: trio.Event,
    limits: HttpLimits | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Start an application and serve it until `stop` is set.

    Stopping: listeners are closed; the application is told to take no new work; idle connections are
    closed; running requests get `limits.grace_s`; then they are cancelled, and the application stops.

    Args:
        listeners: owned from now on.
        task_status: started when the application is, and connections are accepted.

    Raises:
        StartFailed: the application cannot start.
        ExceptionGroup: it failed while running. Errors of connections are not raised.
    """
    limits = limits or HttpLimits()
    context = WorkerContext(None)
    config = hypercorn_config(limits)
    connections: set[Connection] = set()
    opened: list[Any] = list(listeners)

    async def serve_stream(stream: trio.abc.Stream) -> None:
        connection = Connection(app, stream, config=config, context=context, limits=limits)
        connections.add(connection)
        try:
            await connection.run()
        finally:
            connections.discard(connection)

    async with open_lifespan(app):
        async with trio.open_nursery() as serving:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(
                    partial(trio.serve_listeners, serve_stream, opened, handler_nursery=serving)
                )
                task_status.started()
                await stop.wait()
                accepting.cancel_scope.cancel()
            stop_accepting = getattr(app, "stop_accepting", None)
            if stop_accepting is not None:
                stop_accepting()
            await context.terminated.set()
            for connection in connections:
                connection.stop_when_idle()
            serving.cancel_scope.deadline = trio.current_time() + limits.grace_s


def run_server(app: AsgiApp, sock: socket.socket, *, limits: HttpLimits | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the main function of a server's process.

    Returns:
        The exit status: 0 after a signal, 1 when the application could not start or failed.
    """
    status = 0
    try:
        trio.run(_serve_until_signal, app, sock, limits)
    except* StartFailed:
        # The application has logged why.
        status = 1
    except* Exception:  # noqa: BLE001
        # The edge of the process: told, and turned into its exit status.
        _log.critical("the server failed", exc_info=True)
        status = 1
    return status


async def _serve_until_signal(app: AsgiApp, sock: socket.socket, limits: HttpLimits | None) -> None:
    stop = trio.Event()
    address = bound_to(sock)
    async with open_background() as background:
        async with trio.open_nursery() as serving:
            started = trio.Event()
            await background.start(_watch_signals, started, stop, serving.cancel_scope)
            listeners = [to_listener(sock)]
            await serving.start(partial(serve_app, app, listeners, stop=stop, limits=limits))
            started.set()
            spare_long_lived_objects()
            _log.info("serving on %s", address)


async def _watch_signals(
    started: trio.Event,
    stop: trio.Event,
    hard: trio.CancelScope,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """The first signal stops in order, the second at once; so does any before all has started."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            _log.info("stopping after %s", signal.Signals(number).name)
            if stop.is_set() or not started.is_set():
                hard.cancel()
            stop.set()


def spare_long_lived_objects() -> None:
    """Take what start-up made out of garbage collection, and collect rarely from here on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def load_app(name: str) -> AsgiApp:
    """Import `module:attribute`.

    Raises:
        SettingsError: there is no such module or attribute, or it is not callable.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise SettingsError(f"{name!r} is not module:attribute")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise SettingsError(f"{name}: no module named {error.name!r}") from None
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise SettingsError(f"{name}: module {module_name} has no {attribute!r}")
        value = getattr(value, part)
    if not callable(value):
        raise SettingsError(f"{name}: not an ASGI application")
    return cast(AsgiApp, value)


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed when its parent ends, however it ends. Linux only, else nothing.

    Args:
        parent_pid: who started us; if it is gone already, this process exits.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise HostError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    # The parent may have died between its fork and this call.
    if os.getppid() != parent_pid:
        os._exit(1)
