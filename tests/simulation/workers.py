"""A policy server of several processes: a coordinator, and workers that share its port (WRK).

They are what `gymtrio.serving.coordinating` runs, on the simulated machine: the server's own process
coordinates and serves no port, its workers die with it, and one that dies alone is replaced. What links
them is a Unix socket: nothing is lost, reordered or late on it, and it ends with either side.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import trio
import trio.testing

from gymtrio.errors import GymtrioError, HostError
from gymtrio.participants.policy.worker import PolicyWorker
from gymtrio.serving.app import ServerApp, open_asgi
from gymtrio.serving.coordinator import WorkerHub, open_hub
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.inprocess import open_network
from gymtrio.serving.model_server import HttpBackend, ModelSettings, worker_service
from gymtrio.serving.policy_worker import linked, part_writer
from gymtrio.wire.channel import PeerInfo
from tests.simulation.processes import CURRENT, Process, Processes
from tests.simulation.servers import Surroundings, make_deployment, model_app, ports_of
from tests.simulation.tokens import TokenPort

REPLACED_S: Final = 0.1
"""How long the server's process takes to replace a worker."""


class LinkEnd(trio.abc.Stream):
    """One end of a socket, as the process has it that holds it."""

    def __init__(self, process: Process, stream: trio.StapledStream[Any, Any]) -> None:
        self._process = process
        self._stream = stream
        process.on_death(self._close)

    def _close(self) -> None:
        self._stream.send_stream.close()
        self._stream.receive_stream.close()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._process.running()
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data: bytes | bytearray = await self._stream.receive_some(max_bytes)
        await self._process.running()
        return data

    async def aclose(self) -> None:
        self._close()
        await trio.lowlevel.checkpoint()


async def serve_with_workers(
    process: Process,
    around: Surroundings,
    processes: Processes,
    *,
    count: int,
    recover: bool,
    on_lost: Callable[[Process], None],
) -> None:
    """The main task of the server's process.

    Args:
        on_lost: told of a worker that has died alone.
    """
    CURRENT.set(process)
    deployment = make_deployment(recover=recover, lease_grace_s=around.lease_grace_s, workers=count)
    workers: dict[str, Process] = {}

    def kill(lost: PeerInfo) -> None:
        if lost.instance in workers:
            workers[lost.instance].kill()

    async def keep(name: str, hub: WorkerHub) -> None:
        while True:
            work = partial(_serve_worker, server=process, hub=hub, around=around, count=count)
            worker = await processes.start(f"{process.name}.{name}", work)
            workers[str(worker)] = worker
            process.on_death(worker.kill)
            await worker.ended.wait()
            process.check()
            on_lost(worker)
            await trio.sleep(REPLACED_S)

    async with (
        open_hub(deployment, process.name, ports=ports_of(process, around)) as hub,
        trio.open_nursery() as nursery,
    ):
        assert hub is not None
        hub.participant.on_left = kill
        around.network.share(process)
        for number in range(count):
            nursery.start_soon(keep, str(number), hub)


async def _serve_worker(
    worker: Process,
    *,
    server: Process,
    hub: WorkerHub,
    around: Surroundings,
    count: int,
) -> None:
    """The main task of a worker's process."""
    here, there = trio.testing.memory_stream_pair()
    # Whatever a worker does, it is not the coordinator that ends of it.
    server.spawn(_serve_link, server, hub, LinkEnd(server, there), name=f"link of {worker}")
    deployment = make_deployment(recover=False, lease_grace_s=around.lease_grace_s, workers=count)
    app = _worker_app(worker, LinkEnd(worker, here), TokenPort(around.shelf, worker))
    ports = ports_of(worker, around, server)
    try:
        async with (
            open_network() as network,
            open_asgi(app, deployment=deployment, name=server.name, ports=ports) as asgi,
        ):
            with network.serving(server.name, around.network.tapped(worker, asgi, server)):
                around.network.join(server, worker, network)
                await trio.sleep_forever()
    except* HostError:
        # It has lost its coordinator, or was never heard.
        worker.check()
        worker.kill()


async def _serve_link(server: Process, hub: WorkerHub, stream: LinkEnd) -> None:
    CURRENT.set(server)
    try:
        await hub.serve(stream, None)
    except* GymtrioError:
        pass


def _worker_app(worker: Process, stream: LinkEnd, store: TokenPort) -> ServerApp[ModelSettings]:
    """As `servers.model.policy` with several workers, on a link and a token store of the simulation."""

    @asynccontextmanager
    async def open_service(host: ServiceHost[ModelSettings]) -> AsyncIterator[Service]:
        settings = host.settings
        policy = PolicyWorker(
            host.instance,
            backend=HttpBackend(host.client, settings, control_token=host.control_token),
            token_store=store,
            randomness=host.randomness,
            generation_cuts=settings.checkpoint_generation_cuts,
            part_writer=part_writer(host),
        )
        name = worker.name.rpartition(".")[2]
        async with linked(policy, stream, name=name, instance=str(worker)):
            yield worker_service(policy, host)

    return model_app(open_service)
