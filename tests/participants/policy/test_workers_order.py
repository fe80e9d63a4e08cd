"""The ordering rule of claims, whatever the connection and the scheduler do (WRK-4)."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import memory_stream_pair

from gymtrio.participants.policy.coordinator import CoordinatedPolicy
from gymtrio.participants.policy.keeper import Entered, Entry
from gymtrio.participants.policy.link import LINK_LIMITS, CallEnd, EnterReply, GateState, ask, tell
from gymtrio.wire.channel import Channel, open_channel
from gymtrio.wire.codec import unpack
from gymtrio.wire.messages import Hello
from tests.helpers.plane import episode

CALLS = 60


class RandomPieces(trio.abc.Stream):
    """Delivers what was sent late, and in pieces that have nothing to do with frames."""

    def __init__(self, inner: trio.abc.Stream, chance: random.Random) -> None:
        self._inner = inner
        self._chance = chance
        self._got = b""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._chance.random() < 0.5:
            await trio.sleep(self._chance.choice([0, 0.001, 0.003]))
        if not self._got:
            self._got = bytes(await self._inner.receive_some(max_bytes))
        count = self._chance.choice([1, 7, 100, 100_000])
        piece, self._got = self._got[:count], self._got[count:]
        return piece

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.sleep(self._chance.choice([0, 0.001]))
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()


class Watched(CoordinatedPolicy):
    """Notes how many claims were decided when a state was told."""

    def __init__(self, instance: str, **options: Any) -> None:
        super().__init__(instance, **options)
        self.decided = 0
        self.decided_before: dict[tuple[int, bool], int] = {}

    def admit(self, entry: Entry, owner: object = None) -> Entered | None:
        self.decided += 1
        return super().admit(entry, owner)

    def publish_state(self) -> None:
        key = (self.generation, self.admission.closed)
        self.decided_before.setdefault(key, self.decided)
        super().publish_state()


@pytest.mark.parametrize("seed", range(20))
async def test_a_claim_is_heard_before_what_is_said_after_its_decision(
    seed: int, autojump_clock: object
) -> None:
    """WRK-4, K1: and one that is decided after a close is refused until the next opening."""
    chance = random.Random(seed)
    ours, theirs = memory_stream_pair()
    watched = Watched("policy", expected=1)
    sent = 0
    states = 0
    late: list[str] = []
    channels: list[Channel] = []
    closed = True

    def posted(kind: str, body: bytes) -> None:
        nonlocal states, closed
        assert kind == "state"
        state = unpack(GateState, body)
        unheard = len(channels[0]._ours)
        decided = watched.decided_before[state.generation, state.closed]
        if unheard > sent - decided:
            late.append(f"{unheard} of {sent} unheard, {decided} decided before {state}")
        states, closed = states + 1, state.closed

    async def claim(channel: Channel, number: int) -> None:
        nonlocal sent
        await trio.sleep(chance.random() / 20)
        while True:
            entry = Entry(
                call_id=f"{number} {chance.random()}",
                episode_id=episode(f"r{number}"),
                epoch=None,
                request_digest="d",
                continues=False,
                chain=(),
            )
            sent += 1
            entered = (await ask(channel, "enter", entry, EnterReply)).entered
            if entered is not None:
                await trio.sleep(chance.random() / 20)
                tell(channel, "end", CallEnd(call_id=entry.call_id, sent=False))
                return
            await trio.sleep(0.001)

    async def toggle() -> None:
        for _ in range(200):
            await trio.sleep(chance.choice([0, 0, 0.001]))
            if watched.admission.closed:
                watched.open()
            else:
                watched.close()
        watched.open()

    coordinator, worker = (Hello(role=role, name="0", instance="i") for role in ("c", "w"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            partial(
                watched.serve,
                RandomPieces(ours, random.Random(seed + 1)),
                me=coordinator,
                uid=None,
                control=_no_control,
            )
        )
        stream = RandomPieces(theirs, random.Random(seed + 2))
        async with open_channel(
            stream, role="opener", me=worker, limits=LINK_LIMITS, posted=posted
        ) as channel:
            channels.append(channel)
            async with trio.open_nursery() as claims:
                claims.start_soon(toggle)
                for number in range(CALLS):
                    claims.start_soon(claim, channel, number)
            await trio.sleep(1)
    assert late == []
    assert not closed
    assert states > 4
    assert len(watched.books) == 0


async def _no_control(call: object) -> None:
    raise AssertionError("no control call is made here")
