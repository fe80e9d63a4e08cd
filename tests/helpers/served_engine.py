"""The embedded engine, loaded once for many tests: in a thread with a trio loop of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import trio

from gymtrio.context import AsgiApp, Receive, Scope, Send
from gymtrio.serving.app import open_asgi
from gymtrio.serving.client import Reply, ServerClient
from gymtrio.serving.deployment import Deployment, DeploymentDirectory, parse_deployment
from gymtrio.serving.inprocess import open_network
from gymtrio.serving.pool import open_pool
from servers.model.embedded_engine import app
from tests.helpers.serving import serve_on_sockets

TOKEN: Final = "token-of-the-tests"
SETTINGS: Final[dict[str, object]] = {
    "parallel_calls": 5,
    "cached_sequences": 3,
    "context_tokens": 512,
    "waiting_calls_max": 6,
    "policy_version": 3,
}

T = TypeVar("T")


def engine_deployment(state_dir: Path, **settings: object) -> Deployment:
    """A deployment of one engine, with a control token."""
    return parse_deployment(
        {
            "state_dir": str(state_dir),
            "checkpoint": {"control_auth_token": TOKEN},
            "servers": {
                "engine": {
                    "app": "servers.model.embedded_engine:app",
                    "settings": SETTINGS | settings,
                }
            },
        }
    )


@asynccontextmanager
async def open_engine_app(state_dir: Path, **settings: object) -> AsyncIterator[AsgiApp]:
    """Another engine, in this loop."""
    deployment = engine_deployment(state_dir, **settings)
    async with open_asgi(app, deployment=deployment, name="engine") as asgi:
        yield asgi


@attrs.frozen
class EngineClient:
    """Calls an engine over HTTP."""

    client: ServerClient
    url: str

    async def post(self, path: str, body: object, **headers: str) -> Reply:
        return await self.client.request(
            self.url, "POST", path, json=body, headers=list(headers.items())
        )

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.client.request(self.url, "GET", path, headers=list(headers.items()))

    async def answer(self, path: str, body: object) -> Any:
        """The JSON of a reply that must succeed."""
        reply = await self.post(path, body)
        return reply.raise_for_status().json()


@asynccontextmanager
async def open_engine_client(url: str) -> AsyncIterator[EngineClient]:
    async with open_pool() as pool:
        yield EngineClient(ServerClient(DeploymentDirectory(Deployment()), pool), url)


@asynccontextmanager
async def open_other_engine(state_dir: Path, **settings: object) -> AsyncIterator[EngineClient]:
    """A new incarnation of the engine on the same store, in this loop and without sockets."""
    async with open_network() as network, open_engine_app(state_dir, **settings) as asgi:
        with network.serving("engine", asgi):
            client = ServerClient(DeploymentDirectory(Deployment()), network)
            yield EngineClient(client, "http://engine")


@attrs.frozen
class ServedEngine:
    """An engine that serves; its loop is another thread's."""

    url: str
    state_dir: Path
    asgi: AsgiApp
    token: trio.lowlevel.TrioToken

    def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Run something in the engine's own loop, from a test that is not async."""
        return trio.from_thread.run(function, *args, trio_token=self.token)


@contextmanager
def serve_engine(state_dir: Path) -> Iterator[ServedEngine]:
    """Serve an engine on a socket for the time of the block."""
    news: queue.Queue[ServedEngine | BaseException] = queue.Queue()
    stop = trio.Event()

    async def serve() -> None:
        async with open_engine_app(state_dir) as asgi, serve_on_sockets(started(asgi)) as bind:
            news.put(ServedEngine(bind.url, state_dir, asgi, trio.lowlevel.current_trio_token()))
            await stop.wait()

    def main() -> None:
        try:
            trio.run(serve)
        except BaseException as error:  # noqa: BLE001 - carried to whoever waits for the start
            news.put(error)

    thread = threading.Thread(target=main, name="served engine")
    thread.start()
    served = news.get()
    if isinstance(served, BaseException):
        thread.join()
        raise served
    try:
        yield served
    finally:
        with suppress(trio.RunFinishedError):
            served.token.run_sync_soon(stop.set)
        thread.join()
    if not news.empty():
        failed = news.get()
        assert isinstance(failed, BaseException)
        raise AssertionError("the engine ended while it was served") from failed


def started(asgi: AsgiApp) -> AsgiApp:
    """An application without lifespan, as a server wants one."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await asgi(scope, receive, send)
            return
        for what in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{what}.complete"})

    return serve
