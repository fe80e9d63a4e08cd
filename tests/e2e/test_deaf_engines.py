"""Trial T5: engines that do not answer when their generations are to be cut.

Three policy servers with an engine each, which they reach over HTTP and sockets: one acknowledges the
cut, one never answers, one sends the head of its answer and never the body. Time is virtual.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.capture.cuts import CUT_ROUTE
from gymtrio.capture.log_store import open_log_store
from gymtrio.capture.replies import Route
from gymtrio.checkpoint.coordination import Controller, open_coordination
from gymtrio.checkpoint.members import Prepared
from gymtrio.context import AsgiApp, Receive, RolloutContext, Scope, Send
from gymtrio.ids import CheckpointId, EpisodeId
from gymtrio.ports import HostRandomness
from gymtrio.serving.app import open_asgi
from gymtrio.serving.client import ServerClient
from gymtrio.serving.controlchannel import HttpControlChannel
from gymtrio.serving.deployment import Deployment, DeploymentDirectory, ServerEntry
from gymtrio.serving.host import HostPorts
from gymtrio.serving.inprocess import open_network
from gymtrio.settings import CheckpointSettings, Secret
from gymtrio.wire.control import Kind
from servers.model.policy import app as policy_app
from tests.helpers.clocks import FollowingClock
from tests.helpers.hash_engine import NativeEngine
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.plane import episode
from tests.helpers.scripted_backend import OUTPUT_TOKENS, ScriptedBackend, uncut_tokens
from tests.helpers.serving import make_app, serve_on_sockets

ENGINES: Final = ("honest", "silent", "bodiless")
EPISODES: Final = [episode(name) for name in ENGINES]
C1: Final = CheckpointId("c1")
TOKEN: Final = Secret("a-token-of-sixteen")
HELLO: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "hello"}]}
PREPARE_S: Final = 2.0
STEP_S: Final = 0.25
EMITTED: Final = 7


@attrs.define(eq=False)
class Engine:
    """An engine as an ASGI application, which is deaf in its way."""

    name: str
    backend: ScriptedBackend
    app: AsgiApp
    asked: trio.Event = attrs.Factory(trio.Event)
    """To cut."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != CUT_ROUTE:
            await self.app(scope, receive, send)
            return
        self.asked.set()
        if self.name == "honest":
            await self.app(scope, receive, send)
            return
        if self.name == "bodiless":
            headers = [(b"content-type", b"application/json"), (b"content-length", b"100")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            # A head goes out with the first byte of its body.
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass


@attrs.frozen
class Life:
    """Three policy servers from their start to their end."""

    client: ServerClient
    controller: Controller

    async def ask(self, episode_id: EpisodeId) -> Any:
        server = episode_id.rollout_id
        context = RolloutContext(episode_id)
        reply = await self.client.request(
            server, "POST", Route.CHAT.value, json=HELLO, context=context
        )
        answered: Any = reply.raise_for_status().json()
        return answered["choices"][0]["message"]


@asynccontextmanager
async def open_life(
    directory: Path, urls: dict[str, str], archive: MemoryArchive
) -> AsyncIterator[Life]:
    settings: dict[str, object] = {
        "native_backend": True,
        "checkpoint_policy": True,
        "checkpoint_generation_cuts": True,
    }
    deployment = Deployment(
        checkpoint=CheckpointSettings(enabled=True, control_auth_token=TOKEN, root="/c"),
        state_dir=str(directory),
        servers={
            name: ServerEntry(
                url=f"http://{name}", kind=Kind.MODEL, settings=settings | {"backend": url}
            )
            for name, url in urls.items()
        },
    )
    clock = FollowingClock()
    ports = HostPorts(archive=archive, wall_clock=clock)
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_network())
        for name in urls:
            policy = open_asgi(policy_app, deployment=deployment, name=name, ports=ports)
            asgi = await stack.enter_async_context(policy)
            stack.enter_context(network.serving(name, asgi))
        client = ServerClient(DeploymentDirectory(deployment), network)
        controller = await stack.enter_async_context(
            open_coordination(
                list(urls),
                HttpControlChannel(client, TOKEN),
                wall_clock=clock,
                randomness=HostRandomness(),
            )
        )
        yield Life(client, controller)


@asynccontextmanager
async def open_engines(directory: Path) -> AsyncIterator[tuple[dict[str, Engine], dict[str, str]]]:
    """The engines, which survive every crash, and their addresses."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            open_log_store(directory / "tokens", randomness=HostRandomness())
        )
        engines: dict[str, Engine] = {}
        urls: dict[str, str] = {}
        for name in ENGINES:
            backend = ScriptedBackend(store)
            app = make_app(NativeEngine(backend).routes, kind=Kind.MODEL, name=name)
            engines[name] = Engine(name, backend, app)
            bind = await stack.enter_async_context(serve_on_sockets(engines[name]))
            urls[name] = bind.url
        yield engines, urls


async def test_deaf_engines_cost_their_cuts_and_nothing_else(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    """Trial T5, CUT-1, CUT-7, POL-5, CTL-7, I29: ready in time; after a crash what was not cut is
    generated anew."""
    archive = MemoryArchive()
    async with open_engines(tmp_path) as (engines, urls):
        async with open_life(tmp_path, urls, archive) as life, trio.open_nursery() as nursery:
            for engine, episode_id in zip(engines.values(), EPISODES, strict=True):
                nursery.start_soon(life.ask, episode_id)
                (call,) = await engine.backend.wait_live()
                call.emit(EMITTED)
            prepared, took_s = await prepare(life, engines, mock_clock)
            assert prepared.ready
            assert took_s <= PREPARE_S
            counts = {name: prepared.reports[name].counts for name in ENGINES}
            assert [counts[name]["cut"] for name in ENGINES] == [1, 0, 0]
            assert [counts[name]["cut_failed"] for name in ENGINES] == [0, 1, 1]
            await life.controller.commit(C1, "c1", EPISODES, timeout_s=10)
            nursery.cancel_scope.cancel()
        async with open_life(tmp_path, urls, archive) as life:
            await life.controller.restore(C1, "c1", EPISODES, timeout_s=10)
            for name, episode_id in zip(ENGINES, EPISODES, strict=True):
                backend = engines[name].backend
                backend.at_once = True
                message = await life.ask(episode_id.next_attempt())
                assert tuple(message["generation_token_ids"]) == uncut_tokens(HELLO)
                spared = EMITTED if name == "honest" else 0
                assert backend.calls[-1].generated == OUTPUT_TOKENS - spared


async def prepare(
    life: Life, engines: dict[str, Engine], clock: MockClock
) -> tuple[Prepared, float]:
    """Let time pass once every engine was asked, and only as long as it must.

    Returns:
        With how many seconds went by.
    """
    began = trio.current_time()
    answers: list[Prepared] = []

    async def ask() -> None:
        answers.append(await life.controller.prepare(C1, timeout_s=PREPARE_S))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        for engine in engines.values():
            await engine.asked.wait()
        while (await life.controller.status())["honest"].report.counts["cut"] == 0:
            await wait_all_tasks_blocked(0.01)
        while not answers and trio.current_time() - began < 2 * PREPARE_S:
            clock.jump(STEP_S)
            await wait_all_tasks_blocked(0.01)
    return answers[0], trio.current_time() - began
