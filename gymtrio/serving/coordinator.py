"""The coordinator of a policy server with several workers: the control plane, and no HTTP (WRK-1).

Workers connect to its socket; a control call that reached one of them comes over that connection.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import attrs
import trio

from gymtrio.background import open_background
from gymtrio.checkpoint.control import Control
from gymtrio.checkpoint.routes import serve_control
from gymtrio.errors import SettingsError
from gymtrio.limits import CONTROL_BODY_BYTES_MAX
from gymtrio.participants.policy.coordinator import CoordinatedPolicy
from gymtrio.participants.policy.link import COORDINATOR_ROLE, METRICS_KIND
from gymtrio.serving.app import STATE_DIR_DEFAULT
from gymtrio.serving.controlplane import open_control_plane
from gymtrio.serving.deployment import Deployment
from gymtrio.serving.host import HostPorts
from gymtrio.serving.metrics import CheckpointMetrics
from gymtrio.serving.model_server import ModelSettings
from gymtrio.settings import load_settings
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.listening import serve_channels
from gymtrio.wire.messages import Hello
from gymtrio.wire.unix import lasting_directory, open_unix_listener, peer_uid

_INSTANCE_BYTES: Final = 8


@attrs.frozen
class Coordinator:
    """A coordinator that workers can reach."""

    participant: CoordinatedPolicy
    socket: Path


@attrs.frozen
class WorkerHub:
    """A coordinator, wherever its workers come from."""

    participant: CoordinatedPolicy
    serve: Callable[[trio.abc.Stream, int | None], Awaitable[None]]
    """Serves the connection of one worker until it ends; with the user at its other end, if known."""


def state_dir_of(deployment: Deployment, name: str) -> Path:
    return Path(deployment.state_dir or STATE_DIR_DEFAULT) / name


def settings_of(deployment: Deployment, name: str) -> ModelSettings:
    """The settings of a server with several workers.

    Raises:
        SettingsError: it is none.
    """
    entry = deployment.entry(name)
    settings = load_settings(ModelSettings, entry.settings, f"servers.{name}.settings")
    if settings.num_workers < 2:
        raise SettingsError(f"servers.{name}: num_workers is 1, so there is nothing to coordinate")
    return settings


@asynccontextmanager
async def open_coordinator(
    deployment: Deployment, name: str, *, ports: HostPorts | None = None, path: Path | None = None
) -> AsyncIterator[Coordinator | None]:
    """Coordinate the workers of a server, which connect to a socket, for the time of the block.

    Args:
        path: of its socket; None: the same place in every incarnation.

    Yields:
        When workers can connect. None: the server takes no part in checkpoints, so that its workers
        share nothing.

    Raises:
        SettingsError: the server's settings do not fit.
        HostError: another process coordinates it already.
    """
    async with open_hub(deployment, name, ports=ports) as hub:
        if hub is None:
            yield None
            return
        path = path or lasting_directory(state_dir_of(deployment, name)) / "coordinator"

        async def serve(stream: trio.SocketStream) -> None:
            await hub.serve(stream, peer_uid(stream))

        async with open_unix_listener(path) as listener, open_background() as nursery:
            await nursery.start(serve_channels, listener, serve)
            yield Coordinator(hub.participant, path)


@asynccontextmanager
async def open_hub(
    deployment: Deployment, name: str, *, ports: HostPorts | None = None
) -> AsyncIterator[WorkerHub | None]:
    """As `open_coordinator`, for workers whose connections come from elsewhere."""
    settings = settings_of(deployment, name)
    if not (settings.checkpoint_policy and deployment.checkpoint.enabled):
        yield None
        return
    ports = ports or HostPorts()
    state_dir = state_dir_of(deployment, name)
    opened: list[Control] = []

    def not_ready() -> str | None:
        waiting = any(control.awaiting_restore for control in opened)
        return "waiting to be restored" if waiting else None

    participant = CoordinatedPolicy(name, expected=settings.num_workers, not_ready=not_ready)
    me = Hello(role=COORDINATOR_ROLE, name=name, instance=ports.randomness.hex(_INSTANCE_BYTES))
    async with open_control_plane(participant, deployment.checkpoint, ports, state_dir) as control:
        assert control is not None
        opened.append(control)
        metrics = CheckpointMetrics(control)

        async def control_call(call: IncomingCall) -> None:
            if call.kind == METRICS_KIND:
                call.reply(body=metrics.render())
                return
            operation = call.head.decode("ascii", "replace")
            body = await call.read(CONTROL_BODY_BYTES_MAX)
            reply = await serve_control(control, operation, body)
            if operation == "commit":
                metrics.committed()
            participant.publish_state()
            call.reply(body=reply)

        async def serve(stream: trio.abc.Stream, uid: int | None) -> None:
            await participant.serve(stream, me=me, uid=uid, control=control_call)

        yield WorkerHub(participant, serve)
