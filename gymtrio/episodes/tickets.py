"""Work in flight that has no boundary of its own: it blocks a checkpoint from start to end.

Such as a seed in progress, a session that is being closed, a reply that is being handed to its
connection. A ticket is taken in the instant of admission and given back exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import trio

from gymtrio.episodes.blockers import Blocker
from gymtrio.episodes.by_rollout import ByRollout
from gymtrio.episodes.signal import Signal
from gymtrio.ids import EpisodeId, RolloutId


class Ticket:
    """One piece of work; a context manager that gives it back. Made by `Tickets.take`."""

    def __init__(self, owner: Tickets, episode_id: EpisodeId, doing: str) -> None:
        self.episode_id = episode_id
        self.doing = doing
        self.since = trio.current_time()
        self.ended = trio.Event()
        self._owner = owner

    def give_back(self) -> None:
        """The work has ended; twice is harmless."""
        if not self.ended.is_set():
            self.ended.set()
            self._owner.forget(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()


class Tickets:
    """The tickets of one server.

    Args:
        changed: rung when a ticket is given back.
    """

    def __init__(self, changed: Signal) -> None:
        self._changed = changed
        self._tickets: dict[Ticket, None] = {}
        self._by_rollout: ByRollout[Ticket] = ByRollout()

    def __len__(self) -> int:
        return len(self._tickets)

    def take(self, episode_id: EpisodeId, doing: str) -> Ticket:
        ticket = Ticket(self, episode_id, doing)
        self._tickets[ticket] = None
        self._by_rollout.add(episode_id, ticket)
        return ticket

    def forget(self, ticket: Ticket) -> None:
        """For `Ticket.give_back` only."""
        del self._tickets[ticket]
        self._by_rollout.remove(ticket.episode_id, ticket)
        self._changed.notify()

    def blockers(self) -> Iterator[Blocker]:
        return (Blocker(t.episode_id, t.doing, t.since) for t in self._tickets)

    def up_to(self, episode_id: EpisodeId) -> list[Ticket]:
        """Those of this attempt and the earlier ones of its rollout."""
        return self._by_rollout.up_to(episode_id)

    def of(self, rollout_ids: Iterable[RolloutId]) -> list[EpisodeId]:
        """The attempts of these rollouts that hold a ticket."""
        return [owner for owner, _ in self._by_rollout.of(rollout_ids)]

    async def wait_up_to(self, episode_id: EpisodeId) -> None:
        """Wait until this attempt and the earlier ones hold none. Cancelled: they go on."""
        while tickets := self.up_to(episode_id):
            await tickets[0].ended.wait()
