"""The sessions of a resources server, and which of them keep a checkpoint from being ready.

    stage     exported   blocks prepare    left by
    seeding   no         by its request    the end of its seed
    live      yes        if restart_only   verify, close, an export without it, retirement
    ended     yes        no                the next resume, close, retirement, or its time
    leaving   no         no                its state having been freed

Whatever its stage, a session of a retired attempt is not exported, and blocks until it is freed. One
that was seeded while a checkpoint was open is *late*, until resume: no part of that checkpoint (RES-5).

Invariant S1: `Sessions.blocking` is the number of sessions that block, at every instant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

import attrs
import trio

from gymtrio.episodes.blockers import Blocker
from gymtrio.episodes.by_rollout import ByRollout
from gymtrio.ids import CaptureKey, EpisodeId, RolloutId
from gymtrio.participants.resources.hooks import Mode, SessionId
from gymtrio.participants.resources.tickets import Ticket


class Stage(Enum):
    SEEDING = "being seeded"
    LIVE = "live"
    ENDED = "ended, kept for a checkpoint"
    LEAVING = "being freed"


@attrs.define(eq=False)
class Session:
    """One session of one episode."""

    session_id: SessionId
    episode_id: EpisodeId
    stage: Stage
    late: bool = False
    seed: Ticket | None = None
    """The request that makes it, while it is being seeded."""
    refused: bool = False
    """Its attempt was retired."""
    frees: bool = True
    """Its end frees its state by the server's hook."""
    since: float = attrs.field(factory=trio.current_time)
    seeded: trio.Event = attrs.field(factory=trio.Event)
    """Its seed has ended, well or not."""
    gone: trio.Event = attrs.field(factory=trio.Event)
    key: CaptureKey = attrs.field(init=False)

    @key.default
    def _capture_key(self) -> CaptureKey:
        # Made once: an export asks thousands of sessions for it in one stretch of the loop.
        return self.episode_id.capture_key

    def __str__(self) -> str:
        return f"session {self.session_id!r} of {self.episode_id}"


class Sessions:
    """Sessions by id and by rollout."""

    def __init__(self, mode: Mode) -> None:
        self.blocking = 0
        self._mode = mode
        self._by_id: dict[SessionId, Session] = {}
        self._by_rollout: ByRollout[Session] = ByRollout()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        """Over a copy: whoever walks may change stages and remove."""
        return iter(list(self._by_id.values()))

    def get(self, session_id: SessionId | None) -> Session | None:
        return None if session_id is None else self._by_id.get(session_id)

    def add(self, session: Session) -> None:
        assert session.session_id not in self._by_id
        self._by_id[session.session_id] = session
        self._by_rollout.add(session.episode_id, session)
        self.blocking += self._blocks(session)

    def remove(self, session: Session) -> None:
        """Forget a session and tell who waits for that; twice does no harm."""
        if self._by_id.get(session.session_id) is session:
            del self._by_id[session.session_id]
            self._by_rollout.remove(session.episode_id, session)
            self.blocking -= self._blocks(session)
        session.seeded.set()
        session.gone.set()

    @contextmanager
    def counted(self, session: Session) -> Iterator[None]:
        """Keep invariant S1 across one change of a session that is in the table."""
        before = self._blocks(session)
        yield
        self.blocking += self._blocks(session) - before

    def _blocks(self, session: Session) -> bool:
        return session.refused or (
            self._mode is Mode.RESTART_ONLY and session.stage is Stage.LIVE and not session.late
        )

    def resumed(self) -> None:
        """The checkpoint is over: what is late becomes ordinary."""
        for session in self._by_id.values():
            if session.late:
                with self.counted(session):
                    session.late = False

    def live(self) -> int:
        """How many are neither over nor on their way out."""
        over = (Stage.ENDED, Stage.LEAVING)
        return sum(s.refused or s.stage not in over for s in self._by_id.values())

    def exportable(self, scope: frozenset[CaptureKey] | None) -> list[Session]:
        """What a checkpoint of this scope holds, in order of capture key, then of session."""
        chosen = [
            session
            for session in self._by_id.values()
            if (session.stage is Stage.LIVE or session.stage is Stage.ENDED)
            and not (session.late or session.refused)
            and (scope is None or session.key in scope)
        ]
        return sorted(chosen, key=lambda session: (session.key, session.session_id))

    def up_to(self, episode_id: EpisodeId) -> list[Session]:
        """Those of this attempt and the earlier ones of its rollout."""
        return self._by_rollout.up_to(episode_id)

    def living_of(self, rollout_ids: Iterable[RolloutId]) -> list[EpisodeId]:
        """Attempts of these rollouts with sessions that are in use, or refused and not freed."""
        return [
            owner
            for owner, session in self._by_rollout.of(rollout_ids)
            if session.refused or session.stage is not Stage.ENDED
        ]

    def blockers(self) -> Iterator[Blocker]:
        for session in self._by_id.values():
            if self._blocks(session):
                why = "retired, not freed yet" if session.refused else "cannot be exported"
                yield Blocker(
                    session.episode_id, f"session {session.session_id!r}: {why}", session.since
                )
