"""A resources participant under the real control plane, in front of a server of counters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from gymtrio.checkpoint.control import open_control
from gymtrio.episodes.episode import StepMode
from gymtrio.errors import GymtrioError, NotFound
from gymtrio.ids import EpisodeId
from gymtrio.participants.resources import Admitted, Mode, RequestKind, ResourcesParticipant
from tests.helpers.clocks import FollowingClock
from tests.helpers.memory_archive import Door, MemoryArchive
from tests.helpers.plane import GRACE_S, Plane, episode

R0, R1, R2 = episode("r"), episode("r", 1), episode("r", 2)
Q0, Q1 = episode("q"), episode("q", 1)


class Counters:
    """A server whose sessions are counts; its hooks can be held or made to fail."""

    def __init__(self) -> None:
        self.counts: dict[str, Any] = {}
        self.retired: list[str] = []
        """Sessions that were freed, in order."""
        self.freeing: list[str] = []
        """Sessions that were asked to be freed, in order."""
        self.failure: Exception | None = None
        """Raised by the hooks."""
        self.outside: list[str] = []
        """Sessions whose sandboxes were freed, in order."""
        self.exporting = Door()
        self.restoring = Door()
        self.retiring = Door()

    async def export_session_states(self, session_ids):
        counts = {s: self.counts[s] for s in session_ids if s in self.counts}
        await self.exporting.pass_through()
        if self.failure is not None:
            raise self.failure
        return counts

    async def restore_session_states(self, states):
        await self.restoring.pass_through()
        if self.failure is not None:
            raise self.failure
        for state in states.values():
            if type(state) is not int:
                raise ValueError(f"{state!r} is not a count")
        self.counts.update(states)

    async def retire_session_state(self, session_id):
        self.freeing.append(session_id)
        await self.retiring.pass_through()
        if self.failure is not None:
            raise self.failure
        if self.counts.pop(session_id, None) is not None:
            self.retired.append(session_id)


class Sandboxes(Counters):
    """Its sessions hold something outside the process."""

    async def free_exported_sessions(self, session_ids):
        await self.retiring.pass_through()
        if self.failure is not None:
            raise self.failure
        self.outside += session_ids


Work = Callable[[Admitted], Awaitable[Any]]


@attrs.define(eq=False)
class Caller:
    """A request that runs in the background, and what came of it."""

    scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    result: Any = None
    error: GymtrioError | None = None
    ended: trio.Event = attrs.Factory(trio.Event)

    def leave(self) -> None:
        """The client goes away."""
        self.scope.cancel()


class Resources(Plane):
    """A running server and its controller."""

    server: Counters
    resources: ResourcesParticipant
    nursery: trio.Nursery

    # -- what callers do ----------------------------------------------------------------------

    async def serve(
        self,
        kind: RequestKind,
        session_id: str | None,
        episode_id: EpisodeId | None,
        work: Work,
        **more: Any,
    ) -> Any:
        async with self.resources.request(
            kind, session_id=session_id, episode_id=episode_id, **more
        ) as admitted:
            result = await work(admitted)
            admitted.succeeded()
            return result

    async def seed(
        self,
        session_id: str,
        episode_id: EpisodeId | None = R0,
        count: int = 0,
        door: Door | None = None,
        **more: Any,
    ) -> None:
        async def work(admitted: Admitted) -> None:
            if door is not None:
                await door.pass_through()
            if not admitted.already_seeded:
                self.server.counts[session_id] = count

        await self.serve(RequestKind.SEED, session_id, episode_id, work, **more)

    async def increment(
        self,
        session_id: str,
        episode_id: EpisodeId | None = None,
        door: Door | None = None,
        **more: Any,
    ) -> int:
        async def work(admitted: Admitted) -> int:
            if door is not None:
                await door.pass_through()
            self.server.counts[session_id] = self.count(session_id) + 1
            return self.server.counts[session_id]

        return await self.serve(
            RequestKind.TOOL, session_id, episode_id, work, doing="increment", **more
        )

    def count(self, session_id: str) -> int:
        if session_id not in self.server.counts:
            raise NotFound(f"session {session_id!r} has no count")
        return self.server.counts[session_id]

    async def verify(
        self, session_id: str, episode_id: EpisodeId | None = None, door: Door | None = None
    ) -> int:
        async def work(admitted: Admitted) -> int:
            if door is not None:
                await door.pass_through()
            return self.count(session_id)

        return await self.serve(RequestKind.VERIFY, session_id, episode_id, work)

    async def close(self, session_id: str, episode_id: EpisodeId = R0, **more: Any) -> None:
        async def work(admitted: Admitted) -> None:
            if not admitted.stale:
                await self.server.retire_session_state(session_id)

        await self.serve(RequestKind.CLOSE, session_id, episode_id, work, **more)

    def begin(self, call: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Caller:
        """Start a call without waiting for it."""
        caller = Caller()

        async def run() -> None:
            try:
                with caller.scope:
                    caller.result = await call(*args, **kwargs)
            except GymtrioError as error:
                caller.error = error
            finally:
                caller.ended.set()

        self.nursery.start_soon(run)
        return caller

    # -- what is seen -------------------------------------------------------------------------

    @property
    def counts(self) -> dict[str, int]:
        return self.resources.report().counts

    @property
    def extra(self) -> dict[str, Any]:
        return self.control.status().extra

    async def exported(self, name: str = "c1", **more: Any) -> tuple[str, ...]:
        """Prepare, commit, resume; what was in it."""
        assert (await self.prepare(name)).phase == "prepared"
        reply = await self.commit(name, directory=name, **more)
        await self.resume(name)
        return reply.episode_ids


@asynccontextmanager
async def open_resources(
    archive: MemoryArchive | None = None,
    *,
    mode: Mode = Mode.EXPORTED,
    verify: StepMode = StepMode.WAIT,
    recover: bool = False,
    server: Counters | None = None,
) -> AsyncIterator[Resources]:
    """Run a server; leaving the block is its crash."""
    server = server or Counters()
    participant = ResourcesParticipant("counter", mode=mode, verify=verify, server=server)
    archive = archive or MemoryArchive()
    clock = FollowingClock()
    async with (
        trio.open_nursery() as nursery,
        open_control(
            participant,
            archive=archive,
            wall_clock=clock,
            lease_grace_s=GRACE_S,
            recover=recover,
        ) as control,
    ):
        plane = Resources(control, participant, archive, clock)
        plane.server = server
        plane.resources = participant
        plane.nursery = nursery
        yield plane
        nursery.cancel_scope.cancel()


def shut_door() -> Door:
    door = Door()
    door.shut()
    return door
