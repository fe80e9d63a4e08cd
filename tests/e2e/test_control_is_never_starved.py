"""Trial T2: calls that are parked hold every data connection, and control calls go through at once.

So do the rounds of cuts of a policy server, whose generations hold every connection to the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path
from statistics import median
from typing import Final, TypeVar

import attrs
import pytest
import trio

from gymtrio.capture.memory_store import MemoryTokenStore
from gymtrio.capture.replies import Route
from gymtrio.checkpoint.coordination import Controller, open_coordination
from gymtrio.context import RolloutContext
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId
from gymtrio.ports import HostClock, HostRandomness
from gymtrio.serving.app import open_asgi
from gymtrio.serving.client import ClientSettings, Lane, ServerClient
from gymtrio.serving.controlchannel import HttpControlChannel
from gymtrio.serving.deployment import (
    Deployment,
    DeploymentDirectory,
    ServerEntry,
    parse_deployment,
)
from gymtrio.serving.host import HostPorts
from gymtrio.serving.http import Request, Response, json_response
from gymtrio.serving.inprocess import open_network
from gymtrio.serving.metrics import HEALTH_PATH, METRICS_PATH
from gymtrio.serving.pool import Pool, open_pool
from gymtrio.serving.supervisor import RunningDeployment, open_deployment
from gymtrio.settings import CheckpointSettings, Secret
from gymtrio.storage.disk import ThreadDisk
from gymtrio.strict import unstructure
from gymtrio.wire.control import Kind
from servers.model.policy import app as policy_app
from tests.helpers.checkpoints import commit, place, some_records
from tests.helpers.clocks import FollowingClock
from tests.helpers.hash_engine import NativeEngine
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.scripted_backend import ScriptedBackend
from tests.helpers.serving import make_app, serve_on_sockets

CONNECTIONS: Final = 4
CALLS: Final = 504
EPISODE: Final = EpisodeId(RolloutId("r"))
EPISODES: Final = [EpisodeId(RolloutId(f"r{number}")) for number in range(CALLS)]
CHECKPOINT: Final = CheckpointId("c1")

SERVER_CONNECTIONS: Final = CONNECTIONS // 2
"""Of each server to another: fewer than the runs it is sent, so that its own calls wait as well."""

ROUNDS: Final = 7
"""What is compared are medians: a machine that is busy elsewhere delays a few calls, and not most."""

BEYOND_S_MAX: Final = 0.1
"""What a control call may take beyond its own work. That allows for noise: calls take 2 to 20 ms, and
with three busy processes on every core these medians differ by 20 ms."""

T = TypeVar("T")


def deployment_of(root: Path, server: str, entry: dict[str, object]) -> Deployment:
    """This server and a policy."""
    root.mkdir()
    return parse_deployment(
        {
            "checkpoint": {
                "enabled": True,
                "control_auth_token": HostRandomness().hex(32),
                "root": str(root),
            },
            "client": {"data_connections_max": SERVER_CONNECTIONS},
            "servers": {
                server: {"start_timeout_s": 60.0, **entry},
                "policy": {
                    "app": "servers.model.policy:app",
                    "start_timeout_s": 60.0,
                    "settings": {"backend": "http://127.0.0.1:9", "checkpoint_policy": True},
                },
            },
        }
    )


@pytest.mark.timeout(180)
async def test_control_calls_take_no_longer_than_their_own_work(tmp_path: Path) -> None:
    """COORD-5, CTL-15, SRV-6: also while 4 runs hold every connection and 500 wait for one.

    Without them, its own work is what ordinary calls to the same servers take, and a commit's write.
    With them, it is what the call takes without.
    """
    root = tmp_path / "checkpoints"
    judge = Judge()
    async with serve_on_sockets(make_app({}, fallback=judge.serve)) as stuck:
        servers = {"resources": stuck.url, "agent": stuck.url}
        deployment = deployment_of(
            root,
            "runs",
            {
                "app": "servers.environment.single_agent_turn:app",
                "settings": {"default": servers},
            },
        )
        async with open_deployment(deployment, run_dir=tmp_path / "run") as running:
            settings = ClientSettings(data_connections_max=CONNECTIONS, control_connections_max=2)
            token = running.deployment.checkpoint.control_auth_token
            assert token is not None
            async with open_pool(settings) as pool:
                directory = DeploymentDirectory(running.deployment)
                client = ServerClient(directory, pool, settings)
                async with open_coordination(
                    ["runs", "policy"],
                    HttpControlChannel(client, token),
                    wall_clock=HostClock(),
                    randomness=HostRandomness(),
                ) as controller:
                    await compare(Measured(controller, client, pool, directory, root), judge)


class Judge:
    """Where the runs are parked: a server that answers no seed before it is told to."""

    def __init__(self) -> None:
        self.let_go = trio.Event()

    async def serve(self, request: Request) -> Response:
        if request.path.endswith("/seed_session"):
            await self.let_go.wait()
            return json_response({"error": "no such task"}, 400)
        return json_response({})


@attrs.frozen
class Measured:
    """A deployment whose control calls are timed."""

    controller: Controller
    client: ServerClient
    pool: Pool
    servers: DeploymentDirectory
    root: Path

    async def own_work(self) -> dict[str, float]:
        """Seconds of what a control call cannot do without, by operation."""
        took = _Took()
        for number in range(ROUNDS):
            await took.time("calls", self._one_call_after_the_other())
            written = commit(ThreadDisk(), place(str(self.root), f"own-{number}"), some_records())
            await took.time("write", written)
        calls, write = took.median("calls"), took.median("write")
        operations = ("status", "prepare", "renew", "resume")
        return {**dict.fromkeys(operations, calls), "commit": calls + write}

    async def _one_call_after_the_other(self) -> None:
        for server in ("runs", "policy"):
            await self.client.request(server, "GET", HEALTH_PATH, context=None, control=True)

    async def checkpoints(self, name: str, *, live: int) -> dict[str, float]:
        """Seconds of each call of a whole checkpoint, by operation.

        Args:
            live: episodes that are to be in each of them.
        """
        took = _Took()
        for number in range(ROUNDS):
            checkpoint_id = CheckpointId(f"{name}-{number}")
            directory = str(self.root / checkpoint_id)
            await took.time("status", self.controller.status())
            prepared = await took.time(
                "prepare", self.controller.prepare(checkpoint_id, timeout_s=60)
            )
            assert prepared.ready
            await took.time("renew", self.controller.renew(checkpoint_id, timeout_s=60))
            committed = await took.time(
                "commit", self.controller.commit(checkpoint_id, directory, EPISODES, timeout_s=60)
            )
            assert len(committed["runs"].episode_ids) == live
            await took.time("resume", self.controller.resume(checkpoint_id, timeout_s=60))
        return {operation: took.median(operation) for operation in took.by_name}

    async def run(self, episode_id: EpisodeId, answered: list[int]) -> None:
        task_id = {"taskset": "t", "task_id": "1"}
        body = {
            "episode_id": unstructure(episode_id),
            "task": {"task_id": task_id, "task_input": {"responses_create_params": {"input": "x"}}},
        }
        reply = await self.client.request("runs", "POST", "/run", json=body, context=None)
        answered.append(reply.status)

    async def metrics(self) -> str:
        """As a scraper reads them, over connections of its own."""
        async with open_pool() as scraper:
            client = ServerClient(self.servers, scraper)
            return (await client.request("runs", "GET", METRICS_PATH, context=None)).body.decode()


class _Took:
    """Seconds, by what took them."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[float]] = defaultdict(list)

    async def time(self, name: str, call: Awaitable[T]) -> T:
        began = trio.current_time()
        result = await call
        self.by_name[name].append(trio.current_time() - began)
        return result

    def median(self, name: str) -> float:
        return median(self.by_name[name])


async def compare(measured: Measured, judge: Judge) -> None:
    pool = measured.pool
    answered: list[int] = []
    unloaded = await measured.checkpoints("unloaded", live=0)
    assert_little_beyond(unloaded, await measured.own_work())
    async with trio.open_nursery() as nursery:
        for episode_id in EPISODES:
            nursery.start_soon(measured.run, episode_id, answered)
        while (await measured.controller.status())["runs"].report.counts["live"] < CONNECTIONS:
            continue
        loaded = await measured.checkpoints("loaded", live=CONNECTIONS)
        metrics = await measured.metrics()
        assert answered == []
        data = pool.statistics(Lane.DATA)
        assert (data.active, data.waiting) == (CONNECTIONS, CALLS - CONNECTIONS)
        judge.let_go.set()
    assert answered == [200] * CALLS
    places, queued = float(SERVER_CONNECTIONS), float(CONNECTIONS - SERVER_CONNECTIONS)
    assert f'gymtrio_pool_calls{{lane="data",state="active"}} {places}' in metrics
    assert f'gymtrio_pool_calls{{lane="data",state="waiting"}} {queued}' in metrics
    assert f'gymtrio_pool_waits_total{{lane="data"}} {queued}' in metrics
    assert pool.statistics(Lane.DATA).waits == CALLS - CONNECTIONS
    assert pool.statistics(Lane.CONTROL).waits == 0
    # The machine may have become busier meanwhile, which is not the runs' doing.
    again = await measured.checkpoints("again", live=0)
    assert_little_beyond(loaded, {name: max(unloaded[name], again[name]) for name in loaded})


def assert_little_beyond(took: dict[str, float], own: dict[str, float]) -> None:
    beyond = {name: took_s - own[name] for name, took_s in took.items()}
    assert max(beyond.values()) <= BEYOND_S_MAX, (took, own)


@pytest.mark.timeout(180)
async def test_control_calls_pass_parked_data_calls(tmp_path: Path) -> None:
    """COORD-5, CTL-15, CTL-18: status, prepare, commit and resume answer while all of them wait."""
    deployment = deployment_of(
        tmp_path / "checkpoints", "counter", {"app": "servers.resources.counter:app"}
    )
    async with open_deployment(deployment, run_dir=tmp_path / "run") as running:
        await park_and_control(running, tmp_path / "checkpoints")


async def park_and_control(running: RunningDeployment, root: Path) -> None:
    settings = ClientSettings(data_connections_max=CONNECTIONS, control_connections_max=2)
    token = running.deployment.checkpoint.control_auth_token
    assert token is not None
    answered: list[int] = []
    async with open_pool(settings) as pool:
        client = ServerClient(DeploymentDirectory(running.deployment), pool, settings)
        context = RolloutContext(EPISODE)
        seeded = await client.request(
            "counter", "POST", "/seed_session", json={"initial_count": 0}, context=context
        )

        async def increment() -> None:
            reply = await client.request(
                "counter",
                "POST",
                "/increment_counter",
                json={"count": 1},
                cookies=seeded.cookies(),
                context=context,
            )
            answered.append(reply.status)

        async with (
            open_coordination(
                ["counter", "policy"],
                HttpControlChannel(client, token),
                wall_clock=HostClock(),
                randomness=HostRandomness(),
            ) as controller,
            trio.open_nursery() as nursery,
        ):
            async with controller.checkpoint(CHECKPOINT, str(root / "c1"), timeout_s=60) as held:
                for _ in range(CALLS):
                    nursery.start_soon(increment)
                while await waiting_at_the_gate(controller) < CONNECTIONS:
                    continue
                await held.commit([EPISODE])
                await held.prove_held()
                assert answered == []
        count = await client.request(
            "counter",
            "POST",
            "/get_counter_value",
            cookies=seeded.cookies(),
            context=context,
        )
    assert answered == [200] * CALLS
    assert count.json() == {"count": CALLS}


async def test_cuts_pass_generations_that_hold_every_connection(
    tmp_path: Path, autojump_clock: object
) -> None:
    """CUT-1, COORD-5: those that the engine has are cut, and the others cost their own regeneration."""
    settings: dict[str, object] = {
        "native_backend": True,
        "checkpoint_policy": True,
        "checkpoint_generation_cuts": True,
    }
    episodes = [EpisodeId(RolloutId(f"r{number}")) for number in range(CONNECTIONS + 2)]
    backend = ScriptedBackend(MemoryTokenStore())
    async with (
        serve_on_sockets(make_app(NativeEngine(backend).routes, kind=Kind.MODEL)) as engine,
        open_network() as network,
        trio.open_nursery() as nursery,
    ):
        entry = ServerEntry(
            url="http://policy", kind=Kind.MODEL, settings=settings | {"backend": engine.url}
        )
        token = Secret(HostRandomness().hex(32))
        deployment = Deployment(
            checkpoint=CheckpointSettings(enabled=True, control_auth_token=token, root="/c"),
            state_dir=str(tmp_path),
            client=ClientSettings(data_connections_max=CONNECTIONS, control_connections_max=2),
            servers={"policy": entry},
        )
        clock = FollowingClock()
        ports = HostPorts(archive=MemoryArchive(), wall_clock=clock)
        async with open_asgi(policy_app, deployment=deployment, name="policy", ports=ports) as asgi:
            with network.serving("policy", asgi):
                client = ServerClient(DeploymentDirectory(deployment), network)

                async def ask(episode_id: EpisodeId) -> None:
                    body = {"messages": [{"role": "user", "content": "hello"}]}
                    context = RolloutContext(episode_id)
                    await client.request(
                        "policy", "POST", Route.CHAT.value, json=body, context=context
                    )

                for episode_id in episodes:
                    nursery.start_soon(ask, episode_id)
                for call in await backend.wait_live(CONNECTIONS):
                    call.emit(3)
                async with open_coordination(
                    ["policy"],
                    HttpControlChannel(client, token),
                    wall_clock=clock,
                    randomness=HostRandomness(),
                ) as controller:
                    prepared = await controller.prepare(CHECKPOINT, timeout_s=10)
                    counts = prepared.reports["policy"].counts
                    assert prepared.ready
                    assert (counts["cut"], counts["cut_failed"]) == (CONNECTIONS, 2)
                    await controller.resume(CHECKPOINT, timeout_s=10)
                nursery.cancel_scope.cancel()


async def waiting_at_the_gate(controller: Controller) -> int:
    status = await controller.status()
    waiting: int = status["counter"].report.counts["waiting"]
    return waiting
