"""The participant of a policy server with several workers, which serves no calls itself (WRK-1).

To its `Control` it is a participant like another. It keeps the books; each worker has a gate.

- D1 Closing is one instant: the generation rises, admission is decided against it from here on, and
  every worker has its `state` queued before anything that is said later (WRK-4).
- D2 It is ready when every expected worker has reported for this generation that nothing blocks, and
  none was lost since the close (WRK-3, I18).
- D3 A lost worker's claims return at once, for the next export (HARD-7). What its calls came to is not
  known, so it blocks until they were retired, or the checkpoint has ended.
- D4 The cut of an episode is written by the worker that has its latest admitted undelivered call, and
  by nobody else; which call that is, is known here alone (CUT-3, I28).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from itertools import islice
from typing import Final

import attrs
import trio

from gymtrio.capture.cuts import EngineDescription
from gymtrio.checkpoint.participant import Export, Settling
from gymtrio.errors import CoordinatorUnavailable, GymtrioError, InvalidPhase, NotFound
from gymtrio.ids import CaptureKey, EpisodeId, RolloutId
from gymtrio.limits import BLOCKERS_LISTED_MAX
from gymtrio.participants.base import make_record
from gymtrio.participants.policy.connected import Worker
from gymtrio.participants.policy.keeper import Entry
from gymtrio.participants.policy.link import (
    CONTROL_KIND,
    DONE,
    LEDGER_SECTION,
    LINK_LIMITS,
    METRICS_KIND,
    CallEnd,
    Delivery,
    EnterReply,
    Episodes,
    GateState,
    LedgerRows,
    Rollouts,
    Settled,
    SettleOrder,
    WorkerReport,
    in_slices,
    read,
    tell,
    tell_all,
)
from gymtrio.participants.policy.participant import BookedParticipant, StagingKeys, engine_field
from gymtrio.participants.policy.records import PolicyRecord
from gymtrio.participants.policy.shares import survey
from gymtrio.storage.records import Record
from gymtrio.storage.slices import LoopSlice
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.channel import Channel, Handler, PeerInfo, open_channel
from gymtrio.wire.codec import pack
from gymtrio.wire.control import BlockerDetail, Report
from gymtrio.wire.messages import Hello

LOG = logging.getLogger(__name__)

SETTLE_SHARE: Final = 0.75
"""Of the time that is left: a worker bounds its round to half of it, and its answer needs a moment."""


class CoordinatedPolicy(BookedParticipant):
    """Implements `gymtrio.checkpoint.participant.Participant`.

    Args:
        expected: how many workers there are when all run.
        not_ready: why the server as a whole accepts no work, which workers tell.
    """

    def __init__(
        self,
        instance: str,
        *,
        expected: int,
        not_ready: Callable[[], str | None] = lambda: None,
    ) -> None:
        super().__init__(instance)
        self.expected = expected
        self.generation = 0
        self.complete = False
        """All workers have been there at once, since the start."""
        self.on_left: Callable[[PeerInfo], None] = lambda lost: None
        """Told of a worker that is lost: whoever started its process must end it."""
        self._not_ready = not_ready
        self._workers: dict[str, Worker] = {}
        self._any_left = False
        """A worker that had joined is gone; since the start."""
        self._any_lost = False
        """A worker was lost since the close, and what it had is not known."""
        self._unknown: dict[EpisodeId, float] = {}
        """Episodes that had calls at a lost worker, and since when."""
        self._engine: EngineDescription | None = None

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().run)
            nursery.start_soon(self._keep_told)

    async def _keep_told(self) -> None:
        # Whether the server is ready changes without a call as well, such as at the end of a lease.
        while True:
            await self.changed.wait()
            self.publish_state()

    # -- workers ------------------------------------------------------------------------------

    @property
    def connected(self) -> int:
        return len(self._workers)

    def _join(self, channel: Channel) -> Worker:
        """A worker has connected: it is told how things stand, before anything else (WRK-4)."""
        worker = Worker(channel.peer.name, channel)
        before = self._workers.get(worker.name)
        if before is not None:
            self._leave(before)
        self._workers[worker.name] = worker
        self.complete = self.complete or self.connected >= self.expected
        LOG.info("worker %s has joined: %d of %d", worker.name, self.connected, self.expected)
        self.publish_state()
        return worker

    def _leave(self, worker: Worker) -> None:
        """A worker is gone, or is taken for gone; twice is harmless."""
        if self._workers.get(worker.name) is not worker:
            return
        del self._workers[worker.name]
        worker.scope.cancel()
        self._any_left = True
        lost = self.books.lose(worker)
        LOG.warning("worker %s is lost, with calls of %d episodes", worker.name, len(lost))
        if self.admission.closed:
            self._any_lost = True
            now = trio.current_time()
            self._unknown |= dict.fromkeys(lost, now)
        self.on_left(worker.channel.peer)
        self.changed.notify()
        self.publish_state()

    async def serve(
        self, stream: trio.abc.Stream, *, me: Hello, uid: int | None, control: Handler
    ) -> None:
        """Serve the connection of one worker until it ends.

        Args:
            control: serves what a worker passes on: control calls, and who asks for metrics.

        Raises:
            ChannelLost: there was no handshake.
        """

        async def handle(call: IncomingCall) -> None:
            if call.kind in {CONTROL_KIND, METRICS_KIND}:
                await control(call)
            elif call.kind == "rows":
                (episode_id,) = read(Episodes, call.body).episode_ids
                call.reply(body=pack(LedgerRows(rows=self.rows(episode_id))))
            else:
                raise NotFound(f"no call {call.kind!r}")

        async with open_channel(
            stream,
            role="acceptor",
            me=me,
            limits=LINK_LIMITS,
            handler=handle,
            inline=lambda call: self._answer(worker, call),
            posted=self._take_post,
            uid=uid,
        ) as channel:
            # Nothing of the peer is looked at before the first wait.
            worker = self._join(channel)
            try:
                with worker.scope:
                    await channel.closed.wait()
            finally:
                self._leave(worker)

    def publish_state(self) -> None:
        """Tell every worker how things stand, unless it knows."""
        not_ready = self._not_ready()
        if not_ready is None and not self.complete:
            not_ready = f"{self.connected} of {self.expected} workers are there"
        state = GateState(
            generation=self.generation, closed=self.admission.closed, not_ready=not_ready
        )
        for worker in list(self._workers.values()):
            if worker.told != state:
                worker.told = state
                if not tell(worker.channel, "state", state):
                    self._leave(worker)

    def _tell_all(self, kind: str, messages: Iterable[object]) -> None:
        by_channel = {worker.channel: worker for worker in self._workers.values()}
        for channel in tell_all(list(by_channel), kind, messages):
            # It cannot be told, so it cannot be counted on; its channel will end.
            self._leave(by_channel[channel])

    def _answer(self, worker: Worker, call: IncomingCall) -> bool:
        """Answer in line what decides or is counted; False: it is for a task.

        Raises:
            Refusal: the answer. MalformedValue: it is not what the table says.
        """
        if self._workers.get(worker.name) is not worker:
            # Its calls were given up; one that came in now would never be.
            raise CoordinatorUnavailable(f"worker {worker.name} is taken for lost")
        if call.kind == "enter":
            entered = self.admit(read(Entry, call.body), worker)
            reply = pack(EnterReply(entered=entered))
        elif call.kind == "deliver":
            delivery = read(Delivery, call.body)
            if not self.books.deliver(delivery.call_id, delivery.row):
                raise InvalidPhase(f"call {delivery.call_id} is not in")
            reply = DONE
        elif call.kind == "report":
            self._take_report(worker, read(WorkerReport, call.body))
            reply = DONE
        else:
            return False
        call.reply(body=reply)
        return True

    def _take_post(self, kind: str, body: bytes) -> None:
        if kind == "end":
            ended = read(CallEnd, body)
            self.books.end(ended.call_id, sent=ended.sent)

    def _take_report(self, worker: Worker, report: WorkerReport) -> None:
        if report.generation != self.generation or not self.admission.closed:
            return
        if worker.report is None or report.seq > worker.report.seq:
            worker.report = report
            self.changed.notify()

    # -- readiness ----------------------------------------------------------------------------

    def close(self) -> None:
        super().close()
        self.generation += 1
        self._forget_round()
        self.publish_state()

    def open(self) -> None:
        super().open()
        self._forget_round()
        self.publish_state()

    def _forget_round(self) -> None:
        self._any_lost = False
        self._unknown = {}
        for worker in self._workers.values():
            worker.report = worker.settled = None

    @property
    def _unreported(self) -> int:
        reported = sum(worker.report is not None for worker in self._workers.values())
        return max(self.expected, self.connected) - reported

    def ready(self) -> bool:
        return not (
            self._any_lost
            or self._unreported
            or any(worker.blocking for worker in self._workers.values())
        )

    def report(self) -> Report:
        reports = [w.report for w in self._workers.values() if w.report is not None]
        rounds = [w.settled for w in self._workers.values() if w.settled is not None]
        closed = self.admission.closed
        count = len(self._unknown) + sum(report.blocking for report in reports)
        named: list[str] = []
        if closed and self._unreported:
            named.append(f"{self.instance}-workers-unreported:{self._unreported}")
        if self._any_lost:
            named.append(f"{self.instance}-worker-lost")
        details = tuple(islice(self._details(reports), BLOCKERS_LISTED_MAX - len(named)))
        inflight = sum(report.inflight for report in reports) if closed else len(self.books)
        return Report(
            ready=not closed or self.ready(),
            blockers=(*named, *(detail.blocker for detail in details)),
            blocker_count=len(named) + count,
            counts={
                "inflight": inflight,
                "held": sum(report.inflight - report.leaving for report in reports),
                "cut": sum(settled.cut for settled in rounds),
                "cut_failed": sum(settled.cut_failed for settled in rounds),
                "cut_skipped": sum(settled.cut_skipped for settled in rounds),
            },
            details=details,
        )

    def _details(self, reports: Iterable[WorkerReport]) -> Iterator[BlockerDetail]:
        now = trio.current_time()
        for episode_id, since in self._unknown.items():
            yield BlockerDetail(
                blocker=str(episode_id),
                doing="was at a worker that is lost",
                since_s=round(now - since, 3),
            )
        for report in reports:
            yield from report.details

    def status_fields(self) -> dict[str, object]:
        return super().status_fields() | {
            "workers": self.connected,
            "expected_workers": self.expected,
        }

    async def settle(self, settling: Settling) -> None:
        """Every worker's round; what fails costs a regeneration, never the checkpoint (CUT-7)."""
        self._engine = None
        generation = self.generation
        remaining_s = max(0.0, settling.deadline - trio.current_time())
        order = SettleOrder(checkpoint_id=settling.checkpoint_id, remaining_s=remaining_s)
        deadline = trio.current_time() + remaining_s * SETTLE_SHARE

        async def settle(worker: Worker) -> None:
            try:
                settled = await worker.ask("settle", order, Settled, deadline=deadline)
            except GymtrioError as error:
                LOG.warning("worker %s: no round of cuts: %s", worker.name, error)
            else:
                if generation == self.generation:
                    worker.settled = settled
                    self._engine = settled.engine or self._engine

        async with trio.open_nursery() as nursery:
            for worker in self._workers.values():
                nursery.start_soon(settle, worker)

    # -- commit -------------------------------------------------------------------------------

    async def export(self, scope: frozenset[CaptureKey] | None) -> Export:
        generation = self.generation
        episodes = await self.exportable(scope)
        shares = await survey(self.books, episodes)
        records: dict[EpisodeId, PolicyRecord] = {}
        staging_keys = StagingKeys()
        slices = LoopSlice()
        for episode_id in episodes:
            if self.admission.fences.is_stale(episode_id):
                # Retired since it was named: its ledger may be gone.
                continue
            written = shares.staging_keys.get(episode_id)
            record = records[episode_id] = self.books.record_of(
                episode_id, None, cut_elsewhere=written is not None
            )
            staging_keys.add(episode_id.capture_key, (*record.staging_keys(), *(written or ())))
            await slices.turn()
        if generation != self.generation or not self.ready():
            raise InvalidPhase("no longer ready: " + ", ".join(self.report().blockers))
        export = Export(
            records=(make_record(e, record) for e, record in records.items() if not record.empty),
            episode_ids=tuple(e.capture_key for e in records),
            manifest_fields=engine_field(self._engine),
            reply_fields=staging_keys.reply_fields(),
        )
        if not shares:
            return export
        return attrs.evolve(export, section=LEDGER_SECTION, write_elsewhere=shares.write)

    # -- restore, retire, forget --------------------------------------------------------------

    def check_installable(self) -> None:
        super().check_installable()
        if self._any_left:
            raise InvalidPhase("a worker of this server has left since it started; start it anew")

    async def install(
        self,
        records: MutableSequence[Record],
        scope: Sequence[EpisodeId],
        *,
        execution_epoch: str | None = None,
    ) -> None:
        await super().install(records, scope, execution_epoch=execution_epoch)
        # Whoever waits at a worker's gate under an old attempt learns of it.
        self._tell_all("refuse", (Episodes.of(some) for some in in_slices(scope)))

    def refuse(self, episode_ids: Sequence[EpisodeId]) -> None:
        self.admission.refuse(episode_ids)
        self._tell_all("refuse", (Episodes.of(some) for some in in_slices(episode_ids)))

    async def retire(self, episode_id: EpisodeId) -> None:
        for call in self.books.open_up_to(episode_id):
            await call.ended.wait()
        self.books.discard_up_to(episode_id)
        if self._unknown:
            self._settle_unknown(episode_id)

    def _settle_unknown(self, retired: EpisodeId) -> None:
        """What a lost worker had is not unknown any more once it is retired (WRK-3)."""
        for episode_id in [e for e in self._unknown if e.rollout_id == retired.rollout_id]:
            if episode_id.attempt <= retired.attempt:
                del self._unknown[episode_id]
        if not self._unknown:
            self._any_lost = False
        self.changed.notify()

    def still_running(self, rollout_ids: Sequence[RolloutId]) -> list[EpisodeId]:
        return self.books.open_of(rollout_ids)

    def forget(self, rollout_ids: Sequence[RolloutId]) -> None:
        super().forget(rollout_ids)
        self._tell_all("forget", (Rollouts(rollout_ids=some) for some in in_slices(rollout_ids)))
