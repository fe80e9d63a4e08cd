"""The main process of a server with several workers: it coordinates them, and keeps them running.

    python -m gymtrio.serving.coordinating MODULE:APP --fd N --parent PID

Started by `gymtrio.serving.supervisor` as `gymtrio.serving.child` is, with the listening socket. It
never accepts: its workers inherit the socket and do (WRK-1).

- P1 A worker that ends before all have once been there fails the launch; a later one is replaced, ever
  more slowly if its replacements end as well (WRK-5).
- P2 Whoever is lost to the coordinator is killed, so that nothing of it goes on unseen.
- P3 Workers die with this process, however it dies: they are of its process group, the kernel kills
  them (`PR_SET_PDEATHSIG`), and their connection ends.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Final

import attrs
import trio

from gymtrio.background import open_background
from gymtrio.errors import GymtrioError, HostError
from gymtrio.serving.connection import HttpLimits
from gymtrio.serving.coordinator import Coordinator, open_coordinator, settings_of
from gymtrio.serving.deployment import (
    DEPLOYMENT_VARIABLE,
    SERVER_VARIABLE,
    Deployment,
    load_deployment,
)
from gymtrio.serving.draining import DRAIN_S_MAX
from gymtrio.serving.launch import die_with_parent
from gymtrio.serving.logs import configure_logging
from gymtrio.serving.processes import describe_end, wait_exited
from gymtrio.serving.workers import COORDINATOR_VARIABLE, WORKER_VARIABLE, instance_of
from gymtrio.wire.channel import PeerInfo

STOP_TIMEOUT_S: Final = HttpLimits().grace_s + DRAIN_S_MAX + 2.0
"""A worker's grace, its drain, and a little for what it closes last."""

BACKOFF_S_MIN: Final = 0.1
BACKOFF_S_MAX: Final = 5.0
STEADY_S: Final = 30.0
"""A worker that ran for this long is replaced at once, whatever its predecessors did."""

_log = logging.getLogger(__name__)


class WorkerFailed(HostError):
    """A worker did not start."""


@attrs.define(eq=False)
class _Slot:
    """One worker, and its replacements."""

    name: str
    process: subprocess.Popen[bytes]
    since: float
    backoff_s: float = 0.0


class Workers:
    """The processes of the workers of one server.

    Args:
        sock: listens; handed down.
        coordinator: None: they have nothing to share.
    """

    def __init__(
        self, app: str, sock: socket.socket, count: int, coordinator: Coordinator | None
    ) -> None:
        self._app = app
        self._sock = sock
        self._coordinator = coordinator
        self._stopping = trio.Event()
        self._slots = [
            _Slot(name, self._spawn(name), trio.current_time()) for name in map(str, range(count))
        ]

    def _spawn(self, name: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, WORKER_VARIABLE: name}
        if self._coordinator is not None:
            environment[COORDINATOR_VARIABLE] = str(self._coordinator.socket)
        command = [sys.executable, "-m", "gymtrio.serving.child", self._app]
        command += ["--fd", str(self._sock.fileno()), "--parent", str(os.getpid())]
        # In this process's group: whoever kills the group kills the workers.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[self._sock.fileno()]
        )

    async def run(self) -> None:
        """Keep them running until they are stopped.

        Raises:
            WorkerFailed: one ended before all had been there.
        """
        async with trio.open_nursery() as nursery:
            for slot in self._slots:
                nursery.start_soon(self._keep, slot)

    async def _keep(self, slot: _Slot) -> None:
        while True:
            await wait_exited(slot.process)
            end = describe_end(slot.process.wait())
            if self._stopping.is_set():
                return
            if self._coordinator is not None and not self._coordinator.participant.complete:
                raise WorkerFailed(f"worker {slot.name} ended with {end} before all had started")
            if trio.current_time() - slot.since >= STEADY_S:
                slot.backoff_s = 0.0
            _log.warning(
                "worker %s ended with %s; replaced in %g s", slot.name, end, slot.backoff_s
            )
            with trio.move_on_after(slot.backoff_s):
                await self._stopping.wait()
                return
            slot.backoff_s = min(BACKOFF_S_MAX, max(BACKOFF_S_MIN, 2 * slot.backoff_s))
            slot.process, slot.since = self._spawn(slot.name), trio.current_time()

    def kill(self, lost: PeerInfo) -> None:
        """SIGKILL a worker that is lost to the coordinator, unless it ends in order."""
        for slot in self._slots:
            # Not by its name, which its replacement has as well.
            if lost.instance == instance_of(slot.process.pid) and not self._stopping.is_set():
                slot.process.kill()

    def stop(self) -> None:
        """Ask them to drain and to end; none is replaced any more."""
        self._stopping.set()
        for slot in self._slots:
            slot.process.terminate()

    def kill_all(self) -> None:
        """SIGKILL those that have not ended, and reap all."""
        self._stopping.set()
        for slot in self._slots:
            slot.process.kill()
            slot.process.wait()


async def run_workers(app: str, sock: socket.socket, deployment: Deployment, name: str) -> None:
    """Coordinate, start the workers, and keep them running until a signal.

    Raises:
        WorkerFailed: one did not start. GymtrioError: see `open_coordinator`.
    """
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with open_coordinator(deployment, name) as coordinator:
            count = settings_of(deployment, name).num_workers
            workers = Workers(app, sock, count, coordinator)
            try:
                if coordinator is not None:
                    coordinator.participant.on_left = workers.kill
                async with open_background() as background:
                    background.start_soon(_stop_at, signals, workers)
                    await workers.run()
            finally:
                workers.kill_all()


async def _stop_at(signals: AsyncIterator[int], workers: Workers) -> None:
    """The first signal stops in order, with a deadline; the second at once."""
    number = await anext(signals)
    _log.info("stopping after %s", signal.Signals(number).name)
    workers.stop()
    with trio.move_on_after(STOP_TIMEOUT_S):
        await anext(signals)
    workers.kill_all()


def main(arguments: list[str] | None = None) -> int:
    """Coordinate until told to stop; the exit status says whether something failed."""
    parser = argparse.ArgumentParser(prog="python -m gymtrio.serving.coordinating")
    parser.add_argument("app")
    parser.add_argument("--fd", type=int, required=True, help="the listening socket, inherited")
    parser.add_argument("--parent", type=int, required=True, help="pid to die with")
    given = parser.parse_args(arguments)
    die_with_parent(given.parent)
    name = os.environ[SERVER_VARIABLE]
    configure_logging(name)
    sock = socket.socket(fileno=given.fd)
    status = 0
    try:
        deployment = load_deployment(os.environ[DEPLOYMENT_VARIABLE])
        trio.run(run_workers, given.app, sock, deployment, name)
    except* GymtrioError as errors:
        _log.critical("%s", first_of(errors))
        status = 1
    except* Exception:  # noqa: BLE001
        # The edge of the process: told, and turned into its exit status.
        _log.critical("the coordinator failed", exc_info=True)
        status = 1
    return status


def first_of(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


if __name__ == "__main__":
    sys.exit(main())
