"""What can become of a channel and of a call over it."""

from __future__ import annotations

from gymtrio.errors import GymtrioError, PeerRefused, TransportError


class ProtocolViolation(GymtrioError):
    """The peer broke a rule of the protocol: its connection ends, and nothing else (SRV-1).

    `code` goes to the peer in the goodbye and is one of the documented ones; the detail never holds
    what the peer sent.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class ChannelLost(TransportError):
    """The connection ended before this call was answered, or had ended before it was made."""


class ChannelFull(TransportError):
    """As much is queued, or as many calls are open, as the limits allow; nothing was sent."""


class CallTimedOut(TransportError):
    """The deadline of a call passed; the peer was told that nobody waits any more."""


class ChannelRefused(PeerRefused):
    """The peer answered a call with an error."""


def shown(text: str) -> str:
    """A text of the peer, fit for a log (I36)."""
    return text.encode("unicode_escape").decode("ascii")
