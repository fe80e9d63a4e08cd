"""A call as the callee sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import trio

from gymtrio.errors import TooLarge
from gymtrio.wire.bodies import BodyReader
from gymtrio.wire.bounds import CHUNK_BYTES_MAX
from gymtrio.wire.errors import ChannelLost
from gymtrio.wire.messages import Call
from gymtrio.wire.outgoing import Mark

if TYPE_CHECKING:
    from gymtrio.wire.channel import Channel


_log = logging.getLogger(__name__)


class IncomingCall:
    """One call of the peer, to be answered once: by `reply`, by `fail`, or by `begin` to `finish`.

    Answering a call that nobody wants any more does nothing; the caller has its answer already.
    """

    __slots__ = (
        "_channel",
        "_is_answered",
        "_reader",
        "_scope",
        "body",
        "call_id",
        "control",
        "deadline",
        "has_task",
        "head",
        "is_cancelled",
        "kind",
        "on_cancel",
    )

    def __init__(self, channel: Channel, call: Call, control: bool, now: float) -> None:
        self._channel = channel
        self._is_answered = False
        self._scope: trio.CancelScope | None = None
        self.is_cancelled = False
        """Its handler is, as soon as it runs."""
        self.has_task = False
        """A handler serves it; else it was answered at once, or an `Inline` keeps it."""
        self.call_id = call.call_id
        self.kind = call.kind
        self.head = call.head
        self.body = call.body
        """The whole body if it came with the call, which is usual; None: `receive_some` or `read`."""
        self.control = control
        """It came in the control lane, and its answer goes there."""
        self.deadline: float | None = None
        """When the caller stops waiting, on this side's trio clock; it cancels the call then."""
        if call.timeout_ms is not None:
            self.deadline = now + call.timeout_ms / 1000
        self.on_cancel: Callable[[], None] | None = None
        """For a call that an `Inline` keeps to answer later: called once, synchronously, when nobody
        wants the answer any more. (A handler's task is cancelled besides.)"""
        self._reader: BodyReader | None = None
        if self.body is None:
            self._reader = BodyReader(self._consumed)

    def __repr__(self) -> str:
        return f"<call {self.call_id} {self.kind!r}>"

    @property
    def channel(self) -> Channel:
        """The channel it came by: who asks is `channel.peer`."""
        return self._channel

    @property
    def is_answered(self) -> bool:
        """An answer was given, or at least begun and finished."""
        return self._is_answered

    @property
    def is_wanted(self) -> bool:
        """Whether the caller still waits."""
        return self._channel.dialogue.is_wanted(self.call_id)

    async def receive_some(self) -> bytes:
        """Give the next piece of the body; empty at the end.

        Raises:
            ChannelLost: the connection ended before the body was whole.
        """
        if self._reader is not None:
            return await self._reader.receive_some()
        await trio.lowlevel.checkpoint()
        body, self.body = self.body, b""
        assert body is not None
        return body

    async def read(self, bytes_max: int) -> bytes:
        """Give the whole body.

        Raises:
            TooLarge: it has more than `bytes_max` bytes; a handler may let it pass.
            ChannelLost: the connection ended before the body was whole.
        """
        if self.body is not None:
            if len(self.body) > bytes_max:
                raise TooLarge(f"a body of {len(self.body)} bytes, limit {bytes_max}")
            return self.body
        chunks: list[bytes] = []
        size = 0
        while chunk := await self.receive_some():
            chunks.append(chunk)
            size += len(chunk)
            if size > bytes_max:
                raise TooLarge(f"a body of more than the limit of {bytes_max} bytes")
        self.body = b"".join(chunks)
        return self.body

    def reply(self, head: bytes = b"", body: bytes = b"", *, on_done: Mark | None = None) -> None:
        """Answer. A large body leaves in chunks as the caller reads it.

        Args:
            on_done: called once, synchronously: True when the last byte was handed to the connection,
                False when it will not be (lost, or cancelled before); perhaps before this returns.
        """
        assert not self._is_answered, "answered twice"
        self._is_answered = True
        self._channel.dialogue.reply(self.call_id, head, body, _guarded(on_done))
        self._channel.answered(self)

    def fail(self, status: int, code: str, detail: str) -> None:
        """Answer with an error, or end a body that was begun with one."""
        assert not self._is_answered, "answered twice"
        self._is_answered = True
        self._channel.dialogue.fail(self.call_id, status, code, detail)
        self._channel.answered(self)

    async def begin(self, head: bytes) -> None:
        """Answer with a head; the body follows by `send` and `finish`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._channel.dialogue.begin(self.call_id, head)
        self._channel.wake()

    async def send(self, chunk: bytes) -> None:
        """Send a piece of the body; waits while the caller, or the connection, does not take it.

        Returns also when nobody wants it any more (the handler is being cancelled then).

        Cancelled: once it waits, the piece leaves all the same.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        body = self._channel.dialogue.send(self.call_id, chunk)
        self._channel.wake()
        if body is None or body.pending_bytes < CHUNK_BYTES_MAX:
            return
        assert body.on_room is None, "two tasks send one body"
        room = trio.Event()
        body.on_room = room.set
        try:
            await room.wait()
        finally:
            body.on_room = None

    async def finish(self, *, on_done: Mark | None = None) -> None:
        """The body is whole; does not wait until it has left.

        Args:
            on_done: as for `reply`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._is_answered = True
        self._channel.dialogue.finish(self.call_id, _guarded(on_done))
        self._channel.answered(self)

    async def sent(self, head: bytes = b"", body: bytes = b"") -> bool:
        """Reply, wait until the last byte was handed to the connection, and say whether it was.

        Cancelled: the reply leaves all the same.
        """
        done = trio.Event()
        outcome: list[bool] = []

        def note(sent: bool) -> None:
            outcome.append(sent)
            done.set()

        self.reply(head, body, on_done=note)
        await done.wait()
        return outcome[0]

    def cancel(self) -> None:
        """Cancel its handler; whoever asked for that may still answer."""
        self.is_cancelled = True
        if self._scope is not None:
            self._scope.cancel()

    # --- for the channel ------------------------------------------------------------------------

    def enter(self, scope: trio.CancelScope) -> None:
        """Its handler begins, in this scope."""
        self._scope = scope
        if self.is_cancelled:
            scope.cancel()

    def leave(self) -> None:
        """Its handler has ended; what the scope serves from now on is not this call's."""
        self._scope = None

    def received(self, chunk: bytes, is_last: bool) -> None:
        if self._reader is not None:
            self._reader.feed(chunk, is_last)

    def lost(self, error: ChannelLost) -> None:
        if self._reader is not None:
            self._reader.fail(error)

    def cancelled(self) -> None:
        """Nobody wants the answer any more."""
        self.cancel()
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()

    def _consumed(self, size_bytes: int) -> None:
        self._channel.dialogue.consume(self.call_id, size_bytes)
        self._channel.wake()


def _guarded(on_done: Mark | None) -> Mark | None:
    return None if on_done is None else partial(_tell, on_done)


def _tell(on_done: Mark, is_sent: bool) -> None:
    try:
        on_done(is_sent)
    except Exception:  # noqa: BLE001 - it runs in the tasks of the connection, which goes on
        _log.exception("error in a callback of a reply")
