"""A deployment in one process: real control planes of all four kinds, and a channel to them.

The channel encodes and decodes every message as the wire does, keeps a log of what was sent, and can
lose a request, lose a reply, refuse, or hold a call.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import trio

from gymtrio.background import open_background
from gymtrio.checkpoint.control import Control, open_control
from gymtrio.checkpoint.coordination import Controller, open_coordination
from gymtrio.checkpoint.dispatch import parse_request, perform
from gymtrio.errors import PeerRefused, Refusal, TransportError
from gymtrio.ports import HostRandomness
from gymtrio.wire.codec import to_json
from gymtrio.wire.control import ControlRequest, Kind, reply_to_plain
from tests.helpers.clocks import FollowingClock
from tests.helpers.memory_archive import Door, MemoryArchive
from tests.helpers.plane import GRACE_S
from tests.helpers.scripted_participant import ScriptedParticipant

SERVERS = {
    "env": Kind.ENVIRONMENT,
    "policy": Kind.MODEL,
    "agent": Kind.AGENT,
    "tools": Kind.RESOURCES,
}


class FleetChannel:
    """Implements `gymtrio.checkpoint.coordination.ControlChannel` without a network."""

    def __init__(self) -> None:
        self.controls: dict[str, Control] = {}
        self.sent: list[tuple[str, str]] = []
        """(operation, server), in order of arrival."""
        self.times: list[tuple[float, tuple[str, str]]] = []
        self.requests: list[tuple[str, str, ControlRequest | None]] = []
        self.lost_requests: dict[tuple[str, str], int] = {}
        """(operation, server) to how many of the next ones never arrive."""
        self.lost_replies: dict[tuple[str, str], int] = {}
        self.slow_replies_s: dict[tuple[str, str], float] = {}
        self.refusals: dict[tuple[str, str], Refusal | PeerRefused] = {}
        """What is answered instead; `PeerRefused` by something that is no control plane of ours."""
        self.left_out: dict[str, str] = {}
        """By operation, a field of its replies that servers of an earlier release do not have."""
        self.stands_still = False
        """The controller's process does; it notices a deadline only once it runs again."""
        self.absent: set[str] = set()
        self.doors: dict[tuple[str, str], Door] = {}

    async def call(
        self, server: str, operation: str, request: ControlRequest | None, deadline: float
    ) -> object:
        with trio.move_on_at(math.inf if self.stands_still else deadline):
            return await self._call(server, operation, request)
        raise TransportError(f"{server}: no reply before the deadline")

    async def _call(self, server: str, operation: str, request: ControlRequest | None) -> object:
        where = (operation, server)
        if server in self.absent:
            raise PeerRefused(server, 404, "not_found", "no such route")
        # A real channel suspends before anything is sent, so a cancelled caller sends nothing.
        await trio.lowlevel.checkpoint()
        self.sent.append(where)
        self.times.append((trio.current_time(), where))
        self.requests.append((operation, server, request))
        if self._take(self.lost_requests, where):
            raise TransportError(f"{server}: connection refused")
        await self.doors.get(where, Door()).pass_through()
        try:
            if where in self.refusals:
                raise self.refusals[where]
            plain = await self._serve(server, operation, request)
        except Refusal as refusal:
            raise PeerRefused(server, refusal.status, refusal.code, refusal.detail) from None
        await trio.sleep(self.slow_replies_s.get(where, 0))
        if self._take(self.lost_replies, where):
            raise TransportError(f"{server}: connection lost before the reply")
        return plain

    async def _serve(self, server: str, operation: str, request: ControlRequest | None) -> object:
        control = self.controls[server]
        if request is None:
            return json.loads(json.dumps(reply_to_plain(control.status())))
        reply = await perform(control, operation, parse_request(operation, to_json(request)))
        plain = json.loads(json.dumps(reply_to_plain(reply)))
        plain.pop(self.left_out.get(operation), None)
        return plain

    @staticmethod
    def _take(counts: dict[tuple[str, str], int], where: tuple[str, str]) -> bool:
        left = counts.get(where, 0)
        counts[where] = left - 1
        return left > 0

    def order(self, operation: str) -> list[str]:
        return [server for sent, server in self.sent if sent == operation]


class Fleet:
    def __init__(
        self,
        controller: Controller,
        channel: FleetChannel,
        participants: dict[str, ScriptedParticipant],
        archive: MemoryArchive,
        clock: FollowingClock,
        processes: trio.Nursery,
    ) -> None:
        self._processes = processes
        self.controller = controller
        self.channel = channel
        self.participants = participants
        self.archive = archive
        self.clock = clock

    async def replace(self, server: str, *, recover: bool = False) -> None:
        """The process of a server is another one from now on, which knows nothing of the first."""
        participant = ScriptedParticipant(server, kind=SERVERS[server])
        self.participants[server] = participant
        await self._processes.start(
            _process, self.channel, participant, self.archive, self.clock, recover
        )

    def phases(self) -> dict[str, str]:
        return {name: control.phase.value for name, control in self.channel.controls.items()}

    def closed(self) -> set[str]:
        return {name for name, p in self.participants.items() if p.admission.closed}


async def _process(
    channel: FleetChannel,
    participant: ScriptedParticipant,
    archive: MemoryArchive,
    clock: FollowingClock,
    recover: bool,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    async with open_control(
        participant, archive=archive, wall_clock=clock, lease_grace_s=GRACE_S, recover=recover
    ) as control:
        channel.controls[participant.instance] = control
        task_status.started()
        await trio.sleep_forever()


@asynccontextmanager
async def open_fleet(
    *,
    archive: MemoryArchive | None = None,
    recover: bool = False,
    ahead_s: Mapping[str, float] | None = None,
) -> AsyncIterator[Fleet]:
    """Run the four control planes and a controller for as long as the block runs.

    Args:
        ahead_s: by server, how far the wall clock of its host is ahead of all others.
    """
    channel = FleetChannel()
    archive = archive or MemoryArchive()
    clock = FollowingClock()
    participants = {name: ScriptedParticipant(name, kind=kind) for name, kind in SERVERS.items()}
    async with open_background() as processes:
        for name, participant in participants.items():
            of_host = FollowingClock()
            of_host.jump((ahead_s or {}).get(name, 0.0))
            await processes.start(_process, channel, participant, archive, of_host, recover)
        async with open_coordination(
            [*SERVERS], channel, wall_clock=clock, randomness=HostRandomness()
        ) as controller:
            channel.sent.clear()
            channel.requests.clear()
            yield Fleet(controller, channel, participants, archive, clock, processes)
