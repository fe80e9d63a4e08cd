"""What `bench.serving` parks its requests at: a server of ours that tells what it costs."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from bench.measure import Heart, resident_bytes
from gymtrio.serving.app import ServerApp
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.http import Request, Response, json_response
from gymtrio.serving.resources_server import NoSettings

_DESCRIPTORS = Path("/proc/self/fd")


def descriptors() -> int:
    """That this process has open."""
    return len(list(_DESCRIPTORS.iterdir()))


class Pauses:
    """The longest collection, of whatever generation, since somebody asked."""

    def __init__(self) -> None:
        self._began = (0.0, 0.0)
        self.longest_s = self.longest_cpu_s = 0.0

    def __call__(self, phase: str, _: dict[str, int]) -> None:
        now = (time.perf_counter(), time.thread_time())
        if phase == "start":
            self._began = now
        else:
            self.longest_s = max(self.longest_s, now[0] - self._began[0])
            self.longest_cpu_s = max(self.longest_cpu_s, now[1] - self._began[1])


class Parking:
    """The handlers."""

    def __init__(self, heart: Heart, pauses: Pauses) -> None:
        self._heart = heart
        self._pauses = pauses
        self._parked = trio.lowlevel.ParkingLot()

    async def park(self, request: Request) -> Response:
        await self._parked.park()
        return json_response({})

    async def release(self, request: Request) -> Response:
        self._parked.unpark_all()
        return json_response({})

    async def one_more(self, request: Request) -> Response:
        return json_response({})

    async def collect(self, request: Request) -> Response:
        gc.collect()
        return json_response({})

    async def facts(self, request: Request) -> Response:
        sample, pauses = self._heart.so_far(), self._pauses
        found: dict[str, Any] = {
            "parked": len(self._parked),
            "resident_bytes": resident_bytes(),
            "descriptors": descriptors(),
            "cpu_s": time.process_time(),
            "held_s": sample.held_s,
            "held_cpu_s": sample.held_cpu_s,
            "collected_s": pauses.longest_s,
            "collected_cpu_s": pauses.longest_cpu_s,
        }
        pauses.longest_s = pauses.longest_cpu_s = 0.0
        return json_response(found)


@asynccontextmanager
async def open_parking(host: ServiceHost[NoSettings]) -> AsyncIterator[Service]:
    heart, pauses = Heart(), Pauses()
    host.nursery.start_soon(heart.beat)
    parking = Parking(heart, pauses)
    gc.callbacks.append(pauses)
    try:
        yield Service(
            routes={
                ("POST", "/park"): parking.park,
                ("POST", "/release"): parking.release,
                ("POST", "/one-more"): parking.one_more,
                ("POST", "/collect"): parking.collect,
                ("GET", "/facts"): parking.facts,
            }
        )
    finally:
        gc.callbacks.remove(pauses)


app = ServerApp(
    kind="resources",
    default_instance="parking",
    settings_class=NoSettings,
    open_service=open_parking,
)
