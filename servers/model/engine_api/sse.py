"""Server-sent events, and what the streams of both APIs have in common."""

from __future__ import annotations

from typing import Final, Protocol

from gymtrio.errors import Refusal
from gymtrio.serving.http import dump_json
from servers.model.embedded.generation import Emission, Generated

DONE: Final = b"data: [DONE]\n\n"


def event(value: object, name: str | None = None) -> bytes:
    """One event; JSON in ASCII has no line break that would end it early."""
    head = b"" if name is None else b"event: " + name.encode("ascii") + b"\n"
    return head + b"data: " + dump_json(value) + b"\n\n"


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
