"""Where requests are admitted, and what their outcome does to sessions (RES-3, RES-5).

- Q1 What is decided about a request, and the ticket it gets, are one stretch without an await (HARD-1).
  Who had to wait decides again from the start: duplicates join the first one so.
- Q2 A ticket is given back exactly once, when its reply has left or there will be none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from gymtrio.episodes.admission import Admission
from gymtrio.episodes.episode import StepMode
from gymtrio.episodes.signal import Signal
from gymtrio.errors import NotFound, RolloutIdRequired, SessionConflict, StaleAttempt
from gymtrio.ids import EpisodeId
from gymtrio.participants.resources.hooks import Mode, SessionId
from gymtrio.participants.resources.keeper import Keeper
from gymtrio.participants.resources.sessions import Session, Stage
from gymtrio.participants.resources.tickets import RequestKind, Ticket, Tickets


class Admitted:
    """A request inside `Desk.request`."""

    def __init__(self, desk: Desk, ticket: Ticket | None, *, already_seeded: bool) -> None:
        self._desk = desk
        self._ticket = ticket
        self.already_seeded = already_seeded
        """A seed of a session that exists: answer as the first time, and do nothing."""

    @property
    def stale(self) -> bool:
        """A close by a retired attempt or a superseded execution: answer that it is closed, and do
        nothing. What it held is freed by the retirement, and the session may be another's by now."""
        return self._ticket is None

    @property
    def episode_id(self) -> EpisodeId | None:
        """Whose request it is; None: a stateless server does not need to know."""
        return None if self._ticket is None else self._ticket.episode_id

    def succeeded(self) -> None:
        """The request is answered 2xx; a close has freed what its session held.

        One instant. A session whose attempt was retired meanwhile is left to the retirement.
        """
        if self._ticket is not None:
            self._desk.succeeded(self._ticket)

    def until_sent(self) -> Callable[[bool], None]:
        """Keep the request in flight beyond the block, until its reply has left.

        Returns:
            What to call once, with whether the reply was sent.
        """
        desk, ticket = self._desk, self._ticket
        if ticket is None:
            return lambda sent: None
        ticket.replying = True
        return lambda sent: desk.replied(ticket)


class Desk:
    """Admits the requests of one server.

    Args:
        changed: rung when a ticket is given back.
    """

    def __init__(
        self,
        mode: Mode,
        verify: StepMode,
        admission: Admission,
        keeper: Keeper,
        changed: Signal,
    ) -> None:
        self.tickets = Tickets()
        self.replays_pass = False
        """A checkpoint is being prepared: what may run again is admitted. Not while a server is
        restored, or waits for that (HARD-3)."""
        self._mode = mode
        self._verify = verify
        self._admission = admission
        self._keeper = keeper
        self._changed = changed

    @asynccontextmanager
    async def request(
        self,
        kind: RequestKind,
        *,
        session_id: SessionId | None,
        episode_id: EpisodeId | None,
        doing: str,
        epoch: str | None,
        refuse: bool,
        only_session: bool = False,
    ) -> AsyncIterator[Admitted]:
        """See `ResourcesParticipant.request`."""
        ticket, already_seeded = await self._admit(
            kind, session_id, episode_id, doing, epoch, refuse
        )
        if only_session and kind is RequestKind.SEED and ticket is not None:
            # Still the instant of admission.
            self._keeper.let_go_left_over(ticket.episode_id, session_id, keep=ticket.late)
        admitted = Admitted(self, ticket, already_seeded=already_seeded)
        if ticket is None:
            yield admitted
            return
        handed_over = False
        try:
            with ticket.scope:
                yield admitted
            if ticket.refusal is not None:
                raise ticket.refusal
            handed_over = ticket.replying
        finally:
            self._worked(ticket)
            if not handed_over:
                self.replied(ticket)

    async def _admit(
        self,
        kind: RequestKind,
        session_id: SessionId | None,
        episode_id: EpisodeId | None,
        doing: str,
        epoch: str | None,
        refuse: bool,
    ) -> tuple[Ticket | None, bool]:
        """Wait until the request may run.

        Returns:
            Its ticket, or None for a stale close; and whether its session exists.
        """
        await trio.lowlevel.checkpoint()
        while True:
            owner = episode_id or self._keeper.owner(session_id)
            try:
                if not self._passes(kind):
                    await self._admission.enter(owner, epoch=epoch, refuse=refuse)
                elif owner is not None:
                    self._admission.fences.check(owner, epoch)
            except StaleAttempt:
                if kind is RequestKind.CLOSE:
                    return None, False
                raise
            # Q1: from here to the ticket nothing else runs.
            if owner != (episode_id or self._keeper.owner(session_id)):
                continue
            session = self._keeper.sessions.get(session_id)
            settled = self._unsettled(kind, session)
            if settled is None:
                return self._enter(kind, session_id, session, owner, doing), session is not None
            await settled.wait()

    def _passes(self, kind: RequestKind) -> bool:
        """Whether it is admitted although a checkpoint is open."""
        if not (self._admission.closed and self.replays_pass):
            return False
        return kind is RequestKind.SEED or self._may_run_again(kind)

    def _may_run_again(self, kind: RequestKind) -> bool:
        return kind is RequestKind.VERIFY and self._verify is StepMode.REPLAY

    @staticmethod
    def _unsettled(kind: RequestKind, session: Session | None) -> trio.Event | None:
        """What has to happen before this request can know what its session is."""
        if session is None:
            return None
        if session.stage is Stage.LEAVING:
            return session.gone
        if session.stage is Stage.SEEDING and kind is RequestKind.SEED:
            return session.seeded
        if session.seed is not None and kind is RequestKind.CLOSE:
            session.seed.stop(SessionConflict(f"{session} was closed while it was being seeded"))
            return session.gone
        return None

    def _enter(
        self,
        kind: RequestKind,
        session_id: SessionId | None,
        session: Session | None,
        owner: EpisodeId | None,
        doing: str,
    ) -> Ticket:
        """The instant of admission."""
        if session is not None and session.episode_id != owner:
            raise SessionConflict(f"{session} was asked for by {owner}")
        if owner is None and self._mode is not Mode.STATELESS:
            _refuse_unowned(kind, session_id)
        ticket = Ticket(
            kind=kind,
            episode_id=owner,
            session_id=session_id,
            doing=doing,
            replayed=self._may_run_again(kind),
            late=self._admission.closed,
        )
        self.tickets.add(ticket)
        if session is not None:
            self._keeper.claim(session)
        elif kind is RequestKind.SEED and session_id is not None and owner is not None:
            self._keeper.sessions.add(
                Session(session_id, owner, Stage.SEEDING, late=ticket.late, seed=ticket)
            )
        return ticket

    def succeeded(self, ticket: Ticket) -> None:
        session = self._keeper.sessions.get(ticket.session_id)
        if session is None or ticket.refusal is not None:
            return
        if session.seed is ticket:
            self._keeper.seeded(session)
        elif ticket.kind is RequestKind.VERIFY:
            self._keeper.end(session, keep=ticket.replayed)
        elif ticket.kind is RequestKind.CLOSE and not session.refused:
            self._keeper.remove(session)

    def _worked(self, ticket: Ticket) -> None:
        """The work of a request has ended."""
        session = self._keeper.sessions.get(ticket.session_id)
        if session is not None and session.seed is ticket:
            # A seed that failed may have made something all the same.
            self._keeper.let_go(session)
        ticket.worked.set()

    def replied(self, ticket: Ticket) -> None:
        self.tickets.remove(ticket)
        self._changed.notify()

    def refuse(self, episode_id: EpisodeId) -> None:
        """Begin to stop what works for this attempt and the earlier ones, their closes apart."""
        for ticket in self.tickets.up_to(episode_id):
            if ticket.kind is not RequestKind.CLOSE and ticket.refuse(
                StaleAttempt(f"{ticket.episode_id} was retired")
            ):
                self._admission.wakes.add(ticket.scope.cancel)

    async def wait_worked(self, episode_id: EpisodeId) -> None:
        """Wait until nothing works for this attempt and the earlier ones."""
        for ticket in self.tickets.up_to(episode_id):
            await ticket.worked.wait()

    async def wait_replied(self, episode_id: EpisodeId, timeout_s: float) -> None:
        """Wait for the replies, too; one that is not taken in time does not count any more."""
        tickets = self.tickets.up_to(episode_id)
        if tickets:
            with trio.move_on_after(timeout_s):
                for ticket in tickets:
                    await ticket.replied.wait()
        for ticket in tickets:
            self.replied(ticket)


def _refuse_unowned(kind: RequestKind, session_id: SessionId | None) -> None:
    if kind is RequestKind.SEED or session_id is None:
        raise RolloutIdRequired(
            f"{kind.value} without a rollout id: it could be neither recorded nor retired"
        )
    if kind is not RequestKind.CLOSE:
        raise NotFound(f"session {session_id!r} is not known here")
