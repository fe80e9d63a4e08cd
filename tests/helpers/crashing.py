"""Lives of a deployment of real processes that a test kills: environment, agent, policy, resources.

    async with open_world(forks, directory, policy_workers=2) as world:
        async with world.life() as life:
            ...
            await life.crash()

What survives is the test's own: the engine, the judge, the token store, and what was committed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from gymtrio.capture.ledger import LedgerRow
from gymtrio.capture.log_store import LogTokenStore, open_log_store
from gymtrio.capture.tokens import StagingKey, TokensMissing
from gymtrio.checkpoint.coordination import Controller
from gymtrio.cli.demonstration.evidence import Evidence, read_evidence
from gymtrio.cli.demonstration.rollouts import read_ledger
from gymtrio.cli.demonstration.servers_file import TOKEN_STORE
from gymtrio.episodes.signal import Signal
from gymtrio.errors import TransportError
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId
from gymtrio.ports import HostRandomness
from gymtrio.serving.client import ServerClient
from gymtrio.serving.controller import open_controller
from gymtrio.serving.deployment import (
    Deployment,
    DeploymentDirectory,
    load_deployment,
    parse_deployment,
)
from gymtrio.serving.metrics import HEALTH_PATH
from gymtrio.serving.pool import open_pool
from gymtrio.serving.supervisor import write_resolved
from gymtrio.serving.transports import open_transport
from gymtrio.strict import unstructure
from gymtrio.wire.control import CommitReply, Kind, StatusReply
from gymtrio.wire.unix import runtime_directory
from tests.helpers.forked_servers import Forked, Forks, reserved_addresses
from tests.helpers.game import TASK, GameEngine, Judge
from tests.helpers.hash_engine import NativeEngine
from tests.helpers.scripted_backend import LiveCall
from tests.helpers.serving import make_app, serve_on_sockets

TIMEOUT_S: Final = 30.0
SYNC_ROUNDS: Final = 50
POLL_S: Final = 0.01
REPLAYED: Final = "tests.helpers.judged_counter:app"
WAITED_FOR: Final = "tests.helpers.judged_counter:waiting_app"
APPS: Final = (
    "servers.environment.single_agent_turn:app",
    "servers.model.policy:app",
    "servers.agent.simple_agent:app",
    REPLAYED,
    WAITED_FOR,
)


UNDISTURBED: Final = EpisodeId(RolloutId("undisturbed"))


def episode(rollout: str, attempt: int = 0) -> EpisodeId:
    return EpisodeId(RolloutId(rollout), attempt)


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Ask processes of which there is nothing to wait for."""
    with trio.fail_after(TIMEOUT_S):
        while not await is_so():  # noqa: ASYNC110
            await trio.sleep(POLL_S)


@attrs.frozen(kw_only=True)
class Outside:
    """What no crash touches."""

    engine: GameEngine
    judge: Judge
    store: LogTokenStore
    checkpoints: Path

    async def until_staged(self, call: LiveCall) -> None:
        """Wait until a reply's tokens can be read."""
        extension = call.extension
        assert extension is not None
        key = StagingKey(f"{extension.capture_key}/{extension.model_call_id}/whole")

        async def is_so() -> bool:
            try:
                await self.store.get(key)
            except TokensMissing:
                return False
            return True

        await until(is_so)


@attrs.frozen
class Life:
    """The same servers from one start to their end, as their callers and a controller see them."""

    outside: Outside
    deployment: Deployment
    client: ServerClient
    controller: Controller
    nursery: trio.Nursery
    replies: dict[EpisodeId, Any] = attrs.Factory(dict)
    """Results of `/run`, by episode."""
    replied: Signal = attrs.Factory(Signal)

    # -- rollouts -----------------------------------------------------------------------------

    async def run(self, episode_id: EpisodeId, **headers: str) -> Any:
        """One `/run`; its result."""
        body = {
            "episode_id": unstructure(episode_id),
            "task": {"task_id": {"taskset": "count", "task_id": "1"}, "task_input": TASK},
        }
        reply = await self.client.request(
            "environment", "POST", "/run", json=body, headers=list(headers.items()), context=None
        )
        answered: Any = reply.raise_for_status().json()
        assert answered.get("failure") is None, answered
        assert episode_id not in self.replies
        self.replies[episode_id] = answered["result"]
        self.replied.notify()
        return answered["result"]

    def start(self, *episodes: EpisodeId) -> None:
        """Run rollouts in the background, as long as the servers live."""

        async def run(episode_id: EpisodeId) -> None:
            with suppress(TransportError):
                await self.run(episode_id)

        for episode_id in episodes:
            self.nursery.start_soon(run, episode_id)

    async def until_replied(self, *episodes: EpisodeId) -> None:
        with trio.fail_after(TIMEOUT_S):
            while not self.replies.keys() >= set(episodes):
                await self.replied.wait()

    async def undisturbed(self) -> Evidence:
        """Of a rollout that is left alone."""
        await self.run(UNDISTURBED)
        return await self.evidence(UNDISTURBED)

    async def evidence(self, episode_id: EpisodeId) -> Evidence:
        """What a finished rollout left: its result, its calls, and their tokens from the store."""
        rows = await self.rows(episode_id)
        keys = [row.staging_key for row in rows]
        records = [await self.outside.store.get(key) for key in keys if key is not None]
        assert len(records) == len(rows)
        return read_evidence(self.replies[episode_id], rows, records)

    async def rows(self, episode_id: EpisodeId) -> tuple[LedgerRow, ...]:
        """The model calls of an episode that were delivered."""
        token = self.deployment.checkpoint.control_auth_token
        assert token is not None
        return await read_ledger(self.client, episode_id.capture_key, token)

    async def until_rows(self, episode_id: EpisodeId, count: int) -> None:
        async def is_so() -> bool:
            return len(await self.rows(episode_id)) == count

        await until(is_so)

    # -- checkpoints --------------------------------------------------------------------------

    async def status(self, server: str) -> StatusReply:
        return (await self.controller.status(timeout_s=TIMEOUT_S))[server]

    async def until_status(self, server: str, is_so: Callable[[StatusReply], bool]) -> StatusReply:
        """Wait until a server says so of itself."""
        last: list[StatusReply] = []

        async def ask() -> bool:
            last[:] = [await self.status(server)]
            return is_so(last[0])

        await until(ask)
        return last[0]

    async def until_held(self, call: LiveCall) -> None:
        """Wait until the policy server has a reply, and lacks nothing to let it leave."""
        await self.outside.until_staged(call)
        # What was written can be read before it is synced, and the server counts it only then. Nothing
        # tells that moment; each of these takes several turns of every process that may do it.
        for _ in range(SYNC_ROUNDS):
            await self.status("policy")

    async def until_count(self, server: str, name: str, number: int) -> None:
        await self.until_status(server, lambda status: status.report.counts[name] == number)

    async def prepare(self, name: str) -> dict[str, int]:
        """Close everything.

        Returns:
            The policy server's counts.
        """
        prepared = await self.controller.prepare(CheckpointId(name), timeout_s=TIMEOUT_S)
        assert prepared.ready, prepared.blocking
        return dict(prepared.reports["policy"].counts)

    async def commit(self, name: str, *scope: EpisodeId) -> dict[str, CommitReply]:
        """Write a checkpoint that is prepared."""
        replies = await self.controller.commit(
            CheckpointId(name), self.place(name), scope, timeout_s=TIMEOUT_S
        )
        keys = sorted(episode_id.capture_key for episode_id in scope)
        for server in ("environment", "policy"):
            assert list(replies[server].episode_ids) == keys, server
        staged: Any = replies["policy"].extra["staging_keys"]
        for key in staged:
            await self.outside.store.get(key)
        return replies

    async def checkpoint(self, name: str, *scope: EpisodeId) -> None:
        """Prepare and commit; it stays open."""
        await self.prepare(name)
        await self.commit(name, *scope)

    async def resume(self, name: str) -> None:
        await self.controller.resume(CheckpointId(name), timeout_s=TIMEOUT_S)

    async def restore(self, name: str, *scope: EpisodeId) -> None:
        await self.controller.restore(
            CheckpointId(name), self.place(name), scope, timeout_s=TIMEOUT_S
        )

    def place(self, name: str) -> str:
        return str(self.outside.checkpoints / name)


class World:
    """One deployment, whose processes live several times."""

    def __init__(self, outside: Outside, file: Path, forks: Forks) -> None:
        self.outside = outside
        self._file = file
        self._forks = forks
        self._forked: dict[str, Forked] = {}

    @property
    def engine(self) -> GameEngine:
        return self.outside.engine

    @property
    def judge(self) -> Judge:
        return self.outside.judge

    @asynccontextmanager
    async def life(
        self, restored: str | None = None, scope: Iterable[EpisodeId] = ()
    ) -> AsyncIterator[Life]:
        """New processes; at the end of the block every group of them is killed.

        Args:
            restored: the checkpoint that they go on from; None: they start afresh.
        """
        deployment = load_deployment(self._file)
        async with (
            self._forks.start(self._file, dict.fromkeys(deployment.servers)) as forked,
            serving(deployment),
            open_life(self.outside, deployment) as life,
        ):
            if restored is None:
                await life.controller.start_afresh([], timeout_s=TIMEOUT_S)
            else:
                await life.restore(restored, *scope)
            self._forked = forked
            yield life
            await kill(forked.values())
            life.nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def replaced(self, server: str) -> AsyncIterator[None]:
        """Kill one server alone; for the time of the block there is another in its place."""
        await kill([self._forked[server]])
        async with (
            self._forks.start(self._file, {server: None}),
            serving(load_deployment(self._file)),
        ):
            yield


async def kill(groups: Iterable[Forked]) -> None:
    """SIGKILL process groups, and wait until nothing of them runs."""
    groups = list(groups)
    for one in groups:
        one.kill()
    for one in groups:
        await one.wait_gone()


@asynccontextmanager
async def serving(deployment: Deployment) -> AsyncIterator[None]:
    """Wait until every server serves: a request over HTTP waits for that by itself."""
    async with open_pool() as pool:
        outside = ServerClient(DeploymentDirectory(deployment), pool)
        for server in deployment.servers:
            reply = await outside.request(server, "GET", HEALTH_PATH, context=None)
            reply.raise_for_status()
    yield


@asynccontextmanager
async def open_life(outside: Outside, deployment: Deployment) -> AsyncIterator[Life]:
    """A controller and a caller of servers that run."""
    async with (
        open_controller(deployment) as controller,
        open_transport(deployment, "caller") as transport,
        trio.open_nursery() as nursery,
    ):
        client = ServerClient(DeploymentDirectory(deployment), transport)
        yield Life(outside, deployment, client, controller, nursery)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_outside(directory: Path) -> AsyncIterator[tuple[Outside, dict[str, str]]]:
    """Engine, judge and stores, and the addresses of the first two."""
    checkpoints = directory / "checkpoints"
    checkpoints.mkdir()
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            open_log_store(directory / "state" / TOKEN_STORE, randomness=HostRandomness())
        )
        engine, judge = GameEngine(store), Judge()
        apps = {
            "engine": make_app(NativeEngine(engine).routes, kind=Kind.MODEL, name="engine"),
            "judge": make_app({("POST", "/judge"): judge.serve}, name="judge"),
        }
        urls = {
            name: (await stack.enter_async_context(serve_on_sockets(app))).url
            for name, app in apps.items()
        }
        outside = Outside(engine=engine, judge=judge, store=store, checkpoints=checkpoints)
        yield outside, urls


def describe(
    directory: Path, urls: dict[str, str], *, policy_workers: int, counter: str = REPLAYED
) -> dict[str, Any]:
    """The four servers, at free ports."""
    servers = _servers(urls, policy_workers=policy_workers, counter=counter)
    return {
        "state_dir": str(directory / "state"),
        "checkpoint": {
            "enabled": True,
            "control_auth_token": HostRandomness().hex(32),
            "root": str(directory / "checkpoints"),
        },
        "servers": {name: entry | {"start_timeout_s": 60.0} for name, entry in servers.items()},
    }


def _servers(urls: dict[str, str], *, policy_workers: int, counter: str) -> dict[str, Any]:
    return {
        "environment": {
            "app": "servers.environment.single_agent_turn:app",
            "settings": {"default": {"resources": "counter", "agent": "agent"}},
        },
        "policy": {
            "app": "servers.model.policy:app",
            "settings": {
                "backend": urls["engine"],
                "native_backend": True,
                "checkpoint_policy": True,
                "checkpoint_generation_cuts": True,
                "num_workers": policy_workers,
            },
        },
        "agent": {"app": "servers.agent.simple_agent:app", "settings": {"model": "policy"}},
        "counter": {"app": counter, "kind": "resources", "settings": {"judge": urls["judge"]}},
    }


@asynccontextmanager
async def open_world(
    forks: Forks, directory: Path, *, policy_workers: int, counter: str = REPLAYED
) -> AsyncIterator[World]:
    async with open_outside(directory) as (outside, urls):
        block = describe(directory, urls, policy_workers=policy_workers, counter=counter)
        block["checkpoint"]["recover"] = True
        with reserved_addresses(list(block["servers"])) as binds, runtime_directory() as sockets:
            for server, entry in block["servers"].items():
                entry["bind"] = binds[server]
            block["socket_dir"] = str(sockets)
            yield World(outside, write_resolved(parse_deployment(block), directory), forks)
