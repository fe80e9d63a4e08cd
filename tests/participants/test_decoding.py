"""Records to values without holding the loop."""

from __future__ import annotations

import attrs
import pytest
import trio
from trio.testing import MockClock

from gymtrio.errors import InvalidCheckpointState
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import LOOP_SLICE_S
from gymtrio.participants.base import make_record
from gymtrio.participants.decoding import Slices, decode_records
from gymtrio.storage.records import Record


@attrs.frozen
class Note:
    text: str


async def test_records_come_back_with_their_episodes(autojump_clock: MockClock) -> None:
    """CTL-14, ENV-1."""
    episodes = [EpisodeId(RolloutId(f"r{n}"), n) for n in range(3)]
    records = [make_record(e, Note(str(e))) for e in episodes]
    assert await decode_records(Note, records) == [(e, Note(str(e))) for e in episodes]
    assert not records, "STO-5: their bytes are not held beside what was made of them"


async def test_a_record_that_is_none_is_refused_by_name(autojump_clock: MockClock) -> None:
    """STO-4."""
    bad = Record(EpisodeId(RolloutId("r")), b"\xc1")
    with pytest.raises(InvalidCheckpointState, match="record of r"):
        await decode_records(Note, [bad])


async def test_the_loop_turns_once_per_slice(mock_clock: MockClock) -> None:
    """STO-5."""
    turns: list[None] = []

    async def other() -> None:
        while True:
            turns.append(None)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        slices = Slices()
        for _ in range(10):
            await slices.turn()
        assert turns == []
        # The order of two tasks that are ready is random, so one turn may be ours alone.
        for _ in range(2):
            mock_clock.jump(LOOP_SLICE_S)
            await slices.turn()
        assert turns
        before = len(turns)
        await slices.turn()
        assert len(turns) == before
        nursery.cancel_scope.cancel()
