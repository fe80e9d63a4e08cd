"""A call as the caller sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import outcome
import trio

from gymtrio.errors import GymtrioError, TransportError
from gymtrio.wire.bodies import BodyReader
from gymtrio.wire.errors import CallTimedOut

if TYPE_CHECKING:
    from gymtrio.wire.channel import Channel


class WholeReply(NamedTuple):
    head: bytes
    body: bytes


OnReply: TypeAlias = Callable[[WholeReply], None]


class Waiting(Protocol):
    """What the channel tells the owner of an open call; synchronously."""

    def replied(self, head: bytes, body: bytes | None) -> None: ...

    def received(self, chunk: bytes, is_last: bool) -> None: ...

    def failed(self, error: GymtrioError) -> None: ...


class WholeCall:
    """A task that waits for a whole reply."""

    __slots__ = (
        "_body",
        "_call_id",
        "_channel",
        "_head",
        "_kind",
        "_on_reply",
        "_size_bytes",
        "_task",
    )

    def __init__(self, channel: Channel, call_id: int, kind: str, on_reply: OnReply | None) -> None:
        self._on_reply = on_reply
        self._channel = channel
        self._call_id = call_id
        self._kind = kind
        self._task = trio.lowlevel.current_task()
        self._head = b""
        self._body: list[bytes] = []
        self._size_bytes = 0

    def replied(self, head: bytes, body: bytes | None) -> None:
        if body is None:
            self._head = head
            return
        reply = WholeReply(head, body)
        if self._on_reply is not None:
            try:
                self._on_reply(reply)
            except Exception as error:  # noqa: BLE001 - raised where the reply is awaited
                trio.lowlevel.reschedule(self._task, outcome.Error(error))
                return
        trio.lowlevel.reschedule(self._task, outcome.Value(reply))

    def received(self, chunk: bytes, is_last: bool) -> None:
        self._body.append(chunk)
        self._size_bytes += len(chunk)
        limit = self._channel.limits.body_bytes_max
        if self._size_bytes > limit:
            self._channel.leave(self._call_id)
            self.failed(TransportError(f"a reply of more than {limit} bytes"))
        elif is_last:
            self.replied(self._head, b"".join(self._body))
        else:
            self._channel.dialogue.consume(self._call_id, len(chunk))

    def failed(self, error: GymtrioError) -> None:
        trio.lowlevel.reschedule(self._task, outcome.Error(error))

    def overdue(self) -> None:
        """Its deadline has passed."""
        self._channel.leave(self._call_id)
        self.failed(_timed_out(self._channel, self._kind))

    def abort(self, raise_cancel: Any) -> trio.lowlevel.Abort:
        """The task is cancelled, and the peer told so."""
        self._channel.leave(self._call_id)
        return trio.lowlevel.Abort.SUCCEEDED


async def ask(
    channel: Channel,
    kind: str,
    head: bytes,
    body: bytes,
    control: bool,
    deadline: float | None,
    on_reply: OnReply | None,
) -> WholeReply:
    """See `Channel.request`."""
    call_id: int | None = None
    now = channel.now()
    if not channel.dialogue.is_congested and (deadline is None or deadline > now):
        # The call is queued without waiting, so that only the wait for its reply need be timed.
        await trio.lowlevel.checkpoint_if_cancelled()
        call_id = channel.open_call(kind, head, body, control, deadline, now)
    else:
        with trio.CancelScope(deadline=math.inf if deadline is None else deadline):
            call_id = await channel.start_call(kind, head, body, control, deadline)
    if call_id is None:
        raise _timed_out(channel, kind)
    call = WholeCall(channel, call_id, kind, on_reply)
    channel.own(call_id, call)
    if deadline is not None:
        channel.deadlines.add(deadline, call_id, call.overdue)
    reply: WholeReply = await trio.lowlevel.wait_task_rescheduled(call.abort)
    return reply


def _timed_out(channel: Channel, kind: str) -> CallTimedOut:
    return CallTimedOut(f"{channel.peer.name}: no answer to {kind} by the deadline")


class OpenCall:
    """A call whose reply is read piece by piece; made by `Channel.exchange`."""

    def __init__(
        self,
        channel: Channel,
        kind: str,
        head: bytes,
        body: bytes,
        *,
        control: bool,
        deadline: float | None,
    ) -> None:
        self._channel = channel
        self._arguments = (kind, head, body, control, deadline)
        self._call_id: int
        self._reader = BodyReader(self._consumed)
        self._answered = trio.Event()
        self._has_head = False
        self._failure: GymtrioError | None = None
        self.head = b""
        """Of the reply."""

    async def __aenter__(self) -> OpenCall:
        self._call_id = await self._channel.start_call(*self._arguments)
        self._channel.own(self._call_id, self)
        try:
            await self._answered.wait()
            if self._failure is not None and not self._has_head:
                raise self._failure
        except BaseException:
            self._channel.leave(self._call_id)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.leave(self._call_id)

    async def receive_some(self) -> bytes:
        """Give the next piece of the reply's body; empty at the end.

        Raises:
            ChannelRefused: the callee ended the body with an error.
            ChannelLost: the connection ended first.
        """
        return await self._reader.receive_some()

    def replied(self, head: bytes, body: bytes | None) -> None:
        self.head = head
        self._has_head = True
        if body is not None:
            self._reader.feed(body, True)
        self._answered.set()

    def received(self, chunk: bytes, is_last: bool) -> None:
        self._reader.feed(chunk, is_last)

    def failed(self, error: GymtrioError) -> None:
        self._failure = error
        self._reader.fail(error)
        self._answered.set()

    def _consumed(self, size_bytes: int) -> None:
        self._channel.dialogue.consume(self._call_id, size_bytes)
        self._channel.wake()
