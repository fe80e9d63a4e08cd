"""Control calls over frames: a controller on the same host needs no HTTP (WIRE-1, COORD-5)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from gymtrio.background import open_background
from gymtrio.checkpoint.members import ControlChannel
from gymtrio.errors import HostError, TransportError
from gymtrio.serving.control_frames_server import KIND_PREFIX
from gymtrio.serving.garbage import note_message
from gymtrio.settings import Secret
from gymtrio.strict import MalformedValue
from gymtrio.wire.channel import Channel, open_channel
from gymtrio.wire.codec import pack, unpack_plain
from gymtrio.wire.control import STATUS, ControlRequest
from gymtrio.wire.errors import ChannelLost
from gymtrio.wire.messages import Hello
from gymtrio.wire.unix import connect_unix

CONTROLLER_ROLE: Final = "controller"


class _Line:
    """A connection of its own to one server, made when it is needed, and again when it was lost."""

    def __init__(
        self, server: str, path: Path, me: Hello, token: Secret, nursery: trio.Nursery
    ) -> None:
        self._server = server
        self._path = path
        self._me = me
        self._token = token
        self._nursery = nursery
        self._connecting = trio.Lock()
        self._channel: Channel | None = None

    async def channel(self) -> Channel:
        """
        Raises:
            TransportError: it cannot be connected to.
        """
        async with self._connecting:
            if self._channel is None or self._channel.closed.is_set():
                found: Channel | str = await self._nursery.start(self._keep)
                if isinstance(found, str):
                    raise TransportError(f"{self._server}: cannot connect: {found}")
                self._channel = found
            return self._channel

    async def _keep(self, task_status: trio.TaskStatus[Channel | str]) -> None:
        """Say the channel, or why there is none, and keep it until it is lost."""
        try:
            stream = await connect_unix(self._path)
            async with open_channel(
                stream, role="opener", me=self._me, token=self._token
            ) as channel:
                task_status.started(channel)
                await channel.closed.wait()
        except (OSError, HostError, ChannelLost) as error:
            # A channel that was there raises nothing when it is lost.
            task_status.started(str(error))


class FramesControlChannel:
    """Carries control calls over frames where a server has a socket file here, else as it is told.

    Args:
        others: carries them to every other server.
    """

    def __init__(self, lines: Mapping[str, _Line], others: ControlChannel) -> None:
        self._lines = lines
        self._others = others
        self._packed_last: tuple[ControlRequest, bytes] | None = None
        """The same request goes to every participant, and its scope may name thousands."""

    async def call(
        self, server: str, operation: str, request: ControlRequest | None, deadline: float
    ) -> object:
        """See `gymtrio.checkpoint.members.ControlChannel`."""
        line = self._lines.get(server)
        if line is None:
            return await self._others.call(server, operation, request, deadline)
        assert (request is None) == (operation == STATUS)
        body = b"" if request is None else self._packed(request)
        with trio.CancelScope(deadline=deadline):
            channel = await line.channel()
            reply = await channel.request(
                KIND_PREFIX + operation, body, control=True, deadline=deadline
            )
            try:
                return unpack_plain(reply.body)
            except MalformedValue as error:
                raise TransportError(f"{server}: not a reply: {error}") from None
        raise TransportError(f"{server}: no answer to {operation} by the deadline")

    def _packed(self, request: ControlRequest) -> bytes:
        if self._packed_last is None or self._packed_last[0] is not request:
            note_message()
            self._packed_last = (request, pack(request))
        return self._packed_last[1]


@asynccontextmanager
async def open_control_frames(
    sockets: Mapping[str, Path], token: Secret, others: ControlChannel, *, nonce: str
) -> AsyncIterator[FramesControlChannel]:
    """Own a connection to each of these servers, made when it is first needed.

    Args:
        sockets: server to its socket file.
        token: presented to each of them: they are of this user (the kernel says so).
        nonce: tells this controller from others in the servers' logs.

    Cancelled: every connection is closed; what is open at the servers ends by its lease.
    """
    me = Hello(role=CONTROLLER_ROLE, name=CONTROLLER_ROLE, instance=nonce)
    async with open_background() as nursery:
        lines = {
            server: _Line(server, path, me, token, nursery) for server, path in sockets.items()
        }
        yield FramesControlChannel(lines, others)
