"""Boundaries that are read before the instant in which they are needed."""

from __future__ import annotations

from collections import Counter

import pytest
import trio

from gymtrio.errors import InvalidCheckpointState
from gymtrio.participants import decoding
from gymtrio.participants.decoding import READ_AHEAD_BYTES, Boundaries
from gymtrio.storage import opaque
from gymtrio.storage.opaque_pieces import Steps, decode_steps
from tests.helpers.halting_disk import loop_meter
from tests.helpers.ticking import TickingClock

LARGE = opaque.encode([{"id": number} for number in range(40_000)], "x")


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
