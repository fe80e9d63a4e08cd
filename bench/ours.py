"""The client of `bench.transport` that is ours: `python -m bench.ours DEPLOYMENT TRANSPORT JOB`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import attrs
import trio

from bench.echo_server import resident_bytes
from bench.load import (
    BODY,
    ENCODED,
    FAILED_S,
    SLICE_CALLS,
    WARM_S,
    Counting,
    Job,
    Parked,
    Throughput,
)
from bench.measure import Heart, open_heart
from gymtrio.background import open_background
from gymtrio.errors import TransportError
from gymtrio.serving.client import ServerClient
from gymtrio.serving.deployment import Deployment, DeploymentDirectory, load_deployment
from gymtrio.serving.garbage import spare_the_loop
from gymtrio.serving.transports import open_transport

SERVER = "echo"


class _Caller:
    def __init__(self, client: ServerClient) -> None:
        self._client = client

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        reply = await self._client.request(SERVER, method, path, json=body)
        return reply.raise_for_status().json()

    async def echo(self) -> bool:
        return bool(await self.call("POST", "/echo", BODY) == BODY)

    async def raw(self) -> bool:
        reply = await self._client.request(SERVER, "POST", "/raw", body=ENCODED)
        return reply.raise_for_status().body == ENCODED

    async def costs(self) -> dict[str, float]:
        told: dict[str, float] = await self.call("GET", "/costs")
        return told


@asynccontextmanager
async def open_caller(deployment: Deployment, transport: str) -> AsyncIterator[_Caller]:
    settings = attrs.evolve(deployment.client, data_connections_max=0)
    deployment = attrs.evolve(deployment, transport=transport, client=settings)
    async with open_transport(deployment, "bench") as opened:
        yield _Caller(ServerClient(DeploymentDirectory(deployment), opened, settings))


async def drive(deployment: Deployment, transport: str, job: Job) -> Throughput | Parked:
    """Do a job as a client of the deployment's server."""
    async with open_caller(deployment, transport) as caller, open_background() as nursery:
        nursery.start_soon(spare_the_loop, lambda: 1)
        if not job.parks:
            return await _load(caller, job)
        async with open_heart() as heart:
            return await _park(caller, job, heart)


async def _load(caller: _Caller, job: Job) -> Throughput:
    counting = Counting()

    async def loop() -> None:
        while counting.running:
            try:
                counting.replied(await (caller.echo() if job.parses else caller.raw()))
            except TransportError:
                counting.failed()
                await trio.sleep(FAILED_S)

    async with trio.open_nursery() as nursery:
        for _ in range(job.in_flight):
            nursery.start_soon(loop)
        await trio.sleep(WARM_S)
        counting.begin(await caller.costs())
        await trio.sleep(job.seconds)
        counting.end(await caller.costs())
    return counting.told


async def _park(caller: _Caller, job: Job, heart: Heart) -> Parked:
    told = Parked()
    await caller.call("POST", "/echo", BODY)
    before = await caller.costs()
    own_bytes, own_cpu_s = resident_bytes(), time.process_time()
    heart.so_far()

    async def park() -> None:
        try:
            told.errors += await caller.call("POST", "/park", BODY) != BODY
        except TransportError:
            told.errors += 1
        else:
            told.calls += 1

    async with trio.open_nursery() as nursery:
        began = time.perf_counter()
        for number in range(job.in_flight):
            nursery.start_soon(park)
            if number % SLICE_CALLS == 0:
                await trio.lowlevel.checkpoint()
        server = await caller.costs()
        while server["parked"] + told.errors < job.in_flight:
            await trio.sleep(0.1)
            seen = server["held_s"]
            server = await caller.costs()
            server["held_s"] = max(seen, server["held_s"])
        told.parking_s = time.perf_counter() - began
        told.client_held_s, told.server_held_s = heart.so_far().held_s, server["held_s"]
        told.client_bytes = resident_bytes() - own_bytes
        told.server_bytes = server["resident_bytes"] - before["resident_bytes"]
        more = []
        for _ in range(20):
            one = time.perf_counter()
            await caller.call("POST", "/echo", BODY)
            more.append(time.perf_counter() - one)
        told.one_more_s = median(more)
        began = time.perf_counter()
        await caller.call("POST", "/release", {})
    told.releasing_s = time.perf_counter() - began
    told.client_cpu_s = time.process_time() - own_cpu_s
    told.server_cpu_s = (await caller.costs())["cpu_s"] - before["cpu_s"]
    return told


def main(given: list[str]) -> None:
    told = trio.run(drive, load_deployment(given[0]), given[1], Job.of(given[2]))
    sys.stdout.write(json.dumps(attrs.asdict(told)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
