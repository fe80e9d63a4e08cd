"""What a checkpoint keeps of the agent sessions of one episode (AGT-2, AGT-5, AGT-6)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import attrs

from gymtrio.episodes.episode import boundary_of
from gymtrio.errors import InvalidCheckpointState
from gymtrio.ids import EpisodeId
from gymtrio.participants.agent.hooks import RestoredSession
from gymtrio.participants.agent.session import Activation, AgentSession, Completed, Interrupted
from gymtrio.storage.opaque_pieces import Steps, decode_steps, encode_steps, in_slices
from gymtrio.storage.slices import LoopSlice


@attrs.frozen(kw_only=True)
class CompletedRecord:
    index: int
    request_digest: str
    reply: bytes
    """Opaque JSON."""


@attrs.frozen(kw_only=True)
class ActivationRecord:
    index: int
    request_digest: str
    boundary: bytes | None
    """Where it continues, as opaque JSON; None: from its input."""


@attrs.frozen(kw_only=True)
class SessionRecord:
    session_key: str
    session: bytes
    """The agent's own state, as opaque JSON."""
    completed: CompletedRecord | None = None
    activation: ActivationRecord | None = None


@attrs.frozen(kw_only=True)
class AgentRecord:
    sessions: tuple[SessionRecord, ...]


Noted: TypeAlias = Callable[[], Steps[SessionRecord]]
"""What encodes a session, later, and lets the loop turn where it is large."""


def note(session: AgentSession, state: object) -> Noted:
    """Note a session at a safe point; what it is made of does not change before resume.

    Args:
        state: as the agent's hook gave it.

    Returns:
        What encodes it, later, and lets the loop turn where it is large. Raises
        `InvalidCheckpointState` for something in it that is not JSON; the detail names episode and
        session.
    """
    running, boundary = session.activation, None
    waiting = session.interrupted if running is None else None
    if running is not None and running.index != session.next_index:
        # It has completed and waits only for its reply to be sent, and that is stored already.
        running = None
    if running is not None:
        assert running.episode is not None
        boundary = running.episode.last_boundary
    return partial(_encoded, session, state, session.completed, running, boundary, waiting)


def _encoded(
    session: AgentSession,
    state: object,
    done: Completed | None,
    running: Activation | None,
    boundary: object,
    waiting: Interrupted | None,
) -> Steps[SessionRecord]:
    where = f"episode {session.episode_id}, session {session.key}"
    activation = None
    if running is not None:
        at = boundary_of(boundary, where)
        activation = ActivationRecord(
            index=running.index,
            request_digest=running.request_digest,
            boundary=None if at is None else (yield from encode_steps(at, f"{where}, boundary")),
        )
    elif waiting is not None:
        activation = ActivationRecord(
            index=waiting.index, request_digest=waiting.request_digest, boundary=waiting.boundary
        )
    completed = None
    if done is not None:
        completed = CompletedRecord(
            index=done.index,
            request_digest=done.request_digest,
            reply=(yield from encode_steps(done.reply, f"{where}, reply")),
        )
    encoded = yield from encode_steps(state, where)
    return SessionRecord(
        session_key=session.key, session=encoded, completed=completed, activation=activation
    )


async def restored_session(
    record: SessionRecord, episode_id: EpisodeId, slice_: LoopSlice
) -> AgentSession:
    """Make the session that waits for `episode_id`, the replacement attempt.

    Raises:
        InvalidCheckpointState: the stored reply is not a JSON object.
    """
    done, running = record.completed, record.activation
    return AgentSession(
        key=record.session_key,
        episode_id=episode_id,
        completed=None
        if done is None
        else Completed(
            index=done.index,
            request_digest=done.request_digest,
            reply=await _object(done.reply, record.session_key, slice_),
        ),
        interrupted=None
        if running is None
        else Interrupted(
            index=running.index, request_digest=running.request_digest, boundary=running.boundary
        ),
        unclaimed=True,
    )


async def restored_state(
    record: SessionRecord, episode_id: EpisodeId, slice_: LoopSlice
) -> RestoredSession:
    """What the agent's hook is given.

    Raises:
        InvalidCheckpointState: the state cannot be parsed.
    """
    where = f"session {record.session_key} of {episode_id}"
    state = await in_slices(decode_steps(record.session, where), slice_)
    return RestoredSession(key=record.session_key, episode_id=episode_id, state=state)


async def _object(data: bytes, key: str, slice_: LoopSlice) -> dict[str, object]:
    value = await in_slices(decode_steps(data, f"reply of session {key}"), slice_)
    if not isinstance(value, dict):
        raise InvalidCheckpointState(f"reply of session {key}: not a JSON object")
    return value
