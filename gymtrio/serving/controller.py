"""The controller library over a deployment: what a trio-based trainer embeds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gymtrio.checkpoint.coordination import Controller, open_coordination
from gymtrio.errors import SettingsError
from gymtrio.ports import HostClock, HostRandomness
from gymtrio.serving.client import ServerClient
from gymtrio.serving.control_frames import open_control_frames
from gymtrio.serving.controlchannel import HttpControlChannel
from gymtrio.serving.deployment import Deployment, DeploymentDirectory, load_deployment
from gymtrio.serving.transports import open_transport


@asynccontextmanager
async def open_controller(
    deployment: Deployment | str | Path, *, discovery_timeout_s: float = 60.0
) -> AsyncIterator[Controller]:
    """Discover a deployment's participants and drive their checkpoints.

    Runs inside any trio program, beside any other task. It owns its connections, so that calls which
    are parked at the servers never delay a control call (COORD-5).

    Args:
        deployment: as loaded, or the path of its file; `RunningDeployment.deployment` for servers
            that were started with free ports.

    Raises:
        SettingsError: the file is wrong, or checkpointing is off.
        Failed: a server could not be reached, which must not pass for absence (COORD-4).
        NoPolicyModel: there is none.

    Cancelled: every connection is closed. What is open at the servers ends by its lease.
    """
    if not isinstance(deployment, Deployment):
        deployment = load_deployment(deployment)
    token = deployment.checkpoint.control_auth_token
    if not deployment.checkpoint.enabled or token is None:
        raise SettingsError("checkpoint.enabled is false: there is nothing to control")
    async with open_transport(deployment, "controller") as transport:
        client = ServerClient(DeploymentDirectory(deployment), transport, deployment.client)
        sockets = {name: deployment.socket_path(name) for name in deployment.servers}
        randomness = HostRandomness()
        async with (
            open_control_frames(
                {name: path for name, path in sockets.items() if path is not None},
                token,
                HttpControlChannel(client, token),
                nonce=randomness.hex(8),
            ) as channel,
            open_coordination(
                list(deployment.servers),
                channel,
                wall_clock=HostClock(),
                randomness=randomness,
                discovery_timeout_s=discovery_timeout_s,
            ) as controller,
        ):
            yield controller
