"""What a policy server knows of its episodes: delivered rows, restored cuts, calls that are in.

One process keeps the books of a server. With one worker it is the one that serves the calls; with
several it is the coordinator, and every worker asks it over a link.

- B1 Whether a call is admitted is decided here, in one instant with its ordinal, its parent and the
  claim of a restored cut (POL-4). So ordinals tell the order of admission across all workers (CUT-3).
- B2 A restored cut is unclaimed or held by one call that is in; a call that ends without having
  delivered gives it back, and so does a worker that is lost (CUT-5, I14, HARD-7).
- B3 A row stands in the ledger from the instant its reply begins to leave until its call has ended,
  and after that only if the reply was sent, or the conversation went on from it, which proves that it
  has arrived (POL-3, I16). So no row loses the parent that it names.
- B4 Whether a reply that was leaving when its worker was lost has arrived, nobody knows. Its row stays,
  as uncertain, also through a restore: until the conversation goes on from it, which proves that it
  has, or the same is asked again, which proves that it has not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from enum import Enum

import attrs
import trio

from gymtrio.capture.cuts import CutRecord
from gymtrio.capture.ledger import EpisodeLedger, Ledger, LedgerRow
from gymtrio.episodes.by_rollout import ByRollout
from gymtrio.errors import InvalidCheckpointState, InvalidPhase
from gymtrio.ids import CaptureKey, EpisodeId, RolloutId
from gymtrio.limits import ATTEMPT_MAX
from gymtrio.participants.policy.keeper import Entered, Entry
from gymtrio.participants.policy.records import PolicyRecord
from gymtrio.participants.restored import Restored


class NotContinued(Enum):
    """Why a call was generated from its beginning although its episode had a restored cut (POL-5)."""

    ANOTHER_REQUEST = "another_request"
    """The cut is of another call; it waits for that one (CUT-5)."""
    CANNOT = "cannot"
    """Its decoding is constrained, or its backend does not continue cuts; the cut waits (CUT-6)."""
    FAILED = "failed"
    """It went on from the cut, and that failed; the cut is used up (CUT-7)."""


@attrs.define(eq=False, kw_only=True)
class OpenCall:
    """One admitted call that has not ended."""

    call_id: str
    ordinal: int
    episode_id: EpisodeId
    request_digest: str
    owner: Hashable
    """The worker that has it."""
    claimed: CutRecord | None
    row: LedgerRow | None = None
    """In the ledger; the reply is leaving."""
    heard: bool = False
    """The conversation went on from the reply, so it has arrived whatever else is said of it."""
    ended: trio.Event = attrs.Factory(trio.Event)


class Books:
    """Kept by one process per server; plain synchronous state."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.cuts: Restored[CutRecord] = Restored()
        self.not_continued: Counter[NotContinued] = Counter()
        """Since the start."""
        self._calls: dict[str, OpenCall] = {}
        self._by_rollout: ByRollout[OpenCall] = ByRollout()
        self._admitted = 0
        self._served_rollouts = False
        self._unstarted: dict[RolloutId, EpisodeId] = {}
        """Restored episodes whose replacement attempt has not called yet."""
        self._uncertain: dict[EpisodeId, set[str]] = {}
        """The calls whose rows are those of B4."""

    def __len__(self) -> int:
        """How many calls are in."""
        return len(self._calls)

    # -- calls --------------------------------------------------------------------------------

    def enter(self, entry: Entry, owner: Hashable = None) -> Entered:
        """Admit a call; whoever calls this has looked at gate and fences in this instant (B1)."""
        episode_id = entry.episode_id
        self._served_rollouts = True
        if self._unstarted.get(episode_id.rollout_id) == episode_id:
            del self._unstarted[episode_id.rollout_id]
        parent_call_id = self._find_parent(entry)
        if parent_call_id in self._calls:
            self._calls[parent_call_id].heard = True
        self._admitted += 1
        restored = self.cuts.peek(episode_id)
        left_alone = None if restored is None else _why_not(entry, restored)
        if left_alone is not None:
            self.not_continued[left_alone] += 1
        call = OpenCall(
            call_id=entry.call_id,
            ordinal=self._admitted,
            episode_id=episode_id,
            request_digest=entry.request_digest,
            owner=owner,
            claimed=self.cuts.claim(episode_id) if left_alone is None else None,
        )
        self._calls[call.call_id] = call
        self._by_rollout.add(episode_id, call)
        return Entered(
            ordinal=call.ordinal,
            parent_call_id=parent_call_id,
            cut=call.claimed,
            left_alone=left_alone is not None,
        )

    def deliver(self, call_id: str, row: LedgerRow) -> bool:
        """The row of a call whose reply begins to leave; False: it is not in, so no reply may."""
        call = self._calls.get(call_id)
        if call is None:
            return False
        call.row = row
        self.ledger.add(call.episode_id, row)
        return True

    def end(self, call_id: str, *, sent: bool) -> None:
        """Nothing of a call is left; harmless for one that is not in."""
        call = self._calls.pop(call_id, None)
        if call is None:
            return
        self._by_rollout.remove(call.episode_id, call)
        if call.row is None or not (sent or call.heard):
            self.ledger.take_back(call.episode_id, call_id)
            if call.claimed is not None:
                self.cuts.give_back(call.episode_id, call.claimed)
        elif call.claimed is not None and _was_anew(call.row, call.claimed):
            self.not_continued[NotContinued.FAILED] += 1
        call.ended.set()

    def lose(self, owner: Hashable) -> list[EpisodeId]:
        """A worker is gone: its claims return (HARD-7), replies that were leaving become uncertain.

        Returns:
            The episodes of the calls that it had.
        """
        lost = [call for call in self._calls.values() if call.owner == owner]
        for call in lost:
            if call.row is not None and not call.heard:
                self._uncertain.setdefault(call.episode_id, set()).add(call.call_id)
            self.end(call.call_id, sent=call.row is not None)
        return sorted({call.episode_id for call in lost})

    def _find_parent(self, entry: Entry) -> str | None:
        """The parent of a call; what it proves about uncertain rows is settled first (B4)."""
        episode_id = entry.episode_id
        uncertain = self._uncertain.get(episode_id)
        if not uncertain:
            return self.ledger.find_parent(episode_id, entry.chain)
        for row in self.ledger.rows(episode_id):
            if row.model_call_id in uncertain and row.request_digest == entry.request_digest:
                self.ledger.take_back(episode_id, row.model_call_id)
                uncertain.discard(row.model_call_id)
        parent_call_id = self.ledger.find_parent(episode_id, entry.chain)
        if parent_call_id is not None:
            uncertain.discard(parent_call_id)
        if not uncertain:
            del self._uncertain[episode_id]
        return parent_call_id

    def open_up_to(self, episode_id: EpisodeId) -> list[OpenCall]:
        """Calls that are in, of this attempt and the earlier ones."""
        return self._by_rollout.up_to(episode_id)

    def open_of(self, rollout_ids: Iterable[RolloutId]) -> list[EpisodeId]:
        """Attempts of these rollouts that have calls which are in."""
        return sorted({owner for owner, _ in self._by_rollout.of(rollout_ids)})

    # -- export -------------------------------------------------------------------------------

    def latest_undelivered(self, episode_id: EpisodeId) -> OpenCall | None:
        """The call whose cut is the episode's, if it has one (CUT-3)."""
        return max(
            self._undelivered(episode_id),
            key=lambda call: call.ordinal,
            default=None,
        )

    def _undelivered(self, episode_id: EpisodeId) -> list[OpenCall]:
        of_rollout = self._by_rollout.of([episode_id.rollout_id])
        return [call for owner, call in of_rollout if owner == episode_id and call.row is None]

    def record_of(
        self, episode_id: EpisodeId, cut: CutRecord | None, *, cut_elsewhere: bool = False
    ) -> PolicyRecord:
        """What a checkpoint holds of an episode.

        Args:
            cut: that of its latest undelivered call. None: the restored one stands, whether it was
                claimed or not, because its continuation was not delivered (CUT-5).
            cut_elsewhere: somebody else writes its cut.
        """
        return PolicyRecord(
            rows=self.ledger.rows(episode_id),
            cut=None if cut_elsewhere else cut or self.restored_cut(episode_id),
            uncertain=tuple(sorted(self._uncertain.get(episode_id, ()))),
        )

    def restored_cut(self, episode_id: EpisodeId) -> CutRecord | None:
        """The restored cut of an episode that was not used up."""
        claimed = (call.claimed for call in self._undelivered(episode_id))
        return next((cut for cut in claimed if cut is not None), self.cuts.peek(episode_id))

    def unclaimed_outside(self, scope: frozenset[CaptureKey] | None) -> list[EpisodeId]:
        """See `Participant.unclaimed_outside`."""
        if scope is None:
            return []
        return sorted(e for e in self._unstarted.values() if e.capture_key not in scope)

    def release(self, episode_ids: Sequence[EpisodeId]) -> None:
        """Free restored state that nobody claimed. Closed since the commit began: none has started."""
        for episode_id in episode_ids:
            self._unstarted.pop(episode_id.rollout_id, None)
            self.ledger.discard(episode_id)
            self._uncertain.pop(episode_id, None)
        self.cuts.drop(episode_ids)

    # -- restore ------------------------------------------------------------------------------

    def check_installable(self) -> None:
        """
        Raises:
            InvalidPhase: this server served rollouts since it started, or was restored already.
        """
        if self._served_rollouts:
            raise InvalidPhase("this server has served calls of rollouts since it started")
        if self._unstarted:
            raise InvalidPhase(f"{len(self._unstarted)} restored episodes wait for their calls")

    def install(self, target: EpisodeId, record: PolicyRecord, rows: EpisodeLedger) -> None:
        """Take a restored episode in, under its replacement attempt.

        Args:
            rows: those of the record; given away.
        """
        self._unstarted[target.rollout_id] = target
        self.ledger.install(target, rows)
        if record.uncertain:
            self._uncertain[target] = set(record.uncertain)
        if record.cut is not None:
            self.cuts.put_one(target, record.cut)

    def take_over(self, made: Books) -> None:
        """Have what was installed in books made for it, which are given away.

        In an instant when nothing is here, as it is at a restore (`check_installable`).
        """
        self._unstarted.update(made._unstarted)
        self._uncertain.update(made._uncertain)
        self.ledger.take_over(made.ledger)
        self.cuts.put_all(made.cuts)

    # -- end ----------------------------------------------------------------------------------

    def discard_up_to(self, episode_id: EpisodeId) -> None:
        """Free what is kept of retired attempts."""
        self.ledger.discard_up_to(episode_id)
        self.cuts.drop_up_to(episode_id)
        unstarted = self._unstarted.get(episode_id.rollout_id)
        if unstarted is not None and unstarted.attempt <= episode_id.attempt:
            del self._unstarted[episode_id.rollout_id]
        for attempt in [e for e in self._uncertain if e.rollout_id == episode_id.rollout_id]:
            if attempt.attempt <= episode_id.attempt:
                del self._uncertain[attempt]

    def forget(self, rollout_ids: Sequence[RolloutId]) -> None:
        """Free what is kept of rollouts that are finished for good."""
        for rollout_id in rollout_ids:
            self.discard_up_to(EpisodeId(rollout_id, ATTEMPT_MAX))


def _why_not(entry: Entry, restored: CutRecord) -> NotContinued | None:
    if not entry.continues:
        return NotContinued.CANNOT
    same = restored.request_digest == entry.request_digest
    return None if same else NotContinued.ANOTHER_REQUEST


def _was_anew(row: LedgerRow, claimed: CutRecord) -> bool:
    return row.continued_token_count < claimed.continuation.prefix_token_count


def merge(read: Iterable[tuple[EpisodeId, PolicyRecord]]) -> dict[EpisodeId, PolicyRecord]:
    """Put together what several processes wrote of the same episode (I18, I28).

    Raises:
        InvalidCheckpointState: rows or cuts of one episode twice; the detail names it.
    """
    merged: dict[EpisodeId, PolicyRecord] = {}
    for episode_id, record in read:
        other = merged.get(episode_id)
        if other is not None:
            if other.rows and record.rows:
                raise InvalidCheckpointState(f"{episode_id}: two processes wrote its calls")
            if other.cut is not None and record.cut is not None:
                raise InvalidCheckpointState(f"{episode_id}: two processes wrote a cut of it")
            record = PolicyRecord(
                rows=other.rows or record.rows,
                cut=other.cut or record.cut,
                uncertain=other.uncertain or record.uncertain,
            )
        merged[episode_id] = record
    return merged
