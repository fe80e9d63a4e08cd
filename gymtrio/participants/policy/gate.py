"""The gate of a policy server's process: admission, tickets, held replies, its own round of cuts.

It serves the calls; what is known of episodes is kept by its `Keeper`, in the same process or behind a
link. What it does to a call is the same in both cases.

- G1 No reply leaves between the instant of closing and that of opening, an error's neither; one whose
  sending has begun is waited for, and nothing else is (POL-2, I2).
- G2 The row of a reply is in the books before the reply leaves; its tokens were durable before (POL-3,
  I16, I17).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import trio

from gymtrio.capture.constrained import constrained_reason
from gymtrio.capture.cuts import CallExtension, CutRecord, EngineDescription
from gymtrio.capture.fingerprint import conversation_chain, request_digest
from gymtrio.capture.storable import check_description
from gymtrio.capture.tokens import TokenStore
from gymtrio.checkpoint.participant import Settling
from gymtrio.episodes.admission import Admission
from gymtrio.episodes.signal import Signal
from gymtrio.errors import GymtrioError, Refusal, StaleAttempt
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.calls import Backend, PolicyCall, PolicyReply, check_call
from gymtrio.participants.policy.cut_round import NOT_NATIVE, CutRound
from gymtrio.participants.policy.exchange import Exchanged, exchange
from gymtrio.participants.policy.keeper import Entered, Entry, Keeper
from gymtrio.participants.policy.records import finished_cut
from gymtrio.participants.policy.staging import stage
from gymtrio.participants.policy.tickets import Ticket, Tickets
from gymtrio.ports import Randomness
from gymtrio.wire.control import Report

LOG = logging.getLogger(__name__)

ANOTHER_REQUEST: Final = "it is of another request"


class PolicyGate:
    """Implements `calls.Policy`.

    Args:
        instance: of the server, for inventories and logs.
        admission: opened and closed by the owner of the gate, through `close` and `open`.
        changed: rung when something stops blocking.
        backend: where calls go.
        token_store: where tokens of replies are made durable.
        generation_cuts: ask the backend for cuts at a close.
    """

    def __init__(
        self,
        instance: str,
        *,
        keeper: Keeper,
        admission: Admission,
        changed: Signal,
        backend: Backend,
        token_store: TokenStore,
        randomness: Randomness,
        generation_cuts: bool,
    ) -> None:
        self.instance = instance
        self.admission = admission
        self.tickets = Tickets(changed)
        self.engine: EngineDescription | None = None
        """What the backend said it is, at the last close."""
        self._keeper = keeper
        self._backend = backend
        self._token_store = token_store
        self._randomness = randomness
        self._generation_cuts = generation_cuts
        self._round: CutRound | None = None

    # -- calls --------------------------------------------------------------------------------

    async def call(self, episode_id: EpisodeId | None, call: PolicyCall) -> PolicyReply:
        """See `calls.Policy`. While a checkpoint is open, nothing is answered.

        Raises:
            StaleAttempt: the attempt is refused, or was retired meanwhile.
            AdmissionClosed: the gate is closed and the caller would not wait.
            CoordinatorUnavailable: whoever keeps the books cannot be asked.
            Refusal: see `check_call`.

        Cancelled: the backend has stopped, the ticket is gone, a claimed cut is given back.
        """
        check_call(call, for_rollout=episode_id is not None)
        digest = request_digest(call.route, call.body)
        await trio.lowlevel.checkpoint()
        while True:
            if episode_id is None:
                await self.admission.enter(None, refuse=call.refuse_when_closed)
            ticket = self.tickets.enter(
                episode_id,
                model_call_id=self._randomness.hex(16),
                request_digest=digest,
                constrained=constrained_reason(call.body),
            )
            reply = None
            try:
                with ticket.scope:
                    if await self._is_admitted(ticket, call) and not ticket.retired:
                        answer = await self._answer(ticket, call)
                        if not ticket.retired:
                            reply = await self._leave(ticket, answer)
                if ticket.retired and reply is None:
                    raise StaleAttempt(f"{episode_id} was retired")
            finally:
                if reply is None:
                    self._end(ticket, sent=False)
            if reply is not None:
                return reply
            await self.admission.enter(episode_id, epoch=call.epoch, refuse=call.refuse_when_closed)

    async def _is_admitted(self, ticket: Ticket, call: PolicyCall) -> bool:
        """Ask for admission; in process, that is the instant of the ticket (POL-4)."""
        if ticket.episode_id is None:
            self.tickets.admit(ticket, 0)
            return True
        entry = Entry(
            call_id=ticket.model_call_id,
            episode_id=ticket.episode_id,
            epoch=call.epoch,
            request_digest=ticket.request_digest,
            continues=ticket.constrained is None and self._backend.native,
            chain=tuple(conversation_chain(call.route, call.body)),
        )
        ticket.asked = True
        ticket.entered = await self._keeper.enter(entry)
        ticket.asked = ticket.entered is not None
        if ticket.entered is None:
            return False
        if ticket.entered.left_alone:
            LOG.info(
                "%s, call %s: generated from its beginning, a restored cut is not for it: %s",
                ticket.episode_id.capture_key,
                ticket.model_call_id,
                ticket.constrained or (ANOTHER_REQUEST if self._backend.native else NOT_NATIVE),
            )
        self.tickets.admit(ticket, ticket.entered.ordinal)
        return True

    async def _answer(self, ticket: Ticket, call: PolicyCall) -> Exchanged | Refusal:
        """Get the reply, or the refusal that stands for it, and hold it until the gate is open."""
        answer: Exchanged | Refusal
        try:
            answer = await self._exchange(ticket, call)
        except Refusal as refusal:
            answer = refusal
        except Exception:
            # A fault of ours; the application's answer to it is a reply too.
            await self._hold(ticket)
            raise
        await self._hold(ticket)
        return answer

    async def _hold(self, ticket: Ticket) -> None:
        if self.admission.closed:
            self.tickets.hold(ticket)
            await self.admission.wait_open()

    async def _exchange(self, ticket: Ticket, call: PolicyCall) -> Exchanged:
        if ticket.episode_id is None:
            return await exchange(self._backend, call, extension=None, wants_tokens=False)
        assert ticket.entered is not None
        exchanged = await exchange(
            self._backend,
            call,
            extension=self._extension(ticket, ticket.episode_id, ticket.entered),
            wants_tokens=True,
        )
        if exchanged.succeeded:
            ticket.row = await stage(
                self._token_store,
                ticket.episode_id,
                call,
                exchanged,
                model_call_id=ticket.model_call_id,
                request_digest=ticket.request_digest,
                parent_call_id=ticket.entered.parent_call_id,
            )
            ticket.exchanged = exchanged
        return exchanged

    def _extension(
        self, ticket: Ticket, episode_id: EpisodeId, entered: Entered
    ) -> CallExtension | None:
        if not self._backend.native:
            return None
        return CallExtension(
            model_call_id=ticket.model_call_id,
            rollout_id=episode_id.rollout_id,
            attempt=episode_id.attempt,
            continuation=None if entered.cut is None else entered.cut.continuation,
        )

    async def _leave(self, ticket: Ticket, answer: Exchanged | Refusal) -> PolicyReply | None:
        """The reply begins to leave, in the instant in which the gate was found open.

        None: the call was retired while the books were told.
        """
        assert not self.admission.closed
        self.tickets.leave(ticket)
        if ticket.row is not None:
            await self._keeper.deliver(ticket.model_call_id, ticket.row)
            if ticket.retired:
                return None
        done: Callable[[bool], None] = partial(self._done, ticket)
        if isinstance(answer, Refusal):
            return PolicyReply(
                status=answer.status, body={**answer.body()}, refusal=answer, done=done
            )
        return PolicyReply(status=answer.status, body=answer.body, done=done)

    def _done(self, ticket: Ticket, sent: bool) -> None:
        self._end(ticket, sent=sent)

    def _end(self, ticket: Ticket, *, sent: bool) -> None:
        """The instant in which nothing of a call is left."""
        if ticket.asked:
            self._keeper.end(ticket.model_call_id, sent=sent)
        self.tickets.end(ticket)

    # -- checkpoints --------------------------------------------------------------------------

    def close(self) -> None:
        self.admission.close()

    def open(self) -> None:
        self._round = None
        self.admission.open()

    def report(self) -> Report:
        details = self.tickets.blockers()
        cuts = self._round
        held = len(self.tickets) - self.tickets.leaving if self.admission.closed else 0
        return Report(
            ready=not self.tickets.blocking,
            blockers=tuple(detail.blocker for detail in details),
            blocker_count=self.tickets.blocking,
            counts={
                "inflight": len(self.tickets),
                "held": held,
                "cut": 0 if cuts is None else cuts.cut,
                "cut_failed": 0 if cuts is None else cuts.failed.total(),
                "cut_skipped": 0 if cuts is None else cuts.skipped.total(),
            },
            details=details,
        )

    async def settle(self, settling: Settling) -> None:
        """The round of cuts, within half of the time that is left (CUT-1)."""
        now = trio.current_time()
        deadline = now + max(0.0, settling.deadline - now) / 2
        cut_round = None
        if self._generation_cuts:
            cut_round = self._round = CutRound(
                settling.checkpoint_id, self.instance, self.tickets, native=self._backend.native
            )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._describe, deadline)
            if cut_round is not None:
                await cut_round.run(self._backend, deadline=deadline)

    async def _describe(self, deadline: float) -> None:
        """Ask what the manifest says of the engine; without it a checkpoint is as good."""
        self.engine = None
        try:
            with trio.move_on_at(deadline):
                described = await self._backend.describe(deadline=deadline)
                if described is not None:
                    check_description(described)
                self.engine = described
        except GymtrioError as error:
            LOG.warning("%s: the backend does not say what it is: %s", self.instance, error)
        except Exception:
            # As in a round of cuts.
            LOG.exception("%s: a fault in asking the backend what it is", self.instance)

    def cut_of(self, model_call_id: str) -> CutRecord | None:
        """The cut of an undelivered call: its whole reply, if it is held, or what the round got."""
        ticket = self.tickets.of_call(model_call_id)
        if ticket is None or self._round is None:
            return None
        return finished_cut(ticket) or self._round.cut_of(ticket)

    def refuse(self, episode_ids: Sequence[EpisodeId]) -> None:
        """One instant: raise the fences, wake those at the gate, begin to stop what runs."""
        self.admission.refuse(episode_ids)
        for episode_id in episode_ids:
            for ticket in self.tickets.up_to(episode_id):
                if self.tickets.retire(ticket):
                    self.admission.wakes.add(ticket.scope.cancel)
