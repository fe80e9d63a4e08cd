"""What the author of a resources server writes.

A server is a class: it declares how its sessions take part in checkpoints, answers seed, verify and
tools, and, if it exports, has three hooks. `SessionServer` has the hooks for state that is an object
per session, which is most servers: see `servers/resources/counter.py`.

`gymtrio.serving.resources_service` serves it.

With checkpointing off there is no participant, and nothing is kept but what the author keeps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import attrs

from gymtrio.context import current_episode
from gymtrio.episodes.episode import StepMode
from gymtrio.errors import InvalidCheckpointState, NotFound, RolloutIdRequired
from gymtrio.participants.resources import Mode, ResourcesParticipant, SessionId
from gymtrio.serving.resources_tools import Tool, declared_tools, read_task, tool
from gymtrio.storage.slices import LoopSlice

__all__ = [
    "NoSettings",
    "ResourcesServer",
    "SessionId",
    "SessionServer",
    "Tool",
    "Verdict",
    "read_task",
    "tool",
]

S = TypeVar("S")

Verdict: TypeAlias = float | Mapping[str, object]
"""What a verify says: a reward, or an object with `reward` and what else the reply shall have."""


@attrs.frozen
class NoSettings:
    """For a server that can be told nothing."""


class ResourcesServer:
    """Base of resources servers."""

    checkpoint_mode: ClassVar[str] = Mode.RESTART_ONLY.value
    """`restart_only`, `stateless` or `exported`; the last needs the hooks of `SessionHooks` (RES-1),
    and may have that of `StopHook` for what a session holds outside the process (CTL-13)."""
    checkpoint_verify: ClassVar[str] = StepMode.WAIT.value
    """`replay`: a verify may run again after a crash; else `wait` (RES-4)."""

    participant: ResourcesParticipant | None = None
    """Set when the service opens; None: checkpointing is off."""

    async def seed(self, session_id: SessionId, task_data: Mapping[str, object]) -> None:
        """Begin a session. It may come again for the same session, and then changes nothing.

        Args:
            task_data: the task's own fields; from a caller of the one-call protocol the whole row.

        Raises:
            InvalidRequest: the task lacks something.

        Cancelled or raising: `retire_session_state` follows.
        """

    async def verify(self, session_id: SessionId, task_data: Mapping[str, object]) -> Verdict:
        """Judge what came of a session; it ends with that.

        Args:
            task_data: the task's own fields, `responses_create_params` and `response`.
        """
        raise NotFound(f"{type(self).__name__} has no verify")

    def tools(self) -> Sequence[Tool]:
        """Every tool; by default the methods that `@tool` declares."""
        return declared_tools(self)

    def checkpoint_session_started(self, session_id: SessionId) -> None:
        """For servers whose sessions begin in another request than a seed, such as `reset` (RES-3).

        Raises:
            RolloutIdRequired: the request has no rollout context.
            StaleAttempt, SessionConflict: see `ResourcesParticipant`.
        """
        if self.participant is not None:
            episode_id = current_episode()
            if episode_id is None:
                raise RolloutIdRequired(f"session {session_id!r} was started without a rollout id")
            self.participant.checkpoint_session_started(session_id, episode_id)

    def checkpoint_session_ended(self, session_id: SessionId) -> None:
        """Their end; what the session held has been freed or will be, by the caller."""
        if self.participant is not None:
            self.participant.checkpoint_session_ended(session_id)


class SessionStates(dict[SessionId, S], Generic[S]):
    """State by session; asking for one that is not there answers 404."""

    def __missing__(self, session_id: SessionId) -> S:
        raise NotFound(f"session {session_id!r} is not known here")


class SessionServer(ResourcesServer, ABC, Generic[S]):
    """A server that keeps one object per session in memory, and exports it.

    An author writes `begin`, tools, `verify` and, unless the objects are JSON, `dump_state` and
    `load_state`.
    """

    checkpoint_mode = Mode.EXPORTED.value

    def __init__(self) -> None:
        self.states: SessionStates[S] = SessionStates()

    @abstractmethod
    async def begin(self, task_data: Mapping[str, object]) -> S:
        """Make the state of a new session.

        Raises:
            InvalidRequest: the task lacks something.
        """

    def dump_state(self, state: S) -> object:
        """The state as JSON, exactly."""
        return state

    def load_state(self, dumped: Any) -> S:
        """Invert `dump_state`.

        Raises:
            InvalidCheckpointState: it is not what `dump_state` makes.
        """
        loaded: S = dumped
        return loaded

    async def seed(self, session_id: SessionId, task_data: Mapping[str, object]) -> None:
        if session_id not in self.states:
            state = await self.begin(task_data)
            # Of two seeds at once the first wins, whichever began first (HARD-1).
            self.states.setdefault(session_id, state)

    async def export_session_states(
        self, session_ids: Sequence[SessionId]
    ) -> Mapping[SessionId, object]:
        dumped: dict[SessionId, object] = {}
        slices = LoopSlice()
        for session_id in session_ids:
            if session_id in self.states:
                dumped[session_id] = self.dump_state(self.states[session_id])
                await slices.turn()
        return dumped

    async def restore_session_states(self, states: Mapping[SessionId, object]) -> None:
        loaded: dict[SessionId, S] = {}
        slices = LoopSlice()
        for session_id, dumped in states.items():
            try:
                loaded[session_id] = self.load_state(dumped)
            except InvalidCheckpointState as error:
                raise InvalidCheckpointState(f"session {session_id!r}: {error.detail}") from None
            await slices.turn()
        self.states.update(loaded)

    async def retire_session_state(self, session_id: SessionId) -> None:
        self.states.pop(session_id, None)
