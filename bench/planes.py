"""Three ways to a participant's control plane: its owner itself, and the controller's library over the
control route, in process and on real connections."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import attrs
import trio

from gymtrio.checkpoint.control import Control, open_control
from gymtrio.checkpoint.coordination import Controller
from gymtrio.checkpoint.directory_archive import DirectoryArchive
from gymtrio.checkpoint.incarnations import Incarnations
from gymtrio.checkpoint.members import Member
from gymtrio.checkpoint.participant import Participant
from gymtrio.ids import CheckpointId, EpisodeId
from gymtrio.participants.environment import EnvironmentParticipant
from gymtrio.ports import HostClock, HostRandomness
from gymtrio.serving.app import ServerApp
from gymtrio.serving.client import ServerClient
from gymtrio.serving.controlchannel import HttpControlChannel
from gymtrio.serving.deployment import (
    DEPLOYMENT_VARIABLE,
    SERVER_VARIABLE,
    Bind,
    DeploymentDirectory,
    load_deployment,
)
from gymtrio.serving.embedded import open_embedded
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.launch import bind_socket, bound_to, serve_app, to_listener
from gymtrio.serving.pool import open_pool
from gymtrio.settings import Secret
from gymtrio.storage.disk import ThreadDisk
from gymtrio.storage.root import CheckpointRoot
from gymtrio.wire.control import (
    CommitRequest,
    Kind,
    PrepareRequest,
    Report,
    RestoreRequest,
    ResumeRequest,
    RetireRequest,
)

INSTANCE: Final = "environment"
TIMEOUT_S: Final = 600.0
_TOKEN: Final = "a-token-for-measuring"


class Plane(Protocol):
    """What the bench asks for; returns when it is answered."""

    async def prepare(self, name: str) -> None: ...
    async def status(self) -> Report: ...
    async def commit(self, name: str, ids: Sequence[EpisodeId]) -> None: ...
    async def resume(self, name: str) -> None: ...

    async def restore(self, name: str, ids: Sequence[EpisodeId]) -> None:
        """Restore and let it go on."""
        ...

    async def retire(self, name: str, ids: Sequence[EpisodeId]) -> None: ...


OpenPlane = Callable[[EnvironmentParticipant, Path], AbstractAsyncContextManager[Plane]]
"""Args: the participant; the root, which has a directory `checkpoints` and is else the bench's."""


class _Direct:
    def __init__(self, control: Control, clock: HostClock) -> None:
        self._control = control
        self._clock = clock

    def _base(self, name: str) -> dict[str, Any]:
        deadline_ts = self._clock.now_s() + TIMEOUT_S
        return {"checkpoint_id": CheckpointId(name), "deadline_ts": deadline_ts}

    async def prepare(self, name: str) -> None:
        await self._control.prepare(PrepareRequest(**self._base(name)))

    async def status(self) -> Report:
        return self._control.status().report

    async def commit(self, name: str, ids: Sequence[EpisodeId]) -> None:
        reply = await self._control.commit(
            CommitRequest(**self._base(name), checkpoint_dir=name, episode_ids=tuple(ids))
        )
        assert len(reply.episode_ids) == len(ids)

    async def resume(self, name: str) -> None:
        await self._control.resume(ResumeRequest(**self._base(name)))

    async def restore(self, name: str, ids: Sequence[EpisodeId]) -> None:
        hold = f"{name}.restore"
        reply = await self._control.restore(
            RestoreRequest(**self._base(hold), checkpoint_dir=name, episode_ids=tuple(ids))
        )
        assert len(reply.restored) == len(ids)
        await self.resume(hold)

    async def retire(self, name: str, ids: Sequence[EpisodeId]) -> None:
        await self._control.retire(RetireRequest(**self._base(name), episode_ids=tuple(ids)))


class _Controlled:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def prepare(self, name: str) -> None:
        await self._controller.prepare(CheckpointId(name), timeout_s=TIMEOUT_S)

    async def status(self) -> Report:
        replies = await self._controller.status()
        return replies[INSTANCE].report

    async def commit(self, name: str, ids: Sequence[EpisodeId]) -> None:
        replies = await self._controller.commit(CheckpointId(name), name, ids, timeout_s=TIMEOUT_S)
        assert len(replies[INSTANCE].episode_ids) == len(ids)

    async def resume(self, name: str) -> None:
        await self._controller.resume(CheckpointId(name), timeout_s=TIMEOUT_S)

    async def restore(self, name: str, ids: Sequence[EpisodeId]) -> None:
        replies = await self._controller.restore(CheckpointId(name), name, ids, timeout_s=TIMEOUT_S)
        assert len(replies[INSTANCE].restored) == len(ids)

    async def retire(self, name: str, ids: Sequence[EpisodeId]) -> None:
        await self._controller.retire(CheckpointId(name), ids, timeout_s=TIMEOUT_S)


@asynccontextmanager
async def open_direct(participant: Participant, root: Path) -> AsyncIterator[Plane]:
    disk, clock = ThreadDisk(), HostClock()
    archive = DirectoryArchive(disk, CheckpointRoot(str(root / "checkpoints")), HostRandomness())
    async with open_control(
        participant, archive=archive, wall_clock=clock, lease_grace_s=TIMEOUT_S
    ) as control:
        yield _Direct(control, clock)


@attrs.frozen
class _NoSettings:
    pass


def _app(participant: EnvironmentParticipant) -> ServerApp[_NoSettings]:
    @asynccontextmanager
    async def open_service(host: ServiceHost[_NoSettings]) -> AsyncIterator[Service]:
        yield Service(participant=participant)

    return ServerApp(
        kind=Kind.ENVIRONMENT,
        default_instance=INSTANCE,
        settings_class=_NoSettings,
        open_service=open_service,
    )


def _write_deployment(root: Path, bind: str) -> Path:
    checkpoint = {"enabled": True, "control_auth_token": _TOKEN, "root": "checkpoints"}
    entry = {"app": "bench.planes:app", "kind": Kind.ENVIRONMENT.value, "bind": bind}
    file = root / "deployment.json"
    file.write_text(
        json.dumps({"checkpoint": checkpoint, "state_dir": "state", "servers": {INSTANCE: entry}})
    )
    return file


def _controlled(client: ServerClient) -> Plane:
    member = Member(INSTANCE, Kind.ENVIRONMENT, INSTANCE)
    channel = HttpControlChannel(client, Secret(_TOKEN))
    return _Controlled(
        Controller(
            (member,),
            channel,
            wall_clock=HostClock(),
            nonce=HostRandomness().hex(16),
            incarnations=Incarnations(),
        )
    )


@asynccontextmanager
async def open_in_process(participant: EnvironmentParticipant, root: Path) -> AsyncIterator[Plane]:
    deployment = load_deployment(_write_deployment(root, "127.0.0.1:0"))
    async with open_embedded(deployment, apps={INSTANCE: _app(participant)}) as embedded:
        yield _controlled(embedded.client)


@asynccontextmanager
async def open_on_sockets(participant: EnvironmentParticipant, root: Path) -> AsyncIterator[Plane]:
    sock = bind_socket(Bind("127.0.0.1", 0), INSTANCE)
    file = _write_deployment(root, str(bound_to(sock)))
    deployment = load_deployment(file)
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        serving = partial(serve_app, _app(participant), [to_listener(sock)], stop=stop)
        # A server that is started finds its deployment there.
        told = {DEPLOYMENT_VARIABLE: str(file), SERVER_VARIABLE: INSTANCE}
        os.environ |= told
        try:
            await nursery.start(serving)
        finally:
            for name in told:
                del os.environ[name]
        async with open_pool(deployment.client) as pool:
            yield _controlled(ServerClient(DeploymentDirectory(deployment), pool))
        stop.set()


WAYS: Final[dict[str, OpenPlane]] = {
    "direct": open_direct,
    "in process": open_in_process,
    "sockets": open_on_sockets,
}
