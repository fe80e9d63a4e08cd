"""Trial T2: calls that are parked hold every data connection, and control calls go through at once.

So do the rounds of cuts of a policy server, whose generations hold every connection to the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import trio

from gymtrio.capture.memory_store import MemoryTokenStore
from gymtrio.capture.replies import Route
from gymtrio.checkpoint.coordination import Controller, open_coordination
from gymtrio.context import RolloutContext
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId
from gymtrio.ports import HostClock, HostRandomness
from gymtrio.serving.app import open_asgi
from gymtrio.serving.client import ClientSettings, ServerClient
from gymtrio.serving.controlchannel import HttpControlChannel
from gymtrio.serving.deployment import (
    Deployment,
    DeploymentDirectory,
    ServerEntry,
    parse_deployment,
)
from gymtrio.serving.host import HostPorts
from gymtrio.serving.inprocess import open_network
from gymtrio.serving.pool import open_pool
from gymtrio.serving.supervisor import RunningDeployment, open_deployment
from gymtrio.settings import CheckpointSettings, Secret
from gymtrio.wire.control import Kind
from servers.model.policy import app as policy_app
from tests.helpers.clocks import FollowingClock
from tests.helpers.hash_engine import NativeEngine
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.scripted_backend import ScriptedBackend
from tests.helpers.serving import make_app, serve_on_sockets

CONNECTIONS: Final = 4
CALLS: Final = 504
EPISODE: Final = EpisodeId(RolloutId("r"))
CHECKPOINT: Final = CheckpointId("c1")


@pytest.mark.timeout(180)
async def test_control_calls_pass_parked_data_calls(tmp_path: Path) -> None:
    """COORD-5, CTL-15, CTL-18: status, prepare, commit and resume answer while all of them wait."""
    (tmp_path / "checkpoints").mkdir()
    deployment = parse_deployment(
        {
            "checkpoint": {
                "enabled": True,
                "control_auth_token": HostRandomness().hex(32),
                "root": str(tmp_path / "checkpoints"),
            },
            "servers": {
                "counter": {"app": "servers.resources.counter:app", "start_timeout_s": 60.0},
                "policy": {
                    "app": "servers.model.policy:app",
                    "start_timeout_s": 60.0,
                    "settings": {"backend": "http://127.0.0.1:9", "checkpoint_policy": True},
                },
            },
        }
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
