"""The life of sessions: begun, claimed after a restore, ended, freed.

- S2 A session is in the table from the admission of its seed until its state was freed, so that a
  retirement finds whatever a seed may have made.
- S3 A session is freed by one task at a time: an end by `run`, what was left out of a commit by
  `release`, a retired one by `retire`. Everybody else waits until it is gone.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import trio

from gymtrio.checkpoint.participant import Export
from gymtrio.episodes.admission import Admission
from gymtrio.episodes.signal import Signal
from gymtrio.errors import InvalidCheckpointState, SessionConflict
from gymtrio.ids import CaptureKey, EpisodeId
from gymtrio.limits import CLEANUP_S_MAX, LEASE_GRACE_S_DEFAULT
from gymtrio.participants.resources.hooks import Hooks, Mode, SessionId
from gymtrio.participants.resources.record import RestoredSession, encode_sessions, named
from gymtrio.participants.resources.sessions import Session, Sessions, Stage
from gymtrio.participants.restored import Restored

LOG: Final = logging.getLogger(__name__)

ENDED_KEPT_S: Final = LEASE_GRACE_S_DEFAULT
"""How long a session outlives its replayed verify if no checkpoint comes. One that closed the caller's
server before the verify reaches this server sooner, or has lost its lease there."""


class Keeper:
    """Keeps the sessions of one server.

    Args:
        admission: the server's gate.
        changed: rung when a session stops to block.
    """

    def __init__(self, mode: Mode, hooks: Hooks, admission: Admission, changed: Signal) -> None:
        self.sessions = Sessions(mode)
        self.restored: Restored[set[SessionId]] = Restored()
        """Restored sessions that no request has asked for yet."""
        self.ended: dict[SessionId, float] = {}
        """Sessions in stage `ENDED`, oldest first, and until when they are kept."""
        self.retired: dict[SessionId, EpisodeId] = {}
        """Freed by a retirement: a late request that carries only its session is refused as stale."""
        self._mode = mode
        self._hooks = hooks
        self._admission = admission
        self._changed = changed
        self._leaving: deque[Session] = deque()
        self._work = Signal()

    def owner(self, session_id: SessionId | None) -> EpisodeId | None:
        """Whose session it is, or was until it was retired."""
        if session_id is None:
            return None
        session = self.sessions.get(session_id)
        return session.episode_id if session is not None else self.retired.get(session_id)

    # -- begin and end ------------------------------------------------------------------------

    def start(self, session_id: SessionId, episode_id: EpisodeId) -> None:
        """
        Raises:
            SessionConflict: it is another episode's.
        """
        session = self.sessions.get(session_id)
        if session is None:
            self.sessions.add(Session(session_id, episode_id, Stage.LIVE))
        elif session.episode_id != episode_id:
            raise SessionConflict(f"{session} was asked for by {episode_id}")
        else:
            self.claim(session)

    def claim(self, session: Session) -> None:
        """A request asked for it: it is not pending any more."""
        waiting = self.restored.peek(session.episode_id)
        if waiting is not None:
            waiting.discard(session.session_id)
            if not waiting:
                self.restored.claim(session.episode_id)

    def seeded(self, session: Session) -> None:
        with self.sessions.counted(session):
            session.stage = Stage.LIVE
        session.seed = None
        session.seeded.set()

    def end(self, session: Session, *, keep: bool) -> None:
        """The session is over for its caller.

        Args:
            keep: a checkpoint that is open here, or already at the caller's, may need it still.
        """
        if session.stage is not Stage.LIVE or session.refused:
            return
        if keep and self._mode is Mode.EXPORTED:
            session.stage = Stage.ENDED
            self.ended[session.session_id] = trio.current_time() + ENDED_KEPT_S
            self._work.notify()
        else:
            self.let_go(session)

    def let_go(self, session: Session) -> None:
        """Have `run` free it, unless a retirement does."""
        self.ended.pop(session.session_id, None)
        session.seed = None
        session.seeded.set()
        if session.refused:
            return
        if not session.frees:
            self.remove(session)
            return
        self._leave(session)
        self._leaving.append(session)
        self._work.notify()

    def let_go_left_over(
        self, episode_id: EpisodeId | None, session_id: SessionId | None, *, keep: bool
    ) -> None:
        """Let go what was restored for an attempt that has started over since (STEP-4).

        Args:
            session_id: the only session that it has here from now on.
            keep: a checkpoint is open: what it is made of must not change before resume.
        """
        pending = None if episode_id is None else self.restored.peek(episode_id)
        for other in sorted(pending or ()):
            session = self.sessions.get(other)
            if session is not None and other != session_id:
                self.claim(session)
                self.end(session, keep=keep)

    def _leave(self, session: Session) -> None:
        with self.sessions.counted(session):
            session.stage = Stage.LEAVING

    def remove(self, session: Session) -> None:
        """Its state was freed, or there never was any."""
        self.claim(session)
        self.ended.pop(session.session_id, None)
        self.sessions.remove(session)
        self._changed.notify()

    def resumed(self) -> None:
        """The checkpoint is over, and with it what was kept or left out for its sake."""
        self.sessions.resumed()
        self.let_go_ended()
        self.forget_retired()

    def let_go_ended(self) -> None:
        for session_id in list(self.ended):
            self._let_go_by_id(session_id)

    def _let_go_by_id(self, session_id: SessionId) -> None:
        session = self.sessions.get(session_id)
        assert session is not None
        self.let_go(session)

    def forget_retired(self) -> None:
        """Drop the memory of sessions whose marks were forgotten."""
        for session_id, episode_id in list(self.retired.items()):
            if not self._admission.fences.is_stale(episode_id):
                del self.retired[session_id]

    async def run(self) -> None:
        """Free what is over; ends when cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                look_again = self._expire()
                while self._leaving:
                    nursery.start_soon(self._free, self._leaving.popleft())
                with trio.move_on_at(look_again):
                    await self._work.wait()

    def _expire(self) -> float:
        """Let go what was kept long enough, and say when to look again."""
        while self.ended and not self._admission.closed:
            session_id, kept_until = next(iter(self.ended.items()))
            if kept_until > trio.current_time():
                return kept_until
            self._let_go_by_id(session_id)
        # A resume lets all of them go, and rings.
        return math.inf

    async def _free(self, session: Session) -> None:
        try:
            await self._hooks.retire(session.session_id, str(session))
        except InvalidCheckpointState as error:
            # Nobody waits for this who could be told, and nobody will ask for the session again.
            LOG.warning("%s; what it holds may be left over", error.detail)
        finally:
            self.remove(session)

    # -- checkpoints --------------------------------------------------------------------------

    async def export(self, scope: frozenset[CaptureKey] | None) -> Export:
        """Ask the server for its states; those that it leaves out are gone already (RES-2)."""
        sessions = self.sessions.exportable(scope) if self._mode is Mode.EXPORTED else []
        if not sessions:
            return Export(records=(), episode_ids=())
        # Between stretches of some milliseconds for thousands of sessions (STO-5).
        await trio.lowlevel.checkpoint()
        states = await self._hooks.export([s.session_id for s in sessions], named(sessions))
        await trio.lowlevel.checkpoint()
        # A retirement may have come in between.
        sessions = [s for s in sessions if not s.refused and not s.gone.is_set()]
        for session in sessions:
            if session.session_id not in states:
                self.remove(session)
        kept = [session for session in sessions if session.session_id in states]
        return Export(
            records=encode_sessions(kept, states),
            episode_ids=tuple(dict.fromkeys(session.key for session in kept)),
        )

    async def release(self, episode_ids: Sequence[EpisodeId]) -> None:
        """Free restored sessions that no request asked for.

        Cancelled: those of the remaining episodes stay as they are.
        """
        for episode_id in episode_ids:
            await trio.lowlevel.checkpoint_if_cancelled()
            for session_id in sorted(self.restored.claim(episode_id) or ()):
                session = self.sessions.get(session_id)
                if session is None or session.refused or session.stage is not Stage.LIVE:
                    continue
                self._leave(session)
                await self._free_shielded(session)

    async def free_outside(self, keys: Sequence[CaptureKey]) -> None:
        """The deployment ends: have the server free what these sessions hold outside (CTL-13)."""
        sessions = self.sessions.exportable(frozenset(keys))
        if sessions and self._mode is Mode.EXPORTED:
            await self._hooks.free_outside([s.session_id for s in sessions], named(sessions))

    async def _free_shielded(self, session: Session) -> None:
        """Once begun it is not left halfway, nor waited for without end."""
        deadline = trio.current_time() + CLEANUP_S_MAX
        with trio.CancelScope(shield=True, deadline=deadline) as scope:
            await self._free(session)
        if scope.cancelled_caught:
            LOG.warning("%s was not freed within %g s", session, CLEANUP_S_MAX)

    async def restore(self, restored: Sequence[RestoredSession]) -> None:
        """Hand states to the server; `appear` comes next, in the same instant.

        Raises:
            InvalidCheckpointState: the server took nothing in.
        """
        # One that has ended in this process may have the id of one that comes back.
        for session in self.sessions:
            await session.gone.wait()
        if restored and self._mode is not Mode.EXPORTED:
            raise InvalidCheckpointState(
                f"the server is {self._mode.value}, but the checkpoint holds {named(restored)}"
            )
        if restored:
            states = {entry.session_id: entry.state for entry in restored}
            await self._hooks.restore(states, named(restored))

    def appear(self, restored: Iterable[RestoredSession]) -> None:
        """Put restored sessions under the attempts that continue them."""
        pending: dict[EpisodeId, set[SessionId]] = {}
        for entry in restored:
            episode_id = entry.episode_id.next_attempt()
            self.retired.pop(entry.session_id, None)
            self.sessions.add(Session(entry.session_id, episode_id, Stage.LIVE))
            pending.setdefault(episode_id, set()).add(entry.session_id)
        self.restored.put(pending.items())

    # -- retire -------------------------------------------------------------------------------

    def refuse(self, episode_id: EpisodeId) -> None:
        for session in self.sessions.up_to(episode_id):
            with self.sessions.counted(session):
                session.refused = True

    async def retire(self, episode_id: EpisodeId) -> None:
        """Free the sessions of this attempt and the earlier ones.

        Raises:
            InvalidCheckpointState: it failed; the session stays, and a repeated call tries again.
        """
        for session in self.sessions.up_to(episode_id):
            if session.stage is Stage.LEAVING:
                await session.gone.wait()
            else:
                await self._hooks.retire(session.session_id, str(session))
                self.remove(session)
            self.retired[session.session_id] = session.episode_id
