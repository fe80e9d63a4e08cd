"""The policy server over the embedded engine, through a checkpoint, a crash and a restore."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from gymtrio.checkpoint.coordination import Controller, open_coordination
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId
from gymtrio.ports import HostClock, HostRandomness
from gymtrio.serving.app import open_asgi
from gymtrio.serving.client import ServerClient
from gymtrio.serving.controlchannel import HttpControlChannel
from gymtrio.serving.deployment import Deployment, DeploymentDirectory, parse_deployment
from gymtrio.serving.host import HostPorts
from gymtrio.serving.inprocess import open_network
from gymtrio.settings import Secret
from servers.model.embedded_engine import app as engine_app
from servers.model.policy import app as policy_app
from tests.helpers.served_engine import SETTINGS, TOKEN

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Write a story about a fox and a cat."}],
    "max_tokens": 24,
    "temperature": 0.5,
    "seed": 5,
}
EPISODE = EpisodeId(RolloutId("r"))


@attrs.frozen
class Incarnation:
    """Policy server and engine, as processes would be."""

    client: ServerClient
    controller: Controller

    async def call(self, key: str) -> Any:
        path = f"/ng-rollout/{key}/v1/chat/completions"
        reply = await self.client.request("policy", "POST", path, json=BODY)
        return reply.raise_for_status().json()


def deployment(tmp_path: Path, *, recover: bool) -> Deployment:
    policy = {
        "backend": "engine",
        "native_backend": True,
        "checkpoint_policy": True,
        "checkpoint_generation_cuts": True,
    }
    return parse_deployment(
        {
            "state_dir": str(tmp_path / "state"),
            "checkpoint": {
                "enabled": True,
                "control_auth_token": TOKEN,
                "root": str(tmp_path / "checkpoints"),
                "recover": recover,
            },
            "servers": {
                "engine": {"url": "http://engine", "kind": "model", "settings": SETTINGS},
                "policy": {"url": "http://policy", "kind": "model", "settings": policy},
            },
        }
    )


@asynccontextmanager
async def open_incarnation(tmp_path: Path, *, recover: bool = False) -> AsyncIterator[Incarnation]:
    where = deployment(tmp_path, recover=recover)
    async with open_network() as network:
        client = ServerClient(DeploymentDirectory(where), network)
        ports = HostPorts(transport=network)
        async with (
            open_asgi(engine_app, deployment=where, name="engine", ports=ports) as engine,
            open_asgi(policy_app, deployment=where, name="policy", ports=ports) as policy,
        ):
            with network.serving("engine", engine), network.serving("policy", policy):
                async with open_coordination(
                    ["engine", "policy"],
                    HttpControlChannel(client, Secret(TOKEN)),
                    wall_clock=HostClock(),
                    randomness=HostRandomness(),
                ) as controller:
                    yield Incarnation(client, controller)


async def checkpoint_in_flight(incarnation: Incarnation, directory: Path) -> CheckpointId:
    """Checkpoint while the call of the episode decodes, however long its prompt takes."""
    number = 0
    while True:
        number += 1
        checkpoint_id = CheckpointId(f"c{number}")
        prepared = await incarnation.controller.prepare(checkpoint_id, timeout_s=20)
        assert prepared.ready
        if prepared.reports["policy"].counts["cut"]:
            await incarnation.controller.commit(
                checkpoint_id, str(directory), [EPISODE], timeout_s=20
            )
            return checkpoint_id
        await incarnation.controller.resume(checkpoint_id, timeout_s=20)


async def be_interrupted(incarnation: Incarnation) -> None:
    await incarnation.call(EPISODE.capture_key)
    pytest.fail("the call ended before it was cut")


async def test_a_call_in_flight_survives_the_crash_of_policy_and_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CUT-1, CUT-4, POL-3, I26: the replacement's call continues the cut, and its reply is that of a
    call that was left alone. The engine itself is no participant (COORD-4)."""
    (tmp_path / "checkpoints").mkdir()
    directory = tmp_path / "checkpoints" / "one"
    async with open_incarnation(tmp_path) as first:
        assert [member.server for member in first.controller.members] == ["policy"]
        uncut = await first.call("other")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(be_interrupted, first)
            checkpoint_id = await checkpoint_in_flight(first, directory)
            nursery.cancel_scope.cancel()
    async with open_incarnation(tmp_path, recover=True) as second:
        await second.controller.restore(checkpoint_id, str(directory), [EPISODE], timeout_s=20)
        status = await second.controller.status()
        assert status["policy"].extra["restored_generation_cuts"] == ["r-a1"]
        told = await second.call(EPISODE.next_attempt().capture_key)
        assert told["choices"][0]["message"] == uncut["choices"][0]["message"]
        status = await second.controller.status()
        assert status["policy"].extra["restored_generation_cuts"] == []
    assert "generated anew" not in caplog.text
