"""What a server takes from its host, as protocols, so that a simulation can hand in its own.

Monotonic time needs no port: it is `trio.current_time()`, which a virtual clock already replaces.
Streams come from a `Connector`, files from `gymtrio.storage.disk`.
"""

from __future__ import annotations

import secrets
import time
from typing import Protocol

import trio


class WallClock(Protocol):
    """Absolute time, only to translate the deadlines that controllers send."""

    def now_s(self) -> float:
        """Unix time in seconds. It may jump both ways; nothing inside may be timed by it."""
        ...


class Randomness(Protocol):
    """Where ids and nonces come from."""

    def hex(self, n_bytes: int) -> str:
        """`2 * n_bytes` hexadecimal digits that nobody can guess."""
        ...


class Connector(Protocol):
    """How a client reaches a peer."""

    async def connect(self, host: str, port: int) -> trio.abc.Stream:
        """Open a byte stream.

        Raises:
            OSError: nobody listens there, or the name does not resolve.

        Cancelled: no stream is left open.
        """
        ...


class HostClock:
    """The machine's clock."""

    def now_s(self) -> float:
        return time.time()


class HostRandomness:
    """The machine's source of randomness."""

    def hex(self, n_bytes: int) -> str:
        return secrets.token_hex(n_bytes)
