"""One worker of a policy server: a gate whose books are kept by the coordinator (WRK-1).

- W1 A worker is closed until it is told otherwise: one that joins during a checkpoint serves nothing
  before it ends (WRK-4).
- W2 It knows no restored state and no fences but those raised since it joined: whether a call is
  admitted is decided by the coordinator, so that no worker can be behind.
- W3 What it writes of a checkpoint is its own until the coordinator has the whole of it.
"""

from __future__ import annotations

import logging

import attrs
import trio

from gymtrio.capture.cuts import CutRecord
from gymtrio.capture.ledger import LedgerRow
from gymtrio.capture.tokens import TokenStore
from gymtrio.checkpoint.archive import PartWriter
from gymtrio.checkpoint.participant import Settling
from gymtrio.episodes.admission import Admission
from gymtrio.episodes.signal import Signal
from gymtrio.errors import CoordinatorUnavailable, GymtrioError, InvalidCheckpointState, NotFound
from gymtrio.ids import EpisodeId, parse_capture_key
from gymtrio.participants.base import make_record
from gymtrio.participants.policy.calls import Backend, PolicyCall, PolicyReply
from gymtrio.participants.policy.gate import PolicyGate
from gymtrio.participants.policy.keeper import Entered, Entry
from gymtrio.participants.policy.link import (
    CHAIN_ENTRIES_MAX,
    CUTS_SECTION,
    DONE,
    LINK_LIMITS,
    CallEnd,
    Delivery,
    EnterReply,
    Episodes,
    GateState,
    LedgerRows,
    Nothing,
    PartWritten,
    Rollouts,
    Settled,
    SettleOrder,
    Survey,
    Surveyed,
    WorkerReport,
    WriteOrder,
    ask,
    read,
    tell,
)
from gymtrio.participants.policy.records import PolicyRecord
from gymtrio.ports import Randomness
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.channel import Channel, open_channel
from gymtrio.wire.codec import pack
from gymtrio.wire.messages import Hello

LOG = logging.getLogger(__name__)


class CoordinatorLink:
    """The coordinator as a worker sees it. Implements `keeper.Keeper`."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self.unheard = trio.Event()
        """The coordinator could not be told of a call's end: what it knows of this worker is wrong."""

    def connect(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def channel(self) -> Channel:
        """
        Raises:
            CoordinatorUnavailable: there is none, or none any more.
        """
        if self._channel is None:
            raise CoordinatorUnavailable("this worker has not reached its coordinator yet")
        if self._channel.closed.is_set():
            raise CoordinatorUnavailable(
                f"this worker has lost its coordinator: {self._channel.why}"
            )
        return self._channel

    async def enter(self, entry: Entry) -> Entered | None:
        short = attrs.evolve(entry, chain=entry.chain[-CHAIN_ENTRIES_MAX:])
        return (await ask(self.channel, "enter", short, EnterReply)).entered

    async def deliver(self, call_id: str, row: LedgerRow) -> None:
        await ask(self.channel, "deliver", Delivery(call_id=call_id, row=row), Nothing)

    def end(self, call_id: str, *, sent: bool) -> None:
        ended = CallEnd(call_id=call_id, sent=sent)
        if self._channel is not None and not tell(self._channel, "end", ended):
            # One that has ended with its channel was given back there (HARD-7); so the channel ends.
            self.unheard.set()

    async def rows(self, episode_id: EpisodeId) -> tuple[LedgerRow, ...]:
        """See `BookedParticipant.rows`."""
        return (await ask(self.channel, "rows", Episodes.of([episode_id]), LedgerRows)).rows


class PolicyWorker:
    """Implements `calls.Policy`, while `serve` runs.

    Args: see `gate.PolicyGate`.
        part_writer: writes its share of a checkpoint (STO-6).
    """

    def __init__(
        self,
        instance: str,
        *,
        backend: Backend,
        token_store: TokenStore,
        randomness: Randomness,
        generation_cuts: bool,
        part_writer: PartWriter,
    ) -> None:
        self.link = CoordinatorLink()
        self.admission = Admission(closed=True)
        self.changed = Signal()
        self.state = GateState(generation=0, closed=True, not_ready="not connected yet")
        self.gate = PolicyGate(
            instance,
            keeper=self.link,
            admission=self.admission,
            changed=self.changed,
            backend=backend,
            token_store=token_store,
            randomness=randomness,
            generation_cuts=generation_cuts,
        )
        self._part_writer = part_writer
        self._chosen: dict[EpisodeId, CutRecord] = {}
        """What a write writes."""
        self._writing: trio.CancelScope | None = None
        self._idle = Signal()
        self._written: tuple[WriteOrder, str] | None = None
        """The part that was written last, and for which commit: it may come to no end."""

    async def call(self, episode_id: EpisodeId | None, call: PolicyCall) -> PolicyReply:
        """See `gate.PolicyGate.call`.

        Raises:
            CoordinatorUnavailable: the coordinator is away, so nothing can be admitted.
        """
        return await self.gate.call(episode_id, call)

    def not_ready(self) -> str | None:
        """Why this worker accepts no work; None: it does, or will when a checkpoint ends."""
        try:
            _ = self.link.channel
        except CoordinatorUnavailable as refusal:
            return refusal.detail
        return self.state.not_ready

    async def serve(
        self,
        stream: trio.abc.Stream,
        *,
        me: Hello,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> str:
        """Be a worker of whoever is at the other end, until the connection ends.

        Args:
            task_status: started when the connection is there.

        Returns:
            Why it has ended. Nothing can be admitted or answered any more: the process is of no use.

        Raises:
            ChannelLost: there was no handshake.
        """
        async with open_channel(
            stream,
            role="opener",
            me=me,
            limits=LINK_LIMITS,
            handler=self._handle,
            posted=self._take_post,
        ) as channel:
            self.link.connect(channel)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.admission.run)
                nursery.start_soon(self._report, channel)
                nursery.start_soon(self._give_up_unheard, nursery.cancel_scope)
                task_status.started()
                await channel.closed.wait()
                nursery.cancel_scope.cancel()
        return channel.why

    async def _give_up_unheard(self, serving: trio.CancelScope) -> None:
        await self.link.unheard.wait()
        LOG.error("the coordinator does not take what it must know; the connection is given up")
        serving.cancel()

    # -- what comes from the coordinator ------------------------------------------------------

    def _take_post(self, kind: str, body: bytes) -> None:
        """Take a post, in the instant in which it comes."""
        if kind == "state":
            self._take_state(read(GateState, body))
        elif kind == "refuse":
            self.gate.refuse(read(Episodes, body).episode_ids)
        elif kind == "forget":
            self.admission.fences.forget(read(Rollouts, body).rollout_ids)

    def _take_state(self, state: GateState) -> None:
        if state.generation < self.state.generation:
            return
        self.state = state
        if state.closed:
            self.gate.close()
        else:
            self._chosen = {}
            self.gate.open()
        self.changed.notify()

    async def _handle(self, call: IncomingCall) -> None:
        """Serve a call.

        Raises:
            Refusal: the answer; MalformedValue: it is not what the table says.
        """
        if call.kind == "settle":
            reply = await self._settle(read(SettleOrder, call.body))
        elif call.kind == "survey":
            reply = self._survey(read(Survey, call.body))
        elif call.kind == "write":
            reply = await self._write(read(WriteOrder, call.body))
        elif call.kind == "discard":
            await self._discard(read(WriteOrder, call.body))
            reply = DONE
        else:
            raise NotFound(f"no call {call.kind!r}")
        call.reply(body=reply)

    async def _settle(self, order: SettleOrder) -> bytes:
        await self.gate.settle(
            Settling(
                checkpoint_id=order.checkpoint_id,
                deadline=trio.current_time() + order.remaining_s,
            )
        )
        counts = self.gate.report().counts
        return pack(
            Settled(
                engine=self.gate.engine,
                cut=counts["cut"],
                cut_failed=counts["cut_failed"],
                cut_skipped=counts["cut_skipped"],
            )
        )

    def _survey(self, survey: Survey) -> bytes:
        if survey.begins:
            self._chosen = {}
        found = {}
        for call_id, key in survey.calls.items():
            cut = self.gate.cut_of(call_id)
            if cut is not None:
                self._chosen[parse_capture_key(key)] = cut
                found[call_id] = cut.continuation.staging_keys
        return pack(Surveyed(cuts=found))

    async def _write(self, order: WriteOrder) -> bytes:
        await self._stop_writing()
        chosen = sorted(self._chosen.items(), key=lambda item: item[0].capture_key)
        written = None
        with trio.CancelScope() as scope:
            self._writing = scope
            try:
                written = await self._part_writer.write_part(
                    order.checkpoint_dir,
                    order.identity,
                    (make_record(e, PolicyRecord(cut=cut)) for e, cut in chosen),
                    CUTS_SECTION,
                )
                if written is not None and scope.cancel_called:
                    # Whoever stopped it may not have had the time to wait until it had ended.
                    name, written = written.part.file, None
                    await self._part_writer.remove_parts(
                        order.checkpoint_dir, order.identity, [name]
                    )
                elif written is not None:
                    self._written = order, written.part.file
            finally:
                self._writing = None
                self._idle.notify()
        if written is None:
            raise InvalidCheckpointState("there was nothing to write, or the write was stopped")
        return pack(PartWritten(part=written.part))

    async def _stop_writing(self) -> None:
        while self._writing is not None:
            self._writing.cancel()
            await self._idle.wait()

    async def _discard(self, order: WriteOrder) -> None:
        """Nothing of a commit remains that came to no end (CTL-10, I31)."""
        await self._stop_writing()
        # The part of an earlier commit belongs to its manifest.
        if self._written is not None and self._written[0] == order:
            _, name = self._written
            self._written = None
            await self._part_writer.remove_parts(order.checkpoint_dir, order.identity, [name])

    # -- what goes to the coordinator ---------------------------------------------------------

    async def _report(self, channel: Channel) -> None:
        """Report each change while closed, at most one report at a time (WRK-6)."""
        said: WorkerReport | None = None
        seq = 0
        while True:
            report = self._current_report()
            # How long each blocker takes changes all the time, and is no news.
            news = attrs.evolve(report, details=())
            if self.admission.closed and news != said:
                said, seq = news, seq + 1
                try:
                    await ask(channel, "report", attrs.evolve(report, seq=seq), Nothing)
                except GymtrioError as error:
                    LOG.warning("a report was not taken: %s", error)
            else:
                await self.changed.wait()

    def _current_report(self) -> WorkerReport:
        report = self.gate.report()
        return WorkerReport(
            generation=self.state.generation,
            seq=0,
            blocking=report.blocker_count,
            inflight=report.counts["inflight"],
            leaving=self.gate.tickets.leaving,
            details=report.details,
        )
