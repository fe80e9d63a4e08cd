"""Run a deployment: one process and process group per server, watched until the block ends.

Invariants:
  V1  Every socket is bound before any server starts, so that each knows the address of all others,
      and a port that is taken fails the launch before anything has run.
  V2  When the block is left, no process of it runs: neither servers nor what they started.
  V3  Servers die with this process, however it dies (`PR_SET_PDEATHSIG`).
  V4  A secret is in no command line; files that hold one are readable by their owner only.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import attrs
import trio

from gymtrio.background import open_background
from gymtrio.errors import HostError, TransportError
from gymtrio.limits import CLEANUP_S_MAX
from gymtrio.serving.client import ServerClient
from gymtrio.serving.connection import HttpLimits
from gymtrio.serving.deployment import (
    DEPLOYMENT_VARIABLE,
    RESOLVED_FILE,
    SERVER_VARIABLE,
    SESSION_FILE,
    TOKEN_FILE,
    Deployment,
    DeploymentDirectory,
    ServerEntry,
    parse_bind,
)
from gymtrio.serving.draining import DRAIN_S_MAX
from gymtrio.serving.launch import bind_socket, bound_to
from gymtrio.serving.logs import LOG_FORMAT_VARIABLE
from gymtrio.serving.metrics import HEALTH_PATH, READY_PATH
from gymtrio.serving.pool import open_pool
from gymtrio.serving.processes import describe_end, wait_exited, wait_group_ended
from gymtrio.serving.transports import open_transport
from gymtrio.settings import TOKEN_VARIABLE
from gymtrio.strict import unstructure
from gymtrio.wire.unix import lasting_directory

TAIL_BYTES: Final = 4096
READY_POLL_S: Final = 0.05
STOP_TIMEOUT_S_DEFAULT: Final = HttpLimits().grace_s + DRAIN_S_MAX + 4.0
"""A server's grace, its drain, and a little for what it closes last."""

_log = logging.getLogger(__name__)


class ServerFailed(HostError):
    """A server did not start, or ended while the deployment ran; the message has its log's tail."""

    def __init__(self, name: str, what: str, log_tail: str) -> None:
        shown = log_tail.strip() or "(the log is empty)"
        super().__init__(f"server {name!r} {what}; end of its log:\n{shown}")
        self.name = name
        self.what = what
        self.log_tail = log_tail


@attrs.define(eq=False)
class _Child:
    """One server's process."""

    name: str
    entry: ServerEntry
    log_path: Path
    process: subprocess.Popen[bytes]
    expected_to_exit: bool = False

    @property
    def has_exited(self) -> bool:
        return self.process.returncode is not None

    async def watch(self) -> None:
        """Wait for the end of the process.

        Raises:
            ServerFailed: nobody had asked it to end.
        """
        await self.wait()
        if not self.expected_to_exit:
            raise self.failed(f"ended with {describe_end(self.process.returncode)}")

    async def wait(self) -> None:
        """Return when nothing of the process and its group runs any more."""
        if self.has_exited:
            await trio.lowlevel.checkpoint()
            return
        await wait_exited(self.process)
        if not self.has_exited:
            # Until it is reaped, the number of its group cannot be given to anybody else.
            self.signal_group(signal.SIGKILL)
            # What is killed has its sockets for a moment longer.
            await wait_group_ended(self.process.pid)
            self.process.wait()

    def signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def failed(self, what: str) -> ServerFailed:
        return ServerFailed(self.name, what, read_tail(self.log_path))


def read_tail(path: Path) -> str:
    """The last lines of a log, at most 4 kB."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


class RunningDeployment:
    """A deployment whose servers run; made by `open_deployment`."""

    def __init__(
        self,
        deployment: Deployment,
        run_dir: Path,
        children: Mapping[str, _Child],
        client: ServerClient,
    ) -> None:
        self.deployment = deployment
        """With the addresses that were really bound: opened again, it gets the same ports."""
        self.run_dir = run_dir
        self.client = client
        """Calls its servers by name."""
        self._children = children

    @property
    def urls(self) -> dict[str, str]:
        """Name to URL, of every server of the deployment."""
        return {name: self.deployment.url(name) for name in self.deployment.servers}

    def pid(self, name: str) -> int:
        """The process, and process group, of a server."""
        return self._children[name].process.pid

    def log_path(self, name: str) -> Path:
        return self._children[name].log_path

    async def kill_groups(self, names: Iterable[str] | None = None) -> None:
        """SIGKILL the process groups of these servers (None: of all), and wait until they are gone.

        A crash on purpose: it is not reported as a failure.
        """
        children = self._named(names)
        for child in children:
            child.expected_to_exit = True
        for child in children:
            if not child.has_exited:
                child.signal_group(signal.SIGKILL)
        for child in children:
            await child.wait()

    async def stop(
        self, names: Iterable[str] | None = None, timeout_s: float = STOP_TIMEOUT_S_DEFAULT
    ) -> None:
        """SIGTERM these servers (None: all), SIGKILL the groups of those that do not end in time."""
        children = self._named(names)
        for child in children:
            child.expected_to_exit = True
            if not child.has_exited:
                child.process.terminate()
        with trio.move_on_after(timeout_s):
            for child in children:
                await child.wait()
        late = [child.name for child in children if not child.has_exited]
        if late:
            _log.warning("killed after %g s: %s", timeout_s, ", ".join(late))
            await self.kill_groups(late)

    def _named(self, names: Iterable[str] | None) -> list[_Child]:
        return [self._children[name] for name in (self._children if names is None else names)]


@asynccontextmanager
async def open_deployment(
    deployment: Deployment,
    *,
    run_dir: Path,
    stop_timeout_s: float = STOP_TIMEOUT_S_DEFAULT,
) -> AsyncIterator[RunningDeployment]:
    """Start every server of a deployment that is started here, and keep them running for the block.

    To be called in a thread that lives as long as the deployment: servers die with the thread that
    started them.

    Args:
        run_dir: logs, the resolved deployment, and servers' state if the deployment has no `state_dir`;
            created, readable by the owner only. One deployment at a time.

    Yields:
        When every server is ready; with `checkpoint.recover`, when every server is alive.

    Raises:
        HostError: an address is taken, or `run_dir` is used by another deployment.
        ServerFailed: a server did not become ready in its `start_timeout_s`, or ended, then or later.
            The block was cancelled and everything is stopped.

    Cancelled: everything is stopped, with a deadline.
    """
    with (
        _claimed(run_dir) as run_dir,
        _socket_dir(deployment, run_dir) as socket_dir,
        ExitStack() as bound,
    ):
        sockets = _bind_all(deployment, bound)
        binds = {name: bound_to(sock) for name, sock in sockets.items()}
        resolved = _with_state_dir(deployment.resolved(binds), run_dir)
        resolved = attrs.evolve(resolved, socket_dir=str(socket_dir))
        file = write_resolved(resolved, run_dir)
        try:
            async with (
                open_pool(deployment.client) as pool,
                open_transport(resolved, "supervisor") as transport,
                open_background() as nursery,
            ):
                children = {
                    name: _spawn(name, resolved, sock, file, run_dir)
                    for name, sock in sockets.items()
                }
                # Ours are only copies now: kept, they would swallow connections to a dead server.
                bound.close()
                directory = DeploymentDirectory(resolved)
                outside = ServerClient(directory, pool, deployment.client)
                client = ServerClient(directory, transport, deployment.client)
                running = RunningDeployment(resolved, run_dir, children, client)
                for child in children.values():
                    nursery.start_soon(child.watch)
                try:
                    await _wait_until_ready(running, children.values(), outside)
                    yield running
                finally:
                    cleanup = trio.CancelScope(shield=True)
                    cleanup.deadline = trio.current_time() + stop_timeout_s + CLEANUP_S_MAX
                    with cleanup:
                        await running.stop(timeout_s=stop_timeout_s)
        except ExceptionGroup as group:
            raise _first_failure(group) from None


def _first_failure(group: ExceptionGroup[Exception]) -> Exception:
    """The failure of a server, when that is all that a group tells; else the group."""
    failures, others = group.split(ServerFailed)
    if failures is None or others is not None:
        return group
    first: Exception = failures
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    return first


@contextmanager
def _claimed(run_dir: Path) -> Iterator[Path]:
    """Hold a run directory for the block; gives its absolute path."""
    run_dir = run_dir.absolute()
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    (run_dir / "logs").mkdir(mode=0o700, exist_ok=True)
    with (run_dir / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HostError(f"{run_dir} is used by a deployment that runs") from None
        yield run_dir


@contextmanager
def _socket_dir(deployment: Deployment, run_dir: Path) -> Iterator[Path]:
    """Where its servers have their socket files; what is left of them at the end is removed."""
    directory = lasting_directory(run_dir)
    if deployment.socket_dir is not None:
        directory = Path(deployment.socket_dir)
    try:
        yield directory
    finally:
        try:
            for left in directory.glob("*.lock"):
                left.unlink(missing_ok=True)
            directory.rmdir()
        except OSError:
            # Not there, or somebody else's files are in it.
            pass


def _bind_all(deployment: Deployment, bound: ExitStack) -> dict[str, socket.socket]:
    # Fixed ports first: a free one, chosen for port 0, must not be one that somebody asked for.
    here = [name for name, entry in deployment.servers.items() if entry.app is not None]
    here.sort(key=lambda name: deployment.servers[name].is_unbound)
    return {
        name: bound.enter_context(bind_socket(parse_bind(deployment.servers[name].bind), name))
        for name in here
    }


def _with_state_dir(deployment: Deployment, run_dir: Path) -> Deployment:
    if deployment.state_dir is not None:
        return deployment
    return attrs.evolve(deployment, state_dir=str(run_dir / "state"))


def write_resolved(deployment: Deployment, run_dir: Path) -> Path:
    """Write the deployment as its servers read it, secrets in files of their own."""
    token = deployment.checkpoint.control_auth_token
    secret = deployment.session_secret
    if token is not None:
        _write_private(run_dir / TOKEN_FILE, token.reveal())
    if secret is not None:
        _write_private(run_dir / SESSION_FILE, secret.reveal())
    without = attrs.evolve(
        deployment,
        checkpoint=attrs.evolve(
            deployment.checkpoint,
            control_auth_token=None,
            control_auth_token_file=None if token is None else TOKEN_FILE,
        ),
        session_secret=None,
        session_secret_file=None if secret is None else SESSION_FILE,
    )
    file = run_dir / RESOLVED_FILE
    _write_private(file, json.dumps(unstructure(without), indent=2))
    return file


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        # It may be left over from an earlier run, with another mode.
        os.fchmod(descriptor, 0o600)
        file.write(text)


def _spawn(
    name: str, deployment: Deployment, sock: socket.socket, deployment_file: Path, run_dir: Path
) -> _Child:
    # Not trio.lowlevel.open_process: it forks in a worker thread, and PR_SET_PDEATHSIG fires when the
    # thread that forked ends, which trio's idle workers do after ten seconds.
    entry = deployment.servers[name]
    assert entry.app is not None
    environment = {**os.environ, LOG_FORMAT_VARIABLE: deployment.log_format, **entry.env}
    environment.pop(TOKEN_VARIABLE, None)
    environment[DEPLOYMENT_VARIABLE] = str(deployment_file)
    environment[SERVER_VARIABLE] = name
    descriptor = str(sock.fileno())
    # A server with several workers is started by its coordinator, which starts them (WRK-1).
    main = "coordinating" if entry.process_count > 1 else "child"
    command = [sys.executable, "-m", f"gymtrio.serving.{main}", entry.app]
    command += ["--fd", descriptor, "--parent", str(os.getpid())]
    log_path = run_dir / "logs" / f"{name}.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[sock.fileno()],
            start_new_session=True,
        )
    return _Child(name, entry, log_path, process)


async def _wait_until_ready(
    running: RunningDeployment, children: Iterable[_Child], outside: ServerClient
) -> None:
    """
    Args:
        outside: asks as whoever is none of the deployment does, over HTTP.

    Raises:
        ServerFailed: of the first that was not ready in time.
    """
    failures: list[ServerFailed] = []
    recover = running.deployment.checkpoint.recover

    async def wait_for(child: _Child) -> None:
        last = "no answer yet"
        with trio.move_on_after(child.entry.start_timeout_s) as timer:
            while True:
                answer = await _ask_ready(outside, child.name, recover)
                if answer is None:
                    return
                last = answer
                await trio.sleep(READY_POLL_S)
        if timer.cancelled_caught and not child.has_exited:
            what = f"was not ready within {child.entry.start_timeout_s:g} s ({last})"
            failures.append(child.failed(what))
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for child in children:
            nursery.start_soon(wait_for, child)
    if failures:
        raise failures[0]


async def _ask_ready(client: ServerClient, name: str, recover: bool) -> str | None:
    """Why a server is not ready; None: it is. A server that waits to be restored is alive."""
    path = HEALTH_PATH if recover else READY_PATH
    try:
        reply = await client.request(name, "GET", path, control=True, context=None)
    except TransportError as error:
        return str(error)
    if reply.status == 200:
        return None
    return f"{path} answered {reply.status}: {reply.body[:200].decode('utf-8', 'replace')}"
