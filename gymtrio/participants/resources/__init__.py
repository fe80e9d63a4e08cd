"""The participant of a resources server: sessions, the requests that use them, and their state."""

from gymtrio.participants.resources.desk import Admitted
from gymtrio.participants.resources.hooks import Mode, SessionHooks, SessionId
from gymtrio.participants.resources.participant import ResourcesParticipant
from gymtrio.participants.resources.tickets import RequestKind

__all__ = [
    "Admitted",
    "Mode",
    "RequestKind",
    "ResourcesParticipant",
    "SessionHooks",
    "SessionId",
]
