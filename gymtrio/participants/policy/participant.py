"""The policy model's participant: gate, tickets, ledger and cuts of one server (POL, CUT).

- M1 No reply leaves between the instant of closing and that of opening; one whose sending has begun is
  waited for, and nothing else is (POL-2, I2).
- M2 A row enters the ledger in the instant in which its reply begins to leave; its tokens were durable
  before (POL-3, I16, I17).
- M3 A restored cut is either unclaimed, or held by one ticket; a ticket that ends without having
  delivered gives it back (CUT-5, I14).
- M4 Of an episode at most one cut is exported (CUT-3, I28).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableSequence, Sequence
from functools import partial
from typing import ClassVar

import trio

from gymtrio.capture.constrained import constrained_reason
from gymtrio.capture.cuts import CallExtension, CutRecord, EngineDescription
from gymtrio.capture.fingerprint import conversation_chain, conversation_end, request_digest
from gymtrio.capture.ledger import Ledger, LedgerRow
from gymtrio.capture.tokens import StagingKey, TokenRecord, TokenStore, TokenStoreFailed
from gymtrio.checkpoint.participant import Export, Settling
from gymtrio.errors import (
    BackendFailed,
    GymtrioError,
    InvalidCheckpointState,
    InvalidPhase,
    InvalidRequest,
    StaleAttempt,
    Unavailable,
)
from gymtrio.ids import CaptureKey, EpisodeId, RolloutId, parse_capture_key
from gymtrio.limits import ATTEMPT_MAX, BLOCKERS_LISTED_MAX
from gymtrio.participants.base import ParticipantBase, make_record
from gymtrio.participants.decoding import Slices, decode_records
from gymtrio.participants.policy.calls import Backend, PolicyCall, PolicyReply, check_call
from gymtrio.participants.policy.cut_round import CutRound
from gymtrio.participants.policy.exchange import Exchanged, exchange
from gymtrio.participants.policy.records import PolicyRecord, check_record, choose_cut
from gymtrio.participants.policy.tickets import Ticket, Tickets
from gymtrio.participants.restored import Restored
from gymtrio.ports import Randomness
from gymtrio.storage.records import Record
from gymtrio.strict import unstructure
from gymtrio.wire.control import Kind, Report

LOG = logging.getLogger(__name__)


class PolicyParticipant(ParticipantBase):
    """Implements `gymtrio.checkpoint.participant.Participant` and `calls.Policy`.

    Args:
        backend: where calls go.
        token_store: where tokens of replies are made durable.
        generation_cuts: ask the backend for cuts at a close.
    """

    kind: ClassVar[Kind] = Kind.MODEL

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
        self._backend = backend
        self._token_store = token_store
        self._randomness = randomness
        self._generation_cuts = generation_cuts
        self._tickets = Tickets(self.changed)
        self._ledger = Ledger()
        self._cuts: Restored[CutRecord] = Restored()
        self._unstarted: dict[RolloutId, EpisodeId] = {}
        """Restored episodes whose replacement attempt has not called yet."""
        self._served_rollouts = False
        self._round: CutRound | None = None
        self._engine: EngineDescription | None = None

    # -- calls --------------------------------------------------------------------------------

    async def call(self, episode_id: EpisodeId | None, call: PolicyCall) -> PolicyReply:
        """See `calls.Policy`. While a checkpoint is open, nothing is answered.

        Raises:
            StaleAttempt: the attempt is refused, or was retired meanwhile.
            AdmissionClosed: the gate is closed and the caller would not wait.
            BackendFailed, Unavailable: no reply, or its tokens could not be made durable.
            Refusal: see `check_call`.

        Cancelled: the backend has stopped, the ticket is gone, a claimed cut is given back.
        """
        check_call(call, for_rollout=episode_id is not None)
        digest = request_digest(call.route, call.body)
        await self.admission.enter(episode_id, epoch=call.epoch, refuse=call.refuse_when_closed)
        ticket = self._admit(episode_id, call, digest)
        try:
            with ticket.scope:
                exchanged = await self._reply_of(ticket, call)
                if not ticket.retired:
                    return self._leave(ticket, exchanged)
            raise StaleAttempt(f"{episode_id} was retired")
        finally:
            if ticket.undelivered:
                self._end(ticket, delivered=False)

    def _admit(self, episode_id: EpisodeId | None, call: PolicyCall, digest: str) -> Ticket:
        """The instant of admission: ticket, and claim of a restored cut (POL-4)."""
        ticket = self._tickets.enter(
            episode_id,
            model_call_id=self._randomness.hex(16),
            request_digest=digest,
            constrained=constrained_reason(call.body),
        )
        if episode_id is not None:
            self._served_rollouts = True
            if self._unstarted.get(episode_id.rollout_id) == episode_id:
                del self._unstarted[episode_id.rollout_id]
            self._claim(ticket, episode_id)
        return ticket

    def _claim(self, ticket: Ticket, episode_id: EpisodeId) -> None:
        restored = self._cuts.peek(episode_id)
        if (
            restored is not None
            and restored.request_digest == ticket.request_digest
            and ticket.constrained is None
            and self._backend.native
        ):
            ticket.claimed = self._cuts.claim(episode_id)

    async def _reply_of(self, ticket: Ticket, call: PolicyCall) -> Exchanged:
        """Get the reply and hold it, or the refusal that stands for it, until the gate is open."""
        try:
            exchanged = await self._exchange(ticket, call)
        except Exception:
            # Whatever it is, its answer is a reply too.
            await self._hold(ticket)
            raise
        await self._hold(ticket)
        return exchanged

    async def _hold(self, ticket: Ticket) -> None:
        if self.admission.closed:
            self._tickets.hold(ticket)
            await self.admission.wait_open()

    async def _exchange(self, ticket: Ticket, call: PolicyCall) -> Exchanged:
        if ticket.episode_id is None:
            return await exchange(self._backend, call, extension=None, wants_tokens=False)
        chain = conversation_chain(call.route, call.body)
        parent_call_id = self._ledger.find_parent(ticket.episode_id, chain)
        exchanged = await exchange(
            self._backend,
            call,
            extension=self._extension(ticket, ticket.episode_id),
            wants_tokens=True,
        )
        if exchanged.succeeded:
            await self._stage(ticket, ticket.episode_id, call, exchanged, parent_call_id)
        return exchanged

    def _extension(self, ticket: Ticket, episode_id: EpisodeId) -> CallExtension | None:
        if not self._backend.native:
            return None
        return CallExtension(
            model_call_id=ticket.model_call_id,
            rollout_id=episode_id.rollout_id,
            attempt=episode_id.attempt,
            continuation=None if ticket.claimed is None else ticket.claimed.continuation,
        )

    async def _stage(
        self,
        ticket: Ticket,
        episode_id: EpisodeId,
        call: PolicyCall,
        exchanged: Exchanged,
        parent_call_id: str | None,
    ) -> None:
        """Make the tokens durable; then, in one instant, the call has its row and its reply."""
        tokens, extension = exchanged.tokens, exchanged.extension
        key: StagingKey | None = None
        if tokens is not None:
            key = StagingKey(f"{episode_id.capture_key}/{ticket.model_call_id}/whole")
            record = TokenRecord(
                staging_key=key,
                capture_key=episode_id.capture_key,
                model_call_id=ticket.model_call_id,
                prompt_token_ids=tokens.prompt_token_ids,
                token_ids=tokens.token_ids,
                log_probs=tokens.log_probs,
                mask=(1,) * len(tokens.token_ids),
                policy_version=0 if extension is None else extension.policy_version,
            )
            try:
                await self._token_store.put((record,))
            except TokenStoreFailed as error:
                raise Unavailable(f"the reply's tokens could not be kept: {error}") from error
        elif call.capture_tokens:
            raise BackendFailed("token capture was asked for, and the backend gives no token ids")
        ticket.row = LedgerRow(
            model_call_id=ticket.model_call_id,
            parent_call_id=parent_call_id,
            request_digest=ticket.request_digest,
            conversation_end=conversation_end(call.route, call.body, exchanged.body),
            staged_under=episode_id.capture_key,
            staging_key=key,
            prompt_token_count=0 if tokens is None else len(tokens.prompt_token_ids),
            generated_token_count=0 if tokens is None else len(tokens.token_ids),
            continued_token_count=0 if extension is None else extension.continued_token_count,
            policy_version=None if extension is None else extension.policy_version,
            finish_reason=None if extension is None else extension.finish_reason,
        )
        ticket.exchanged = exchanged

    def _leave(self, ticket: Ticket, exchanged: Exchanged) -> PolicyReply:
        """The instant in which the reply begins to leave; the gate is open."""
        assert not self.admission.closed
        self._tickets.leave(ticket)
        if ticket.episode_id is not None and ticket.row is not None:
            self._ledger.add(ticket.episode_id, ticket.row)
        done: Callable[[bool], None] = partial(self._done, ticket)
        return PolicyReply(status=exchanged.status, body=exchanged.body, done=done)

    def _done(self, ticket: Ticket, sent: bool) -> None:
        if not sent and ticket.episode_id is not None and ticket.row is not None:
            self._ledger.take_back(ticket.episode_id, ticket.model_call_id)
        self._end(ticket, delivered=sent and ticket.row is not None)

    def _end(self, ticket: Ticket, *, delivered: bool) -> None:
        """The instant in which nothing of a call is left."""
        if ticket.claimed is not None and ticket.episode_id is not None:
            if not delivered:
                self._cuts.give_back(ticket.episode_id, ticket.claimed)
            ticket.claimed = None
        self._tickets.end(ticket)

    # -- readiness ----------------------------------------------------------------------------

    def ready(self) -> bool:
        return not self._tickets.blocking

    def report(self) -> Report:
        details = self._tickets.blockers() if self._tickets.blocking else ()
        cuts = self._round
        return Report(
            ready=self.ready(),
            blockers=tuple(detail.blocker for detail in details),
            blocker_count=self._tickets.blocking,
            counts={
                "inflight": len(self._tickets),
                "held": len(self._tickets) - self._tickets.leaving if self.admission.closed else 0,
                "cut": 0 if cuts is None else cuts.cut,
                "cut_failed": 0 if cuts is None else cuts.failed.total(),
                "cut_skipped": 0 if cuts is None else cuts.skipped.total(),
            },
            details=details,
        )

    def rows(self, episode_id: EpisodeId) -> tuple[LedgerRow, ...]:
        """The delivered calls of an episode, those before a restore included.

        Raises:
            StaleAttempt: the attempt was retired or superseded.
        """
        self.admission.fences.check(episode_id)
        return self._ledger.rows(episode_id)

    def status_fields(self) -> dict[str, object]:
        return {"restored_generation_cuts": self._cuts.waiting(BLOCKERS_LISTED_MAX)}

    def open(self) -> None:
        self._round = None
        super().open()

    async def settle(self, settling: Settling) -> None:
        """The round of cuts, within half of the time that is left (CUT-1)."""
        now = trio.current_time()
        deadline = now + max(0.0, settling.deadline - now) / 2
        cut_round = None
        if self._generation_cuts:
            cut_round = self._round = CutRound(
                settling.checkpoint_id, self.instance, self._tickets, native=self._backend.native
            )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._describe, deadline)
            if cut_round is not None:
                await cut_round.run(self._backend, deadline=deadline)

    async def _describe(self, deadline: float) -> None:
        """Ask what the manifest says of the engine; without it a checkpoint is as good."""
        self._engine = None
        try:
            with trio.move_on_at(deadline):
                self._engine = await self._backend.describe(deadline=deadline)
        except GymtrioError as error:
            LOG.warning("%s: the backend does not say what it is: %s", self.instance, error)

    # -- commit -------------------------------------------------------------------------------

    async def export(self, scope: frozenset[CaptureKey] | None) -> Export:
        if scope is None:
            raise InvalidRequest(
                "episode_ids: a model server holds the ledger of every episode it ever served, "
                "so a commit names those it wants"
            )
        # Each episode is looked at once (POL-6). Nothing is delivered meanwhile, so slices agree.
        records: dict[CaptureKey, tuple[EpisodeId, PolicyRecord]] = {}
        by_episode: dict[str, list[StagingKey]] = {}
        slices = Slices()
        for key in sorted(scope):
            episode_id = parse_capture_key(key)
            if self.admission.fences.is_stale(episode_id):
                continue
            record = self._record_of(episode_id)
            records[key] = (episode_id, record)
            if keys := record.staging_keys():
                by_episode[key] = keys
            await slices.turn()
        return Export(
            records=(
                make_record(episode_id, record)
                for episode_id, record in records.values()
                if not record.empty
            ),
            episode_ids=tuple(records),
            manifest_fields={"engine": None if self._engine is None else unstructure(self._engine)},
            reply_fields={
                "staging_keys": sorted({key for keys in by_episode.values() for key in keys}),
                "staging_keys_by_episode": by_episode,
            },
        )

    def _record_of(self, episode_id: EpisodeId) -> PolicyRecord:
        return PolicyRecord(
            rows=self._ledger.rows(episode_id),
            cut=choose_cut(
                self._tickets.of_attempt(episode_id), self._round, self._cuts.peek(episode_id)
            ),
        )

    def unclaimed_outside(self, scope: frozenset[CaptureKey] | None) -> list[EpisodeId]:
        if scope is None:
            return []
        return sorted(e for e in self._unstarted.values() if e.capture_key not in scope)

    async def release(self, episode_ids: Sequence[EpisodeId]) -> None:
        for episode_id in episode_ids:
            # Closed since the commit began, so none of them has started meanwhile.
            self._unstarted.pop(episode_id.rollout_id, None)
            self._ledger.discard(episode_id)
        self._cuts.drop(episode_ids)
        await trio.lowlevel.checkpoint()

    # -- restore ------------------------------------------------------------------------------

    def check_installable(self) -> None:
        if self._served_rollouts:
            raise InvalidPhase("this server has served calls of rollouts since it started")
        if self._unstarted:
            raise InvalidPhase(f"{len(self._unstarted)} restored episodes wait for their calls")

    async def install(
        self,
        records: MutableSequence[Record],
        scope: Sequence[EpisodeId],
        *,
        execution_epoch: str | None = None,
    ) -> None:
        read = await decode_records(PolicyRecord, records)
        named = frozenset(scope)
        for episode_id, record in read:
            if episode_id not in named:
                raise InvalidCheckpointState(f"{episode_id} is not in the scope")
            check_record(episode_id, record)
        self.check_installable()
        self.admission.supersede(scope, execution_epoch)
        for episode_id, record in read:
            target = episode_id.next_attempt()
            if self.admission.fences.is_stale(target):
                # The scope names a later attempt of the rollout as well.
                continue
            self._unstarted[target.rollout_id] = target
            self._ledger.install(target, record.rows)
            if record.cut is not None:
                self._cuts.put([(target, record.cut)])

    # -- retire -------------------------------------------------------------------------------

    def refuse(self, episode_ids: Sequence[EpisodeId]) -> None:
        self.admission.refuse(episode_ids)
        for episode_id in episode_ids:
            for ticket in self._tickets.up_to(episode_id):
                self._tickets.retire(ticket)

    async def retire(self, episode_id: EpisodeId) -> None:
        for ticket in self._tickets.up_to(episode_id):
            await ticket.ended.wait()
        self._ledger.discard_up_to(episode_id)
        self._cuts.drop_up_to(episode_id)
        unstarted = self._unstarted.get(episode_id.rollout_id)
        if unstarted is not None and unstarted.attempt <= episode_id.attempt:
            del self._unstarted[episode_id.rollout_id]

    def still_running(self, rollout_ids: Sequence[RolloutId]) -> list[EpisodeId]:
        return self._tickets.of_rollouts(rollout_ids)

    def forget(self, rollout_ids: Sequence[RolloutId]) -> None:
        """Free what is kept of rollouts that are finished for good: ledgers and restored cuts."""
        super().forget(rollout_ids)
        for rollout_id in rollout_ids:
            last = EpisodeId(rollout_id, ATTEMPT_MAX)
            self._ledger.discard_up_to(last)
            self._cuts.drop_up_to(last)
            self._unstarted.pop(rollout_id, None)
