"""The participant of a resources server (RES-1..5).

It knows nothing of HTTP. Whoever serves requests brackets each of them:

    async with participant.request(
        RequestKind.TOOL, session_id=session_id, episode_id=current_episode()
    ) as admitted:
        ...                                  the work; cancelled when its attempt is retired
        admitted.succeeded()                 it is answered 2xx
        return reply, admitted.until_sent()  to be called when the reply has left, or never will

Entering waits at the gate; leaving without `succeeded` means that the request failed. What happens to
sessions follows from that alone: a seed binds its session to the episode, a verify or a close ends it.
Servers that begin and end sessions in other requests say so: `checkpoint_session_started`, `..._ended`.

`DESIGN.md` has the flows, and why a session outlives a verify that may be replayed.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain

import attrs
import trio

from gymtrio.checkpoint.participant import Export, Settling
from gymtrio.episodes.blockers import report_of
from gymtrio.episodes.episode import StepMode
from gymtrio.errors import InvalidPhase
from gymtrio.ids import CaptureKey, EpisodeId, RolloutId
from gymtrio.limits import BLOCKERS_LISTED_MAX, CLEANUP_S_MAX
from gymtrio.participants.base import ParticipantBase
from gymtrio.participants.resources.desk import Admitted, Desk
from gymtrio.participants.resources.hooks import Hooks, Mode, SessionId
from gymtrio.participants.resources.keeper import Keeper
from gymtrio.participants.resources.record import decode_sessions
from gymtrio.participants.resources.tickets import RequestKind
from gymtrio.storage.records import Record
from gymtrio.wire.control import Kind, Report


class ResourcesParticipant(ParticipantBase):
    """Sessions of a resources server under checkpoints.

    Args:
        mode: what a checkpoint does with the sessions.
        verify: whether a verify may run again after a crash (RES-4).
        server: has the hooks that the mode needs, see `SessionHooks`.

    Raises:
        SettingsError: it has not.
    """

    kind = Kind.RESOURCES

    def __init__(
        self,
        instance: str,
        *,
        mode: Mode,
        verify: StepMode = StepMode.WAIT,
        server: object = None,
    ) -> None:
        super().__init__(instance)
        self.mode = mode
        self.verify = verify
        hooks = Hooks(instance, mode, server)
        self._keeper = Keeper(mode, hooks, self.admission, self.changed)
        self._desk = Desk(mode, verify, self.admission, self._keeper, self.changed)
        self._installed: trio.Event | None = None
        """While an install runs."""

    # -- requests and sessions ----------------------------------------------------------------

    def request(
        self,
        kind: RequestKind,
        *,
        session_id: SessionId | None,
        episode_id: EpisodeId | None,
        doing: str | None = None,
        epoch: str | None = None,
        refuse: bool = False,
        only_session: bool = False,
    ) -> AbstractAsyncContextManager[Admitted]:
        """Serve one request in a block.

        Args:
            session_id: which session it is for, if it says so.
            episode_id: on whose behalf it comes; None: on that of its session.
            doing: for blocker lists, such as the tool's name.
            epoch: which execution of the episode it belongs to, if it says so (HARD-11).
            refuse: the caller would rather be refused than wait (CTL-18).
            only_session: of a seed: its episode has no other session here; those that were restored
                for it and that nobody asked for are let go.

        Raises:
            StaleAttempt: the attempt is refused, or was while the block ran: it was cancelled then.
            AdmissionClosed: see `refuse`.
            SessionConflict: the session is another episode's, or was closed while being seeded.
            NotFound: the session is not known, and the request has no episode.
            RolloutIdRequired: a seed that nobody could record or retire.
            whatever the block raises.

        Cancelled: the request failed; a session that it was seeding is freed.
        """
        return self._desk.request(
            kind,
            session_id=session_id,
            episode_id=episode_id,
            doing=doing or kind.value,
            epoch=epoch,
            refuse=refuse,
            only_session=only_session,
        )

    def checkpoint_session_started(self, session_id: SessionId, episode_id: EpisodeId) -> None:
        """Track a session that another request than a seed began; again does no harm.

        Raises:
            StaleAttempt: the attempt is refused.
            SessionConflict: the session is another episode's.
        """
        self.admission.fences.check(episode_id)
        self._keeper.start(session_id, episode_id)

    def checkpoint_session_ended(self, session_id: SessionId) -> None:
        """Stop to track a session; the server frees by itself what it holds.

        It stays in a checkpoint that is open now, as far as the server still exports it.
        """
        session = self._keeper.sessions.get(session_id)
        if session is not None:
            session.frees = False
            self._keeper.end(session, keep=self.admission.closed)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().run)
            nursery.start_soon(self._keeper.run)

    # -- readiness ----------------------------------------------------------------------------

    def ready(self) -> bool:
        return not (self._desk.tickets.blocking or self._keeper.sessions.blocking)

    def report(self) -> Report:
        tickets, keeper = self._desk.tickets, self._keeper
        unattributed = tickets.unattributed()
        report = report_of(
            keeper.sessions.blocking + tickets.blocking - unattributed,
            chain(keeper.sessions.blockers(), tickets.blockers()),
            {
                "inflight": len(tickets),
                "sessions": keeper.sessions.live(),
                "ended": len(keeper.ended),
                "restored": len(keeper.restored),
                "waiting": self.admission.waiting,
            },
        )
        if unattributed:
            report = attrs.evolve(
                report,
                ready=False,
                blockers=(*report.blockers, f"requests without a rollout: {unattributed}"),
                blocker_count=report.blocker_count + unattributed,
            )
        return report

    def forget(self, rollout_ids: Sequence[RolloutId]) -> None:
        super().forget(rollout_ids)
        self._keeper.forget_retired()

    def status_fields(self) -> dict[str, object]:
        return {
            "mode": self.mode.value,
            "verify": self.verify.value,
            "retired_sessions": len(self._keeper.retired),
            "restored_pending": self._keeper.restored.waiting(BLOCKERS_LISTED_MAX),
            "restored_pending_count": len(self._keeper.restored),
        }

    # -- close and open -----------------------------------------------------------------------

    async def settle(self, settling: Settling) -> None:
        """Learn that it was a prepare that closed admission: a restore does not settle."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._desk.replays_pass = self.admission.closed

    def open(self) -> None:
        self._desk.replays_pass = False
        self._desk.tickets.resumed()
        self._keeper.resumed()
        super().open()

    # -- export and install -------------------------------------------------------------------

    async def export(self, scope: frozenset[CaptureKey] | None) -> Export:
        return await self._keeper.export(scope)

    def unclaimed_outside(self, scope: frozenset[CaptureKey] | None) -> list[EpisodeId]:
        return self._keeper.restored.outside(scope)

    async def release(self, episode_ids: Sequence[EpisodeId]) -> None:
        await self._keeper.release(episode_ids)

    async def free_outside(self, episode_ids: Sequence[CaptureKey]) -> None:
        await self._keeper.free_outside(episode_ids)

    def check_installable(self) -> None:
        live = self._keeper.sessions.live()
        if live or len(self._desk.tickets):
            raise InvalidPhase(
                f"{live} sessions and {len(self._desk.tickets)} requests in flight are in the way: "
                "only a server without live state can be restored"
            )

    async def install(
        self,
        records: MutableSequence[Record],
        scope: Sequence[EpisodeId],
        *,
        execution_epoch: str | None = None,
    ) -> None:
        self.check_installable()
        self._keeper.let_go_ended()
        self._installed = trio.Event()
        try:
            restored = await decode_sessions(records)
            await self._keeper.restore(restored)
            # The instant in which sessions appear and the attempts they come from are refused.
            self.admission.supersede(scope, execution_epoch)
            self._keeper.appear(restored)
        finally:
            self._installed.set()
            self._installed = None

    # -- retire -------------------------------------------------------------------------------

    def refuse(self, episode_ids: Sequence[EpisodeId]) -> None:
        self.admission.refuse(episode_ids)
        for episode_id in episode_ids:
            self._desk.refuse(episode_id)
            self._keeper.refuse(episode_id)

    async def retire(self, episode_id: EpisodeId) -> None:
        """
        Raises:
            InvalidCheckpointState: a session could not be freed; it stays tracked and blocks, and a
                repeated retire tries again.
        """
        while self._installed is not None:
            await self._installed.wait()
            # What the install put in was not there to be refused.
            self._keeper.refuse(episode_id)
        await self._desk.wait_worked(episode_id)
        await self._keeper.retire(episode_id)
        await self._desk.wait_replied(episode_id, CLEANUP_S_MAX)

    def still_running(self, rollout_ids: Sequence[RolloutId]) -> list[EpisodeId]:
        working = set(self._desk.tickets.of(rollout_ids))
        return sorted(working.union(self._keeper.sessions.living_of(rollout_ids)))
