"""Two dialogues joined by nothing but bytes, which the test carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from gymtrio.settings import Secret
from gymtrio.wire.bounds import ChannelLimits
from gymtrio.wire.dialogue import Dialogue
from gymtrio.wire.events import Event, Welcomed
from gymtrio.wire.frames import Frame, FrameDecoder
from gymtrio.wire.messages import Hello
from gymtrio.wire.tables import Role

OPENER: Final = Hello(role="worker", name="w0", instance="0badcafe")
ACCEPTOR: Final = Hello(role="coordinator", name="policy", instance="deadbeef")
SMALL: Final = ChannelLimits(
    frame_bytes_max=2**17,
    head_bytes_max=1000,
    body_inline_bytes_max=100,
    window_bytes=1000,
    calls_open_max=8,
    outgoing_bytes_max=10_000,
)
"""Limits that a short test can reach."""

Cut = Callable[[bytes], Iterator[bytes]]


def whole(data: bytes) -> Iterator[bytes]:
    yield data


class Ends:
    """The opener's end and the acceptor's, and what each was told."""

    def __init__(
        self,
        limits: ChannelLimits = SMALL,
        *,
        token: Secret | None = None,
        presented: Secret | None = None,
        token_required: bool = True,
        cut: Cut = whole,
    ) -> None:
        self.opener = Dialogue(Role.OPENER, OPENER, limits, token=presented)
        self.acceptor = Dialogue(
            Role.ACCEPTOR, ACCEPTOR, limits, token=token, token_required=token_required
        )
        self.told_opener: list[Event] = []
        self.told_acceptor: list[Event] = []
        self._cut = cut

    def carry(self, batch_bytes: int = 2**18) -> None:
        """Carry bytes both ways until there are none."""
        while self.opener.has_data_to_send or self.acceptor.has_data_to_send:
            self.to_acceptor(batch_bytes)
            self.to_opener(batch_bytes)

    def to_acceptor(self, batch_bytes: int = 2**18) -> None:
        """Carry one batch."""
        self._carry(self.opener, self.acceptor, self.told_acceptor, batch_bytes)

    def to_opener(self, batch_bytes: int = 2**18) -> None:
        self._carry(self.acceptor, self.opener, self.told_opener, batch_bytes)

    def _carry(
        self, sender: Dialogue, receiver: Dialogue, told: list[Event], batch_bytes: int
    ) -> None:
        data, marks = sender.data_to_send(batch_bytes)
        for piece in self._cut(data):
            told += receiver.receive_data(piece)
        for mark in marks:
            mark(True)

    def forget(self) -> None:
        self.told_opener.clear()
        self.told_acceptor.clear()


def open_ends(limits: ChannelLimits = SMALL, *, cut: Cut = whole) -> Ends:
    """Two ends that have shaken hands."""
    ends = Ends(limits, cut=cut)
    ends.carry()
    assert isinstance(ends.told_opener[0], Welcomed)
    assert isinstance(ends.told_acceptor[0], Welcomed)
    ends.forget()
    return ends


def frames_of(data: bytes) -> list[Frame]:
    decoder = FrameDecoder()
    decoder.receive_data(data)
    found = decoder.whole_frames()
    assert not decoder.pending_bytes
    return found
