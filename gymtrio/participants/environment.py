"""The participant of an environment server: whole episodes (ENV-1..4).

- V1 A restored boundary is claimed in the instant in which its replacement attempt is admitted, and
  given back when that attempt was cancelled before it had done anything (I14).
- V2 What a finished episode answers counts as in flight until the connection has it (I2): an episode
  past its last boundary blocks until its reply is out or its caller has left.
- V3 While the gate is closed no clean-up begins: the gates of other servers may be closed as well, so
  it would only block. It is owed until resume, and then owned by the participant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Final, TypeVar

import attrs
import trio

from gymtrio.checkpoint.participant import Export
from gymtrio.episodes.blockers import Blocker, report_of
from gymtrio.episodes.cleanups import Cleanups
from gymtrio.episodes.episode import Episode, Episodes
from gymtrio.episodes.signal import Signal
from gymtrio.episodes.tickets import Ticket, Tickets
from gymtrio.errors import CheckpointConflict, InvalidCheckpointState, InvalidPhase, StaleAttempt
from gymtrio.ids import CaptureKey, EpisodeId, RolloutId
from gymtrio.limits import BLOCKERS_LISTED_MAX
from gymtrio.participants.base import ParticipantBase, make_record
from gymtrio.participants.decoding import decode_records
from gymtrio.participants.deliveries import Deliveries
from gymtrio.participants.restored import Restored
from gymtrio.storage.opaque import decode, encode
from gymtrio.storage.records import Record
from gymtrio.wire.control import Kind, Report

T = TypeVar("T")

OWED_CLEANUPS_AT_ONCE_MAX: Final = 64
"""Episodes cleaned up in parallel after a resume: more would only queue at the other servers."""


@attrs.frozen(kw_only=True)
class EnvironmentRecord:
    """What a checkpoint keeps of one episode."""

    task_digest: str
    boundary: bytes | None
    """Where it continues, as opaque JSON; None: from its input."""


class EnvironmentParticipant(ParticipantBase):
    """Runs episodes and records their boundaries: `gymtrio.checkpoint.participant.Participant`."""

    kind = Kind.ENVIRONMENT

    def __init__(self, instance: str) -> None:
        super().__init__(instance)
        self.episodes = Episodes(self.admission, self.changed)
        self.restored: Restored[EnvironmentRecord] = Restored()
        self._digests: dict[str, str] = {}
        """Of live episodes, by capture key."""
        self._deliveries = Deliveries(self.changed)
        self._late = Tickets(self.changed)
        """Clean-ups that were owed and run now."""
        self._owed: deque[tuple[EpisodeId, Cleanups]] = deque()
        self._opened = Signal()

    # -- episodes -----------------------------------------------------------------------------

    async def run_episode(
        self,
        episode_id: EpisodeId,
        digest: str,
        body: Callable[[Episode], Awaitable[T]],
        timeout_s: float | None = None,
        *,
        refuse: bool = False,
    ) -> T:
        """Admit an episode and run it, from its restored boundary if there is one.

        Whatever comes of it but a cancellation, the caller calls `deliver` in the same instant.

        Args:
            digest: `json_digest` of its task.
            timeout_s: time it may run, parked time not counted; None: no limit.
            refuse: rather be refused than wait at the gate (CTL-18).

        Raises:
            StaleAttempt: the attempt is refused, or was retired while it ran.
            AdmissionClosed: `refuse`, and a checkpoint is open.
            CheckpointConflict: the same attempt runs already.
            InvalidCheckpointState: the attempt was restored with another task (ENV-3).
            EpisodeTimedOut: its time is used up.
            whatever `body` raises.

        Cancelled: nothing of it runs any more; clean-ups may be owed.
        """
        await self.admission.enter(episode_id, refuse=refuse)
        key = episode_id.capture_key
        if key in self.episodes.live:
            raise CheckpointConflict(f"{episode_id} runs already")
        claimed, boundary = self._claim(episode_id, digest)
        self._digests[key] = digest
        unused = False

        async def noticing(episode: Episode) -> T:
            nonlocal unused
            try:
                return await body(episode)
            finally:
                unused = _unused(episode)

        try:
            result = await self.episodes.run(
                episode_id, noticing, boundary=boundary, timeout_s=timeout_s
            )
        except trio.Cancelled:
            if claimed is not None and unused and not self.admission.fences.is_stale(episode_id):
                self.restored.give_back(episode_id, claimed)
            raise
        except StaleAttempt:
            # Retired: nobody waits for what it answers.
            raise
        except Exception:
            self._deliveries.ended(episode_id, key)
            raise
        finally:
            del self._digests[key]
        self._deliveries.ended(episode_id, key)
        return result

    def _claim(self, episode_id: EpisodeId, digest: str) -> tuple[EnvironmentRecord | None, object]:
        """The restored record of this attempt and its boundary, handed out once (ENV-3)."""
        waiting = self.restored.peek(episode_id)
        if waiting is None:
            return None, None
        if waiting.task_digest != digest:
            raise InvalidCheckpointState(
                f"{episode_id} was restored with a different task: digest {waiting.task_digest}, "
                f"asked to run {digest}"
            )
        state = waiting.boundary
        boundary = None if state is None else decode(state, f"boundary of {episode_id}")
        return self.restored.claim(episode_id), boundary

    def deliver(self, episode_id: EpisodeId) -> Callable[[bool], None]:
        """Say that the reply of an ended episode goes to its connection now, see `Deliveries`."""
        return self._deliveries.deliver(episode_id.capture_key)

    async def clean_up(self, episode: Episode, cleanups: Cleanups) -> None:
        """End an episode's body: take back what it left elsewhere, now or after resume.

        A restored one whose caller left before its first step waits to be claimed again (V1): its
        sessions are not to be closed.

        Cancelled: the clean-ups go on to their end.
        """
        if episode.continuation is not None and _unused(episode):
            return
        if self.admission.closed:
            if len(cleanups):
                self._owed.append((episode.episode_id, cleanups))
            return
        episode.finishing()
        await cleanups.run()

    # -- checkpoints --------------------------------------------------------------------------

    def ready(self) -> bool:
        return not (self.episodes.blocking or len(self._deliveries.tickets) or len(self._late))

    def report(self) -> Report:
        return report_of(
            self._blockers(),
            {
                "live": len(self.episodes.live),
                "waiting": self.admission.waiting,
                "delivering": len(self._deliveries.tickets),
                "restored": len(self.restored),
            },
        )

    def _blockers(self) -> Iterator[Blocker]:
        return chain(
            self.episodes.blockers(), self._deliveries.tickets.blockers(), self._late.blockers()
        )

    def status_fields(self) -> dict[str, object]:
        return {
            "restored_pending": self.restored.waiting()[:BLOCKERS_LISTED_MAX],
            "restored_pending_count": len(self.restored),
        }

    def close(self) -> None:
        super().close()
        self.episodes.close()

    def open(self) -> None:
        super().open()
        self.episodes.open()
        self._opened.notify()

    async def export(self, scope: frozenset[CaptureKey] | None) -> Export:
        await trio.lowlevel.checkpoint()
        if not self.ready():
            raise InvalidPhase("no longer ready: " + ", ".join(self.report().blockers))
        # Noted in one instant; made while they are written.
        makers: dict[CaptureKey, Callable[[], Record]] = {}
        for episode_id, record in self.restored:
            makers[episode_id.capture_key] = partial(make_record, episode_id, record)
        for episode in self.episodes.live.values():
            episode_id = episode.episode_id
            key = episode_id.capture_key
            boundary = episode.boundary_maker()
            makers[key] = partial(_live_record, episode_id, self._digests[key], boundary)
        if scope is not None:
            makers = {key: makers[key] for key in scope if key in makers}
        keys = tuple(sorted(makers))
        return Export(records=_made(makers, keys), episode_ids=keys)

    def unclaimed_outside(self, scope: frozenset[CaptureKey] | None) -> list[EpisodeId]:
        return self.restored.outside(scope)

    async def release(self, episode_ids: Sequence[EpisodeId]) -> None:
        await trio.lowlevel.checkpoint()
        self.restored.drop(episode_ids)

    def check_installable(self) -> None:
        in_the_way = [
            *(f"{name} runs" for name in self.episodes.live),
            *(f"{b.episode_id}: {b.doing}" for b in self._deliveries.tickets.blockers()),
            *(f"{b.episode_id}: {b.doing}" for b in self._late.blockers()),
            *(f"{key} was restored already" for key in self.restored.waiting()),
        ]
        if in_the_way:
            raise InvalidPhase("in the way: " + ", ".join(in_the_way[:BLOCKERS_LISTED_MAX]))

    async def install(self, records: Sequence[Record], scope: Sequence[EpisodeId]) -> None:
        read = await decode_records(EnvironmentRecord, records)
        self.check_installable()
        self.admission.refuse(scope)
        self.restored.put((episode_id.next_attempt(), record) for episode_id, record in read)

    def refuse(self, episode_ids: Sequence[EpisodeId]) -> None:
        self.admission.refuse(episode_ids)
        for episode_id in episode_ids:
            for episode in self.episodes.up_to(episode_id):
                episode.retire()
            self.restored.drop_up_to(episode_id)

    async def retire(self, episode_id: EpisodeId) -> None:
        await self.episodes.wait_up_to(episode_id)
        await self._late.wait_up_to(episode_id)
        await self._deliveries.wait_up_to(episode_id)

    def still_running(self, rollout_ids: Sequence[RolloutId]) -> list[EpisodeId]:
        found = {*self.episodes.of(rollout_ids), *self._late.of(rollout_ids)}
        return sorted(e for e in found if self.admission.fences.is_stale(e))

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().run)
            nursery.start_soon(self._pay)

    async def _pay(self) -> None:
        """Do the clean-ups that are owed, while the gate is open."""
        while True:
            while self._owed and not self.admission.closed:
                async with trio.open_nursery() as nursery:
                    for _ in range(min(len(self._owed), OWED_CLEANUPS_AT_ONCE_MAX)):
                        episode_id, cleanups = self._owed.popleft()
                        ticket = self._late.take(episode_id, "cleaning up")
                        nursery.start_soon(_clean_up_later, ticket, cleanups)
            await self._opened.wait()


def _unused(episode: Episode) -> bool:
    """Whether its caller left before it had done anything; called at the end of its body."""
    return episode.abandoned and episode.last_step is None


async def _clean_up_later(ticket: Ticket, cleanups: Cleanups) -> None:
    with ticket:
        await cleanups.run()


def _live_record(episode_id: EpisodeId, digest: str, boundary: Callable[[], object]) -> Record:
    state = boundary()
    return make_record(
        episode_id,
        EnvironmentRecord(
            task_digest=digest,
            boundary=None if state is None else encode(state, f"episode {episode_id}"),
        ),
    )


def _made(
    makers: dict[CaptureKey, Callable[[], Record]], keys: Sequence[CaptureKey]
) -> Iterator[Record]:
    return (makers[key]() for key in keys)
