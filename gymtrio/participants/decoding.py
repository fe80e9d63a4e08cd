"""Records to values in short slices of the loop (STO-5)."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import TypeVar

import trio

from gymtrio.ids import EpisodeId
from gymtrio.participants.base import read_record
from gymtrio.storage.records import Record
from gymtrio.storage.slices import LoopSlice

T = TypeVar("T")


class Slices(LoopSlice):
    """Lets the loop turn every few milliseconds of work that would otherwise hold it."""

    async def turn(self) -> None:
        """Between two items. Cancelled: at most once per slice."""
        if self.is_over:
            await self.pause()


async def decode_records(
    cls: type[T], records: MutableSequence[Record]
) -> list[tuple[EpisodeId, T]]:
    """Decode records strictly; thousands of them in one stretch would stall the loop.

    Args:
        records: taken out as they are decoded: both forms of all would need twice the memory.

    Raises:
        InvalidCheckpointState: one does not hold what it must; the detail names its episode.
    """
    read: list[tuple[EpisodeId, T]] = []
    slices = Slices()
    await trio.lowlevel.checkpoint()
    records.reverse()
    while records:
        read.append(read_record(cls, records.pop()))
        if slices.is_over:
            await slices.pause()
    return read
