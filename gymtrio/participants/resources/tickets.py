"""Requests that are being served, and which of them a checkpoint waits for.

A ticket is made in the instant of admission and counts until the last byte of the reply was handed to
the caller's connection, so that no reply is under way once a checkpoint is prepared (I2). Two sorts do
not count: what was admitted while a checkpoint was open (*late*, until resume), and a verify that may
run again after a crash: waiting for one that itself waits for other episodes would never end (RES-9).

Invariant K1: `Tickets.blocking` is the number of tickets that block, at every instant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

import attrs
import trio

from gymtrio.episodes.blockers import Blocker
from gymtrio.episodes.by_rollout import ByRollout
from gymtrio.errors import Refusal
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.participants.resources.hooks import SessionId


class RequestKind(Enum):
    """What a request does to its session (RES-3)."""

    SEED = "seed_session"
    VERIFY = "verify"
    CLOSE = "close_session"
    TOOL = "tool"


@attrs.define(eq=False, kw_only=True)
class Ticket:
    """One admitted request."""

    kind: RequestKind
    episode_id: EpisodeId | None
    """None: a stateless server does not need to know."""
    session_id: SessionId | None
    doing: str
    replayed: bool
    """It may run again after a crash."""
    late: bool
    since: float = attrs.field(factory=trio.current_time)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    refusal: Refusal | None = None
    """Why it was stopped: what its caller is answered."""
    replying: bool = False
    """The work is done, the reply is on its way."""
    worked: trio.Event = attrs.field(factory=trio.Event)
    """Nothing of the work runs any more."""
    replied: trio.Event = attrs.field(factory=trio.Event)
    """Its reply was sent, or there was nobody left to send it to."""

    @property
    def blocks(self) -> bool:
        return not (self.replayed or self.late)

    def stop(self, refusal: Refusal) -> None:
        """Cancel the work and answer its caller so; the first reason stands."""
        if self.refuse(refusal):
            self.scope.cancel()

    def refuse(self, refusal: Refusal) -> bool:
        """Decide what its caller is answered; cancelling its scope is to follow.

        Returns:
            Whether that was undecided.
        """
        if self.refusal is not None or self.replying:
            return False
        self.refusal = refusal
        return True


class Tickets:
    """The admitted requests of one server."""

    def __init__(self) -> None:
        self.blocking = 0
        self._all: dict[Ticket, None] = {}
        self._by_rollout: ByRollout[Ticket] = ByRollout()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, ticket: Ticket) -> None:
        self._all[ticket] = None
        if ticket.episode_id is not None:
            self._by_rollout.add(ticket.episode_id, ticket)
        self.blocking += ticket.blocks

    def remove(self, ticket: Ticket) -> None:
        """It is over; twice does no harm."""
        if ticket in self._all:
            del self._all[ticket]
            if ticket.episode_id is not None:
                self._by_rollout.remove(ticket.episode_id, ticket)
            self.blocking -= ticket.blocks
        ticket.replied.set()

    def resumed(self) -> None:
        """The checkpoint is over: what is late becomes ordinary."""
        for ticket in self._all:
            before = ticket.blocks
            ticket.late = False
            self.blocking += ticket.blocks - before

    def up_to(self, episode_id: EpisodeId) -> list[Ticket]:
        """Those of this attempt and the earlier ones of its rollout."""
        return self._by_rollout.up_to(episode_id)

    def of(self, rollout_ids: Iterable[RolloutId]) -> list[EpisodeId]:
        return [owner for owner, _ in self._by_rollout.of(rollout_ids)]

    def blockers(self) -> Iterator[Blocker]:
        """Those that a controller can retire: the others are `unattributed`."""
        for ticket in self._all:
            if ticket.blocks and ticket.episode_id is not None:
                doing = f"reply to {ticket.doing}" if ticket.replying else ticket.doing
                yield Blocker(ticket.episode_id, doing, ticket.since)

    def unattributed(self) -> int:
        return sum(ticket.blocks and ticket.episode_id is None for ticket in self._all)
