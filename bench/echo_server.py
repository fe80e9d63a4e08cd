"""What `bench.transport` calls: a server of ours that echoes, parks, and tells what it cost."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio

from bench.measure import Heart, Sample, resident_bytes
from gymtrio.serving.app import ServerApp
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.http import Request, Response, json_response


def costs(heart: Sample, parked: int) -> dict[str, float]:
    """What both servers answer under `/costs`."""
    return {
        "cpu_s": time.process_time(),
        "resident_bytes": resident_bytes(),
        "held_s": heart.held_s,
        "held_cpu_s": heart.held_cpu_s,
        "parked": parked,
    }


@attrs.frozen(kw_only=True)
class EchoSettings:
    heart: bool = False
    """Watch how long the loop is held; a thousand wake-ups a second."""


class Echo:
    """The handlers."""

    def __init__(self, heart: Heart) -> None:
        self._heart = heart
        self._parked = trio.lowlevel.ParkingLot()

    async def echo(self, request: Request) -> Response:
        return json_response(request.json())

    async def raw(self, request: Request) -> Response:
        return Response(200, request.body)

    async def park(self, request: Request) -> Response:
        await self._parked.park()
        return json_response(request.json())

    async def release(self, request: Request) -> Response:
        self._parked.unpark_all()
        return json_response({})

    async def costs(self, request: Request) -> Response:
        return json_response(costs(self._heart.so_far(), len(self._parked)))


@asynccontextmanager
async def open_echo(host: ServiceHost[EchoSettings]) -> AsyncIterator[Service]:
    heart = Heart()
    if host.settings.heart:
        host.nursery.start_soon(heart.beat)
    echo = Echo(heart)
    yield Service(
        routes={
            ("POST", "/echo"): echo.echo,
            ("POST", "/raw"): echo.raw,
            ("POST", "/park"): echo.park,
            ("POST", "/release"): echo.release,
            ("GET", "/costs"): echo.costs,
        }
    )


app = ServerApp(
    kind="resources", default_instance="echo", settings_class=EchoSettings, open_service=open_echo
)
