"""The checkpoint control plane of a server: there when checkpointing is enabled, else nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from quart_trio import QuartTrio

from gymtrio.checkpoint.archive import Archive
from gymtrio.checkpoint.control import Control, open_control
from gymtrio.checkpoint.directory_archive import DirectoryArchive
from gymtrio.checkpoint.participant import Participant
from gymtrio.checkpoint.routes import ServeControl, serving_blueprint
from gymtrio.serving.garbage import note_message
from gymtrio.serving.host import HostPorts
from gymtrio.settings import CheckpointSettings
from gymtrio.storage.incarnation import only_incarnation
from gymtrio.storage.root import CheckpointRoot


@asynccontextmanager
async def open_control_plane(
    participant: Participant | None,
    settings: CheckpointSettings,
    ports: HostPorts,
    state_dir: Path,
) -> AsyncIterator[Control | None]:
    """Own the participant for the block.

    Args:
        state_dir: the server's own; locked, so that no second incarnation runs beside it (HARD-10).

    Yields:
        None when the server takes no part: nothing is installed and nothing recorded (SET-1).

    Raises:
        SettingsError: the root for checkpoints is not there.
        HostError: another process is this server already.
    """
    if participant is None or not settings.enabled:
        yield None
        return
    async with AsyncExitStack() as stack:
        archive = ports.archive
        if archive is None:
            await stack.enter_async_context(only_incarnation(ports.disk, str(state_dir)))
            archive = await _archive_on_disk(settings, ports)
        yield await stack.enter_async_context(
            open_control(
                participant,
                archive=archive,
                wall_clock=ports.wall_clock,
                lease_grace_s=settings.lease_grace_seconds,
                recover=settings.recover,
                randomness=ports.randomness,
            )
        )


async def _archive_on_disk(settings: CheckpointSettings, ports: HostPorts) -> Archive:
    assert settings.root is not None, "checked when the deployment was read"
    root = CheckpointRoot(settings.root)
    await root.check(ports.disk)
    return DirectoryArchive(ports.disk, root, ports.randomness)


def add_control_routes(app: QuartTrio, serve: ServeControl, settings: CheckpointSettings) -> None:
    """Serve the control plane below its prefix, to whoever has the token (CTL-1, CTL-2).

    Args:
        serve: answers its calls, here or from the process that has it.
    """
    token = settings.control_auth_token
    assert token is not None, "checked when the deployment was read"

    async def serve_noted(operation: str, body: bytes) -> bytes:
        note_message()
        return await serve(operation, body)

    app.register_blueprint(serving_blueprint(serve_noted, token.matches))
