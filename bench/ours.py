"""The client of `bench.transport` that is ours: `python -m bench.ours DEPLOYMENT TRANSPORT JOB`."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from bench.load import (
    ENCODED,
    FAILED_S,
    SLICE_CALLS,
    WARM_S,
    Caller,
    Counting,
    Crowd,
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


class _Caller(Caller):
    def __init__(self, client: ServerClient) -> None:
        self._client = client

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        reply = await self._client.request(SERVER, method, path, json=body)
        return reply.raise_for_status().json()

    async def raw(self) -> bool:
        reply = await self._client.request(SERVER, "POST", "/raw", body=ENCODED)
        return reply.raise_for_status().body == ENCODED


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
    crowd = Crowd(
        caller,
        job.in_flight,
        sleep=trio.sleep,
        held_s=lambda: heart.so_far().held_s,
        failures=(TransportError,),
    )
    await crowd.begin()
    async with trio.open_nursery() as nursery:
        for number in range(job.in_flight):
            nursery.start_soon(crowd.park)
            if number % SLICE_CALLS == 0:
                await trio.lowlevel.checkpoint()
        await crowd.release()
    await crowd.end()
    return crowd.told


def main(given: list[str]) -> None:
    told = trio.run(drive, load_deployment(given[0]), given[1], Job.of(given[2]))
    sys.stdout.write(json.dumps(attrs.asdict(told)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
