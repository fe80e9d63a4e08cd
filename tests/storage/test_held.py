"""A resource of blocking calls is let go of exactly once, by whoever has it last."""

from __future__ import annotations

import errno
import logging
import threading

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.errors import InvalidCheckpointState
from gymtrio.storage.disk import ThreadDisk
from gymtrio.storage.held import Resource, hold

HANG_S_MAX = 30.0


class Noted(Resource):
    """Notes in which order it was used and released."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.entered = threading.Event()
        self.may_end = threading.Event()
        self.released = threading.Event()

    def work(self) -> str:
        self.events.append("work")
        return "done"

    def fail(self) -> None:
        raise OSError(errno.EIO, "EIO")

    def hang(self) -> None:
        self.entered.set()
        assert self.may_end.wait(HANG_S_MAX)
        self.events.append("hung call ended")

    def release(self) -> None:
        self.events.append("released")
        self.released.set()


async def in_thread(event: threading.Event) -> None:
    assert await trio.to_thread.run_sync(event.wait, HANG_S_MAX)


async def test_calls_run_off_the_loop_and_the_resource_is_released_after() -> None:
    resource = Noted()
    loop = threading.current_thread()
    async with hold(ThreadDisk(), resource) as held:
        assert await held.run(lambda r: r.work()) == "done"
        assert await held.run(lambda _: threading.current_thread()) is not loop
        assert resource.events == ["work"]
    assert resource.events == ["work", "released"]


async def test_what_a_call_raises_reaches_its_caller_and_the_resource_is_released() -> None:
    resource = Noted()
    with pytest.raises(OSError, match="EIO"):
        async with hold(ThreadDisk(), resource) as held:
            await held.run(lambda r: r.fail())
    assert resource.events == ["released"]


async def test_a_cancelled_block_waits_for_a_call_that_ends_soon() -> None:
    resource = Noted()
    disk = ThreadDisk(stop_grace_s=HANG_S_MAX)
    with trio.CancelScope() as scope:
        async with hold(disk, resource) as held:
            async with trio.open_nursery() as nursery:

                async def let_it_end() -> None:
                    await in_thread(resource.entered)
                    scope.cancel()
                    resource.may_end.set()

                nursery.start_soon(let_it_end)
                await held.run(lambda r: r.hang())
    assert scope.cancelled_caught
    assert resource.events == ["hung call ended", "released"]


async def test_a_cancelled_block_leaves_a_call_that_hangs_to_its_thread() -> None:
    """CTL-10, I31: no use after the release, and the release comes when the call ends."""
    resource = Noted()
    disk = ThreadDisk(stop_grace_s=0.0)
    with trio.CancelScope() as scope:
        async with hold(disk, resource) as held:
            async with trio.open_nursery() as nursery:

                async def stop() -> None:
                    await in_thread(resource.entered)
                    scope.cancel()

                nursery.start_soon(stop)
                await held.run(lambda r: r.hang())
    assert scope.cancelled_caught
    assert resource.events == []
    assert disk.steps_under_way == 1
    resource.may_end.set()
    await in_thread(resource.released)
    assert resource.events == ["hung call ended", "released"]


async def test_a_cancelled_caller_starts_nothing() -> None:
    resource = Noted()
    with trio.CancelScope() as scope:
        scope.cancel()
        async with hold(ThreadDisk(stop_grace_s=HANG_S_MAX), resource) as held:
            await held.run(lambda r: r.work())
    assert resource.events == ["released"]


async def test_a_block_without_any_grace_still_releases() -> None:
    resource = Noted()
    with trio.CancelScope() as scope:
        async with hold(ThreadDisk(stop_grace_s=0.0), resource) as held:
            await held.run(lambda r: r.work())
            scope.cancel()
    await in_thread(resource.released)
    assert resource.events == ["work", "released"]


def test_a_call_that_outlives_the_loop_still_releases() -> None:
    """I31."""
    resource = Noted()

    async def main() -> None:
        with trio.CancelScope() as scope:
            async with hold(ThreadDisk(stop_grace_s=0.0), resource) as held:
                async with trio.open_nursery() as nursery:

                    async def stop() -> None:
                        await in_thread(resource.entered)
                        scope.cancel()

                    nursery.start_soon(stop)
                    await held.run(lambda r: r.hang())

    trio.run(main)
    assert resource.events == []
    resource.may_end.set()
    assert resource.released.wait(HANG_S_MAX)
    assert resource.events == ["hung call ended", "released"]


async def test_a_release_that_hangs_does_not_hold_the_block(autojump_clock: MockClock) -> None:
    """CTL-10."""

    class Stuck(Noted):
        def release(self) -> None:
            self.hang()

    resource = Stuck()
    began = trio.current_time()
    async with hold(ThreadDisk(stop_grace_s=3.0), resource):
        pass
    assert trio.current_time() - began == pytest.approx(3.0)
    resource.may_end.set()


async def test_too_many_calls_that_hang_make_the_disk_refused() -> None:
    """No disk can make a server collect threads without bound."""
    disk = ThreadDisk(stop_grace_s=HANG_S_MAX, steps_max=1)
    hanging, refused = Noted(), Noted()
    async with trio.open_nursery() as nursery:

        async def hang() -> None:
            async with hold(disk, hanging) as held:
                await held.run(lambda r: r.hang())

        nursery.start_soon(hang)
        await in_thread(hanging.entered)
        with pytest.raises(InvalidCheckpointState, match=r"cannot use the disk: .*EAGAIN"):
            async with hold(disk, refused) as held:
                await held.run(lambda r: r.work())
        assert refused.events == ["released"]
        hanging.may_end.set()
    async with hold(disk, refused) as held:
        await held.run(lambda r: r.work())


async def test_without_a_thread_the_disk_is_refused_and_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """STO-8, H2: the server goes on, also when the system has no thread left."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    disk, resource = ThreadDisk(), Noted()
    with monkeypatch.context() as patched:
        patched.setattr(trio.lowlevel, "start_thread_soon", refuse)
        with pytest.raises(InvalidCheckpointState, match="can't start new thread"):
            async with hold(disk, resource) as held:
                await held.run(lambda r: r.work())
    assert resource.events == ["released"]
    assert disk.steps_under_way == 0
    async with hold(disk, resource) as held:
        await held.run(lambda r: r.work())


async def test_a_fault_of_ours_in_a_late_release_is_logged() -> None:
    class Faulty(Noted):
        def release(self) -> None:
            raise RuntimeError("ours")

    logged = threading.Event()
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            logged.set()

    resource, handler = Faulty(), Handler()
    logger = logging.getLogger("gymtrio.storage.disk")
    logger.addHandler(handler)
    try:
        with trio.CancelScope() as scope:
            async with hold(ThreadDisk(stop_grace_s=0.0), resource) as held:
                async with trio.open_nursery() as nursery:

                    async def stop() -> None:
                        await in_thread(resource.entered)
                        scope.cancel()

                    nursery.start_soon(stop)
                    await held.run(lambda r: r.hang())
        resource.may_end.set()
        await in_thread(logged)
    finally:
        logger.removeHandler(handler)
    assert "ours" in messages[0]


async def test_a_fault_of_ours_in_a_release_is_raised() -> None:
    class Faulty(Noted):
        def release(self) -> None:
            raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        async with hold(ThreadDisk(stop_grace_s=HANG_S_MAX), Faulty()):
            await wait_all_tasks_blocked()
