"""What the streams of both APIs have in common."""

from __future__ import annotations

from typing import Protocol

from gymtrio.errors import Refusal
from servers.model.embedded.generation import Emission, Generated


class ReplyStream(Protocol):
    """Writes one reply as events. Each method gives bytes to send, or none."""

    def begin(self) -> bytes: ...

    def emit(self, choice: int, emission: Emission) -> bytes:
        """Tell what a choice got."""
        ...

    def finish(self, choice: int, generated: Generated) -> bytes:
        """Tell how a choice ended, after all its emissions."""
        ...

    def end(self) -> bytes:
        """End the stream after every choice has finished."""
        ...

    def fail(self, refusal: Refusal) -> bytes:
        """End the stream in the middle: its status was sent long ago."""
        ...
