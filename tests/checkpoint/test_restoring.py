"""What one restore does to the loop."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from gymtrio.storage import slices
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.passes import Passes
from tests.helpers.plane import episode, open_plane


async def test_the_replacements_of_thousands_are_named_in_slices(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STO-5: others run meanwhile."""
    archive = MemoryArchive()
    async with open_plane(archive=archive) as plane:
        await plane.prepare()
        await plane.commit()
    named = [episode(f"r{number:04}", number % 3) for number in range(1_000)]
    passes = Passes()

    monkeypatch.setattr(slices, "LOOP_SLICE_S", 0.0)
    async with open_plane(archive=archive) as plane, trio.open_nursery() as nursery:
        nursery.start_soon(passes.run)
        reply = await plane.restore(*reversed(named))
        nursery.cancel_scope.cancel()
    assert list(reply.restored) == [each.next_attempt().capture_key for each in named]
    assert passes.count >= len(named) // slices.ITEMS_AT_ONCE
