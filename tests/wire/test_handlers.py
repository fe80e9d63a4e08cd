"""Tasks that serve one call after the other: no call finds anything of the one before."""

from __future__ import annotations

import random
from contextvars import ContextVar

import pytest
import trio
import trio.testing

from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.errors import ChannelRefused
from gymtrio.wire.handlers import IDLE_TASKS_MAX
from tests.helpers.channels import open_pair

NOTE: ContextVar[str] = ContextVar("NOTE", default="none")


class Served:
    """A handler whose calls say what it does, and that knows its tasks."""

    def __init__(self) -> None:
        self.tasks: list[trio.lowlevel.Task] = []
        self.scopes: list[trio.CancelScope] = []
        self.let_go = trio.Event()

    async def handle(self, call: IncomingCall) -> None:
        self.tasks.append(trio.lowlevel.current_task())
        assert call._scope is not None
        self.scopes.append(call._scope)
        match call.kind:
            case "park":
                await self.let_go.wait()
            case "note":
                NOTE.set("left behind")
            case "fail":
                raise RuntimeError("of the test")
            case "stubborn":
                with trio.CancelScope(shield=True):
                    await self.let_go.wait()
            case "group":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._fail_when_cancelled)
                    await trio.sleep_forever()
        call.reply(NOTE.get().encode())

    async def _fail_when_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise RuntimeError("of the clean-up")


async def test_short_calls_share_a_task_and_its_scope() -> None:
    served = Served()
    async with open_pair(served.handle) as (channel, _):
        for _ in range(20):
            await channel.request("echo")
    assert len(set(served.tasks)) == 1
    assert len({id(scope) for scope in served.scopes}) == 1


async def test_a_call_begins_in_a_context_of_its_own() -> None:
    """H3"""
    served = Served()
    async with open_pair(served.handle) as (channel, _):
        assert (await channel.request("note")).head == b"left behind"
        assert (await channel.request("echo")).head == b"none"
    assert len(set(served.tasks)) == 1


@pytest.mark.parametrize("kind", ["park", "stubborn", "group"])
async def test_a_cancelled_call_takes_nobody_along(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """H2: whether the handler ends by the cancellation, in spite of it, or by an error in it."""
    served = Served()
    async with open_pair(served.handle) as (channel, end):
        for _ in range(3):
            served.let_go = trio.Event()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(channel.request, kind)
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            served.let_go.set()
            await trio.testing.wait_all_tasks_blocked()
            assert end.dialogue.open_calls == 0
            assert (await channel.request("echo")).head == b"none"
    assert len(set(served.tasks)) == 1
    assert len({id(scope) for scope in served.scopes}) > 3
    assert ("of the clean-up" in caplog.text) is (kind == "group")


async def test_cancelling_a_call_that_has_ended_touches_nobody() -> None:
    """H2: whoever still holds it, as an answer's `on_done` may."""
    calls: list[IncomingCall] = []
    served = Served()

    async def handler(call: IncomingCall) -> None:
        calls.append(call)
        await served.handle(call)

    async with open_pair(handler) as (channel, _):
        await channel.request("echo")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(channel.request, "park")
            await trio.testing.wait_all_tasks_blocked()
            assert len(set(served.tasks)) == 1
            calls[0].cancelled()
            await trio.testing.wait_all_tasks_blocked()
            served.let_go.set()
    assert [call._scope for call in calls] == [None, None]


async def test_a_call_that_is_cancelled_here_may_answer_and_takes_nobody_along() -> None:
    """H2: as a server does with what runs when it stops; the caller still waits for its answer."""
    calls: list[IncomingCall] = []
    served = Served()

    async def handler(call: IncomingCall) -> None:
        calls.append(call)
        try:
            await served.handle(call)
        except trio.Cancelled:
            call.reply(b"cut short")
            raise

    async with open_pair(handler) as (channel, _):
        heads: list[bytes] = []

        async def ask() -> None:
            heads.append((await channel.request("park")).head)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            calls[0].cancel()
        assert heads == [b"cut short"]
        served.let_go.set()
        assert (await channel.request("park")).head == b"none"
    assert len(set(served.tasks)) == 1
    assert len({id(scope) for scope in served.scopes}) == 2


async def test_a_call_that_answers_in_spite_of_its_cancellation_takes_nobody_along() -> None:
    """H2: its scope stays cancelled, so the next call is not served in it."""
    served = Served()

    async def handler(call: IncomingCall) -> None:
        if call.kind == "cancel":
            call.cancel()
        await served.handle(call)

    async with open_pair(handler) as (channel, _):
        assert (await channel.request("cancel")).head == b"none"
        served.let_go.set()
        assert (await channel.request("park")).head == b"none"
    assert len({id(scope) for scope in served.scopes}) == 2


async def test_a_call_may_be_cancelled_before_its_handler_begins() -> None:
    served = Served()

    def early(call: IncomingCall) -> bool:
        call.cancel()
        return False

    async with open_pair(served.handle, inline=early) as (channel, _):
        with pytest.raises(ChannelRefused, match="ended without an answer"):
            await channel.request("park")
    assert [scope.cancel_called for scope in served.scopes] == [True]


async def test_a_fault_ends_its_own_call(caplog: pytest.LogCaptureFixture) -> None:
    served = Served()
    async with open_pair(served.handle) as (channel, _):
        for _ in range(3):
            with pytest.raises(ChannelRefused, match="the handler failed"):
                await channel.request("fail")
            assert (await channel.request("echo")).head == b"none"
    assert len(set(served.tasks)) == 1


async def test_few_tasks_wait_for_more() -> None:
    """H4"""
    served = Served()
    count = 3 * IDLE_TASKS_MAX
    async with open_pair(served.handle) as (channel, _):
        await trio.testing.wait_all_tasks_blocked()
        before = trio.lowlevel.current_statistics().tasks_living
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(channel.request, "park")
            await trio.testing.wait_all_tasks_blocked()
            assert len(set(served.tasks)) == count
            served.let_go.set()
        await trio.testing.wait_all_tasks_blocked()
        after = trio.lowlevel.current_statistics().tasks_living
        assert after - before == IDLE_TASKS_MAX


@pytest.mark.parametrize("seed", range(5))
async def test_a_storm_of_calls_and_cancels_answers_each_once(seed: int) -> None:
    chance = random.Random(seed)
    served = Served()
    answered = 0

    async def ask(kind: str, steps: int) -> None:
        nonlocal answered
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leave, scope, steps)
                await channel.request(kind)
                answered += 1
                nursery.cancel_scope.cancel()

    async def leave(scope: trio.CancelScope, steps: int) -> None:
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    async with open_pair(served.handle) as (channel, end):
        async with trio.open_nursery() as nursery:
            for _ in range(300):
                kind = chance.choice(["echo", "park", "note"])
                nursery.start_soon(ask, kind, chance.randrange(12))
                if chance.random() < 0.5:
                    await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
        assert channel.dialogue.open_calls == end.dialogue.open_calls == 0
        assert answered > 0
        assert (await channel.request("echo")).head == b"none"
