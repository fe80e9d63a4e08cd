"""Replies on their way to the connection (I2).

Work that has passed its last boundary is in no export any more, and its caller has not heard of it
yet. Until the reply is handed over it counts as in flight: a checkpoint waits for it, so that no reply
leaves between prepared and resume and none is lost.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from gymtrio.episodes.signal import Signal
from gymtrio.episodes.tickets import Ticket, Tickets
from gymtrio.ids import EpisodeId
from gymtrio.limits import CLEANUP_S_MAX


class Deliveries:
    """The replies of one server that are on their way.

    Args:
        changed: rung when one of them has arrived.
    """

    def __init__(self, changed: Signal) -> None:
        self.tickets = Tickets(changed)
        self._ended: dict[str, tuple[Ticket, Callable[[bool], None] | None]] = {}
        """Work that has ended and of which `deliver` was not called yet."""

    def ended(
        self, episode_id: EpisodeId, name: str, sent: Callable[[bool], None] | None = None
    ) -> None:
        """A piece of work has ended; `deliver` follows in the same instant.

        Args:
            sent: told whether its reply was handed over, in the instant in which it stops blocking.
        """
        self._ended[name] = self.tickets.take(episode_id, "delivering its reply"), sent

    def deliver(self, name: str) -> Callable[[bool], None]:
        """Hand the reply over to whoever sends it.

        Returns:
            What is called once: True, the bytes are out; False, the caller left. Harmless when nothing
            of this name has ended, as after a refusal at the gate.
        """
        ticket, sent = self._ended.pop(name, (None, None))

        def done(delivered: bool) -> None:
            if sent is not None:
                sent(delivered)
            if ticket is not None:
                ticket.give_back()

        return done

    async def wait_up_to(self, episode_id: EpisodeId) -> None:
        """Wait until no reply of a retired attempt is on its way, at most `CLEANUP_S_MAX`.

        A peer that does not read for so long is none that the reply must be kept from.
        """
        with trio.move_on_after(CLEANUP_S_MAX):
            await self.tickets.wait_up_to(episode_id)
        for ticket in self.tickets.up_to(episode_id):
            ticket.give_back()
