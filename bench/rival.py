"""What a user would take instead: FastAPI under uvicorn, and aiohttp as its client.

Needs the `bench` extra. Both loops are uvloop, the parser is httptools: what `uvicorn[standard]`
brings. `python -m bench.rival serve` prints its URL once it listens; `python -m bench.rival drive URL
JOB` is the client, which is also the neutral one in front of a server of ours.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, Final

import aiohttp
import attrs
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response

from bench.echo_server import costs, resident_bytes
from bench.load import (
    BODY,
    ENCODED,
    FAILED_S,
    HEART_BEAT_S,
    SLICE_CALLS,
    WARM_S,
    Counting,
    Job,
    Parked,
    Throughput,
)

KEEP_ALIVE_S: Final = 75
BACKLOG: Final = 4096
"""As ours, so that neither loses time to connections that are tried again."""


class _Heart:
    """As `bench.measure.Heart`, on asyncio."""

    def __init__(self) -> None:
        self.held_s = self.held_cpu_s = 0.0

    async def beat(self) -> None:
        last, last_cpu = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(HEART_BEAT_S)
            now, cpu = time.perf_counter(), time.thread_time()
            self.held_s = max(self.held_s, now - last - HEART_BEAT_S)
            self.held_cpu_s = max(self.held_cpu_s, cpu - last_cpu)
            last, last_cpu = now, cpu

    def so_far(self) -> tuple[float, float]:
        told = self.held_s, self.held_cpu_s
        self.held_s = self.held_cpu_s = 0.0
        return told


def make_app(*, beats: bool) -> FastAPI:
    heart = _Heart()
    parked = 0
    released = asyncio.Event()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        beating = asyncio.create_task(heart.beat()) if beats else None
        yield
        if beating is not None:
            beating.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.post("/echo", response_model=None)
    async def echo(body: dict[str, Any]) -> dict[str, Any]:
        return body

    @app.post("/raw")
    async def raw(request: Request) -> Response:
        return Response(await request.body(), media_type="application/json")

    @app.post("/park", response_model=None)
    async def park(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal parked
        parked += 1
        await released.wait()
        parked -= 1
        return body

    @app.post("/release", response_model=None)
    async def release() -> dict[str, Any]:
        nonlocal released
        released.set()
        released = asyncio.Event()
        return {}

    @app.get("/costs", response_model=None)
    async def told() -> dict[str, float]:
        return costs(*heart.so_far(), parked)

    return app


class _Server(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        port = self.servers[0].sockets[0].getsockname()[1]
        sys.stdout.write(f"http://127.0.0.1:{port}\n")
        sys.stdout.flush()


def serve(*, beats: bool) -> None:
    """Serve on a free port until killed."""
    app = make_app(beats=beats)
    quiet = {"log_level": "warning", "access_log": False}
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE_S, **quiet
    )
    _Server(config).run()


class _Caller:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        async with self._session.request(method, self._url + path, json=body) as reply:
            reply.raise_for_status()
            return await reply.json()

    async def echo(self) -> bool:
        return bool(await self.call("POST", "/echo", BODY) == BODY)

    async def raw(self) -> bool:
        async with self._session.post(self._url + "/raw", data=ENCODED) as reply:
            reply.raise_for_status()
            return await reply.read() == ENCODED

    async def costs(self) -> dict[str, float]:
        told: dict[str, float] = await self.call("GET", "/costs")
        return told


async def drive(url: str, job: Job) -> Throughput | Parked:
    """Do a job as a client of `url`."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        caller = _Caller(session, url)
        return await (_park(caller, job) if job.parks else _load(caller, job))


async def _load(caller: _Caller, job: Job) -> Throughput:
    counting = Counting()

    async def loop() -> None:
        while counting.running:
            try:
                counting.replied(await (caller.echo() if job.parses else caller.raw()))
            except (aiohttp.ClientError, OSError):
                counting.failed()
                await asyncio.sleep(FAILED_S)

    loops = [asyncio.create_task(loop()) for _ in range(job.in_flight)]
    await asyncio.sleep(WARM_S)
    counting.begin(await caller.costs())
    await asyncio.sleep(job.seconds)
    counting.end(await caller.costs())
    await asyncio.gather(*loops)
    return counting.told


async def _park(caller: _Caller, job: Job) -> Parked:
    told = Parked()
    heart = _Heart()
    beating = asyncio.create_task(heart.beat())
    await caller.call("POST", "/echo", BODY)
    before = await caller.costs()
    own_bytes, own_cpu_s = resident_bytes(), time.process_time()
    heart.so_far()

    async def park() -> None:
        try:
            told.errors += await caller.call("POST", "/park", BODY) != BODY
        except (aiohttp.ClientError, OSError):
            told.errors += 1
        else:
            told.calls += 1

    began = time.perf_counter()
    crowd = []
    for number in range(job.in_flight):
        crowd.append(asyncio.create_task(park()))
        if number % SLICE_CALLS == 0:
            await asyncio.sleep(0)
    server = await caller.costs()
    while server["parked"] + told.errors < job.in_flight:
        await asyncio.sleep(0.1)
        seen = server["held_s"]
        server = await caller.costs()
        server["held_s"] = max(seen, server["held_s"])
    told.parking_s = time.perf_counter() - began
    told.client_held_s, told.server_held_s = heart.so_far()[0], server["held_s"]
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
    await asyncio.gather(*crowd)
    told.releasing_s = time.perf_counter() - began
    told.client_cpu_s = time.process_time() - own_cpu_s
    told.server_cpu_s = (await caller.costs())["cpu_s"] - before["cpu_s"]
    beating.cancel()
    return told


def main(given: list[str]) -> None:
    if given[0] == "serve":
        serve(beats="--heart" in given)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        told = runner.run(drive(given[1], Job.of(given[2])))
    sys.stdout.write(json.dumps(attrs.asdict(told)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
