"""Records to values in short slices of the loop (STO-5)."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from typing import Final, TypeVar

import trio

from gymtrio.errors import InvalidCheckpointState
from gymtrio.ids import EpisodeId
from gymtrio.storage.opaque import decode
from gymtrio.storage.opaque_pieces import decode_steps, in_slices
from gymtrio.storage.records import Record
from gymtrio.storage.slices import ITEMS_AT_ONCE, LoopSlice
from gymtrio.strict import MalformedValue
from gymtrio.wire.codec import unpacker_of

T = TypeVar("T")


READ_AHEAD_BYTES: Final = 2**14
"""From which size on. The gate lets a hundred through in a turn of the loop: 10 ms of smaller ones."""


class Boundaries:
    """Reads the boundaries of one server, the large ones one after the other.

    Thousands are asked for at once when a server is resumed after its restore. Each of them in slices
    would hold the loop for as many slices in each of its turns.
    """

    def __init__(self) -> None:
        self._reading = trio.Lock()

    def at(self, where: str) -> Boundary:
        """
        Args:
            where: whose it is, for the error: `boundary of r-a1`.
        """
        return Boundary(self._reading, where)


class Boundary:
    """Reads a kept boundary, and a large one before the instant in which it is needed."""

    def __init__(self, reading: trio.Lock, where: str) -> None:
        self._reading = reading
        self._where = where
        self._kept: bytes | None = None
        self._value: object = None

    async def read_ahead(self, kept: bytes | None) -> bool:
        """Read what is too large for one stretch of the loop; anything else is left for `value_of`.

        Returns:
            Whether it did, so that the loop has turned and nothing is as it was.

        Raises:
            InvalidCheckpointState: it is not what `opaque.encode` makes.
        """
        if kept is None or kept is self._kept or len(kept) <= READ_AHEAD_BYTES:
            return False
        async with self._reading:
            self._value = await in_slices(decode_steps(kept, self._where), LoopSlice())
        self._kept = kept
        return True

    def value_of(self, kept: bytes | None) -> object:
        """
        Raises:
            InvalidCheckpointState: it is not what `opaque.encode` makes.
        """
        if kept is not None and kept is self._kept:
            return self._value
        return None if kept is None else decode(kept, self._where)


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
    await decode_into(read.extend, cls, records)
    return read


async def decode_into(
    take: Callable[[list[tuple[EpisodeId, T]]], None],
    cls: type[T],
    records: MutableSequence[Record],
) -> None:
    """As `decode_records`, a handful at a time; `take` may keep the list that it is given."""
    slices = LoopSlice()
    await trio.lowlevel.checkpoint()
    content_of = unpacker_of(cls)
    records.reverse()
    some: list[tuple[EpisodeId, T]] = []
    while records:
        episode_id, payload = records.pop()
        try:
            some.append((episode_id, content_of(payload)))
        except MalformedValue as error:
            raise InvalidCheckpointState(f"record of {episode_id}: {error}") from None
        if len(some) == ITEMS_AT_ONCE or len(payload) > READ_AHEAD_BYTES:
            take(some)
            some = []
            await slices.turn()
    take(some)
