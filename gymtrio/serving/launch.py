"""Serve an application on sockets, in this process.

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_app, app, listeners, stop=stop))

`run_server` is the whole life of a server process: signals, garbage collection, exit.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence, Sized
from functools import partial
from typing import Any, Final, cast

import trio

from gymtrio.background import open_background
from gymtrio.context import AsgiApp
from gymtrio.errors import HostError, SettingsError
from gymtrio.serving.connection import Connection, HttpLimits, Shared
from gymtrio.serving.deployment import Bind
from gymtrio.serving.draining import (
    DRAIN_S_MAX,
    LAST_ANSWERS_S,
    LAST_ANSWERS_S_MAX,
)
from gymtrio.serving.garbage import spare_the_loop
from gymtrio.serving.lifespan import SHUTDOWN_S_MAX, StartFailed, open_lifespan

BACKLOG: Final = 4096
"""Connections that wait while the loop is busy; the kernel's own limit on Linux."""

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
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
    connections: set[Connection] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Start an application and serve it until `stop` is set.

    Stopping (SRV-2): listeners are closed; the application is told to take no new work, and answers
    what waits for its gate; idle connections are closed. Running requests get `limits.grace_s`. What
    runs then is cancelled, cleans up within `DRAIN_S` and is answered 503; connections that do not take
    their answers are cut, all of them after `LAST_ANSWERS_S_MAX`. The application stops last.

    Args:
        listeners: owned from now on.
        connections: filled with those that are open, for whoever wants to know.
        task_status: started when the application is, and connections are accepted.

    Raises:
        StartFailed: the application cannot start.
        ExceptionGroup: it failed while running. Errors of connections are not raised.
    """
    limits = limits or HttpLimits()
    shared = Shared(limits)
    connections = set() if connections is None else connections
    opened: list[Any] = list(listeners)

    async def serve_stream(stream: trio.abc.Stream) -> None:
        connection = Connection(app, stream, shared)
        connections.add(connection)
        try:
            await connection.run()
        finally:
            connections.discard(connection)

    async with open_lifespan(app), trio.open_nursery() as ending:
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
            shared.stopping = True
            for connection in connections:
                connection.stop_when_idle()
            ending.start_soon(_end_in_time, app, connections, serving.cancel_scope, limits)
        ending.cancel_scope.cancel()


async def _end_in_time(
    app: AsgiApp, connections: Sized, serving: trio.CancelScope, limits: HttpLimits
) -> None:
    await trio.sleep(limits.grace_s)
    drain = getattr(app, "drain", None)
    if drain is not None:
        await drain()
        with trio.move_on_after(LAST_ANSWERS_S_MAX):
            before = len(connections) + 1
            while len(connections) < before:
                before = len(connections)
                await trio.sleep(LAST_ANSWERS_S)
    serving.cancel()


def run_server(app: AsgiApp, sock: socket.socket, *, limits: HttpLimits | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the main function of a server's process.

    Returns:
        The exit status: 0 after a signal, 1 when the application could not start or failed.
    """
    status = 0
    allow_many_files()
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


def allow_many_files() -> None:
    """Raise this process's limit on open files as far as it may: a connection is one (SRV-4).

    The usual 1,024 are for programs that use `select`; trio does not.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve_until_signal(app: AsgiApp, sock: socket.socket, limits: HttpLimits | None) -> None:
    stop = trio.Event()
    limits = limits or HttpLimits()
    address = bound_to(sock)
    connections: set[Connection] = set()
    stops_s_max = limits.grace_s + DRAIN_S_MAX + SHUTDOWN_S_MAX
    async with open_background() as background:
        async with trio.open_nursery() as serving:
            started = trio.Event()
            hard = serving.cancel_scope
            await background.start(_watch_signals, started, stop, hard, stops_s_max)
            serve = partial(serve_app, stop=stop, limits=limits, connections=connections)
            await serving.start(serve, app, [to_listener(sock)])
            started.set()
            background.start_soon(spare_the_loop, lambda: len(connections))
            _log.info("serving on %s", address)


async def _watch_signals(
    started: trio.Event,
    stop: trio.Event,
    hard: trio.CancelScope,
    stops_s_max: float,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """The first signal stops in order, the second at once; so does any before all has started.

    Args:
        stops_s_max: so long after the first the process ends wherever it is: it says where on standard
            error, and exits with 1. Also when the loop is what does not go on.
    """
    with trio.open_signal_receiver(*_SIGNALS) as signals:
        _limit_stopping(stops_s_max)
        task_status.started()
        try:
            async for number in signals:
                _log.info("stopping after %s", signal.Signals(number).name)
                if stop.is_set() or not started.is_set():
                    hard.cancel()
                stop.set()
        finally:
            faulthandler.cancel_dump_traceback_later()


def _limit_stopping(stops_s_max: float) -> None:
    """See to it that the clock runs from a signal on, whether or not the loop hears of it."""
    counting = False
    for number in _SIGNALS:
        trios: Any = signal.getsignal(number)

        def arrived(number: int, frame: Any, trios: Any = trios) -> None:
            nonlocal counting
            if not counting:
                counting = True
                faulthandler.dump_traceback_later(stops_s_max, exit=True)
            trios(number, frame)

        signal.signal(number, arrived)


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
