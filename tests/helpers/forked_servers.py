"""Server processes that start in milliseconds: forked by one that has imported everything.

A crash at every step needs hundreds of processes; starting an interpreter for each would take most of a
test's time. Each is a real server otherwise: a process and process group of its own, with sockets and
files of its own, that dies with its parent. A server with several workers is its coordinator and they,
in one group, as `gymtrio coordinate` has them: nobody replaces one.

`python -m tests.helpers.forked_servers APP...` reads lines of JSON from its standard input, a `Start`
each, and answers each with the numbers of the processes that it has forked.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from gymtrio.context import AsgiApp, Receive, Scope, Send
from gymtrio.serving.app import ServerApp, open_asgi
from gymtrio.serving.coordinator import open_coordinator, state_dir_of
from gymtrio.serving.deployment import Deployment, load_deployment, parse_bind
from gymtrio.serving.host import HostPorts
from gymtrio.serving.launch import bind_socket, die_with_parent, load_app, run_server
from gymtrio.serving.logs import configure_logging
from gymtrio.serving.transports import open_frames_server
from gymtrio.serving.workers import COORDINATOR_VARIABLE, WORKER_VARIABLE
from gymtrio.storage.disk import ThreadDisk
from gymtrio.strict import structure, unstructure
from gymtrio.wire.unix import lasting_directory
from tests.helpers.deadly_files import DeadlyFiles

_DIED: Final = "dies of change"


@attrs.frozen(kw_only=True)
class Start:
    """What the forking process is told."""

    deployment: str
    """The file of a resolved one."""
    server: str
    changes_max: int | None = None
    """See `DeadlyFiles`."""


# -- the test's side --------------------------------------------------------------------------


@attrs.frozen
class Forked:
    """One server's process group."""

    server: str
    pids: tuple[int, ...]
    """The first one leads the group."""
    _pidfds: tuple[int, ...]

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            # Not by a number that somebody else may have by now.
            signal.pidfd_send_signal(self._pidfds[0], 0)
            os.killpg(self.pids[0], signal.SIGKILL)

    async def wait_gone(self) -> None:
        for pidfd in self._pidfds:
            await trio.lowlevel.wait_readable(pidfd)

    def close(self) -> None:
        for pidfd in self._pidfds:
            trio.lowlevel.notify_closing(pidfd)
            os.close(pidfd)


class Forks:
    """Made by `open_forks`; starts the servers of deployments, any number of times."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def deaths(self) -> list[str]:
        """The operation after which each one died, in order; see `DeadlyFiles`."""
        lines = self._log.read_text().splitlines()
        return [line.rpartition(" ")[2] for line in lines if _DIED in line]

    @asynccontextmanager
    async def start(
        self, deployment_file: Path, starts: Mapping[str, int | None]
    ) -> AsyncIterator[dict[str, Forked]]:
        """Run servers for as long as the block runs; then none of them runs any more.

        Args:
            deployment_file: a resolved one, whose applications were all imported.
            starts: by server, its `changes_max`.
        """
        forked: dict[str, Forked] = {}
        try:
            for server, changes_max in starts.items():
                pids = self._fork(
                    Start(deployment=str(deployment_file), server=server, changes_max=changes_max)
                )
                forked[server] = Forked(server, pids, tuple(map(os.pidfd_open, pids)))
            yield forked
        finally:
            for one in forked.values():
                one.kill()
            with trio.CancelScope(shield=True):
                for one in forked.values():
                    await one.wait_gone()
                    one.close()

    def _fork(self, start: Start) -> tuple[int, ...]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(unstructure(start)).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._log.read_text()
        return tuple(map(int, answer.split()))


@contextmanager
def open_forks(log: Path, apps: Iterable[str]) -> Iterator[Forks]:
    """Import applications, ready to be forked.

    Args:
        apps: `module:attribute`.
    """
    command = [sys.executable, "-m", "tests.helpers.forked_servers", *apps]
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
        self._deployment = deployment
        self._name = name
        self._running: AsgiApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            assert self._running is not None
            await self._running(scope, receive, send)
            return
        await receive()
        async with (
            self._open() as running,
            open_frames_server(
                running,
                self._deployment,
                self._name,
                calls=running.calls,
                worker=os.environ.get(WORKER_VARIABLE),
            ),
        ):
            self._running = running
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


def main(*names: str) -> None:
    # Who ends is gone at once, without being waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    apps: dict[str | None, AsgiApp] = {name: load_app(name) for name in names}
    # What is shared stays shared: a collection would copy every page of it.
    gc.freeze()
    for line in sys.stdin:
        start = structure(Start, json.loads(line))
        deployment = load_deployment(start.deployment)
        entry = deployment.entry(start.server)
        app = apps[entry.app]
        assert isinstance(app, ServerApp)
        sock = bind_socket(parse_bind(entry.bind), start.server)
        serve = partial(_serve, app, deployment, start, sock)
        workers = entry.process_count
        pids = [_fork(serve)] if workers == 1 else _fork_workers(deployment, start, serve, workers)
        # It listens already: whoever calls before it serves is served then.
        sock.close()
        sys.stdout.write(" ".join(map(str, pids)) + "\n")
        sys.stdout.flush()


def _fork(serve: Callable[[], int], group: int = 0) -> int:
    """
    Args:
        group: of whom the process is one; 0: its own.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent)
        os.setpgid(0, group)
        os._exit(serve())
    with suppress(ProcessLookupError):
        # Whoever comes first: a worker of this one's must find the group.
        os.setpgid(pid, group or pid)
    return pid


def _fork_workers(
    deployment: Deployment, start: Start, serve: Callable[[], int], count: int
) -> list[int]:
    """A coordinator, and its workers once it listens."""
    name = start.server
    path = lasting_directory(state_dir_of(deployment, name)) / "coordinator"
    listens, tell = os.pipe()

    def coordinate() -> int:
        os.close(listens)
        trio.run(_coordinate, deployment, name, path, tell)
        return 0

    def work(number: int) -> int:
        os.close(tell)
        # The end of what is never written to.
        os.read(listens, 1)
        os.environ |= {COORDINATOR_VARIABLE: str(path), WORKER_VARIABLE: str(number)}
        return serve()

    leader = _fork(coordinate)
    workers = [_fork(partial(work, number), leader) for number in range(count)]
    os.close(listens)
    os.close(tell)
    return [leader, *workers]


async def _coordinate(deployment: Deployment, name: str, path: Path, tell: int) -> None:
    configure_logging(name)
    async with open_coordinator(deployment, name, path=path):
        os.close(tell)
        await trio.sleep_forever()


def _serve(app: ServerApp[Any], deployment: Deployment, start: Start, sock: socket.socket) -> int:
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
