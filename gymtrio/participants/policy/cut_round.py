"""One round of generation cuts: what is asked of a backend at a close, and what came of it (CUT-1).

A round never fails: whatever goes wrong is counted and logged, and costs the calls' regeneration after
a crash (CUT-7, POL-5).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Final

import trio

from gymtrio.capture.cuts import (
    NOTHING_GENERATED,
    CutRecord,
    Disposition,
    PrefixAcknowledgement,
    continuation_of,
    match_receipt,
    take_inventory,
)
from gymtrio.errors import GymtrioError
from gymtrio.ids import CheckpointId
from gymtrio.participants.policy.calls import Backend
from gymtrio.participants.policy.tickets import Ticket

LOG = logging.getLogger(__name__)

NOT_NATIVE: Final = "the backend does not cut"
INVENTORY_CALLS_MAX: Final = 256
"""Calls of one inventory. Receipts are checked on the loop, about 10 ms for this many; a part that
fails costs the calls of that part only."""
INVENTORIES_AT_ONCE_MAX: Final = 4
"""Of the connections that are reserved for control calls."""
TOO_LATE: Final = "no receipt within half of the time that was left"
NO_REASON: Final = "the backend gave no reason"
REASON_CHARACTERS_MAX: Final = 200
REASONS_LOGGED_MAX: Final = 20
"""A backend may give each call a reason of its own, as long as it likes."""


class CutRound:
    """The cuts of one checkpoint.

    Args:
        server_name: the policy server's, for the inventory.
        tickets: every call that is here; those that can be cut are taken, in one instant.
        native: whether the backend cuts.
    """

    def __init__(
        self,
        checkpoint_id: CheckpointId,
        server_name: str,
        tickets: Iterable[Ticket],
        *,
        native: bool,
    ) -> None:
        self.checkpoint_id = checkpoint_id
        self.cut = 0
        self.failed: Counter[str] = Counter()
        """Reason to how many calls."""
        self.skipped: Counter[str] = Counter()
        self._server_name = server_name
        self._cuts: dict[int, CutRecord] = {}
        self._asked: list[Ticket] = []
        for ticket in tickets:
            # What has its whole reply needs no backend; what is on nobody's behalf comes not again.
            if ticket.episode_id is None or ticket.exchanged is not None or ticket.retired:
                continue
            reason = ticket.constrained if native else NOT_NATIVE
            if reason is None:
                self._asked.append(ticket)
            else:
                self.skipped[reason] += 1

    def cut_of(self, ticket: Ticket) -> CutRecord | None:
        """The durable prefix of a call, if the round got one."""
        return self._cuts.get(ticket.number)

    async def run(self, backend: Backend, *, deadline: float) -> None:
        """Ask the backend and take its receipt.

        Args:
            deadline: on trio's clock; what has not come by then has failed.

        Cancelled: no cut was taken.
        """
        limiter = trio.CapacityLimiter(INVENTORIES_AT_ONCE_MAX)
        async with trio.open_nursery() as nursery:
            for begin in range(0, len(self._asked), INVENTORY_CALLS_MAX):
                part = self._asked[begin : begin + INVENTORY_CALLS_MAX]
                nursery.start_soon(self._run_part, part, limiter, backend, deadline)
        self._log()

    async def _run_part(
        self,
        tickets: list[Ticket],
        limiter: trio.CapacityLimiter,
        backend: Backend,
        deadline: float,
    ) -> None:
        acknowledged: dict[str, PrefixAcknowledgement] = {}
        failure: str | None = TOO_LATE
        try:
            with trio.move_on_at(deadline):
                async with limiter:
                    inventory = take_inventory(
                        self.checkpoint_id,
                        self._server_name,
                        (ticket.active_prefix() for ticket in tickets),
                    )
                    receipt = await backend.cut(inventory, deadline=deadline)
                    acknowledged = match_receipt(inventory, receipt)
                failure = None
        except GymtrioError as error:
            failure = str(error)[:REASON_CHARACTERS_MAX]
        except Exception as error:
            # A fault of ours, or of a backend: it costs the cuts of these calls, no more.
            LOG.exception("checkpoint %s: a fault in the round of cuts", self.checkpoint_id)
            failure = f"a fault: {type(error).__name__}"
        if failure is not None:
            self.failed[failure] += len(tickets)
            return
        for ticket in tickets:
            self._take(ticket, acknowledged[ticket.ticket_id])

    def _take(self, ticket: Ticket, entry: PrefixAcknowledgement) -> None:
        if entry.disposition is Disposition.DURABLE_PREFIX:
            self.cut += 1
            self._cuts[ticket.number] = CutRecord(
                model_call_id=ticket.model_call_id,
                request_digest=ticket.request_digest,
                continuation=continuation_of(entry),
            )
        elif entry.failure == NOTHING_GENERATED:
            self.skipped[NOTHING_GENERATED] += 1
        else:
            self.failed[(entry.failure or NO_REASON)[:REASON_CHARACTERS_MAX]] += 1

    def _log(self) -> None:
        LOG.info("checkpoint %s: %d generations cut", self.checkpoint_id, self.cut)
        for what, level, reasons in (
            ("not cut", logging.WARNING, self.failed),
            ("left to be generated anew", logging.INFO, self.skipped),
        ):
            told = reasons.most_common(REASONS_LOGGED_MAX)
            rest = reasons.total() - sum(count for _, count in told)
            for reason, count in [*told, ("for other reasons", rest)]:
                if count:
                    LOG.log(
                        level,
                        "checkpoint %s: %d generations %s: %s",
                        self.checkpoint_id,
                        count,
                        what,
                        reason,
                    )
