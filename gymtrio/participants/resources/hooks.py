"""What the author of a resources server declares and provides, and the one edge where it is called."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import Final, NewType, Protocol, TypeVar

from gymtrio.errors import InvalidCheckpointState, Refusal, SettingsError

LOG: Final = logging.getLogger(__name__)

T = TypeVar("T")

SessionId = NewType("SessionId", str)
"""Chosen by the caller of a seed; the same before and after a restore."""


class Mode(Enum):
    """What a checkpoint does with the sessions of a server (RES-1)."""

    RESTART_ONLY = "restart_only"
    """They cannot be exported: a live one blocks until its rollout is retired."""
    STATELESS = "stateless"
    """They hold nothing: a reply depends on its request only."""
    EXPORTED = "exported"
    """They are exported and restored by the server's hooks."""


class SessionHooks(Protocol):
    """What a server of mode `EXPORTED` provides; the others may provide the last one."""

    async def export_session_states(
        self, session_ids: Sequence[SessionId]
    ) -> Mapping[SessionId, object]:
        """Give the states of all these sessions at once, as JSON; nothing changes them meanwhile.

        Returns:
            State by session. One that is missing was dropped by the server already (RES-2).
        """
        ...

    async def restore_session_states(self, states: Mapping[SessionId, object]) -> None:
        """Take the sessions in, all of them or, when it raises or is cancelled, none."""
        ...

    async def retire_session_state(self, session_id: SessionId) -> None:
        """Free what a session holds; succeeds for one that is not there.

        Called when a session ends, is retired or is left out of a checkpoint; again after it failed.
        """
        ...


class StopHook(Protocol):
    """What a server of mode `EXPORTED` may provide besides, when its sessions hold more than memory."""

    async def free_exported_sessions(self, session_ids: Sequence[SessionId]) -> None:
        """The deployment ends: free what these sessions hold outside the process, such as a sandbox.

        Their states, as they were exported, are durable, and are what a restore begins from: whatever
        that needs has to stay. Called at a commit with `stop`, once.
        """
        ...


STOP_HOOK: Final = "free_exported_sessions"
REQUIRED_HOOKS: Final = ("export_session_states", "restore_session_states", "retire_session_state")


class Hooks:
    """Calls a server's hooks; whatever they raise becomes `InvalidCheckpointState`.

    Args:
        instance: names the server in errors.
        server: has the hooks, see `SessionHooks`.

    Raises:
        SettingsError: the mode needs hooks that `server` has not, or that are not async (RES-1).
    """

    def __init__(self, instance: str, mode: Mode, server: object) -> None:
        self._server = server
        lacking = [name for name in REQUIRED_HOOKS if not self._has(name)]
        if mode is Mode.EXPORTED and lacking:
            raise SettingsError(
                f"{instance}: its sessions are declared exported, but {type(server).__name__} lacks "
                + ", ".join(f"async {name}" for name in lacking)
            )
        self._frees = REQUIRED_HOOKS[2] not in lacking

    def _has(self, name: str) -> bool:
        return inspect.iscoroutinefunction(getattr(self._server, name, None))

    def _hooks(self) -> SessionHooks:
        # `__init__` has looked: a server without a hook is never asked for it.
        hooks: SessionHooks = self._server  # type: ignore[assignment]
        return hooks

    async def export(
        self, session_ids: Sequence[SessionId], where: str
    ) -> Mapping[SessionId, object]:
        """
        Args:
            where: whose sessions these are, for errors.

        Raises:
            InvalidCheckpointState: the hook failed, or answered with something else.
        """
        call = self._hooks().export_session_states
        states: object = await _foreign(
            f"export_session_states of {where}", lambda: call(session_ids)
        )
        if not isinstance(states, Mapping):
            raise InvalidCheckpointState(
                f"export_session_states of {where}: a {type(states).__name__} is not a mapping"
            )
        unasked = states.keys() - set(session_ids)
        if unasked:
            raise InvalidCheckpointState(
                f"export_session_states of {where}: it has {sorted(map(repr, unasked))[0]}, "
                "which was not asked for"
            )
        return states

    async def restore(self, states: Mapping[SessionId, object], where: str) -> None:
        """
        Raises:
            InvalidCheckpointState: the hook failed; it has taken nothing in.
        """
        call = self._hooks().restore_session_states
        await _foreign(f"restore_session_states of {where}", lambda: call(states))

    async def retire(self, session_id: SessionId, where: str) -> None:
        """Free a session, if the server has anything to free.

        Raises:
            InvalidCheckpointState: the hook failed.
        """
        if self._frees:
            call = self._hooks().retire_session_state
            await _foreign(f"retire_session_state of {where}", lambda: call(session_id))

    async def free_outside(self, session_ids: Sequence[SessionId], where: str) -> None:
        """
        Raises:
            InvalidCheckpointState: the hook failed.
        """
        if self._has(STOP_HOOK):
            call: Callable[[Sequence[SessionId]], Awaitable[None]]
            call = getattr(self._server, STOP_HOOK)
            await _foreign(f"{STOP_HOOK} of {where}", lambda: call(session_ids))


async def _foreign(what: str, call: Callable[[], Awaitable[T]]) -> T:
    try:
        return await call()
    except Refusal as refusal:
        raise InvalidCheckpointState(f"{what}: {refusal.detail}") from refusal
    except Exception as error:
        LOG.warning("%s failed", what, exc_info=error)
        raise InvalidCheckpointState(f"{what}: {type(error).__name__}: {error}") from error
