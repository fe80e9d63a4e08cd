"""What a checkpoint holds of an episode's sessions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from itertools import groupby

import attrs

from gymtrio.errors import InvalidCheckpointState
from gymtrio.ids import EpisodeId
from gymtrio.participants.base import make_record
from gymtrio.participants.decoding import decode_records
from gymtrio.participants.resources.hooks import SessionId
from gymtrio.participants.resources.sessions import Session
from gymtrio.storage.opaque_pieces import decode_steps, encode_steps, in_slices
from gymtrio.storage.records import Record
from gymtrio.storage.slices import LoopSlice


@attrs.frozen(kw_only=True)
class SessionRecord:
    session_id: str
    state: bytes
    """Opaque JSON."""


@attrs.frozen(kw_only=True)
class ResourcesRecord:
    """One episode; never empty."""

    sessions: tuple[SessionRecord, ...]


def encode_sessions(
    sessions: Sequence[Session], states: Mapping[SessionId, object]
) -> Iterator[Record | None]:
    """Make records one by one, as they are written: the loop turns between them, and within large ones.

    Args:
        sessions: in order of capture key; all of them have a state.

    Raises:
        InvalidCheckpointState: a state is not JSON; names the session and the path inside (STO-3).
    """
    for _, group in groupby(sessions, key=lambda session: session.key):
        of_episode = list(group)
        records = []
        for session in of_episode:
            state = yield from encode_steps(states[session.session_id], str(session))
            records.append(SessionRecord(session_id=session.session_id, state=state))
        yield make_record(of_episode[0].episode_id, ResourcesRecord(sessions=tuple(records)))


@attrs.frozen
class RestoredSession:
    session_id: SessionId
    episode_id: EpisodeId
    """The attempt that was checkpointed."""
    state: object

    def __str__(self) -> str:
        return f"session {self.session_id!r} of {self.episode_id}"


async def decode_sessions(records: MutableSequence[Record]) -> list[RestoredSession]:
    """Invert `encode_sessions`.

    Raises:
        InvalidCheckpointState: a record does not hold what it must.
    """
    read: dict[SessionId, RestoredSession] = {}
    contents = await decode_records(ResourcesRecord, records)
    slices = LoopSlice()
    for episode_id, content in contents:
        for entry in content.sessions:
            session_id = SessionId(entry.session_id)
            where = f"session {session_id!r} of {episode_id}"
            if session_id in read:
                raise InvalidCheckpointState(f"{where}: it is there twice")
            state = await in_slices(decode_steps(entry.state, where), slices)
            read[session_id] = RestoredSession(session_id, episode_id, state)
        await slices.turn()
    return list(read.values())


def named(sessions: Sequence[Session | RestoredSession]) -> str:
    """Name sessions for an error that concerns all of them."""
    first = str(sessions[0])
    return first if len(sessions) == 1 else f"{len(sessions)} sessions, first {first}"
