"""Two channels over streams in memory, and streams that behave badly."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
import trio.testing
from trio.testing import memory_stream_pair

from gymtrio.wire.bounds import ChannelLimits
from gymtrio.wire.channel import Channel, Handler, Inline, PostHandler, open_channel
from gymtrio.wire.dialogue import Dialogue
from gymtrio.wire.tables import Role
from tests.helpers.dialogues import ACCEPTOR, OPENER

Wrap = Callable[[trio.abc.Stream], trio.abc.Stream]


@asynccontextmanager
async def open_pair(
    handler: Handler | None = None,
    *,
    inline: Inline | None = None,
    posted: PostHandler | None = None,
    opener_handler: Handler | None = None,
    opener_posted: PostHandler | None = None,
    limits: ChannelLimits | None = None,
    wrap: Wrap = lambda stream: stream,
    streams: tuple[trio.abc.Stream, trio.abc.Stream] | None = None,
) -> AsyncIterator[tuple[Channel, Channel]]:
    """The opener's end, and the acceptor's, which serves."""
    near, far = streams or memory_stream_pair()
    limits = limits or ChannelLimits()
    async with trio.open_nursery() as nursery:
        done = trio.Event()

        async def accept(task_status: trio.TaskStatus[Channel]) -> None:
            async with open_channel(
                wrap(far),
                role="acceptor",
                me=ACCEPTOR,
                limits=limits,
                handler=handler,
                inline=inline,
                posted=posted,
            ) as end:
                task_status.started(end)
                await done.wait()

        ends: list[Channel] = []

        async def keep() -> None:
            ends.append(await nursery.start(accept))

        nursery.start_soon(keep)
        try:
            async with open_channel(
                wrap(near),
                role="opener",
                me=OPENER,
                limits=limits,
                handler=opener_handler,
                posted=opener_posted,
            ) as channel:
                while not ends:
                    await trio.lowlevel.checkpoint()
                yield channel, ends[0]
        finally:
            await trio.testing.wait_all_tasks_blocked()
            done.set()


async def meet(stream: trio.abc.Stream, role: Role) -> Dialogue:
    """Shake hands as a peer that does nothing else."""
    hello = OPENER if role is Role.OPENER else ACCEPTOR
    dialogue = Dialogue(role, hello, ChannelLimits())
    while not dialogue.is_open or dialogue.has_data_to_send:
        if dialogue.has_data_to_send:
            await stream.send_all(dialogue.data_to_send().data)
        else:
            dialogue.receive_data(await stream.receive_some())
    return dialogue


class RaggedStream(trio.abc.Stream):
    """Cuts what passes at random places, and lets other tasks run between the pieces."""

    def __init__(self, inner: trio.abc.Stream, seed: int) -> None:
        self._inner = inner
        self._random = random.Random(seed)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view:
            size = self._random.choice([1, 5, 11, 12, 13, 100, 5000, 100_000])
            await self._inner.send_all(bytes(view[:size]))
            view = view[size:]
            await self._dawdle()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        await self._dawdle()
        return await self._inner.receive_some(self._random.choice([1, 7, 12, 100, 5000, 300_000]))

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _dawdle(self) -> None:
        for _ in range(self._random.randrange(4)):
            await trio.lowlevel.checkpoint()


class HeldStream(trio.abc.Stream):
    """Gives nothing while `held`."""

    def __init__(self, inner: trio.abc.Stream) -> None:
        self._inner = inner
        self._let_go = trio.Event()
        self._let_go.set()

    def hold(self) -> None:
        self._let_go = trio.Event()

    def let_go(self) -> None:
        self._let_go.set()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._inner.send_all(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        await self._let_go.wait()
        data = await self._inner.receive_some(max_bytes)
        await self._let_go.wait()
        return data

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()


class BreakingStream(trio.abc.Stream):
    """Breaks at its n-th send, from 0."""

    def __init__(self, inner: trio.abc.Stream, breaks_at: int) -> None:
        self._inner = inner
        self._left = breaks_at

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if not self._left:
            raise trio.BrokenResourceError("broken by the test")
        self._left -= 1
        await self._inner.send_all(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._inner.receive_some(max_bytes)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()
