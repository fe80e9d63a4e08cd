"""A policy participant under the real control plane, over a scripted backend and a store in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from gymtrio.capture.memory_store import MemoryTokenStore
from gymtrio.capture.replies import Route
from gymtrio.capture.tokens import StagingKey
from gymtrio.checkpoint.control import open_control
from gymtrio.errors import GymtrioError
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.calls import Policy as CallsPolicy
from gymtrio.participants.policy.calls import PolicyCall, PolicyReply
from gymtrio.participants.policy.participant import PolicyParticipant
from gymtrio.participants.policy.records import PolicyRecord
from gymtrio.ports import HostRandomness
from gymtrio.wire.codec import unpack
from tests.helpers.clocks import FollowingClock
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.plane import GRACE_S, Plane
from tests.helpers.scripted_backend import LiveCall, ScriptedBackend, uncut_tokens


def chat(*texts: str, **settings: Any) -> PolicyCall:
    """A chat call: user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return PolicyCall(route=Route.CHAT, body={"messages": messages, **settings})


def text_of(reply: PolicyReply) -> str:
    message = reply.body["choices"][0]["message"]
    return message["content"]


def tokens_of(reply: PolicyReply) -> tuple[int, ...]:
    return tuple(reply.body["choices"][0]["message"]["generation_token_ids"])


@attrs.define(eq=False)
class Caller:
    """A call that runs in the background, and what came of it."""

    scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    reply: PolicyReply | None = None
    error: GymtrioError | None = None
    ended: trio.Event = attrs.Factory(trio.Event)

    def leave(self) -> None:
        """The client goes away."""
        self.scope.cancel()

    @property
    def answered(self) -> bool:
        return self.reply is not None or self.error is not None


class World:
    """What survives a crash of the policy server: archive, token store and backend."""

    def __init__(self) -> None:
        self.archive = MemoryArchive()
        self.store = MemoryTokenStore()
        self.backend = ScriptedBackend(self.store)


class Calling:
    """Makes calls of whoever serves them."""

    world: World
    policy: CallsPolicy
    nursery: trio.Nursery

    @property
    def backend(self) -> ScriptedBackend:
        return self.world.backend

    async def ask(self, episode_id: EpisodeId | None, call: PolicyCall) -> PolicyReply:
        """Make a call and take its reply whole."""
        reply = await self.policy.call(episode_id, call)
        reply.done(True)
        if reply.refusal is not None:
            raise reply.refusal
        return reply

    async def ask_at_once(self, episode_id: EpisodeId | None, call: PolicyCall) -> PolicyReply:
        """As `ask`; the backend needs no telling."""
        self.backend.at_once = True
        try:
            return await self.ask(episode_id, call)
        finally:
            self.backend.at_once = False

    def begin(self, episode_id: EpisodeId | None, call: PolicyCall, *, take: bool = True) -> Caller:
        """Make a call in the background.

        Args:
            take: take the reply whole as soon as it comes; else it stays leaving.
        """
        caller = Caller()

        async def run() -> None:
            with caller.scope:
                try:
                    reply = await self.policy.call(episode_id, call)
                    if take:
                        reply.done(True)
                    caller.reply, caller.error = reply, reply.refusal
                except GymtrioError as error:
                    caller.error = error
                finally:
                    caller.ended.set()

        self.nursery.start_soon(run)
        return caller

    async def begin_live(
        self, episode_id: EpisodeId | None, call: PolicyCall, *, take: bool = True
    ) -> tuple[Caller, LiveCall]:
        """Make a call and wait until the backend has it."""
        count = len(self.backend.live)
        caller = self.begin(episode_id, call, take=take)
        return caller, (await self.backend.wait_live(count + 1))[-1]

    async def begin_leaving(self, episode_id: EpisodeId | None, call: PolicyCall) -> PolicyReply:
        """Make a call and get its reply, which stays leaving."""
        caller, live = await self.begin_live(episode_id, call, take=False)
        live.finish.set()
        await caller.ended.wait()
        assert caller.reply is not None
        return caller.reply


class Policy(Plane, Calling):
    """A running policy server and its controller."""

    policy: PolicyParticipant

    @property
    def counts(self) -> dict[str, int]:
        return self.policy.report().counts

    @property
    def restored_cuts(self) -> object:
        """Of which attempts a restored cut waits."""
        return self.control.status().extra["restored_generation_cuts"]

    @property
    def not_continued(self) -> dict[str, int]:
        """Why calls did not go on from a restored cut; only what there was."""
        counted = self.control.status().extra["generation_cuts_not_continued"]
        assert isinstance(counted, dict)
        return {why: count for why, count in counted.items() if count}

    def records(self, directory: str = "d") -> dict[str, PolicyRecord]:
        """What the archive has of this server, by capture key."""
        part = self.archive.parts[(directory, "model", self.policy.instance)]
        return {r.episode_id.capture_key: unpack(PolicyRecord, r.payload) for r in part.records}

    async def checkpoint(
        self, *episodes: EpisodeId, name: str = "c1", directory: str = "d"
    ) -> dict[str, Any]:
        """Prepare and commit; the reply's own fields. It stays open."""
        prepared = await self.prepare(name)
        assert prepared.phase == "prepared", prepared
        reply = await self.commit(name, episodes, directory)
        return reply.extra


@asynccontextmanager
async def open_policy(
    world: World, *, instance: str = "policy", cuts: bool = True
) -> AsyncIterator[Policy]:
    """Run a policy server; leaving the block is its crash."""
    participant = PolicyParticipant(
        instance,
        backend=world.backend,
        token_store=world.store,
        randomness=HostRandomness(),
        generation_cuts=cuts,
    )
    clock = FollowingClock()
    async with open_control(
        participant, archive=world.archive, wall_clock=clock, lease_grace_s=GRACE_S
    ) as control:
        async with trio.open_nursery() as nursery:
            policy = Policy(control, participant, world.archive, clock)
            policy.world, policy.policy, policy.nursery = world, participant, nursery
            yield policy
            nursery.cancel_scope.cancel()


async def is_readable(world: World, keys: list[StagingKey]) -> bool:
    """Whether the token store has every key (I17)."""
    return all([(await world.store.get(key)).staging_key == key for key in keys])


__all__ = [
    "Caller",
    "Policy",
    "World",
    "chat",
    "open_policy",
    "text_of",
    "tokens_of",
    "uncut_tokens",
]
