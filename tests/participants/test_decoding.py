"""Records and boundaries to values without holding the loop."""

from __future__ import annotations

from collections import Counter
from typing import Final

import attrs
import pytest
import trio
from trio.testing import MockClock

from gymtrio.errors import InvalidCheckpointState
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import LOOP_SLICE_S
from gymtrio.participants import decoding
from gymtrio.participants.base import make_record
from gymtrio.participants.decoding import READ_AHEAD_BYTES, Boundaries, decode_records
from gymtrio.storage import opaque
from gymtrio.storage.opaque_pieces import Steps, decode_steps
from gymtrio.storage.records import Record
from gymtrio.storage.slices import LoopSlice
from tests.helpers.halting_disk import loop_meter
from tests.helpers.ticking import TickingClock

LARGE: Final = opaque.encode([{"id": number} for number in range(40_000)], "x")


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
        slices = LoopSlice()
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


# -- boundaries -------------------------------------------------------------------------------


def test_thousands_of_large_ones_are_read_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """STO-5, CTL-15: however many are asked for, a turn of the loop has one piece in it."""
    pieces: Counter[int] = Counter()
    values: list[object] = []

    async def main() -> None:
        boundaries = Boundaries()
        with loop_meter() as meter:

            def counted(data: bytes, where: str) -> Steps[object]:
                steps = decode_steps(data, where)
                while True:
                    pieces[meter.passes] += 1
                    try:
                        next(steps)
                    except StopIteration as end:
                        return end.value
                    yield

            monkeypatch.setattr(decoding, "decode_steps", counted)

            async def read(number: int) -> None:
                at = boundaries.at(f"boundary {number}")
                assert await at.read_ahead(LARGE)
                assert not await at.read_ahead(LARGE), "it is there"
                values.append(at.value_of(LARGE))

            async with trio.open_nursery() as nursery:
                for number in range(30):
                    nursery.start_soon(read, number)

    trio.run(main, clock=TickingClock())
    assert len(values) == 30
    assert len(pieces) > 30
    assert max(pieces.values()) <= 2, "the end of one and the beginning of another"


async def test_what_is_no_boundary_is_refused_by_name_whatever_its_size() -> None:
    """CTL-14: and nobody who comes after it waits."""
    boundaries = Boundaries()
    at = boundaries.at("boundary of r-a1")
    with pytest.raises(InvalidCheckpointState, match="boundary of r-a1: not JSON"):
        at.value_of(b"{")
    with pytest.raises(InvalidCheckpointState, match="boundary of r-a1: not JSON"):
        await at.read_ahead(b"[" + b"x" * READ_AHEAD_BYTES)
    assert await boundaries.at("another").read_ahead(LARGE)
    assert at.value_of(None) is None
