"""What a dialogue tells: made of the frames of the peer, in their order."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from gymtrio.wire.messages import Call, Hello


class Welcomed(NamedTuple):
    """The handshake is done."""

    peer: Hello
    authenticated: bool
    """The peer presented our token (seen from the acceptor)."""


class Called(NamedTuple):
    call: Call
    control: bool


class CallCancelled(NamedTuple):
    """The caller waits no more; the answer has been queued."""

    call_id: int


class BodyReceived(NamedTuple):
    """A piece of a body: of a request if the peer made the call, else of a reply."""

    call_id: int
    is_last: bool
    chunk: bytes


class Replied(NamedTuple):
    """`body` None: it comes in pieces."""

    call_id: int
    head: bytes
    body: bytes | None


class Failed(NamedTuple):
    """A call of ours ends with an error; a part of its reply may have come before."""

    call_id: int
    status: int
    code: str
    detail: str


class Posted(NamedTuple):
    kind: str
    body: bytes


class Ended(NamedTuple):
    """Nothing comes any more. `by_peer`: it said goodbye; else it broke a rule or is gone."""

    code: str
    detail: str
    by_peer: bool


Event: TypeAlias = (
    Welcomed | Called | CallCancelled | BodyReceived | Replied | Failed | Posted | Ended
)
