"""The receiving end of one body: chunks arrive synchronously, one reader takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from gymtrio.errors import GymtrioError


class BodyReader:
    """Keeps what came until it is read; never more than a window of it, which the dialogue sees to.

    Args:
        consumed: told how many bytes were read, so that the peer may send more.
    """

    __slots__ = ("_arrived", "_chunks", "_consumed", "_failure", "_is_whole")

    def __init__(self, consumed: Callable[[int], None]) -> None:
        self._chunks: deque[bytes] = deque()
        self._consumed = consumed
        self._is_whole = False
        self._failure: GymtrioError | None = None
        self._arrived: trio.Event | None = None

    def feed(self, chunk: bytes, is_last: bool) -> None:
        if chunk:
            self._chunks.append(chunk)
        self._is_whole = is_last
        self._notify()

    def fail(self, error: GymtrioError) -> None:
        """The rest will not come; what came can be read."""
        self._failure = error
        self._notify()

    async def receive_some(self) -> bytes:
        """Give the next piece; empty at the end.

        Raises:
            GymtrioError: what `fail` was given.

        Cancelled: nothing was taken.
        """
        while not self._chunks:
            if self._is_whole:
                await trio.lowlevel.checkpoint()
                return b""
            if self._failure is not None:
                await trio.lowlevel.checkpoint()
                raise self._failure
            self._arrived = trio.Event()
            await self._arrived.wait()
        await trio.lowlevel.checkpoint_if_cancelled()
        chunk = self._chunks.popleft()
        self._consumed(len(chunk))
        return chunk

    def _notify(self) -> None:
        if self._arrived is not None:
            self._arrived.set()
            self._arrived = None
