"""Collections look at what is young; everything else waits for a quiet moment."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from gymtrio.serving import garbage


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    """The collector belongs to the whole process."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Node:
    """Something that a cycle can be made of."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize(
    ("gathered", "connections", "due"),
    [
        (0, 0, False),
        (garbage.GATHERED_MIN, 0, False),
        (garbage.GATHERED_MIN + 1, 0, True),
        (garbage.GATHERED_MIN + 1, garbage.QUIET_CONNECTIONS_MAX, True),
        (garbage.GATHERED_MIN + 1, garbage.QUIET_CONNECTIONS_MAX + 1, False),
        (garbage.GATHERED_MAX, 16_000, False),
        (garbage.GATHERED_MAX + 1, 16_000, True),
    ],
)
def test_everything_is_looked_at_in_a_quiet_moment_or_when_it_must_be(
    gathered: int, connections: int, due: bool
) -> None:
    """SRV-4: not while thousands wait, unless memory would fill."""
    assert garbage.is_due(gathered, connections) is due


async def test_what_has_lived_a_moment_is_not_looked_at(autojump_clock: MockClock) -> None:
    """SRV-4: a full collection finds nothing to do, whatever is parked; memory is found again."""
    connections = 16_000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(garbage.spare_the_loop, lambda: connections)
        await trio.testing.wait_all_tasks_blocked()
        parked = [Node() for _ in range(garbage.GATHERED_MIN + 1_000)]
        first = weakref.ref(parked[0])
        await trio.sleep(1.5 * garbage.SET_ASIDE_S)
        assert len(gc.get_objects()) < 100_000
        parked.clear()
        # Cycles of what was set aside: not found by a collection, and not while others wait.
        await trio.sleep(3 * garbage.LOOK_S)
        gc.collect()
        assert first() is not None
        connections = 1
        await trio.sleep(3 * garbage.LOOK_S)
        assert first() is None
        assert gc.get_threshold() == garbage.GC_THRESHOLDS
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("noted", [True, False])
async def test_thousands_that_end_at_once_do_not_gather_unnoticed(
    noted: bool, autojump_clock: MockClock
) -> None:
    """SRV-4: the interpreter counts what is made less what is freed, of whatever age."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(garbage.spare_the_loop, lambda: 16_000)
        await trio.testing.wait_all_tasks_blocked()
        ending = [Node() for _ in range(30_000)]
        gc.freeze()
        left_behind: list[Node] = []
        most = 0
        while ending:
            ending.pop().itself = None  # type: ignore[assignment]
            left_behind.append(Node())
            if noted:
                garbage.note_end()
            if len(ending) % 1000 == 0:
                most = max(most, len(gc.get_objects(generation=0)))
        assert (most < 3 * garbage.GC_THRESHOLDS[0]) is noted
        nursery.cancel_scope.cancel()


async def test_what_is_young_is_set_aside_before_a_message(autojump_clock: MockClock) -> None:
    """STO-5: thousands of objects may be made of it; what was there before is not looked at."""
    young = Node()
    garbage.note_message()
    assert any(each is young for each in gc.get_objects()), "this process is not spared"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(garbage.spare_the_loop, lambda: 16_000)
        await trio.testing.wait_all_tasks_blocked()
        young = Node()
        garbage.note_message()
        assert not any(each is young for each in gc.get_objects())
        nursery.cancel_scope.cancel()
