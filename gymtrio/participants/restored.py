"""Restored state that waits to be claimed by its replacement attempt (I8, I14).

Invariant R1: an entry is handed out at most once per restore, unless it is given back.
Invariant R2: what is here is exported by every checkpoint whose scope names it, under the attempt as
which it waits, so that any number of crashes in a row keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import nsmallest
from operator import itemgetter
from typing import Final, Generic, TypeVar

from gymtrio.ids import CaptureKey, EpisodeId, RolloutId

T = TypeVar("T")

_NOTHING: Final = (None, None)


class Restored(Generic[T]):
    """Entries by the replacement attempt that may claim them."""

    def __init__(self) -> None:
        # By rollout, so that retiring thousands does not scan thousands for each.
        self._entries: dict[RolloutId, dict[int, tuple[EpisodeId, T]]] = {}
        """By attempt."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, episode_id: EpisodeId) -> bool:
        return episode_id.attempt in self._entries.get(episode_id.rollout_id, {})

    def __iter__(self) -> Iterator[tuple[EpisodeId, T]]:
        """In order of rollout and attempt."""
        for rollout_id in sorted(self._entries):
            attempts = self._entries[rollout_id]
            # An export asks for thousands in one instant, and nearly all are the only one.
            if len(attempts) == 1:
                yield from attempts.values()
            else:
                yield from sorted(attempts.values(), key=itemgetter(0))

    def waiting(self, count_max: int | None = None) -> list[str]:
        """Sorted capture keys, for status: all, or the first of them."""
        keys = (
            episode_id.capture_key
            for attempts in self._entries.values()
            for episode_id, _ in attempts.values()
        )
        return sorted(keys) if count_max is None else nsmallest(count_max, keys)

    def put(self, entries: Iterable[tuple[EpisodeId, T]]) -> None:
        """Add entries under their replacement attempts, in one instant."""
        for entry in entries:
            episode_id = entry[0]
            attempts = self._entries.setdefault(episode_id.rollout_id, {})
            self._count += episode_id.attempt not in attempts
            attempts[episode_id.attempt] = entry

    def put_one(self, episode_id: EpisodeId, value: T) -> None:
        """Add an entry under its replacement attempt."""
        self.put([(episode_id, value)])

    def put_all(self, others: Restored[T]) -> None:
        """Add what was gathered elsewhere, which is given away; at once when nothing is here."""
        if self._count:
            self.put(others)
        else:
            self._entries, self._count = others._entries, others._count

    def peek(self, episode_id: EpisodeId) -> T | None:
        _, value = self._entries.get(episode_id.rollout_id, {}).get(episode_id.attempt, _NOTHING)
        return value

    def claim(self, episode_id: EpisodeId) -> T | None:
        """Hand an entry out, or None: there is none for this attempt."""
        attempts = self._entries.get(episode_id.rollout_id, {})
        if episode_id.attempt not in attempts:
            return None
        _, value = attempts.pop(episode_id.attempt)
        self._count -= 1
        if not attempts:
            del self._entries[episode_id.rollout_id]
        return value

    def give_back(self, episode_id: EpisodeId, value: T) -> None:
        """Undo a claim that was not used."""
        self.put_one(episode_id, value)

    def drop(self, episode_ids: Iterable[EpisodeId]) -> list[T]:
        """Remove entries of these very attempts, without leaving a refusal."""
        dropped = (self.claim(episode_id) for episode_id in list(episode_ids))
        return [value for value in dropped if value is not None]

    def drop_up_to(self, episode_id: EpisodeId) -> list[T]:
        """Remove the entries of this rollout up to this attempt: they were retired."""
        attempts = self._entries.get(episode_id.rollout_id, {}).values()
        return self.drop(each for each, _ in attempts if each.attempt <= episode_id.attempt)

    def outside(self, scope: frozenset[CaptureKey] | None) -> list[EpisodeId]:
        """The attempts that a commit of this scope leaves out."""
        if scope is None:
            return []
        return [episode_id for episode_id, _ in self if episode_id.capture_key not in scope]
