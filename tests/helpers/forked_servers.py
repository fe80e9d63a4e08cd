"""Server processes that start in milliseconds: forked by one that has imported everything.

A crash at every step needs hundreds of processes; starting an interpreter for each would take most of a
test's time. Each is a real server otherwise: a process and process group of its own, with sockets and
files of its own, that dies with its parent.

`python -m tests.helpers.forked_servers FILE APP...` reads lines of JSON from its standard input, a
`Start` each, and answers each with the number of the process that it has forked.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from gymtrio.context import AsgiApp, Receive, Scope, Send
from gymtrio.serving.app import ServerApp, open_asgi
from gymtrio.serving.deployment import Deployment, load_deployment, parse_bind
from gymtrio.serving.host import HostPorts
from gymtrio.serving.launch import bind_socket, die_with_parent, load_app, run_server
from gymtrio.serving.logs import configure_logging
from gymtrio.storage.disk import ThreadDisk
from gymtrio.strict import structure, unstructure
from tests.helpers.deadly_files import DeadlyFiles

_DIED: Final = "dies of change"


@attrs.frozen(kw_only=True)
class Start:
    """What the forking process is told."""

    server: str
    changes_max: int | None = None
    """See `DeadlyFiles`."""


# -- the test's side --------------------------------------------------------------------------


@attrs.frozen
class Forked:
    """One server's process."""

    server: str
    pid: int
    _pidfd: int

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait_gone(self) -> None:
        await trio.lowlevel.wait_readable(self._pidfd)


class Forks:
    """Made by `open_forks`; starts the servers of one deployment, any number of times."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def deaths(self) -> list[str]:
        """The operation after which each one died, in order; see `DeadlyFiles`."""
        lines = self._log.read_text().splitlines()
        return [line.rpartition(" ")[2] for line in lines if _DIED in line]

    @asynccontextmanager
    async def start(self, starts: Mapping[str, int | None]) -> AsyncIterator[dict[str, Forked]]:
        """Run servers for as long as the block runs; then none of them runs any more.

        Args:
            starts: by server, its `changes_max`.
        """
        forked: dict[str, Forked] = {}
        try:
            for server, changes_max in starts.items():
                pid = self._fork(Start(server=server, changes_max=changes_max))
                forked[server] = Forked(server, pid, os.pidfd_open(pid))
            yield forked
        finally:
            for one in forked.values():
                one.kill()
            with trio.CancelScope(shield=True):
                for one in forked.values():
                    await one.wait_gone()
                    trio.lowlevel.notify_closing(one._pidfd)
                    os.close(one._pidfd)

    def _fork(self, start: Start) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(unstructure(start)).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._log.read_text()
        return int(answer)


@contextmanager
def open_forks(deployment_file: Path, apps: Mapping[str, str]) -> Iterator[Forks]:
    """Import the applications of a resolved deployment, ready to be forked.

    Args:
        apps: `module:attribute` by server.
    """
    log = deployment_file.with_suffix(".log")
    command = [sys.executable, "-m", "tests.helpers.forked_servers", str(deployment_file)]
    command += [f"{server}={app}" for server, app in apps.items()]
    with (
        log.open("ab") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        yield Forks(process, log)
        process.kill()


@contextmanager
def reserved_addresses(servers: list[str]) -> Iterator[dict[str, str]]:
    """Addresses that nobody else is given, though the servers that listen there come and go."""
    held = [socket.socket() for _ in servers]
    try:
        for sock in held:
            # Bound and not listening: who also says so may listen, and no free port is chosen here.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
        yield {
            server: f"127.0.0.1:{sock.getsockname()[1]}"
            for server, sock in zip(servers, held, strict=True)
        }
    finally:
        for sock in held:
            sock.close()


# -- the servers' side ------------------------------------------------------------------------


class OnPorts:
    """A server's application on ports of our choice, with the life that an ASGI server gives it."""

    def __init__(
        self, app: ServerApp[Any], deployment: Deployment, name: str, ports: HostPorts
    ) -> None:
        self._open = partial(open_asgi, app, deployment=deployment, name=name, ports=ports)
        self._running: AsgiApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            assert self._running is not None
            await self._running(scope, receive, send)
            return
        await receive()
        async with self._open() as running:
            self._running = running
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


def main(deployment_file: str, *named: str) -> None:
    # Who ends is gone at once, without being waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    apps = {server: load_app(app) for server, app in (name.split("=", 1) for name in named)}
    deployment = load_deployment(deployment_file)
    parent = os.getpid()
    for line in sys.stdin:
        start = structure(Start, json.loads(line))
        app = apps[start.server]
        assert isinstance(app, ServerApp)
        sock = bind_socket(parse_bind(deployment.entry(start.server).bind), start.server)
        pid = os.fork()
        if pid == 0:
            os._exit(_serve(app, deployment, start, sock, parent))
        # It listens already: whoever calls before it serves is served then.
        sock.close()
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _serve(
    app: ServerApp[Any], deployment: Deployment, start: Start, sock: socket.socket, parent: int
) -> int:
    os.setsid()
    die_with_parent(parent)
    configure_logging(start.server)
    log = logging.getLogger(__name__)
    files = DeadlyFiles(
        start.changes_max,
        lambda operation: log.warning("%s %s: %s", _DIED, start.changes_max, operation),
    )
    ports = HostPorts(disk=ThreadDisk(files))
    return run_server(OnPorts(app, deployment, start.server, ports), sock)


if __name__ == "__main__":
    main(*sys.argv[1:])
