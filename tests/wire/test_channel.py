from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import memory_stream_pair

from gymtrio.errors import NotFound, TooLarge, TransportError
from gymtrio.settings import Secret
from gymtrio.wire.bounds import ChannelLimits
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.channel import Channel, open_channel
from gymtrio.wire.errors import CallTimedOut, ChannelFull, ChannelLost, ChannelRefused
from gymtrio.wire.messages import Type, encode
from gymtrio.wire.tables import Role
from tests.helpers.channels import BreakingStream, HeldStream, RaggedStream, meet, open_pair
from tests.helpers.dialogues import ACCEPTOR, OPENER, frames_of


async def echo(call: IncomingCall) -> None:
    call.reply(call.head + b"!", await call.read(2**30))


async def test_a_call_is_answered_with_head_and_body() -> None:
    async with open_pair(echo) as (channel, other):
        assert (channel.peer.name, channel.peer.authenticated) == ("policy", False)
        assert (other.peer.role, other.peer.uid) == ("worker", None)
        assert await channel.request("echo", b"x", head=b"h") == (b"h!", b"x")


@pytest.mark.parametrize("size", [0, 1, 64 * 2**10, 64 * 2**10 + 1, 2**20, 5 * 2**20])
async def test_bodies_of_every_size_come_whole_both_ways(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    async with open_pair(echo) as (channel, _):
        assert (await channel.request("echo", body)).body == body


async def test_a_cancelled_caller_cancels_the_handler() -> None:
    """SRV-3"""
    began, cancelled = trio.Event(), trio.Event()

    async def handler(call: IncomingCall) -> None:
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with open_pair(handler) as (channel, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(channel.request, "park")
            await began.wait()
            nursery.cancel_scope.cancel()
        await cancelled.wait()


async def test_a_deadline_ends_the_call_on_both_sides(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """SRV-3"""
    cancelled_at: list[float] = []
    told: list[float | None] = []

    async def handler(call: IncomingCall) -> None:
        told.append(call.deadline)
        try:
            await trio.sleep_forever()
        finally:
            cancelled_at.append(trio.current_time())

    async with open_pair(handler) as (channel, _):
        with pytest.raises(CallTimedOut, match="no answer to park by the deadline"):
            await channel.request("park", deadline=3.0)
        await trio.testing.wait_all_tasks_blocked()
        assert cancelled_at == [3.0]
        assert told == [3.0]


async def test_errors_are_typed(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(call: IncomingCall) -> None:
        if call.kind == "refusal":
            raise NotFound("no such thing")
        if call.kind == "bug":
            raise KeyError("secret")

    async with open_pair(handler) as (channel, _):
        for kind, status, code in [
            ("refusal", 404, "not_found"),
            ("bug", 500, "internal"),
            ("silent", 500, "not_answered"),
        ]:
            with pytest.raises(ChannelRefused) as caught:
                await channel.request(kind)
            assert (caught.value.status, caught.value.code) == (status, code)
            assert "secret" not in caught.value.detail
    async with open_pair(None) as (channel, _):
        with pytest.raises(ChannelRefused, match="404 unknown_kind"):
            await channel.request("what")


async def test_every_open_call_of_a_lost_channel_raises() -> None:
    async def handler(call: IncomingCall) -> None:
        await trio.sleep_forever()

    lost = 0

    async def call(channel: Channel) -> None:
        nonlocal lost
        with pytest.raises(ChannelLost):
            await channel.request("park")
        lost += 1

    async with open_pair(handler) as (channel, other):
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(call, channel)
            await trio.testing.wait_all_tasks_blocked()
            await trio.aclose_forcefully(other._stream)
        assert lost == 50
        assert channel.closed.is_set()
        with pytest.raises(ChannelLost):
            await channel.request("park")
        with pytest.raises(ChannelLost):
            channel.post("x")


async def test_a_reply_is_read_piece_by_piece_and_leaving_cancels() -> None:
    """SRV-3"""
    cancelled = trio.Event()

    async def handler(call: IncomingCall) -> None:
        await call.begin(b"head")
        try:
            for number in range(1_000_000):
                await call.send(b"%d," % number * 1000)
        finally:
            cancelled.set()

    async with open_pair(handler) as (channel, _):
        async with channel.exchange("stream", b"") as reply:
            assert reply.head == b"head"
            assert (await reply.receive_some()).startswith(b"0,0,")
        await cancelled.wait()
        assert channel.dialogue.open_calls in {0, 1}


async def test_an_inline_answer_comes_before_any_later_post() -> None:
    """A claim is answered before any later message to that worker (WRK-4)."""
    seen: list[str] = []

    def inline(call: IncomingCall) -> bool:
        call.reply(b"", b"claimed")
        call.channel.post("close", control=call.control)
        return True

    async with open_pair(inline=inline, opener_posted=lambda kind, body: seen.append(kind)) as (
        channel,
        _,
    ):
        await channel.request("claim", control=True, on_reply=lambda _: seen.append("claimed"))
        await trio.testing.wait_all_tasks_blocked()
    assert seen == ["claimed", "close"]


async def test_posts_arrive_in_order() -> None:
    got: list[bytes] = []
    async with open_pair(posted=lambda kind, body: got.append(body)) as (channel, _):
        for number in range(1000):
            channel.post("p", b"%d" % number)
    assert got == [b"%d" % number for number in range(1000)]


async def test_a_body_over_the_limit_is_refused_and_the_channel_lives() -> None:
    """SRV-5"""

    async def handler(call: IncomingCall) -> None:
        with pytest.raises(TooLarge):
            await call.read(10)
        raise TooLarge("limit 10")

    async with open_pair(handler) as (channel, _):
        for size in (11, 3 * 2**20):
            with pytest.raises(ChannelRefused, match="413"):
                await channel.request("put", b"x" * size)


# --- many, and at odds --------------------------------------------------------------------------


async def test_16000_calls_are_open_at_once_without_a_task_each_at_the_callee() -> None:
    """SRV-4"""
    kept: list[IncomingCall] = []
    answered = 0

    def inline(call: IncomingCall) -> bool:
        kept.append(call)
        return True

    async def call(channel: Channel) -> None:
        nonlocal answered
        assert (await channel.request("park", b"x")).body == b"x"
        answered += 1

    async with open_pair(inline=inline) as (channel, _):
        tasks = trio.lowlevel.current_statistics().tasks_living
        async with trio.open_nursery() as nursery:
            for _ in range(16_000):
                nursery.start_soon(call, channel)
            while len(kept) < 16_000:
                await trio.lowlevel.checkpoint()
            assert trio.lowlevel.current_statistics().tasks_living < tasks + 16_100
            assert channel.dialogue.open_calls == 16_000
            for waiting in reversed(kept):
                assert waiting.body is not None
                waiting.reply(b"", waiting.body)
        assert answered == 16_000
        assert channel.dialogue.open_calls == 0


async def test_a_kept_call_is_told_when_nobody_wants_it_any_more() -> None:
    """SRV-3"""
    told: list[str] = []

    def inline(call: IncomingCall) -> bool:
        call.on_cancel = lambda: told.append(call.kind)
        return True

    async with open_pair(inline=inline) as (channel, other):
        with trio.move_on_after(0.01):
            await channel.request("left")
        await trio.testing.wait_all_tasks_blocked()
        assert not other._theirs
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises_lost, channel, "lost")
            await trio.testing.wait_all_tasks_blocked()
            assert told == ["left"]
            await trio.aclose_forcefully(channel._stream)
        await trio.testing.wait_all_tasks_blocked()
    assert told == ["left", "lost"]


async def raises_lost(channel: Channel, kind: str) -> None:
    with pytest.raises(ChannelLost):
        await channel.request(kind)


@pytest.mark.parametrize("seed", range(4))
async def test_a_storm_of_cancels_leaves_nothing_behind(seed: int) -> None:
    """SRV-3"""
    chance = random.Random(seed)
    running = 0

    async def handler(call: IncomingCall) -> None:
        nonlocal running
        running += 1
        try:
            body = await call.read(2**20)
            for _ in range(body[0]):
                await trio.lowlevel.checkpoint()
            call.reply(b"", body)
        finally:
            running -= 1

    async def call(channel: Channel) -> None:
        body = bytes([chance.randrange(20)]) * chance.choice([10, 100_000])
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_later, scope, chance.randrange(60))
                reply = await channel.request("k", body, control=chance.random() < 0.5)
                assert reply.body == body
                nursery.cancel_scope.cancel()

    async with open_pair(handler) as (channel, other):
        async with trio.open_nursery() as nursery:
            for _ in range(300):
                nursery.start_soon(call, channel)
        await trio.testing.wait_all_tasks_blocked()
        assert channel.dialogue.open_calls == 0
        assert running == 0
        assert not other._theirs
        assert not channel.closed.is_set()


async def cancel_later(scope: trio.CancelScope, turns: int) -> None:
    for _ in range(turns):
        await trio.lowlevel.checkpoint()
    scope.cancel()


@pytest.mark.parametrize("seed", range(6))
async def test_order_holds_however_the_stream_and_the_tasks_run(seed: int) -> None:
    """D6, N3: what one side queues in a lane is seen in that order, calls of both sides mixed."""
    chance = random.Random(seed)
    seen: list[int] = []
    answers = 0

    def inline(call: IncomingCall) -> bool:
        if call.kind != "claim":
            return False
        nonlocal answers
        answers += 1
        call.reply(b"", str(answers).encode())
        answers += 1
        call.channel.post("number", str(answers).encode())
        return True

    async def claim(channel: Channel) -> None:
        def note(reply: Any) -> None:
            seen.append(int(reply.body))

        await channel.request("claim", control=True, on_reply=note)

    async def put(channel: Channel) -> None:
        body = chance.randbytes(chance.choice([1, 1000, 200_000]))
        assert (await channel.request("echo", body)).body == body

    async with open_pair(
        echo,
        inline=inline,
        opener_handler=echo,
        opener_posted=lambda kind, body: seen.append(int(body)),
        wrap=lambda stream: RaggedStream(stream, chance.randrange(2**32)),
    ) as (channel, other):
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(claim, channel)
                nursery.start_soon(put, channel)
                nursery.start_soon(put, other)
        while len(seen) < 60:
            await trio.lowlevel.checkpoint()
    assert seen == list(range(1, 61))


@pytest.mark.parametrize("breaks_at", range(1, 6))
async def test_a_stream_that_breaks_loses_every_call_and_tells_every_mark(
    breaks_at: int, autojump_clock: trio.testing.MockClock
) -> None:
    """N4"""
    marks: list[bool] = []
    asked = 0

    async def handler(call: IncomingCall) -> None:
        nonlocal asked
        asked += 1
        call.reply(b"", b"x" * 300_000, on_done=marks.append)

    near, far = memory_stream_pair()
    lost = answered = 0

    async def call(channel: Channel) -> None:
        nonlocal lost, answered
        try:
            await channel.request("k")
            answered += 1
        except ChannelLost:
            lost += 1

    async with open_pair(handler, streams=(near, BreakingStream(far, breaks_at))) as (channel, _):
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(call, channel)
        assert (lost > 0, lost + answered) == (True, 10)
        await channel.closed.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert len(marks) == asked
        assert marks.count(True) >= answered


async def test_a_peer_that_does_not_read_bounds_what_is_queued(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """D5: calls wait for room, posts are refused, and then the silence ends it."""
    near, far = trio.testing.lockstep_stream_pair()
    limits = ChannelLimits(outgoing_bytes_max=100_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meet, far, Role.ACCEPTOR)
        async with open_channel(near, role="opener", me=OPENER, limits=limits) as channel:
            with pytest.raises(ChannelFull):
                for _ in range(1000):
                    channel.post("p", b"x" * 1000)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(ChannelFull):
                for _ in range(1000):
                    channel.post("p", b"x" * 1000)
            async with trio.open_nursery() as callers:
                for _ in range(10):
                    callers.start_soon(raises_lost, channel, "k")
                await trio.testing.wait_all_tasks_blocked()
                assert channel.dialogue.open_calls == 0
            assert 15 <= trio.current_time() <= 20
            assert channel.why.startswith("silence")


async def test_calls_that_wait_for_room_go_on_when_the_peer_reads_again() -> None:
    near, far = trio.testing.lockstep_stream_pair()
    held = HeldStream(far)
    limits = ChannelLimits(outgoing_bytes_max=100_000)
    answered = 0

    async def call(channel: Channel) -> None:
        nonlocal answered
        await channel.request("echo", b"x")
        answered += 1

    async with open_pair(echo, limits=limits, streams=(near, held)) as (channel, _):
        held.hold()
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                with pytest.raises(ChannelFull):
                    for _ in range(1000):
                        channel.post("p", b"x" * 1000)
                await trio.testing.wait_all_tasks_blocked()
            for _ in range(20):
                nursery.start_soon(call, channel)
            await trio.testing.wait_all_tasks_blocked()
            assert channel.dialogue.open_calls == 0
            held.let_go()
        assert answered == 20


async def test_a_deadline_also_holds_for_a_call_that_waits_for_room(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """SRV-3: before it could be sent, and after."""
    near, far = trio.testing.lockstep_stream_pair()
    held = HeldStream(far)
    limits = ChannelLimits(outgoing_bytes_max=100_000)
    asked: list[float] = []
    ended: list[tuple[float, str]] = []

    async def park(call: IncomingCall) -> None:
        asked.append(trio.current_time())
        await trio.sleep_forever()

    async def call(channel: Channel, deadline: float) -> None:
        with pytest.raises(CallTimedOut) as caught:
            await channel.request("park", deadline=deadline)
        ended.append((trio.current_time(), str(caught.value)))

    async with open_pair(park, limits=limits, streams=(near, held)) as (channel, _):
        held.hold()
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                with pytest.raises(ChannelFull):
                    for _ in range(1000):
                        channel.post("p", b"x" * 1000)
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(call, channel, 1.0)
            nursery.start_soon(call, channel, 3.0)
            await trio.sleep(2)
            held.let_go()
        why = f"{channel.peer.name}: no answer to park by the deadline"
        assert ended == [(1.0, why), (3.0, why)]
        assert asked == [2.0]


async def test_a_peer_that_makes_us_queue_and_does_not_read_is_given_up() -> None:
    """D5"""

    def inline(call: IncomingCall) -> bool:
        call.reply(b"", b"x" * 1000)
        return True

    near, far = trio.testing.lockstep_stream_pair()
    limits = ChannelLimits(outgoing_bytes_max=100_000)
    async with trio.open_nursery() as nursery:

        async def flood() -> None:
            await meet(far, Role.OPENER)
            with pytest.raises(trio.BrokenResourceError):
                for number in range(10_000):
                    call = encode(Type.CALL, (4 * number, "k", b"", b"", None))
                    await far.send_all(call + encode(Type.CANCEL, (4 * number,)))

        nursery.start_soon(flood)
        async with open_channel(
            near, role="acceptor", me=ACCEPTOR, limits=limits, inline=inline
        ) as channel:
            await channel.closed.wait()
            assert channel.why.startswith("slow_reader")


async def test_answers_that_are_let_go_all_at_once_reach_a_peer_that_reads() -> None:
    """SRV-4: more of them than may be queued, while the peer goes on calling."""
    held: list[IncomingCall] = []
    sizes: list[int] = []

    def inline(call: IncomingCall) -> bool:
        if call.kind == "held":
            held.append(call)
        else:
            call.reply()
        return True

    async def ask(channel: Channel) -> None:
        sizes.append(len((await channel.request("held")).body))

    limits = ChannelLimits(outgoing_bytes_max=100_000)
    async with open_pair(inline=inline, limits=limits) as (channel, _):
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(ask, channel)
            await trio.testing.wait_all_tasks_blocked()
            for call in held:
                call.reply(b"", bytes(10_000))
            await channel.request("other")
    assert sizes == [10_000] * 100


@pytest.mark.parametrize("broken", [False, True])
async def test_what_is_answered_at_the_very_end_is_told_about_once(broken: bool) -> None:
    """N4: the writer has ended, and the answer leaves with the goodbye or not at all."""
    told: list[bool] = []
    answers: list[bytes] = []

    async def handler(call: IncomingCall) -> None:
        try:
            await trio.sleep_forever()
        finally:
            call.reply(b"", b"last words", on_done=told.append)

    near, far = memory_stream_pair()
    breaks_at = 1 if broken else 100
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            async with open_channel(near, role="opener", me=OPENER) as channel:
                try:
                    answers.append((await channel.request("k")).body)
                except ChannelLost:
                    answers.append(b"lost")

        nursery.start_soon(ask)
        stream = BreakingStream(far, breaks_at)
        async with open_channel(stream, role="acceptor", me=ACCEPTOR, handler=handler):
            await trio.testing.wait_all_tasks_blocked()
    assert told == [not broken]
    assert answers == [b"lost" if broken else b"last words"]


async def test_a_handler_that_gave_up_a_send_may_send_again(autojump_clock: object) -> None:
    async def handler(call: IncomingCall) -> None:
        await call.begin(b"")
        with trio.move_on_after(1):
            await call.send(b"x" * 3 * 2**20)
        with trio.move_on_after(1):
            await call.send(b"y")
        await call.finish()

    async with open_pair(handler) as (channel, _):
        async with channel.exchange("k", b"") as call:
            await trio.sleep(5)
            body = b""
            while chunk := await call.receive_some():
                body += chunk
    assert body == b"x" * 3 * 2**20 + b"y"


async def test_back_pressure_reaches_the_sender_of_a_body() -> None:
    sent = 0

    async def handler(call: IncomingCall) -> None:
        nonlocal sent
        await call.begin(b"")
        for _ in range(100):
            await call.send(b"x" * 100_000)
            sent += 1
        await call.finish()

    async with open_pair(handler) as (channel, _):
        async with channel.exchange("k", b"") as reply:
            await trio.testing.wait_all_tasks_blocked()
            assert 10 <= sent <= 12
            size = 0
            while piece := await reply.receive_some():
                size += len(piece)
        assert (sent, size) == (100, 10_000_000)


@pytest.mark.parametrize("seed", range(6))
async def test_every_mark_is_told_once_whatever_happens(seed: int) -> None:
    """O4: under cancels, and when the connection is cut."""
    chance = random.Random(seed)
    told: list[list[bool]] = []

    async def handler(call: IncomingCall) -> None:
        for _ in range(chance.randrange(5)):
            await trio.lowlevel.checkpoint()
        told.append([])
        body = b"x" * chance.choice([0, 10, 70_000, 3_000_000])
        if chance.random() < 0.3:
            mine = told[-1]
            try:
                await call.begin(b"")
                await call.send(body)
                await call.finish(on_done=mine.append)
            except trio.Cancelled:
                mine.append(False)
                raise
        else:
            call.reply(b"", body, on_done=told[-1].append)

    async def call(channel: Channel) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_later, scope, chance.randrange(100))
                try:
                    await channel.request("k")
                except ChannelLost:
                    pass
                nursery.cancel_scope.cancel()

    async with open_pair(handler) as (channel, other):
        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(call, channel)
            for _ in range(30 + chance.randrange(60)):
                await trio.lowlevel.checkpoint()
            if chance.random() < 0.7:
                await trio.aclose_forcefully(chance.choice([channel, other])._stream)
        await trio.testing.wait_all_tasks_blocked()
    assert told
    assert [len(each) for each in told] == [1] * len(told)


async def test_what_came_before_the_stream_broke_is_still_told() -> None:
    """A peer that answers, says why it goes, and closes, while this side sends."""
    near, far = memory_stream_pair()

    async def peer() -> None:
        await meet(far, Role.ACCEPTOR)
        while not frames_of(bytes(await far.receive_some())):
            pass
        reply = encode(Type.REPLY, (0, b"", b"came"))
        await far.send_all(reply + encode(Type.GOODBYE, ("version", "too old")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer)
        async with open_channel(BreakingStream(near, 2), role="opener", me=OPENER) as channel:
            async with trio.open_nursery() as callers:

                async def first() -> None:
                    assert (await channel.request("k")).body == b"came"

                callers.start_soon(first)
                await trio.testing.wait_all_tasks_blocked()
                callers.start_soon(raises_lost, channel, "k")
            assert channel.why == "version: too old"


async def test_handlers_that_clean_up_after_a_cancel_are_bounded() -> None:
    """D5"""
    clean_up = trio.Event()

    async def handler(call: IncomingCall) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await clean_up.wait()

    async with open_pair(handler, limits=ChannelLimits(calls_open_max=4)) as (channel, _):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(channel.request, "k")
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(ChannelFull, match="4 calls are open"):
                await channel.request("k")
            nursery.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert channel.dialogue.open_calls == 0
        with pytest.raises(ChannelRefused, match="503 too_many_calls"):
            await channel.request("k")
        clean_up.set()


# --- endings ------------------------------------------------------------------------------------


async def test_what_is_queued_when_the_block_ends_still_leaves_and_goodbye_is_last() -> None:
    got: list[bytes] = []
    async with open_pair(posted=lambda kind, body: got.append(body)) as (channel, other):
        for number in range(100):
            channel.post("p", b"%d" % number)
    assert len(got) == 100
    assert other.why == "closed: "


async def test_the_end_of_a_block_ends_calls_of_both_sides() -> None:
    """N4"""
    cancelled = trio.Event()

    async def handler(call: IncomingCall) -> None:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with trio.open_nursery() as nursery:
        async with open_pair(handler, opener_handler=handler) as (channel, other):
            nursery.start_soon(raises_lost, channel, "park")
            nursery.start_soon(raises_lost, other, "park")
            await trio.testing.wait_all_tasks_blocked()
    assert cancelled.is_set()


async def test_a_frozen_peer_is_found_by_its_silence(
    autojump_clock: trio.testing.MockClock,
) -> None:
    near, far = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meet, far, Role.ACCEPTOR)
        async with open_channel(near, role="opener", me=OPENER) as channel:
            await raises_lost(channel, "k")
            assert 15 <= trio.current_time() <= 20
            assert channel.why == "silence: nothing came for 15 s"


async def test_two_idle_ends_stay_connected(autojump_clock: trio.testing.MockClock) -> None:
    async with open_pair(echo) as (channel, other):
        await trio.sleep(3600)
        assert not channel.closed.is_set()
        assert not other.closed.is_set()
        await channel.request("k")


@pytest.mark.parametrize("role", ["opener", "acceptor"])
async def test_who_does_not_introduce_itself_is_gone_soon(
    role: Any, autojump_clock: trio.testing.MockClock
) -> None:
    """I36"""
    near, _far = memory_stream_pair()
    with pytest.raises(ChannelLost, match="no handshake within 5 s"):
        async with open_channel(near, role=role, me=OPENER):
            pytest.fail("no handshake")
    assert trio.current_time() == 5


async def test_a_wrong_token_is_told_and_nothing_else() -> None:
    """I35"""
    near, far = memory_stream_pair()

    async def serve() -> None:
        with pytest.raises(ChannelLost, match="unauthorized"):
            async with open_channel(
                far, role="acceptor", me=ACCEPTOR, handler=echo, token=Secret("a" * 16)
            ):
                pytest.fail("let in")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        with pytest.raises(ChannelLost, match="unauthorized: a valid token is required"):
            async with open_channel(near, role="opener", me=OPENER, token=Secret("b" * 16)):
                pytest.fail("let in")


async def test_a_goodbye_of_a_peer_cannot_write_into_the_log() -> None:
    """I36"""
    near, far = memory_stream_pair()
    await far.send_all(encode(Type.GOODBYE, ("x\nFORGED", "a\nFORGED \x1b[31m")))
    with pytest.raises(ChannelLost) as caught:
        async with open_channel(near, role="opener", me=OPENER):
            pytest.fail("no handshake")
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("where", ["posted", "inline", "on_done", "on_reply"])
async def test_a_fault_in_a_callback_does_not_end_the_channel(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """N5"""

    def fault(*_: object) -> bool:
        raise KeyError(where)

    async def handler(call: IncomingCall) -> None:
        call.reply(on_done=fault if where == "on_done" else None)

    async with open_pair(
        handler,
        posted=fault if where == "posted" else None,
        inline=fault if where == "inline" else None,
    ) as (channel, _):
        channel.post("p")
        match where:
            case "inline":
                with pytest.raises(ChannelRefused, match="500 internal"):
                    await channel.request("k")
            case "on_reply":
                with pytest.raises(KeyError):
                    await channel.request("k", on_reply=fault)
            case _:
                await channel.request("k")
        assert not channel.closed.is_set()
    assert bool(caplog.records) is (where != "on_reply")


async def test_a_handler_whose_call_was_cancelled_before_it_began_stops_at_its_first_wait() -> None:
    waited = trio.Event()

    async def handler(call: IncomingCall) -> None:
        await trio.lowlevel.checkpoint()
        waited.set()

    near, far = memory_stream_pair()
    async with trio.open_nursery() as nursery:

        async def peer() -> None:
            await meet(far, Role.OPENER)
            call = encode(Type.CALL, (0, "k", b"", b"", None))
            await far.send_all(call + encode(Type.CANCEL, (0,)))
            frames = frames_of(bytes(await far.receive_some()))
            assert [frame.type for frame in frames] == [Type.ERROR]
            await far.aclose()

        nursery.start_soon(peer)
        async with open_channel(near, role="acceptor", me=ACCEPTOR, handler=handler) as channel:
            await channel.closed.wait()
    assert not waited.is_set()


async def test_a_handler_may_go_on_after_its_answer() -> None:
    went_on = trio.Event()

    async def handler(call: IncomingCall) -> None:
        assert await call.sent(b"", b"x")
        went_on.set()
        raise KeyError("too late to be the answer")

    async with open_pair(handler) as (channel, _):
        assert (await channel.request("k")).body == b"x"
        await went_on.wait()
        assert not channel.closed.is_set()


async def test_a_body_that_ends_with_an_error_says_so_where_it_is_read() -> None:
    async def handler(call: IncomingCall) -> None:
        await call.begin(b"")
        await call.send(b"part")
        raise NotFound("the rest is gone")

    async with open_pair(handler) as (channel, _):
        async with channel.exchange("k", b"") as reply:
            assert await reply.receive_some() == b"part"
            with pytest.raises(ChannelRefused, match="404 not_found: the rest is gone"):
                await reply.receive_some()
        with pytest.raises(ChannelRefused, match="404"):
            await channel.request("k")


async def test_a_reply_over_the_limit_is_an_error_of_its_caller_alone() -> None:
    """SRV-5"""

    async def handler(call: IncomingCall) -> None:
        call.reply(b"", b"x" * 300_000)

    limits = ChannelLimits(body_bytes_max=200_000)
    async with open_pair(handler, limits=limits) as (channel, _):
        with pytest.raises(TransportError, match="more than 200000 bytes"):
            await channel.request("k")
        await trio.testing.wait_all_tasks_blocked()
        assert channel.dialogue.open_calls == 0
        assert not channel.closed.is_set()


async def cancel_at(turn: int, what: Callable[[], Awaitable[object]]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(what)
        for _ in range(turn):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("turn", range(0, 24, 3))
async def test_a_cancel_at_any_moment_leaves_the_channel_whole(turn: int) -> None:
    async with open_pair(echo) as (channel, other):

        async def stream() -> None:
            async with channel.exchange("echo", b"h", b"x" * 200_000) as reply:
                while await reply.receive_some():
                    pass

        async def whole() -> None:
            await channel.request("echo", b"x" * 200_000)

        for what in (stream, whole):
            await cancel_at(turn, what)
            await trio.testing.wait_all_tasks_blocked()
            assert channel.dialogue.open_calls == 0
            assert not other._theirs
            assert not channel._ours
        assert (await channel.request("echo", b"y")).body == b"y"
