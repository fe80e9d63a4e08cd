"""Restored state that waits to be claimed by its replacement attempt (I8, I14).

Invariant R1: an entry is handed out at most once per restore, unless it is given back.
Invariant R2: what is here is exported by every checkpoint whose scope names it, under the attempt as
which it waits, so that any number of crashes in a row keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from gymtrio.ids import CaptureKey, EpisodeId

T = TypeVar("T")


class Restored(Generic[T]):
    """Entries by the replacement attempt that may claim them."""

    def __init__(self) -> None:
        self._entries: dict[CaptureKey, tuple[EpisodeId, T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, episode_id: EpisodeId) -> bool:
        return episode_id.capture_key in self._entries

    def __iter__(self) -> Iterator[tuple[EpisodeId, T]]:
        """In order of capture key."""
        return iter(sorted(self._entries.values(), key=lambda entry: entry[0]))

    def waiting(self) -> list[str]:
        """Sorted capture keys, for status."""
        return sorted(self._entries)

    def put(self, entries: Iterable[tuple[EpisodeId, T]]) -> None:
        """Add entries under their replacement attempts, in one instant."""
        self._entries.update({e.capture_key: (e, value) for e, value in entries})

    def peek(self, episode_id: EpisodeId) -> T | None:
        entry = self._entries.get(episode_id.capture_key)
        return None if entry is None else entry[1]

    def claim(self, episode_id: EpisodeId) -> T | None:
        """Hand an entry out, or None: there is none for this attempt."""
        entry = self._entries.pop(episode_id.capture_key, None)
        return None if entry is None else entry[1]

    def give_back(self, episode_id: EpisodeId, value: T) -> None:
        """Undo a claim that was not used."""
        self._entries[episode_id.capture_key] = (episode_id, value)

    def drop(self, episode_ids: Iterable[EpisodeId]) -> list[T]:
        """Remove entries of these very attempts, without leaving a refusal."""
        dropped = []
        for episode_id in episode_ids:
            value = self.claim(episode_id)
            if value is not None:
                dropped.append(value)
        return dropped

    def drop_up_to(self, episode_id: EpisodeId) -> list[T]:
        """Remove the entries of this rollout up to this attempt: they were retired."""
        return self.drop(
            [
                e
                for e, _ in self._entries.values()
                if e.rollout_id == episode_id.rollout_id and e.attempt <= episode_id.attempt
            ]
        )

    def outside(self, scope: frozenset[CaptureKey] | None) -> list[EpisodeId]:
        """The attempts that a commit of this scope leaves out."""
        if scope is None:
            return []
        return sorted(e for key, (e, _) in self._entries.items() if key not in scope)
