"""What a gate asks of whoever keeps the books: may this call in, may its reply leave, it has ended."""

from __future__ import annotations

from typing import Protocol

import attrs

from gymtrio.capture.cuts import CutRecord
from gymtrio.capture.ledger import LedgerRow
from gymtrio.ids import EpisodeId


@attrs.frozen(kw_only=True)
class Entry:
    """A call that wants in."""

    call_id: str
    episode_id: EpisodeId
    epoch: str | None
    """Which execution of the attempt it says it belongs to."""
    request_digest: str
    continues: bool
    """It may go on from a restored cut."""
    chain: tuple[str, ...]
    """See `fingerprint.conversation_chain`."""


@attrs.frozen(kw_only=True)
class Entered:
    """An admitted call."""

    ordinal: int
    """Rises in order of admission, over all workers."""
    parent_call_id: str | None
    cut: CutRecord | None
    """The restored cut that it has claimed."""
    left_alone: bool = False
    """There is one, and it is not for this call."""


class Keeper(Protocol):
    """The books as a gate sees them."""

    async def enter(self, entry: Entry) -> Entered | None:
        """Ask for admission; None: the gate is closed. In process it does not suspend.

        Raises:
            StaleAttempt: the attempt or its execution is refused.
            CoordinatorUnavailable: whoever keeps the books cannot be asked.

        Cancelled: it may have been admitted; `end` follows in any case.
        """
        ...

    async def deliver(self, call_id: str, row: LedgerRow) -> None:
        """The reply of a call begins to leave. In process it does not suspend.

        Raises:
            CoordinatorUnavailable: see `enter`; the reply must not leave.

        Cancelled: as `enter`.
        """
        ...

    def end(self, call_id: str, *, sent: bool) -> None:
        """Nothing of the call is left.

        Args:
            sent: its reply was handed over whole. False also for a call that was never admitted.
        """
        ...
