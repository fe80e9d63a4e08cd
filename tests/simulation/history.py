"""What was seen from outside, by nobody in particular: the basis of oracles, triggers and traces."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable

import trio


class History:
    """Events in order. Texts in it depend on the seed only: no addresses, no real time."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.sometimes: Counter[str] = Counter()
        """Rare things that happened: a set of runs in which one never did proves nothing of it."""
        self._listeners: list[Callable[[str], None]] = []

    def note(self, event: str, detail: object = "") -> None:
        """Something happened.

        Args:
            event: a name; what triggers of plans are given by.
        """
        self.lines.append(f"{trio.current_time():.6f} {event} {detail}")
        for listener in self._listeners:
            listener(event)

    def listen(self, listener: Callable[[str], None]) -> None:
        self._listeners.append(listener)

    def checksum(self) -> int:
        return zlib.crc32("\n".join(self.lines).encode("utf-8", "surrogatepass"))
