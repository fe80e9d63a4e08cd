"""Which frame may come when: the tables of a connection and of a call, for both sides."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Final

from gymtrio.wire.messages import Type

ACCEPTOR_BIT: Final = 1
CONTROL_BIT: Final = 2
ID_STEP: Final = 4
"""Ids of one maker and lane are this far apart: the two bits below say whose and which."""


class Role(Enum):
    OPENER = "opener"
    """It connected, and speaks first."""
    ACCEPTOR = "acceptor"


class State(Enum):
    AWAITING_HELLO = "awaiting hello"
    AWAITING_WELCOME = "awaiting welcome"
    OPEN = "open"
    ENDED = "ended"


BEGIN: Final = {Role.OPENER: State.AWAITING_WELCOME, Role.ACCEPTOR: State.AWAITING_HELLO}

TAKES: Final[Mapping[State, Mapping[int, State]]] = {
    State.AWAITING_HELLO: {Type.HELLO: State.OPEN, Type.GOODBYE: State.ENDED},
    State.AWAITING_WELCOME: {Type.WELCOME: State.OPEN, Type.GOODBYE: State.ENDED},
    State.OPEN: {
        Type.PING: State.OPEN,
        Type.PONG: State.OPEN,
        Type.CALL: State.OPEN,
        Type.REPLY: State.OPEN,
        Type.ERROR: State.OPEN,
        Type.DATA: State.OPEN,
        Type.CREDIT: State.OPEN,
        Type.CANCEL: State.OPEN,
        Type.POST: State.OPEN,
        Type.CONTROL_POST: State.OPEN,
        Type.GOODBYE: State.ENDED,
    },
    State.ENDED: {},
}
"""Which frames may come when, and what is then. Any other frame, and one that is malformed or breaks a
rule of its call, ends the connection."""


class Said(IntEnum):
    """What a frame says about a call."""

    REPLY_WHOLE = 1
    REPLY_BEGINS = 2
    DATA = 3
    DATA_LAST = 4
    ERROR = 5
    CREDIT = 6
    CANCEL = 7


class Ours(IntEnum):
    """Where a call that we made is."""

    AWAITING = 1
    """Nothing of the answer has come."""
    RECEIVING = 2
    """The answer's head has come, its body is under way."""
    LEFT = 3
    """We said that we wait no more, before anything came."""
    LEFT_RECEIVING = 4
    """We said so while the answer's body was under way."""
    GONE = 5


class Theirs(IntEnum):
    """Where a call that the peer made is."""

    RECEIVING = 1
    """Its body is under way."""
    WHOLE = 2
    """All of it has come."""
    CANCELLED = 3


CALLER: Final[Mapping[tuple[Ours, Said], Ours]] = {
    (Ours.AWAITING, Said.REPLY_WHOLE): Ours.GONE,
    (Ours.AWAITING, Said.REPLY_BEGINS): Ours.RECEIVING,
    (Ours.AWAITING, Said.ERROR): Ours.GONE,
    (Ours.AWAITING, Said.CREDIT): Ours.AWAITING,
    (Ours.RECEIVING, Said.DATA): Ours.RECEIVING,
    (Ours.RECEIVING, Said.DATA_LAST): Ours.GONE,
    (Ours.RECEIVING, Said.ERROR): Ours.GONE,
    (Ours.RECEIVING, Said.CREDIT): Ours.RECEIVING,
    (Ours.LEFT, Said.REPLY_WHOLE): Ours.GONE,
    (Ours.LEFT, Said.REPLY_BEGINS): Ours.LEFT_RECEIVING,
    (Ours.LEFT, Said.ERROR): Ours.GONE,
    (Ours.LEFT, Said.CREDIT): Ours.LEFT,
    (Ours.LEFT_RECEIVING, Said.DATA): Ours.LEFT_RECEIVING,
    (Ours.LEFT_RECEIVING, Said.DATA_LAST): Ours.GONE,
    (Ours.LEFT_RECEIVING, Said.ERROR): Ours.GONE,
    (Ours.LEFT_RECEIVING, Said.CREDIT): Ours.LEFT_RECEIVING,
}
"""What the callee may say. A pair that is not here ends the connection; so does a call that is gone."""

CALLEE: Final[Mapping[tuple[Theirs, Said], Theirs]] = {
    (Theirs.RECEIVING, Said.DATA): Theirs.RECEIVING,
    (Theirs.RECEIVING, Said.DATA_LAST): Theirs.WHOLE,
    (Theirs.RECEIVING, Said.CREDIT): Theirs.RECEIVING,
    (Theirs.RECEIVING, Said.CANCEL): Theirs.CANCELLED,
    (Theirs.WHOLE, Said.CREDIT): Theirs.WHOLE,
    (Theirs.WHOLE, Said.CANCEL): Theirs.CANCELLED,
}
"""What the caller may say. What it says about a call that we have answered crossed with the answer and
is ignored; about one that it never made, it ends the connection."""
