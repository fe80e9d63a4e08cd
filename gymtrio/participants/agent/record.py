"""What a checkpoint keeps of the agent sessions of one episode (AGT-2, AGT-5, AGT-6)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs

from gymtrio.episodes.episode import boundary_of
from gymtrio.errors import InvalidCheckpointState
from gymtrio.ids import EpisodeId
from gymtrio.participants.agent.hooks import RestoredSession
from gymtrio.participants.agent.session import Activation, AgentSession, Completed, Interrupted
from gymtrio.storage.opaque import decode, encode


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


def note(session: AgentSession, state: object) -> Callable[[], SessionRecord]:
    """Note a session at a safe point; what it is made of does not change before resume.

    Args:
        state: as the agent's hook gave it.

    Returns:
        What encodes it, later. Raises `InvalidCheckpointState` for something in it that is not JSON;
        the detail names episode and session.
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
) -> SessionRecord:
    where = f"episode {session.episode_id}, session {session.key}"
    activation = None
    if running is not None:
        at = boundary_of(boundary, where)
        activation = ActivationRecord(
            index=running.index,
            request_digest=running.request_digest,
            boundary=None if at is None else encode(at, f"{where}, boundary"),
        )
    elif waiting is not None:
        activation = ActivationRecord(
            index=waiting.index, request_digest=waiting.request_digest, boundary=waiting.boundary
        )
    return SessionRecord(
        session_key=session.key,
        session=encode(state, where),
        completed=None
        if done is None
        else CompletedRecord(
            index=done.index,
            request_digest=done.request_digest,
            reply=encode(done.reply, f"{where}, reply"),
        ),
        activation=activation,
    )


def restored_session(record: SessionRecord, episode_id: EpisodeId) -> AgentSession:
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
            reply=_object(done.reply, record.session_key),
        ),
        interrupted=None
        if running is None
        else Interrupted(
            index=running.index, request_digest=running.request_digest, boundary=running.boundary
        ),
        unclaimed=True,
    )


def restored_state(record: SessionRecord, episode_id: EpisodeId) -> RestoredSession:
    """What the agent's hook is given.

    Raises:
        InvalidCheckpointState: the state cannot be parsed.
    """
    where = f"session {record.session_key} of {episode_id}"
    return RestoredSession(
        key=record.session_key, episode_id=episode_id, state=decode(record.session, where)
    )


def _object(data: bytes, key: str) -> dict[str, object]:
    value = decode(data, f"reply of session {key}")
    if not isinstance(value, dict):
        raise InvalidCheckpointState(f"reply of session {key}: not a JSON object")
    return value
