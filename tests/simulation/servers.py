"""The deployment under test: the real servers as processes, each on ports of its own."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from gymtrio.participants.policy.participant import PolicyParticipant
from gymtrio.ports import Randomness, WallClock
from gymtrio.serving.app import ServerApp, open_asgi
from gymtrio.serving.deployment import Bind, Deployment, parse_deployment
from gymtrio.serving.host import HostPorts, OpenService, Service, ServiceHost
from gymtrio.serving.inprocess import open_network
from gymtrio.serving.model_server import HttpBackend, ModelSettings
from gymtrio.serving.policy_routes import policy_routes
from gymtrio.wire.control import Kind
from servers.agent.simple_agent import app as simple_agent
from servers.environment.single_agent_turn import app as single_agent_turn
from servers.resources.counter import app as counter
from tests.simulation.disk import ROOT, STATE, DiskPort, Machine
from tests.simulation.network import SimulatedNetwork
from tests.simulation.processes import Process
from tests.simulation.tokens import TokenPort, TokenShelf

CONTROL_TOKEN: Final = "0123456789abcdef-simulated"
PARTICIPANTS: Final = ("env", "policy", "agent", "tools")


def make_deployment(*, recover: bool, lease_grace_s: float = 8.0, workers: int = 1) -> Deployment:
    """Where servers find each other: hosts are process names.

    Args:
        workers: of the policy server.
    """
    servers: dict[str, dict[str, Any]] = {
        "env": {
            "app": "servers.environment.single_agent_turn:app",
            "settings": {"default": {"resources": "tools", "agent": "agent"}},
        },
        "policy": {
            "app": "servers.model.policy:app",
            "settings": {
                "backend": "engine",
                "native_backend": True,
                "checkpoint_policy": True,
                "checkpoint_generation_cuts": True,
                "num_workers": workers,
            },
        },
        "agent": {"app": "servers.agent.simple_agent:app", "settings": {"model": "policy"}},
        "tools": {"app": "servers.resources.counter:app"},
        "engine": {"app": "tests.simulation.engine:app", "kind": "model"},
    }
    deployment = parse_deployment(
        {
            "servers": servers,
            "session_secret": "s" * 32,
            "state_dir": STATE,
            "checkpoint": {
                "enabled": True,
                "control_auth_token": CONTROL_TOKEN,
                "root": ROOT,
                "lease_grace_seconds": lease_grace_s,
                "recover": recover,
            },
        }
    )
    return deployment.resolved({name: Bind(name, 80) for name in servers})


class SeededRandomness:
    """Implements `gymtrio.ports.Randomness`."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)

    def hex(self, n_bytes: int) -> str:
        return self._rng.randbytes(n_bytes).hex()


def policy_app(store: TokenPort) -> ServerApp[ModelSettings]:
    """As `servers.model.policy`, on the simulated token store instead of the one on disk."""

    @asynccontextmanager
    async def open_service(host: ServiceHost[ModelSettings]) -> AsyncIterator[Service]:
        settings = host.settings
        participant = PolicyParticipant(
            host.instance,
            backend=HttpBackend(host.client, settings, control_token=host.control_token),
            token_store=store,
            randomness=host.randomness,
            generation_cuts=settings.checkpoint_generation_cuts,
        )
        yield Service(routes=policy_routes(participant, settings.model), participant=participant)

    return model_app(open_service)


def model_app(open_service: OpenService[ModelSettings]) -> ServerApp[ModelSettings]:
    """The policy server, by what it opens."""
    return ServerApp(
        kind=Kind.MODEL,
        default_instance="policy",
        settings_class=ModelSettings,
        open_service=open_service,
    )


@attrs.frozen(kw_only=True)
class Surroundings:
    """What all processes of a run share."""

    seed: int
    lease_grace_s: float
    wall_clock: WallClock
    network: SimulatedNetwork
    machine: Machine
    shelf: TokenShelf

    def randomness(self, process: Process) -> Randomness:
        return SeededRandomness(f"{self.seed} {process}")


def ports_of(process: Process, around: Surroundings, server: Process | None = None) -> HostPorts:
    """What a process has of the machine; `server`: of which it is a worker."""
    return HostPorts(
        wall_clock=around.wall_clock,
        randomness=around.randomness(process),
        transport=around.network.port(process, server),
        disk=DiskPort(around.machine, process),
    )


async def serve(
    process: Process, app: ServerApp[Any], around: Surroundings, *, recover: bool
) -> None:
    """The main task of a server's process.

    Args:
        recover: it was started to be restored (HARD-3).
    """
    ports = ports_of(process, around)
    deployment = make_deployment(recover=recover, lease_grace_s=around.lease_grace_s)
    async with (
        open_network() as network,
        open_asgi(app, deployment=deployment, name=process.name, ports=ports) as asgi,
    ):
        with network.serving(process.name, around.network.tapped(process, asgi)):
            around.network.listen(process, network)
            await trio.sleep_forever()


def app_of(process: Process, around: Surroundings) -> ServerApp[Any]:
    if process.name == "policy":
        return policy_app(TokenPort(around.shelf, process))
    apps: dict[str, ServerApp[Any]] = {
        "env": single_agent_turn,
        "agent": simple_agent,
        "tools": counter,
    }
    return apps[process.name]
