"""What a user would take instead: FastAPI under uvicorn, and aiohttp as its client.

Needs the `bench` extra. Both loops are uvloop, the parser is httptools: what `uvicorn[standard]`
brings. `python -m bench.rival serve` prints its URL once it listens; `python -m bench.rival drive URL
JOB` is the client, which is also the neutral one in front of a server of ours.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import attrs
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response

from bench.echo_server import costs
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
from bench.measure import BEAT_S, Heart

KEEP_ALIVE_S: Final = 75
BACKLOG: Final = 4096
"""As ours, so that neither loses time to connections that are tried again."""

_FAILURES: Final = (aiohttp.ClientError, OSError)


class _Heart(Heart):
    """On asyncio."""

    async def beat(self) -> None:
        self._start(self._sample)
        while True:
            await asyncio.sleep(BEAT_S)
            self._note()


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
        return costs(heart.so_far(), parked)

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
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        log_level="warning",
        access_log=False,
    )
    _Server(config).run()


class _Caller(Caller):
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        async with self._session.request(method, self._url + path, json=body) as reply:
            reply.raise_for_status()
            return await reply.json()

    async def raw(self) -> bool:
        async with self._session.post(self._url + "/raw", data=ENCODED) as reply:
            reply.raise_for_status()
            return await reply.read() == ENCODED


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
            except _FAILURES:
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
    heart = _Heart()
    crowd = Crowd(
        caller,
        job.in_flight,
        sleep=asyncio.sleep,
        held_s=lambda: heart.so_far().held_s,
        failures=_FAILURES,
    )
    beating = asyncio.create_task(heart.beat())
    await crowd.begin()
    calls = []
    for number in range(job.in_flight):
        calls.append(asyncio.create_task(crowd.park()))
        if number % SLICE_CALLS == 0:
            await asyncio.sleep(0)
    await crowd.release()
    await asyncio.gather(*calls)
    await crowd.end()
    beating.cancel()
    return crowd.told


def main(given: list[str]) -> None:
    if given[0] == "serve":
        serve(beats="--heart" in given)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        told = runner.run(drive(given[1], Job.of(given[2])))
    sys.stdout.write(json.dumps(attrs.asdict(told)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
