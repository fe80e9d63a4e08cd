"""The participant of an agent server: its sessions (AGT-1..7).

- G1 Export asks the agent for every session of the scope at once. Nothing changes them meanwhile: the
  gate is closed, and what runs is parked or awaits a model reply at its last boundary. What belongs
  to a session besides is noted in the instant after; only the encoding is left for later.
- G2 Sessions are restored before their fences rise, behind a closed gate, all of them or none.
- G3 Without hooks nothing can be exported: every session blocks from its seed until it is closed or
  retired, so that an agent that takes no part fails closed (AGT-4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from itertools import chain

import trio

from gymtrio.checkpoint.participant import Export
from gymtrio.episodes.blockers import Blocker, report_of
from gymtrio.errors import InvalidCheckpointState, InvalidPhase
from gymtrio.ids import CaptureKey, EpisodeId, RolloutId
from gymtrio.limits import BLOCKERS_LISTED_MAX
from gymtrio.participants.agent.hooks import Hooks, RestoredSession
from gymtrio.participants.agent.record import (
    AgentRecord,
    Noted,
    note,
    restored_session,
    restored_state,
)
from gymtrio.participants.agent.session import AgentSession
from gymtrio.participants.agent.sessions import AgentSessions
from gymtrio.participants.base import ParticipantBase, make_record
from gymtrio.participants.decoding import decode_records
from gymtrio.storage.records import Record
from gymtrio.storage.slices import LoopSlice
from gymtrio.wire.control import Kind, Report


class AgentParticipant(ParticipantBase):
    """Implements `gymtrio.checkpoint.participant.Participant`.

    Args:
        agent: may have the hooks of `gymtrio.participants.agent.hooks.AgentHooks`.

    Raises:
        SettingsError: it has some of them.
    """

    kind = Kind.AGENT

    def __init__(self, instance: str, agent: object) -> None:
        super().__init__(instance)
        self._hooks = Hooks(instance, agent)
        self.sessions = AgentSessions(self.admission, self.changed, self._hooks.retire)

    @property
    def restart_only(self) -> bool:
        return not self._hooks.supported

    # -- readiness ----------------------------------------------------------------------------

    def ready(self) -> bool:
        return not self._blocking()

    def _blocking(self) -> int:
        sessions = self.sessions
        # One that is retired is among those that cannot be exported.
        unexportable = len(sessions.live) - sessions.retired if self.restart_only else 0
        return sessions.blocking + unexportable

    def report(self) -> Report:
        sessions = self.sessions
        return report_of(
            self._blocking(),
            self._blockers(),
            {
                "sessions": len(sessions.live),
                "live": len(sessions.episodes.live),
                "waiting": self.admission.waiting,
                "delivering": len(sessions.deliveries.tickets),
                "restored": sum(1 for _ in self._unclaimed()),
            },
        )

    def _blockers(self) -> Iterator[Blocker]:
        sessions = self.sessions
        now = trio.current_time()
        return chain(
            sessions.episodes.blockers(),
            sessions.tickets.blockers(),
            sessions.deliveries.tickets.blockers(),
            (
                Blocker(s.episode_id, f"{why}: session {s.key}", now)
                for s in sessions.live.values()
                if (why := self._why_blocking(s)) is not None
            ),
        )

    def _why_blocking(self, session: AgentSession) -> str | None:
        if session.retired:
            return "retired, not freed yet"
        return "cannot be exported" if self.restart_only else None

    def status_fields(self) -> dict[str, object]:
        waiting = sorted({s.episode_id.capture_key for s in self._unclaimed()})
        return {
            "restart_only": self.restart_only,
            "restored_pending": waiting[:BLOCKERS_LISTED_MAX],
            "restored_pending_count": len(waiting),
        }

    def _unclaimed(self) -> Iterator[AgentSession]:
        return (session for session in self.sessions.live.values() if session.unclaimed)

    def close(self) -> None:
        super().close()
        self.sessions.episodes.close()

    def open(self) -> None:
        super().open()
        self.sessions.episodes.open()

    # -- commit -------------------------------------------------------------------------------

    async def export(self, scope: frozenset[CaptureKey] | None) -> Export:
        await trio.lowlevel.checkpoint()
        if not self.ready():
            raise InvalidPhase("no longer ready: " + ", ".join(self.report().blockers))
        wanted = {
            key: session
            for key, session in sorted(self.sessions.live.items())
            if scope is None or session.episode_id.capture_key in scope
        }
        states = await self._hooks.export([*wanted]) if wanted else {}
        # One that was retired meanwhile may be missing: its agent has freed it.
        missing = [k for k, s in wanted.items() if k not in states and not s.retired]
        if missing:
            raise InvalidCheckpointState(
                f"{self.instance} did not export sessions "
                + ", ".join(f"{k} of {wanted[k].episode_id}" for k in missing[:BLOCKERS_LISTED_MAX])
            )
        noted: dict[EpisodeId, list[Noted]] = {}
        slices = LoopSlice()
        await slices.pause()
        for key, session in wanted.items():
            if key in states and not session.retired:
                noted.setdefault(session.episode_id, []).append(note(session, states[key]))
            await slices.turn()
        by_key = {episode_id.capture_key: episode_id for episode_id in noted}
        keys = tuple(sorted(by_key))
        return Export(
            records=_records((by_key[key], noted[by_key[key]]) for key in keys), episode_ids=keys
        )

    def unclaimed_outside(self, scope: frozenset[CaptureKey] | None) -> list[EpisodeId]:
        if scope is None:
            return []
        waiting = {s.episode_id for s in self._unclaimed()}
        waiting -= {s.episode_id for s in self.sessions.live.values() if not s.unclaimed}
        return sorted(e for e in waiting if e.capture_key not in scope)

    async def release(self, episode_ids: Sequence[EpisodeId]) -> None:
        await trio.lowlevel.checkpoint()
        for episode_id in episode_ids:
            for owner, session in [*self.sessions.by_rollout.of([episode_id.rollout_id])]:
                if owner == episode_id and session.unclaimed:
                    await self.sessions.free(session)

    async def free_outside(self, episode_ids: Sequence[CaptureKey]) -> None:
        exported = frozenset(episode_ids)
        keys = sorted(
            key
            for key, session in self.sessions.live.items()
            if session.episode_id.capture_key in exported and not session.retired
        )
        if keys:
            await self._hooks.free_outside(keys)

    # -- restore ------------------------------------------------------------------------------

    def check_installable(self) -> None:
        sessions = self.sessions
        in_the_way = [
            *(f"session {key} is live" for key in sessions.live),
            *(f"{b.episode_id}: {b.doing}" for b in sessions.tickets.blockers()),
            *(f"{b.episode_id}: {b.doing}" for b in sessions.deliveries.tickets.blockers()),
        ]
        if in_the_way:
            raise InvalidPhase("in the way: " + ", ".join(in_the_way[:BLOCKERS_LISTED_MAX]))

    async def install(
        self,
        records: MutableSequence[Record],
        scope: Sequence[EpisodeId],
        *,
        execution_epoch: str | None = None,
    ) -> None:
        read = await decode_records(AgentRecord, records)
        if read and self.restart_only:
            raise InvalidCheckpointState(
                f"{self.instance} cannot restore sessions: its agent has no hooks"
            )
        entered: list[AgentSession] = []
        states: list[RestoredSession] = []
        slices = LoopSlice()
        for episode_id, record in read:
            replacement = episode_id.next_attempt()
            for stored in record.sessions:
                entered.append(await restored_session(stored, replacement, slices))
                states.append(await restored_state(stored, replacement, slices))
            await slices.turn()
        self.check_installable()
        if states:
            await self._hooks.restore(states)
        # One instant from here on. Nothing became live meanwhile, since the gate is closed.
        self.admission.supersede(scope, execution_epoch)
        self.sessions.put(entered)

    # -- retire -------------------------------------------------------------------------------

    def refuse(self, episode_ids: Sequence[EpisodeId]) -> None:
        self.admission.refuse(episode_ids)
        for episode_id in episode_ids:
            self.sessions.refuse(episode_id)

    async def retire(self, episode_id: EpisodeId) -> None:
        await self.sessions.retire(episode_id)

    def still_running(self, rollout_ids: Sequence[RolloutId]) -> list[EpisodeId]:
        sessions = self.sessions
        found = {
            *sessions.episodes.of(rollout_ids),
            *sessions.tickets.of(rollout_ids),
            *(owner for owner, _ in sessions.by_rollout.of(rollout_ids)),
        }
        return sorted(found)


def _records(
    all_noted: Iterable[tuple[EpisodeId, list[Noted]]],
) -> Iterator[Record | None]:
    for episode_id, noted in all_noted:
        sessions = []
        for make in noted:
            sessions.append((yield from make()))
        yield make_record(episode_id, AgentRecord(sessions=tuple(sessions)))
