"""Server-sent events as the APIs of models use them, written and read. Pure."""

from __future__ import annotations

from typing import Final

from gymtrio.json_text import dump_ascii_json

DONE_DATA: Final = b"[DONE]"
"""The data of the event that ends a stream of chat completions."""

DONE: Final = b"data: " + DONE_DATA + b"\n\n"

EVENT_BYTES_MAX: Final = 16 * 1024 * 1024
"""One event of a stream: a chunk of a few tokens, with whatever an engine adds."""


class EventTooLong(ValueError):
    """An event that does not end."""


def encode_event(value: object, name: str | None = None) -> bytes:
    """One event; JSON in ASCII has no line break that would end it early."""
    head = b"" if name is None else b"event: " + name.encode("ascii") + b"\n"
    return head + b"data: " + dump_ascii_json(value) + b"\n\n"


class SseDecoder:
    """Events from chunks of any size: the `data` of each; everything else is skipped."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._data: list[bytes] = []

    def receive_data(self, chunk: bytes) -> list[bytes]:
        """
        Raises:
            EventTooLong: it is over `EVENT_BYTES_MAX`.
        """
        self._buffer += chunk
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        if len(rest) + sum(map(len, self._data)) > EVENT_BYTES_MAX:
            raise EventTooLong(f"an event of the stream is over {EVENT_BYTES_MAX} bytes")
        events: list[bytes] = []
        for line in (bytes(line).rstrip(b"\r") for line in lines):
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
