"""Tickets: one per call, from before its admission until nothing of it is left.

    asking       whoever keeps the books decides     not in flight
    generating   at the backend, or being staged     undelivered
    held         its reply waits for the gate        undelivered
    leaving      its reply is being sent             blocks a checkpoint

- T1 A call has its ticket before it is admitted, so that a retire finds it in any case (POL-4).
- T2 A ticket blocks from the instant in which it is retired or its reply leaves, until it has ended.
- T3 Numbers rise in order of admission, also across workers; a time would not tell two calls of one
  instant apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import islice

import attrs
import trio

from gymtrio.capture.cuts import ActivePrefix
from gymtrio.capture.ledger import LedgerRow
from gymtrio.episodes.by_rollout import ByRollout
from gymtrio.episodes.signal import Signal
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import BLOCKERS_LISTED_MAX
from gymtrio.participants.policy.exchange import Exchanged
from gymtrio.participants.policy.keeper import Entered
from gymtrio.wire.control import BlockerDetail


class TicketState(Enum):
    ASKING = "asking to be admitted"
    GENERATING = "generating"
    HELD = "held"
    LEAVING = "sending its reply"


@attrs.define(eq=False, kw_only=True)
class Ticket:
    """One call while it is here; made by `Tickets.enter`."""

    episode_id: EpisodeId | None
    model_call_id: str
    request_digest: str
    constrained: str | None
    """Why it can be neither cut nor continued (CUT-6)."""
    since: float
    scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    ended: trio.Event = attrs.Factory(trio.Event)
    state: TicketState = TicketState.ASKING
    number: int = 0
    """Once it is admitted; 0: it is on nobody's behalf."""
    retired: bool = False
    asked: bool = False
    """Whoever keeps the books may have it in, and is to be told of its end."""
    entered: Entered | None = None
    """What it was admitted with; None: it was not, or is on nobody's behalf."""
    exchanged: Exchanged | None = None
    """The reply, once it is here and staged."""
    row: LedgerRow | None = None
    """Enters the ledger when the reply leaves."""

    @property
    def ticket_id(self) -> str:
        """Sorts by order of admission."""
        return f"{self.number:012d}"

    @property
    def undelivered(self) -> bool:
        """Admitted, and its reply has not begun to leave."""
        return self.state in (TicketState.GENERATING, TicketState.HELD)

    def active_prefix(self) -> ActivePrefix:
        assert self.episode_id is not None
        return ActivePrefix(
            ticket_id=self.ticket_id,
            rollout_id=self.episode_id.rollout_id,
            attempt=self.episode_id.attempt,
            model_call_id=self.model_call_id,
            admitted_at=float(self.number),
        )


class Tickets:
    """The calls that are here.

    Args:
        changed: rung when a ticket stops blocking.
    """

    def __init__(self, changed: Signal) -> None:
        self._changed = changed
        self._live: dict[Ticket, None] = {}
        self._by_call: dict[str, Ticket] = {}
        self._blocking: dict[Ticket, None] = {}
        self._by_rollout: ByRollout[Ticket] = ByRollout()
        self.leaving = 0
        """How many replies are being sent."""

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Ticket]:
        """Those that were admitted."""
        return iter(self._live)

    def of_call(self, model_call_id: str) -> Ticket | None:
        return self._by_call.get(model_call_id)

    @property
    def blocking(self) -> int:
        """How many keep a checkpoint waiting; O(1)."""
        return len(self._blocking)

    def enter(
        self,
        episode_id: EpisodeId | None,
        *,
        model_call_id: str,
        request_digest: str,
        constrained: str | None,
    ) -> Ticket:
        ticket = Ticket(
            episode_id=episode_id,
            model_call_id=model_call_id,
            request_digest=request_digest,
            constrained=constrained,
            since=trio.current_time(),
        )
        self._by_call[model_call_id] = ticket
        if episode_id is not None:
            self._by_rollout.add(episode_id, ticket)
        return ticket

    def admit(self, ticket: Ticket, number: int) -> None:
        """It is in flight from now on."""
        ticket.number = number
        ticket.state = TicketState.GENERATING
        self._live[ticket] = None

    def hold(self, ticket: Ticket) -> None:
        ticket.state = TicketState.HELD
        ticket.since = trio.current_time()

    def leave(self, ticket: Ticket) -> None:
        """The instant in which its reply begins to leave."""
        ticket.state = TicketState.LEAVING
        ticket.since = trio.current_time()
        self.leaving += 1
        self._blocking[ticket] = None

    def retire(self, ticket: Ticket) -> bool:
        """Decide that it stops: no reply leaves from now on; cancelling its scope is to follow.

        Returns:
            Whether that was undecided. `ended` tells when it has stopped.
        """
        if ticket.retired:
            return False
        ticket.retired = True
        self._blocking[ticket] = None
        return True

    def end(self, ticket: Ticket) -> None:
        """Nothing of the call is left."""
        self._live.pop(ticket, None)
        del self._by_call[ticket.model_call_id]
        self.leaving -= ticket.state is TicketState.LEAVING
        if ticket.episode_id is not None:
            self._by_rollout.remove(ticket.episode_id, ticket)
        ticket.ended.set()
        if ticket in self._blocking:
            del self._blocking[ticket]
            self._changed.notify()

    def up_to(self, episode_id: EpisodeId) -> list[Ticket]:
        """Those of this attempt and the earlier ones."""
        return self._by_rollout.up_to(episode_id)

    def of_rollouts(self, rollout_ids: Iterable[RolloutId]) -> list[EpisodeId]:
        """Attempts of these rollouts that have calls which have not ended."""
        return sorted({owner for owner, _ in self._by_rollout.of(rollout_ids)})

    def blockers(self) -> tuple[BlockerDetail, ...]:
        """What a prepare waits for, at most 100."""
        now = trio.current_time()
        return tuple(
            BlockerDetail(
                blocker=str(ticket.episode_id or f"call {ticket.model_call_id}"),
                doing=f"retired, {ticket.state.value}" if ticket.retired else ticket.state.value,
                since_s=round(now - ticket.since, 3),
            )
            for ticket in islice(self._blocking, BLOCKERS_LISTED_MAX)
        )
