"""Which sequence of the model's memory holds which tokens, and how a new call makes use of them.

Pure: it plans moves and believes that they are performed, in order, before the next chunks.

Sequences `0..slots-1` are slots, the others shelves. What a finished call leaves in its slot stays
usable there; when the slot is needed, it goes to the shelf used longest ago, unless it is short or
held elsewhere. A copy costs as much as one or two tokens of prompt, so copying is the rule and
planning which slot fits best is not worth it.
"""

from __future__ import annotations

from typing import Final

import attrs

from servers.model.embedded.steps import Copy, Move, Trim

WORTH_TOKENS: Final = 16
"""Fewer tokens than this are computed again sooner than looked after."""


@attrs.define
class _Sequence:
    token_ids: list[int] = attrs.Factory(list)
    used_at: int = 0
    """Logical time of the last use."""


def common_tokens(left: list[int], right: list[int]) -> int:
    """Length of the common prefix; by comparing slices, which runs at the speed of memory."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixCache:
    def __init__(self, slots: int, shelves: int) -> None:
        self._slots = slots
        self._sequences = [_Sequence() for _ in range(slots + shelves)]
        self._now = 0

    def match_tokens(self, token_ids: list[int]) -> int:
        """How many leading tokens of `token_ids` some sequence holds."""
        return self._best(token_ids)[0]

    def begin(self, slot: int, token_ids: list[int]) -> tuple[int, tuple[Move, ...]]:
        """Prepare a free slot for a call.

        Args:
            slot: holds what its last call left.
            token_ids: all tokens that the model is to be given, at least one.

        Returns:
            How many of them the slot holds after the moves, at least one less than all: the last is
            always computed, since it yields the logits.
        """
        reused, source = self._best(token_ids[:-1])
        own = self._sequences[slot]
        moves = self._shelve(slot, token_ids, source)
        self._touch(source)
        if reused and source != slot:
            moves.append(Copy(source, slot))
            own.token_ids = list(self._sequences[source].token_ids)
        if reused < len(own.token_ids):
            moves.append(Trim(slot, reused))
            del own.token_ids[reused:]
        self._touch(slot)
        return reused, tuple(moves)

    def extend(self, sequence: int, token_ids: tuple[int, ...]) -> None:
        """Note that a step has computed more tokens."""
        self._sequences[sequence].token_ids += token_ids

    def release(self, slot: int) -> None:
        """Note that the slot's call has ended; its tokens stay usable."""
        self._touch(slot)

    def _best(self, token_ids: list[int]) -> tuple[int, int]:
        """The longest match and the sequence that has it, the lowest of equals."""
        matches = [common_tokens(held.token_ids, token_ids) for held in self._sequences]
        longest = max(matches)
        return longest, matches.index(longest)

    def _shelve(self, slot: int, token_ids: list[int], source: int) -> list[Move]:
        """Save what the slot holds, if starting `token_ids` there loses something of worth."""
        own = self._sequences[slot].token_ids
        shelves = [s for s in range(self._slots, len(self._sequences)) if s != source]
        if not shelves or len(own) - common_tokens(own, token_ids) < WORTH_TOKENS:
            return []
        if self._held_elsewhere(slot):
            return []
        shelf = min(shelves, key=self._shelf_rank)
        self._sequences[shelf] = _Sequence(list(own))
        self._touch(shelf)
        return [Copy(slot, shelf)]

    def _shelf_rank(self, index: int) -> tuple[bool, int]:
        """First a shelf of which nothing is lost, then the one used longest ago."""
        return not self._held_elsewhere(index), self._sequences[index].used_at

    def _held_elsewhere(self, index: int) -> bool:
        own = self._sequences[index].token_ids
        return any(
            other != index and held.token_ids[: len(own)] == own
            for other, held in enumerate(self._sequences)
        )

    def _touch(self, index: int) -> None:
        self._now += 1
        self._sequences[index].used_at = self._now
