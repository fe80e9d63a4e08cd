"""What a service is given by its host, and what it gives back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import attrs
import trio
from quart_trio import QuartTrio

from gymtrio.checkpoint.archive import Archive
from gymtrio.checkpoint.participant import Participant
from gymtrio.checkpoint.routes import ServeControl
from gymtrio.episodes.admission import Admission
from gymtrio.ports import HostClock, HostRandomness, Randomness, WallClock
from gymtrio.serving.client import Directory, ServerClient, Transport
from gymtrio.serving.deployment import Deployment
from gymtrio.serving.http import Handler
from gymtrio.settings import CheckpointSettings, Secret
from gymtrio.storage.disk import Disk, ThreadDisk

S = TypeVar("S")


@attrs.frozen(kw_only=True)
class HostPorts:
    """What a server takes from its surroundings; a simulation hands in its own."""

    wall_clock: WallClock = attrs.field(factory=HostClock)
    randomness: Randomness = attrs.field(factory=HostRandomness)
    transport: Transport | None = None
    """Carries outgoing calls; None: an HTTP pool is opened for the server."""
    directory: Directory | None = None
    """Finds other servers; None: the deployment does."""
    disk: Disk = attrs.field(factory=ThreadDisk)
    archive: Archive | None = None
    """Where checkpoints are kept; None: on `disk`, below the configured root."""


@attrs.frozen(kw_only=True)
class ServiceHost(Generic[S]):
    """What `open_service` is given."""

    nursery: trio.Nursery
    """Outlives every request, and is cancelled after the service was closed. A failure in it ends
    the server loudly."""
    settings: S
    """Of the server's own settings class."""
    instance: str
    """Its name in the deployment, and in checkpoints."""
    client: ServerClient
    wall_clock: WallClock
    randomness: Randomness
    disk: Disk
    checkpoint: CheckpointSettings
    session_secret: Secret
    """For `gymtrio.serving.cookies`. Lasting when the deployment has a session secret or a control
    token, else made up when the server starts."""
    state_dir: Path
    """Where it may keep what outlives its process. Not created: whoever uses it does."""
    deployment: Deployment

    @property
    def control_token(self) -> Secret | None:
        return self.checkpoint.control_auth_token


@attrs.frozen(kw_only=True)
class Service:
    """What `open_service` yields: how requests are answered, until its block is left."""

    routes: Mapping[tuple[str, str], Handler] = attrs.field(factory=dict)
    """(METHOD, exact path) to handler: the hot routes, dispatched before any framework."""
    fallback: Handler | None = None
    """Takes what neither `routes` nor the framework serve, such as tools called by name."""
    participant: Participant | None = None
    """What takes part in checkpoints; opened and served only when checkpointing is enabled."""
    gate: Admission | None = None
    """Where its requests wait during a checkpoint, of a service whose participant is elsewhere."""
    add_routes: Callable[[QuartTrio], None] | None = None
    """Adds an author's own routes to the framework's application."""
    control_elsewhere: ServeControl | None = None
    """Passes control calls on to the process that has the control plane of this server."""
    not_ready: Callable[[], str | None] | None = None
    """Why it accepts no work now, for `/ready`; None: it does."""
    more_metrics: Callable[[], Awaitable[bytes]] | None = None
    """What another process tells of this server, shown by `/metrics` after its own; in the same text
    format, of other families. May raise a `GymtrioError`: then it is left out."""


OpenService: TypeAlias = Callable[[ServiceHost[S]], AbstractAsyncContextManager[Service]]
