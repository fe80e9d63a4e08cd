"""A small server module, as an author writes one: started as a process by tests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum

import attrs
import trio

from gymtrio.serving.app import ServerApp
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.http import Request, Response, json_response


class Mood(Enum):
    CALM = "calm"
    LOUD = "loud"


@attrs.frozen(kw_only=True)
class ExampleSettings:
    greeting: str = "hello"
    mood: Mood = Mood.CALM
    never_ready: bool = False
    fail_at_start: bool = False


@asynccontextmanager
async def open_example(host: ServiceHost[ExampleSettings]) -> AsyncIterator[Service]:
    settings = host.settings
    if settings.fail_at_start:
        raise RuntimeError("the model file is not there")
    if settings.never_ready:
        await trio.sleep_forever()

    async def greet(request: Request) -> Response:
        return json_response(
            {
                "greeting": settings.greeting,
                "instance": host.instance,
                "pid": os.getpid(),
                "body": request.body.decode(),
                "host": request.header("host"),
            }
        )

    async def fail_later() -> None:
        raise RuntimeError("a background task failed")

    async def break_down(request: Request) -> Response:
        host.nursery.start_soon(fail_later)
        return json_response({})

    async def ask(request: Request) -> Response:
        reply = await host.client.request(request.query, "POST", "/greet", body=b"from a server")
        return json_response(reply.json(), reply.status)

    yield Service(
        routes={
            ("POST", "/greet"): greet,
            ("POST", "/ask"): ask,
            ("POST", "/break-down"): break_down,
        }
    )


app = ServerApp(
    kind="resources",
    default_instance="example",
    settings_class=ExampleSettings,
    open_service=open_example,
)
