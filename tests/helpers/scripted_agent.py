"""An agent whose sessions are counters and whose every slow step a test can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import trio

from gymtrio.ids import EpisodeId
from gymtrio.participants.agent.hooks import RestoredSession
from tests.helpers.memory_archive import Door


@attrs.define
class Count:
    value: int = 0


class BareAgent:
    """Has no hooks: restart-only."""

    def __init__(self) -> None:
        self.counts: dict[str, Count] = {}
        self.building = Door()
        self.closed: list[str] = []

    async def build(self, key: str) -> None:
        await self.building.pass_through()
        self.counts[key] = Count()

    async def close_session(self, key: str) -> dict[str, object]:
        self.closed.append(key)
        count = self.counts.pop(key, Count())
        return {"receipt": key, "count": count.value}


class ScriptedAgent(BareAgent):
    """Implements `gymtrio.participants.agent.hooks.AgentHooks`."""

    def __init__(self) -> None:
        super().__init__()
        self.restored: list[tuple[str, EpisodeId, object]] = []
        self.freed: list[str] = []
        self.freeing = Door()
        self.exporting = Door()
        self.left_out: set[str] = set()
        self.failure: Exception | None = None
        """Raised by the next hooks instead of doing anything."""

    async def export_agent_sessions(self, keys: Sequence[str]) -> Mapping[str, object]:
        await self.exporting.pass_through()
        self._maybe_fail()
        return {key: {"count": self.counts[key].value} for key in keys if key not in self.left_out}

    async def restore_agent_sessions(self, sessions: Sequence[RestoredSession]) -> None:
        await trio.lowlevel.checkpoint()
        self._maybe_fail()
        for session in sessions:
            assert isinstance(session.state, dict)
            self.restored.append((session.key, session.episode_id, session.state))
            self.counts[session.key] = Count(session.state["count"])

    async def retire_agent_session(self, key: str) -> None:
        await self.freeing.pass_through()
        self._maybe_fail()
        self.freed.append(key)
        self.counts.pop(key, None)

    def _maybe_fail(self) -> None:
        if self.failure is not None:
            raise self.failure
