"""The sessions of one agent server: seed, activate, close, free (AGT-1, AGT-6, AGT-7).

- A1 A session is entered, and an activation begun, in the instant of its admission.
- A2 Of one session at most one activation, one close and one release runs; whoever comes second waits
  for the first or is refused.
- A3 What seeds, closes or delivers blocks a checkpoint; an activation blocks as its steps say.
- A4 A session is dropped only after what it holds was freed: until then it is tracked and blocks.

The sessions exist with checkpointing off as well; then the gate is simply never closed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias

import trio

from gymtrio.episodes.admission import Admission
from gymtrio.episodes.by_rollout import ByRollout
from gymtrio.episodes.episode import Episode, Episodes
from gymtrio.episodes.signal import Signal
from gymtrio.episodes.tickets import Tickets
from gymtrio.errors import GymtrioError, NotFound, SessionConflict, StaleAttempt
from gymtrio.ids import EpisodeId
from gymtrio.limits import CLEANUP_S_MAX
from gymtrio.participants.agent.session import Activation, AgentSession, Completed
from gymtrio.participants.decoding import Boundaries
from gymtrio.participants.deliveries import Deliveries

LOG: Final = logging.getLogger(__name__)

CLOSED_REMEMBERED_MAX: Final = 1024
"""Closed sessions whose receipt is kept: a retry after a lost reply comes within seconds."""

Reply: TypeAlias = dict[str, object]
Work: TypeAlias = Callable[[Episode, int], Awaitable[Reply]]


class AgentSessions:
    """Every session that this process holds.

    Args:
        free: gives back what a session holds in the agent; idempotent, may raise a `GymtrioError`.
    """

    def __init__(
        self, admission: Admission, changed: Signal, free: Callable[[str], Awaitable[None]]
    ) -> None:
        self.admission = admission
        self.episodes = Episodes(admission, changed)
        """Running activations, by session key."""
        self.live: dict[str, AgentSession] = {}
        self.by_rollout: ByRollout[AgentSession] = ByRollout()
        self.retired = 0
        """How many of `live` are refused and not freed yet."""
        self.tickets = Tickets(changed)
        """Seeds and closes under way."""
        self.deliveries = Deliveries(changed)
        self._boundaries = Boundaries()
        self._changed = changed
        self._free = free
        self._seeding: dict[str, trio.Event] = {}
        self._closed: dict[tuple[EpisodeId, str], Reply | None] = {}
        """Receipts by attempt and key, oldest first; None: closed before its seed came."""

    @property
    def blocking(self) -> int:
        """How much keeps a checkpoint from being ready; O(1)."""
        in_flight = len(self.tickets) + len(self.deliveries.tickets)
        return self.episodes.blocking + in_flight + self.retired

    # -- seed ---------------------------------------------------------------------------------

    async def seed(
        self,
        episode_id: EpisodeId,
        key: str,
        build: Callable[[], Awaitable[None]],
        *,
        only: bool = False,
        epoch: str | None = None,
        refuse: bool = False,
    ) -> None:
        """Make a session, or find the one that an earlier delivery of the same seed made.

        Args:
            build: makes it in the agent; when it raises or is cancelled, nothing of it is left.
            only: the attempt has no other session here; those that were restored for it and that
                nobody asked for are freed, as far as that succeeds.
            epoch: here and below: the execution that the caller belongs to, if it says so.

        Raises:
            StaleAttempt: the attempt or its execution is refused; what was built is freed again.
            AdmissionClosed: `refuse`, and a checkpoint is open.
            SessionConflict: the key belongs to another attempt, or was closed already.
            whatever `build` raises.

        Cancelled: the session was made, or nothing was.
        """
        await self._enter(episode_id, key, epoch, refuse)
        session = self.live.get(key)
        if session is not None:
            self._check_owner(session, episode_id)
            session.unclaimed = False
            if only:
                await self._free_left_over(episode_id, key)
            return
        if (episode_id, key) in self._closed:
            raise SessionConflict(f"session {key} was closed before this seed of it came")
        with self.tickets.take(episode_id, f"seeding session {key}"):
            built = self._seeding[key] = trio.Event()
            try:
                await build()
                await self._check_not_refused(episode_id, key)
                self.put([AgentSession(key=key, episode_id=episode_id)])
            finally:
                del self._seeding[key]
                built.set()
            if only:
                await self._free_left_over(episode_id, key)

    async def _free_left_over(self, episode_id: EpisodeId, key: str) -> None:
        """Free what an earlier execution of this attempt has left; it started over since (STEP-4)."""
        for session in self.by_rollout.up_to(episode_id):
            if session.episode_id == episode_id and session.unclaimed and session.key != key:
                doing = f"freeing session {session.key}"
                with self.tickets.take(episode_id, doing), trio.move_on_after(CLEANUP_S_MAX):
                    try:
                        await self.free(session)
                    except GymtrioError as error:
                        # Still restored: in the next checkpoint, and freed with what that leaves out.
                        LOG.warning("session %s is left over: %s", session.key, error)

    async def _enter(
        self, episode_id: EpisodeId, key: str, epoch: str | None, refuse: bool
    ) -> None:
        """Come through the gate at a moment when no seed of this key is under way."""
        await self.admission.enter(episode_id, epoch=epoch, refuse=refuse)
        while key in self._seeding:
            await self._seeding[key].wait()
            await self.admission.enter(episode_id, epoch=epoch, refuse=refuse)

    async def _check_not_refused(self, episode_id: EpisodeId, key: str) -> None:
        if self.admission.fences.is_stale(episode_id):
            # The retirement waits for our ticket, so this is freed before it answers.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLEANUP_S_MAX):
                await self._free(key)
            self.admission.fences.check(episode_id)

    def put(self, sessions: list[AgentSession]) -> None:
        """Enter sessions, in one instant."""
        for session in sessions:
            self.live[session.key] = session
            self.by_rollout.add(session.episode_id, session)

    # -- activations --------------------------------------------------------------------------

    async def activate(
        self,
        episode_id: EpisodeId,
        key: str,
        work: Work,
        *,
        index: int | None,
        request_digest: str,
        epoch: str | None = None,
        refuse: bool = False,
    ) -> Reply:
        """Run the next activation of a session, or answer a completed one from its stored reply.

        Whatever comes of it but a cancellation, the caller calls `deliveries.deliver(key)` in the same
        instant.

        Args:
            work: is given its steps and its index; continues at `continuation` of the steps.
            index: as the caller counts activations, from 0; None: the next.

        Raises:
            StaleAttempt: the attempt is refused, or was retired while it ran.
            NotFound: there is no such session.
            SessionConflict: it belongs to another attempt, or was closed while this ran.
            whatever `AgentSession.reply_of` and `work` raise.

        Cancelled: nothing of it runs any more.
        """
        at = self._boundaries.at(f"boundary of session {key}")
        while True:
            await self.admission.enter(episode_id, epoch=epoch, refuse=refuse)
            session = self._find(episode_id, key)
            reply = session.reply_of(index, request_digest)
            waiting = session.interrupted
            if not await at.read_ahead(None if waiting is None else waiting.boundary):
                break
        was_unclaimed, session.unclaimed = session.unclaimed, False
        if reply is not None:
            self.deliveries.ended(episode_id, key)
            return reply
        boundary = at.value_of(None if waiting is None else waiting.boundary)
        session.interrupted = None
        running = Activation(index=session.next_index, request_digest=request_digest)
        session.activation = running
        try:
            reply = await self.episodes.run(
                episode_id,
                partial(_activation, session, running, work),
                name=key,
                boundary=boundary,
            )
        except StaleAttempt:
            # Retired: nobody waits for what it answers.
            raise
        except BaseException as error:
            assert running.episode is not None
            if running.episode.last_step is None:
                # Given back: from its input it would do again what was done before (I5, I14).
                session.interrupted, session.unclaimed = waiting, was_unclaimed
            if isinstance(error, Exception):
                self.deliveries.ended(episode_id, key)
            raise
        finally:
            session.activation = None
        self.deliveries.ended(episode_id, key)
        return reply

    # -- close --------------------------------------------------------------------------------

    async def close(
        self,
        episode_id: EpisodeId,
        key: str,
        finish: Callable[[], Awaitable[Reply]],
        *,
        epoch: str | None = None,
        refuse: bool = False,
    ) -> Reply | None:
        """End a session: stop its activation, wait until it has stopped, then free it (AGT-7).

        Args:
            finish: frees the session in the agent and gives the receipt.

        Returns:
            The receipt, also when it is asked for again; None: there never was such a session, and a
            seed of it that comes late will be refused.

        Raises:
            StaleAttempt: the attempt is refused; its retirement frees the session.
            SessionConflict: it belongs to another attempt.
            whatever `finish` raises; the session is still there.

        Cancelled: its activation is stopping or has stopped; the session may still be there.
        """
        while True:
            await self._enter(episode_id, key, epoch, refuse)
            session = self.live.get(key)
            if session is None:
                return self._remember(episode_id, key, self._closed.get((episode_id, key)))
            self._check_owner(session, episode_id)
            if session.closing is None:
                break
            await session.closing.wait()
        session.unclaimed = False
        session.closing = trio.Event()
        with self.tickets.take(episode_id, f"closing session {key}"):
            try:
                await _stop(session)
                self.admission.fences.check(episode_id)
                receipt = await finish()
                self.drop(session)
                return self._remember(episode_id, key, receipt)
            finally:
                session.closing.set()
                session.closing = None

    def _remember(self, episode_id: EpisodeId, key: str, receipt: Reply | None) -> Reply | None:
        # By attempt as well: a restore from before the close brings the session back.
        self._closed.pop((episode_id, key), None)
        self._closed[episode_id, key] = receipt
        if len(self._closed) > CLOSED_REMEMBERED_MAX:
            del self._closed[next(iter(self._closed))]
        return receipt

    # -- retire and free ----------------------------------------------------------------------

    def refuse(self, episode_id: EpisodeId) -> None:
        """Begin to stop what runs of this attempt and the earlier ones; the fence stands already."""
        for session in self.by_rollout.up_to(episode_id):
            if not session.retired:
                session.retired = True
                self.retired += 1
        self.episodes.retire_up_to(episode_id)

    async def retire(self, episode_id: EpisodeId) -> None:
        """Wait until nothing of this attempt and the earlier ones runs, and free their sessions.

        Raises:
            GymtrioError: one could not be freed; it stays tracked and blocks.
        """
        await self.episodes.wait_up_to(episode_id)
        await self.tickets.wait_up_to(episode_id)
        await self.deliveries.wait_up_to(episode_id)
        for session in self.by_rollout.up_to(episode_id):
            await self.free(session)

    async def free(self, session: AgentSession) -> None:
        """Give back what a session holds, and drop it. A second call waits for the first.

        Raises:
            GymtrioError: the agent could not free it; it stays tracked.
        """
        while session.freeing is not None:
            await session.freeing.wait()
        if self.live.get(session.key) is not session:
            return
        session.freeing = trio.Event()
        try:
            await self._free(session.key)
            self.drop(session)
        finally:
            session.freeing.set()
            session.freeing = None

    def drop(self, session: AgentSession) -> None:
        if self.live.get(session.key) is session:
            del self.live[session.key]
            self.by_rollout.remove(session.episode_id, session)
            self.retired -= session.retired
            self._changed.notify()

    # -- shared -------------------------------------------------------------------------------

    def owner(self, key: str) -> EpisodeId:
        """The attempt that a session belongs to.

        Raises:
            NotFound: there is no such session.
        """
        if key not in self.live:
            raise NotFound(_no_session(key))
        return self.live[key].episode_id

    def _find(self, episode_id: EpisodeId, key: str) -> AgentSession:
        session = self.live.get(key)
        if session is None:
            raise NotFound(_no_session(key))
        self._check_owner(session, episode_id)
        if session.closing is not None:
            raise SessionConflict(f"session {key} is being closed")
        return session

    @staticmethod
    def _check_owner(session: AgentSession, episode_id: EpisodeId) -> None:
        if session.episode_id != episode_id:
            raise SessionConflict(
                f"session {session.key} belongs to {session.episode_id}, not to {episode_id}"
            )


def _no_session(key: str) -> str:
    return f"no agent session {key}: it was never opened, or is closed"


async def _activation(
    session: AgentSession,
    running: Activation,
    work: Work,
    episode: Episode,
) -> Reply:
    running.episode = episode
    reply = await work(episode, running.index)
    session.completed = Completed(
        index=running.index, request_digest=running.request_digest, reply=reply
    )
    # From here on a repetition is answered from the stored reply; while a checkpoint is open the
    # reply waits here, so that none leaves before resume (I2).
    await episode.boundary(None)
    return reply


async def _stop(session: AgentSession) -> None:
    running = session.activation
    if running is not None:
        assert running.episode is not None
        running.episode.stop(SessionConflict(f"session {session.key} was closed"))
        await running.episode.ended.wait()
