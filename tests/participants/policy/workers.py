"""A policy server with several workers in one loop: coordinator, links and gates are the real ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, cast

import attrs
import trio
from trio.testing import (
    MemoryReceiveStream,
    MemorySendStream,
    memory_stream_pair,
    wait_all_tasks_blocked,
)

from gymtrio.checkpoint.control import open_control
from gymtrio.checkpoint.directory_archive import DirectoryArchive
from gymtrio.checkpoint.routes import serve_control
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.books import merge
from gymtrio.participants.policy.coordinator import CoordinatedPolicy
from gymtrio.participants.policy.records import PolicyRecord
from gymtrio.participants.policy.worker import PolicyWorker
from gymtrio.ports import HostRandomness
from gymtrio.storage.root import CheckpointRoot
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.codec import unpack
from gymtrio.wire.messages import Hello
from tests.helpers.clocks import FollowingClock
from tests.helpers.page_cache import InlineDisk, PageCacheFiles
from tests.helpers.plane import GRACE_S, Plane
from tests.helpers.scripted_participant import ScriptedParticipant
from tests.participants.policy.harness import Calling, World

MemoryStream: TypeAlias = trio.StapledStream[MemorySendStream, MemoryReceiveStream]


class StallingStream(trio.abc.Stream):
    """A stream whose reader can be made to stand still, as one in a stopped process does."""

    def __init__(self, inner: MemoryStream) -> None:
        self._inner = inner
        self._stalled: trio.Event | None = None

    def stall(self) -> None:
        self._stalled = trio.Event()

    def cut(self) -> None:
        """Both directions end."""
        self._inner.send_stream.close()
        self._inner.receive_stream.close()

    def go_on(self) -> None:
        assert self._stalled is not None
        self._stalled.set()
        self._stalled = None

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self._inner.receive_some(max_bytes)
        if self._stalled is not None:
            await self._stalled.wait()
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._stalled is not None:
            await self._stalled.wait()
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()


@attrs.define(eq=False, kw_only=True)
class OneWorker(Calling):
    """A worker's process: its gate, and the callers whose calls reached it."""

    name: str
    world: World
    policy: PolicyWorker
    stream: StallingStream
    nursery: trio.Nursery
    scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    ended: str | None = None
    """Why its channel has ended: what makes a process end itself (WRK-5)."""

    def die(self) -> None:
        """SIGKILL: callers and gate are gone, the connection is seen to end, and nothing is said."""
        self.stream.cut()
        self.scope.cancel()


class Served(Plane):
    """A coordinator, its workers and a controller."""

    world: World
    files: PageCacheFiles
    policy: CoordinatedPolicy
    nursery: trio.Nursery
    workers: list[OneWorker]
    cuts: bool

    @property
    def counts(self) -> dict[str, int]:
        return self.policy.report().counts

    @property
    def blockers(self) -> tuple[str, ...]:
        return self.policy.report().blockers

    async def join(self, name: str | None = None) -> OneWorker:
        """A worker's process starts and connects."""
        name = name or str(len(self.workers))
        ours, theirs = memory_stream_pair()
        stream = StallingStream(theirs)
        policy = PolicyWorker(
            "policy",
            backend=self.world.backend,
            token_store=self.world.store,
            randomness=HostRandomness(),
            generation_cuts=self.cuts,
            part_writer=make_archive(self.files),
        )
        started = trio.Event()
        made: list[OneWorker] = []

        async def run() -> None:
            async with trio.open_nursery() as nursery:
                worker = OneWorker(
                    name=name, world=self.world, policy=policy, stream=stream, nursery=nursery
                )
                worker.scope = nursery.cancel_scope
                made.append(worker)
                started.set()
                me = Hello(role="policy-worker", name=name, instance="w")
                worker.ended = await policy.serve(stream, me=me)
                nursery.cancel_scope.cancel()

        self.nursery.start_soon(self._serve, ours)
        self.nursery.start_soon(run)
        await started.wait()
        self.workers.append(made[0])
        await wait_all_tasks_blocked()
        return made[0]

    async def _serve(self, stream: trio.abc.Stream) -> None:
        me = Hello(role="policy-coordinator", name="policy", instance="c")
        await self.policy.serve(stream, me=me, uid=None, control=self._control)

    async def _control(self, call: IncomingCall) -> None:
        body = await call.read(2**24)
        call.reply(body=await serve_control(self.control, call.head.decode(), body))

    async def records(self, directory: str = "d") -> dict[str, PolicyRecord]:
        """What is on disk of this server, by capture key, put together from every part."""
        loaded = await make_archive(self.files).read(
            directory, kind=self.policy.kind, instance="policy", scope=None
        )
        read = [(r.episode_id, unpack(PolicyRecord, r.payload)) for r in loaded.records]
        return {e.capture_key: record for e, record in merge(read).items()}

    async def checkpoint(
        self, *episodes: EpisodeId, name: str = "c1", directory: str = "d"
    ) -> dict[str, Any]:
        """Prepare and commit; the reply's own fields. It stays open."""
        prepared = await self.prepare(name)
        assert prepared.phase == "prepared", prepared
        reply = await self.commit(name, episodes, directory)
        return reply.extra


def make_archive(files: PageCacheFiles) -> DirectoryArchive:
    return DirectoryArchive(InlineDisk(files), CheckpointRoot("/"), HostRandomness())


@asynccontextmanager
async def open_served(
    world: World,
    *,
    workers: int = 2,
    files: PageCacheFiles | None = None,
    cuts: bool = True,
    recover: bool = False,
    make: Callable[..., CoordinatedPolicy] = CoordinatedPolicy,
) -> AsyncIterator[Served]:
    """Run a policy server; leaving the block is the crash of all its processes."""
    files = files or PageCacheFiles()
    participant = make("policy", expected=workers)
    clock = FollowingClock()
    archive = make_archive(files)
    async with open_control(
        participant, archive=archive, wall_clock=clock, lease_grace_s=GRACE_S, recover=recover
    ) as control:
        async with trio.open_nursery() as nursery:
            served = Served(control, cast("ScriptedParticipant", participant), archive, clock)
            served.world, served.policy, served.nursery = world, participant, nursery
            served.files, served.workers, served.cuts = files, [], cuts
            for _ in range(workers):
                await served.join()
            yield served
            nursery.cancel_scope.cancel()
