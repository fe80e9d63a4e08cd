"""The participant of a policy server that is one process: its gate and its books in one (POL, CUT).

- M1 At most one cut of an episode is exported: of its latest admitted undelivered call (CUT-3, I28).
- M2 Nothing here suspends between the decision to admit a call and its ticket (POL-4).
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence, Sequence
from typing import ClassVar, Final

import trio

from gymtrio.capture.cuts import EngineDescription
from gymtrio.capture.ledger import EpisodeLedger, LedgerRow
from gymtrio.capture.tokens import StagingKey, TokenStore
from gymtrio.checkpoint.participant import Export, Settling
from gymtrio.errors import InvalidCheckpointState, InvalidRequest
from gymtrio.ids import CaptureKey, EpisodeId, RolloutId, parse_capture_key
from gymtrio.limits import BLOCKERS_LISTED_MAX
from gymtrio.participants.base import ParticipantBase, make_record
from gymtrio.participants.decoding import decode_records
from gymtrio.participants.policy.books import Books, NotContinued, merge
from gymtrio.participants.policy.calls import Backend, PolicyCall, PolicyReply
from gymtrio.participants.policy.gate import PolicyGate
from gymtrio.participants.policy.keeper import Entered, Entry
from gymtrio.participants.policy.records import PolicyRecord, check_record
from gymtrio.ports import Randomness
from gymtrio.storage.records import Record
from gymtrio.storage.slices import LoopSlice
from gymtrio.strict import unstructure
from gymtrio.wire.control import Kind, Report

NOT_CONTINUED_FIELD: Final = "generation_cuts_not_continued"
"""Of status: `books.NotContinued` to how many calls since the start (POL-5)."""


class BookedParticipant(ParticipantBase):
    """What a policy server's participant does with its books, whoever serves the calls."""

    kind: ClassVar[Kind] = Kind.MODEL

    def __init__(self, instance: str) -> None:
        super().__init__(instance)
        self.books = Books()

    def admit(self, entry: Entry, owner: object = None) -> Entered | None:
        """Decide on a call, in one instant; None: the gate is closed.

        Raises:
            StaleAttempt: the attempt or its execution is refused.
        """
        self.admission.fences.check(entry.episode_id, entry.epoch)
        return None if self.admission.closed else self.books.enter(entry, owner)

    def rows(self, episode_id: EpisodeId) -> tuple[LedgerRow, ...]:
        """The delivered calls of an episode, those before a restore included.

        Raises:
            StaleAttempt: the attempt was retired or superseded.
        """
        self.admission.fences.check(episode_id)
        return self.books.ledger.rows(episode_id)

    def status_fields(self) -> dict[str, object]:
        counted = self.books.not_continued
        return {
            "restored_generation_cuts": self.books.cuts.waiting(BLOCKERS_LISTED_MAX),
            NOT_CONTINUED_FIELD: {why.value: counted[why] for why in NotContinued},
        }

    def unclaimed_outside(self, scope: frozenset[CaptureKey] | None) -> list[EpisodeId]:
        return self.books.unclaimed_outside(scope)

    async def release(self, episode_ids: Sequence[EpisodeId]) -> None:
        self.books.release(episode_ids)
        await trio.lowlevel.checkpoint()

    def check_installable(self) -> None:
        self.books.check_installable()

    async def install(
        self,
        records: MutableSequence[Record],
        scope: Sequence[EpisodeId],
        *,
        execution_epoch: str | None = None,
    ) -> None:
        read = merge(await decode_records(PolicyRecord, records))
        slices = LoopSlice()
        named: set[EpisodeId] = set()
        last: dict[RolloutId, int] = {}
        for episode_id in scope:
            named.add(episode_id)
            before = last.get(episode_id.rollout_id, 0)
            last[episode_id.rollout_id] = max(before, episode_id.attempt)
            await slices.turn()
        made = Books()
        targets: list[EpisodeId] = []
        for episode_id, record in read.items():
            if episode_id not in named:
                raise InvalidCheckpointState(f"{episode_id} is not in the scope")
            check_record(episode_id, record)
            # Of an attempt that is followed by another in the scope, the replacement is that one.
            if episode_id.attempt == last[episode_id.rollout_id]:
                targets.append(episode_id.next_attempt())
                made.install(targets[-1], record, EpisodeLedger(record.rows))
            await slices.turn()
        self.check_installable()
        # From here on in one instant, which for thousands must be a short one.
        self.admission.supersede(scope, execution_epoch)
        made.release(list(filter(self.admission.fences.is_stale, targets)))
        self.books.take_over(made)

    def forget(self, rollout_ids: Sequence[RolloutId]) -> None:
        """Free what is kept of rollouts that are finished for good: ledgers and restored cuts."""
        super().forget(rollout_ids)
        self.books.forget(rollout_ids)

    async def exportable(self, scope: frozenset[CaptureKey] | None) -> list[EpisodeId]:
        """The episodes of a commit, sorted by capture key; one may be retired since it was looked at.

        Raises:
            InvalidRequest: no scope is given.
        """
        if scope is None:
            raise InvalidRequest(
                "episode_ids: a model server holds the ledger of every episode it ever served, "
                "so a commit names those it wants"
            )
        found: list[EpisodeId] = []
        slices = LoopSlice()
        for key in sorted(scope):
            episode_id = parse_capture_key(key)
            if not self.admission.fences.is_stale(episode_id):
                found.append(episode_id)
            await slices.turn()
        return found


class StagingKeys:
    """Every token-store key that a checkpoint refers to (I17), each once, in the order of the episodes:
    to sort those of all in one stretch would hold the loop."""

    def __init__(self) -> None:
        self._by_episode: dict[str, list[StagingKey]] = {}
        self._every: dict[StagingKey, None] = {}

    def add(self, key: CaptureKey, staging_keys: Iterable[StagingKey]) -> None:
        if found := sorted(set(staging_keys)):
            self._by_episode[key] = found
            self._every.update(dict.fromkeys(found))

    def reply_fields(self) -> dict[str, object]:
        """What the commit reply adds."""
        return {"staging_keys": [*self._every], "staging_keys_by_episode": self._by_episode}


def engine_field(engine: EngineDescription | None) -> dict[str, object]:
    """What the manifest says of the engine."""
    return {"engine": None if engine is None else unstructure(engine)}


class _OwnBooks:
    """Implements `keeper.Keeper` for the gate of the same process."""

    def __init__(self, participant: BookedParticipant) -> None:
        self._participant = participant

    async def enter(self, entry: Entry) -> Entered | None:
        return self._participant.admit(entry)

    async def deliver(self, call_id: str, row: LedgerRow) -> None:
        known = self._participant.books.deliver(call_id, row)
        assert known, "a ticket is in the books until it ends"

    def end(self, call_id: str, *, sent: bool) -> None:
        self._participant.books.end(call_id, sent=sent)


class PolicyParticipant(BookedParticipant):
    """Implements `gymtrio.checkpoint.participant.Participant` and `calls.Policy`.

    Args: see `gate.PolicyGate`.
    """

    def __init__(
        self,
        instance: str,
        *,
        backend: Backend,
        token_store: TokenStore,
        randomness: Randomness,
        generation_cuts: bool,
    ) -> None:
        super().__init__(instance)
        self.gate = PolicyGate(
            instance,
            keeper=_OwnBooks(self),
            admission=self.admission,
            changed=self.changed,
            backend=backend,
            token_store=token_store,
            randomness=randomness,
            generation_cuts=generation_cuts,
        )

    async def call(self, episode_id: EpisodeId | None, call: PolicyCall) -> PolicyReply:
        """See `gate.PolicyGate.call`."""
        return await self.gate.call(episode_id, call)

    def ready(self) -> bool:
        return not self.gate.tickets.blocking

    def report(self) -> Report:
        return self.gate.report()

    def open(self) -> None:
        self.gate.open()

    async def settle(self, settling: Settling) -> None:
        await self.gate.settle(settling)

    async def export(self, scope: frozenset[CaptureKey] | None) -> Export:
        # Each episode is looked at once (POL-6). Nothing is delivered meanwhile, so slices agree.
        records: dict[EpisodeId, PolicyRecord] = {}
        staging_keys = StagingKeys()
        slices = LoopSlice()
        for episode_id in await self.exportable(scope):
            if self.admission.fences.is_stale(episode_id):
                # Retired since the last slice: its ledger may be gone.
                continue
            record = records[episode_id] = self._record_of(episode_id)
            staging_keys.add(episode_id.capture_key, record.staging_keys())
            await slices.turn()
        return Export(
            records=(make_record(e, record) for e, record in records.items() if not record.empty),
            episode_ids=tuple(e.capture_key for e in records),
            manifest_fields=engine_field(self.gate.engine),
            reply_fields=staging_keys.reply_fields(),
        )

    def _record_of(self, episode_id: EpisodeId) -> PolicyRecord:
        latest = self.books.latest_undelivered(episode_id)
        cut = None if latest is None else self.gate.cut_of(latest.call_id)
        return self.books.record_of(episode_id, cut)

    def refuse(self, episode_ids: Sequence[EpisodeId]) -> None:
        self.gate.refuse(episode_ids)

    async def retire(self, episode_id: EpisodeId) -> None:
        for ticket in self.gate.tickets.up_to(episode_id):
            await ticket.ended.wait()
        self.books.discard_up_to(episode_id)

    def still_running(self, rollout_ids: Sequence[RolloutId]) -> list[EpisodeId]:
        return self.gate.tickets.of_rollouts(rollout_ids)
