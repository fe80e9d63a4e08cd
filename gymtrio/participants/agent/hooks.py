"""What the author of an agent provides for checkpoints, and the one edge where it is called."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import attrs

from gymtrio.errors import InvalidCheckpointState, Refusal, SettingsError
from gymtrio.ids import EpisodeId

LOG: Final = logging.getLogger(__name__)

T = TypeVar("T")

EXPORT: Final = "export_agent_sessions"
RESTORE: Final = "restore_agent_sessions"
RETIRE: Final = "retire_agent_session"
CLOSE: Final = "close_session"
STOP: Final = "free_exported_agent_sessions"


@attrs.frozen(kw_only=True)
class RestoredSession:
    """One session as it was exported, and the attempt that it belongs to now."""

    key: str
    episode_id: EpisodeId
    state: object
    """JSON, as the export hook gave it."""


class AgentHooks(Protocol):
    """An agent with all three takes part with its sessions; one without is restart-only (AGT-4)."""

    async def export_agent_sessions(self, keys: Sequence[str]) -> Mapping[str, object]:
        """Give the states of all these sessions at once, as JSON.

        What a state is made of must not change before resume, also when its session is retired
        meanwhile. The part of a running activation that its boundary has need not be in it.
        """
        ...

    async def restore_agent_sessions(self, sessions: Sequence[RestoredSession]) -> None:
        """Take the sessions in, all of them or, when it raises or is cancelled, none."""
        ...

    async def retire_agent_session(self, key: str) -> None:
        """Free what a session holds; succeeds for one that is not there. Again after it failed."""
        ...


class StopHook(Protocol):
    """What an agent may provide besides, when its sessions hold more than memory."""

    async def free_exported_agent_sessions(self, keys: Sequence[str]) -> None:
        """The deployment ends: free what these sessions hold outside the process.

        Their states, as they were exported, are durable, and are what a restore begins from: whatever
        that needs has to stay. Called at a commit with `stop`, once.
        """
        ...


class Hooks:
    """Calls an agent's hooks; whatever they raise becomes `InvalidCheckpointState`.

    Raises:
        SettingsError: the agent has one of the export and restore hooks but not all three, or they
            are not async.
    """

    def __init__(self, instance: str, agent: object) -> None:
        self._agent = agent
        lacking = [name for name in (EXPORT, RESTORE, RETIRE) if not self._has(name)]
        self.supported = not lacking
        """The agent's sessions can be exported and restored."""
        if lacking and any(hasattr(agent, name) for name in (EXPORT, RESTORE)):
            raise SettingsError(
                f"{instance}: {type(agent).__name__} exports sessions but lacks "
                + ", ".join(f"async {name}" for name in lacking)
            )

    def _has(self, name: str) -> bool:
        return inspect.iscoroutinefunction(getattr(self._agent, name, None))

    def _hooks(self) -> AgentHooks:
        # `__init__` has looked: an agent without a hook is never asked for it.
        hooks: AgentHooks = self._agent  # type: ignore[assignment]
        return hooks

    async def export(self, keys: Sequence[str]) -> Mapping[str, object]:
        """
        Raises:
            InvalidCheckpointState: the hook failed, or answered with something else.
        """
        states: object = await _foreign(EXPORT, lambda: self._hooks().export_agent_sessions(keys))
        if not isinstance(states, Mapping):
            raise InvalidCheckpointState(f"{EXPORT}: a {type(states).__name__} is not a mapping")
        return states

    async def restore(self, sessions: Sequence[RestoredSession]) -> None:
        """
        Raises:
            InvalidCheckpointState: the hook failed; it has taken nothing in.
        """
        await _foreign(RESTORE, lambda: self._hooks().restore_agent_sessions(sessions))

    async def retire(self, key: str) -> None:
        """Free a session; an agent without the hook is asked to close it.

        Raises:
            InvalidCheckpointState: the hook failed.
        """
        name = RETIRE if self._has(RETIRE) else CLOSE
        if self._has(name):
            call: Callable[[str], Awaitable[object]] = getattr(self._agent, name)
            await _foreign(f"{name} {key}", lambda: call(key))

    async def free_outside(self, keys: Sequence[str]) -> None:
        """
        Raises:
            InvalidCheckpointState: the hook failed.
        """
        if self._has(STOP):
            call: Callable[[Sequence[str]], Awaitable[None]] = getattr(self._agent, STOP)
            await _foreign(STOP, lambda: call(keys))


async def _foreign(what: str, call: Callable[[], Awaitable[T]]) -> T:
    try:
        return await call()
    except Refusal as refusal:
        raise InvalidCheckpointState(f"{what}: {refusal.detail}") from refusal
    except Exception as error:
        LOG.warning("%s failed", what, exc_info=error)
        raise InvalidCheckpointState(f"{what}: {type(error).__name__}: {error}") from error
