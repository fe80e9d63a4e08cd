"""A dialogue over a trio stream: calls with replies, one-way posts and bodies, both ways at once.

The rules of this file:

- N1 One task reads, one task writes; the writer sends in one piece whatever has gathered.
- N2 The reader never waits for the writer: two sides that both wait to be read would wait for ever.
- N3 A handler has a task to itself, in the channel's nursery (`HandlerTasks`); what `Inline` answers
  has none, and its answer is queued before anything that is sent later.
- N4 The end of the connection is told once to everybody who waits for something of it (`ChannelLost`),
  and cancels every handler.
- N5 Whatever a peer sends or a handler raises, nothing but this connection or that call ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Literal, TypeAlias

import attrs
import trio

from gymtrio.background import open_background
from gymtrio.errors import Refusal
from gymtrio.settings import Secret
from gymtrio.wire.bounds import ChannelLimits
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.calls_out import OnReply, OpenCall, Waiting, WholeReply, ask
from gymtrio.wire.deadlines import Deadlines
from gymtrio.wire.dialogue import CLOSED, Dialogue
from gymtrio.wire.errors import ChannelLost, ChannelRefused, shown
from gymtrio.wire.events import (
    BodyReceived,
    CallCancelled,
    Called,
    Ended,
    Event,
    Failed,
    Posted,
    Replied,
    Welcomed,
)
from gymtrio.wire.handlers import HandlerTasks
from gymtrio.wire.handshake import RECEIVE_BYTES, shake_hands
from gymtrio.wire.messages import Hello
from gymtrio.wire.outgoing import Mark
from gymtrio.wire.tables import Role

DEFAULT_LIMITS: Final = ChannelLimits()
GOODBYE_S: Final = 0.5
"""How long a peer may take to read why its connection ends, or to say it."""

Handler: TypeAlias = Callable[[IncomingCall], Awaitable[None]]
Inline: TypeAlias = Callable[[IncomingCall], bool]
PostHandler: TypeAlias = Callable[[str, bytes], None]

_log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class PeerInfo:
    """Who is at the other end."""

    role: str
    name: str
    instance: str
    uid: int | None = None
    """Of its process, as the kernel says; None where it does not (TCP)."""
    authenticated: bool = False
    """It presented the token that this side was given to compare with."""


class Channel:
    """One end of an open connection. Made by `open_channel`."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        dialogue: Dialogue,
        peer: PeerInfo,
        limits: ChannelLimits,
        handler: Handler | None,
        inline: Inline | None,
        posted: PostHandler | None,
    ) -> None:
        self.peer: Final = peer
        self.limits: Final = limits
        # Asked for every call: trio's own function looks the clock up each time.
        self.now: Final = trio.lowlevel.current_clock().current_time
        self.closed: Final = trio.Event()
        """Set when nothing will come any more."""
        self.why = ""
        """Why, once it is closed."""
        self.dialogue: Final = dialogue
        """For the calls of this channel only."""
        self._stream = stream
        self._scope = trio.CancelScope()
        self._handler = handler
        self._tasks: HandlerTasks | None = None
        self._inline = inline
        self._posted = posted
        self._ours: dict[int, Waiting] = {}
        self.deadlines: Final = Deadlines(self._ours)
        """For the calls of this channel only."""
        self._theirs: dict[int, IncomingCall] = {}
        """Calls with a handler's task, or kept by an `Inline` to be answered later."""
        self._heard_at = trio.current_time()
        """When the last bytes of the peer came."""
        self._writer: trio.lowlevel.Task | None = None
        """The writer's task while it has nothing to send."""
        self._is_sending = False
        self._room = trio.lowlevel.ParkingLot()
        self._idle = trio.lowlevel.ParkingLot()

    # --- calling --------------------------------------------------------------------------------

    def request(
        self,
        kind: str,
        body: bytes = b"",
        *,
        head: bytes = b"",
        control: bool = False,
        deadline: float | None = None,
        on_reply: OnReply | None = None,
    ) -> Coroutine[object, None, WholeReply]:
        """Call the peer and wait for the whole reply.

        Args:
            deadline: on trio's clock; None: for ever.
            on_reply: told the reply synchronously, before any later message of the peer is looked at;
                this task resumes only in the next turn of the loop.

        Raises:
            ChannelRefused: the peer answered with an error.
            CallTimedOut: the deadline passed; the peer was told.
            ChannelFull: more calls are open than the peer takes.
            ChannelLost: the connection ended first.

        Cancelled: the peer is told, and cancels its handler.
        """
        return ask(self, kind, head, body, control, deadline, on_reply)

    def exchange(
        self,
        kind: str,
        head: bytes,
        body: bytes = b"",
        *,
        control: bool = False,
        deadline: float | None = None,
    ) -> AbstractAsyncContextManager[OpenCall]:
        """Call the peer; the block is entered with the head of its reply and reads the body.

        Leaving it before the end cancels the peer's handler.

        Args:
            deadline: told to the peer; the caller's own scopes bound what it waits.

        Raises:
            See `request`; once entered, `OpenCall.receive_some` raises them.
        """
        return OpenCall(self, kind, head, body, control=control, deadline=deadline)

    def post(self, kind: str, body: bytes = b"", *, control: bool = True) -> None:
        """Queue a one-way message. Posts of one lane arrive in order.

        Raises:
            ChannelFull: too much is queued, or the body does not fit into a frame.
            ChannelLost: the connection has ended.
        """
        self._check_open()
        self.dialogue.post(kind, body, control=control)
        self.wake()

    # --- for the calls of this channel ----------------------------------------------------------

    async def start_call(
        self, kind: str, head: bytes, body: bytes, control: bool, deadline: float | None
    ) -> int:
        """Queue a call; waits while too much is queued."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.dialogue.is_congested and not self.closed.is_set():
            await self._room.park()
        return self.open_call(kind, head, body, control, deadline, self.now())

    def open_call(
        self,
        kind: str,
        head: bytes,
        body: bytes,
        control: bool,
        deadline: float | None,
        now: float,
    ) -> int:
        """Queue a call at once."""
        self._check_open()
        timeout_ms = None
        if deadline is not None and deadline < math.inf:
            timeout_ms = max(0, math.ceil((deadline - now) * 1000))
        call_id = self.dialogue.open_call(kind, head, body, timeout_ms=timeout_ms, control=control)
        self.wake()
        return call_id

    def own(self, call_id: int, call: Waiting) -> None:
        """Say who is told what becomes of a call; in the same instant as `start_call` returns."""
        self._ours[call_id] = call

    def leave(self, call_id: int) -> None:
        """Nobody waits for a call any more."""
        if self._ours.pop(call_id, None) is not None:
            self.dialogue.cancel(call_id)
            self.wake()

    def answered(self, call: IncomingCall) -> None:
        """A call has its answer."""
        if not call.has_task:
            self._theirs.pop(call.call_id, None)
        if self._writer is not None:
            self.wake()

    def wake(self) -> None:
        """Something may have been queued."""
        if self._writer is not None and self.dialogue.has_data_to_send:
            task, self._writer = self._writer, None
            trio.lowlevel.reschedule(task)

    # --- tasks ----------------------------------------------------------------------------------

    async def run(self, events: list[Event]) -> None:
        """Read, write and run handlers until the connection ends.

        Args:
            events: what came with the handshake.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    if self._handler is not None:
                        self._tasks = HandlerTasks(nursery, self._handler, self._fail, self._end)
                    nursery.start_soon(self._read, events)
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._watch)
                    nursery.start_soon(self.deadlines.run)
        finally:
            await self._hang_up()

    async def _read(self, events: list[Event]) -> None:
        for event in events:
            _DISPATCH[type(event)](self, event)
        while not self.closed.is_set():
            try:
                data = await self._stream.receive_some(RECEIVE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            self._heard_at = trio.current_time()
            events = self.dialogue.receive_data(data) if data else self.dialogue.receive_eof()
            for event in events:
                _DISPATCH[type(event)](self, event)
            self._check_stuck()
            self.wake()

    async def _write(self) -> None:
        try:
            await self._write_on()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # What the peer sent before it closed, its reason above all, may still be read.
            await trio.sleep(GOODBYE_S)
            self._lose(CLOSED, "the connection broke")
        finally:
            self._idle.unpark_all()

    async def _write_on(self) -> None:
        marks: list[Mark] = []
        try:
            while not self.closed.is_set():
                if not self.dialogue.has_data_to_send:
                    self._idle.unpark_all()
                    await self._park_writer()
                    continue
                data, marks = self.dialogue.data_to_send()
                self._is_sending = True
                await self._stream.send_all(data)
                self._is_sending = False
                left, marks = marks, []
                for mark in left:
                    mark(True)
                if self._room and not self.dialogue.is_congested:
                    self._room.unpark_all()
        finally:
            for mark in marks:
                mark(False)

    async def _park_writer(self) -> None:
        def abort(raise_cancel: Any) -> trio.lowlevel.Abort:
            self._writer = None
            return trio.lowlevel.Abort.SUCCEEDED

        self._writer = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _watch(self) -> None:
        number, silent_s = 0, 0.0
        heard = self.dialogue.frames_received
        while not self.closed.is_set():
            await trio.sleep(self.limits.ping_interval_s)
            if self.dialogue.frames_received != heard:
                heard, silent_s = self.dialogue.frames_received, 0.0
                continue
            silent_s += self.limits.ping_interval_s
            if silent_s >= self.limits.silence_timeout_s:
                self._lose("silence", f"nothing came for {silent_s:g} s")
                return
            number += 1
            self.dialogue.ping(number)
            self.wake()

    def _end(self, call: IncomingCall) -> None:
        if not call.is_answered:
            call.fail(500, "not_answered", "the handler ended without an answer")
        self._theirs.pop(call.call_id, None)

    def _fail(self, call: IncomingCall, error: Exception) -> None:
        if not isinstance(error, Refusal):
            _log.error("error in the handler of %r", call.kind, exc_info=error)
        if call.is_answered:
            return
        if isinstance(error, Refusal):
            call.fail(error.status, error.code, error.detail)
        else:
            call.fail(500, "internal", "the handler failed")

    # --- events ---------------------------------------------------------------------------------

    def _on_called(self, event: Called) -> None:
        call = IncomingCall(self, event.call, event.control, self._heard_at)
        if self._inline is not None:
            try:
                is_taken = self._inline(call)
            except Exception as error:  # noqa: BLE001 - the edge, as in `HandlerTasks` (N5)
                self._fail(call, error)
                is_taken = True
            if is_taken:
                if not call.is_answered:
                    self._theirs[call.call_id] = call
                return
        if self._tasks is None:
            call.fail(404, "unknown_kind", f"no handler for {call.kind!r}")
        elif len(self._theirs) >= self.limits.calls_open_max:
            # Cancelled ones that still clean up are not open calls, but they are here.
            call.fail(503, "too_many_calls", f"{len(self._theirs)} handlers are running")
        else:
            call.has_task = True
            self._theirs[call.call_id] = call
            self._tasks.start(call)

    def _on_cancelled(self, event: CallCancelled) -> None:
        call = self._theirs.get(event.call_id)
        if call is not None:
            self._cancel(call)

    def _cancel(self, call: IncomingCall) -> None:
        if not call.has_task:
            self._theirs.pop(call.call_id, None)
        call.cancelled()

    def _on_body(self, event: BodyReceived) -> None:
        ours = self._ours.get(event.call_id)
        if ours is not None:
            if event.is_last:
                del self._ours[event.call_id]
            ours.received(event.chunk, event.is_last)
            return
        theirs = self._theirs.get(event.call_id)
        if theirs is not None:
            theirs.received(event.chunk, event.is_last)

    def _on_replied(self, event: Replied) -> None:
        call_id, head, body = event
        if body is None:
            call = self._ours.get(call_id)
        else:
            call = self._ours.pop(call_id, None)
        if call is not None:
            call.replied(head, body)

    def _on_failed(self, event: Failed) -> None:
        call = self._ours.pop(event.call_id, None)
        if call is not None:
            call.failed(ChannelRefused(self.peer.name, event.status, event.code, event.detail))

    def _on_posted(self, event: Posted) -> None:
        if self._posted is None:
            return
        try:
            self._posted(event.kind, event.body)
        except Exception:  # noqa: BLE001 - as in `_on_called`
            _log.exception("error in the handler of the post %r", event.kind)

    def _on_ended(self, event: Ended) -> None:
        why = f"{shown(event.code)}: {shown(event.detail)}"
        if event.code != CLOSED:
            _log.warning("the connection to %s ended: %s", self.peer.name, why)
        self._note_end(why)

    # --- the end --------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed.is_set():
            raise ChannelLost(self._lost())

    def _lost(self) -> str:
        return f"the connection to {self.peer.name} ended: {self.why}"

    def _lose(self, code: str, detail: str) -> None:
        if not self.closed.is_set():
            if code != CLOSED:
                _log.warning("the connection to %s ended: %s: %s", self.peer.name, code, detail)
            self.dialogue.drop()
            self._note_end(f"{code}: {detail}")

    def _note_end(self, why: str) -> None:
        """Tell everybody that the connection has ended (N4)."""
        if self.closed.is_set():
            return
        self.why = why
        self.closed.set()
        for waiting in [self._ours.pop(call_id) for call_id in list(self._ours)]:
            waiting.failed(ChannelLost(self._lost()))
        for call in list(self._theirs.values()):
            call.lost(ChannelLost(self._lost()))
            self._cancel(call)
        self._room.unpark_all()
        self._scope.cancel()

    def _check_stuck(self) -> None:
        if self.dialogue.is_stuck:
            self._lose("slow_reader", "the peer does not read what it makes this side send")

    async def flush(self) -> None:
        """Wait until what is queued has left, or will not."""
        with trio.move_on_after(self.limits.flush_timeout_s):
            while not self.closed.is_set() and (self.dialogue.has_data_to_send or self._is_sending):
                await self._idle.park()

    async def _hang_up(self) -> None:
        """Say goodbye, if the peer takes it at once; the tasks have ended."""
        if not self.closed.is_set():
            self.dialogue.say_goodbye(CLOSED, "")
            self._note_end(f"{CLOSED}: by this side")
        if not self._is_sending and self.dialogue.has_data_to_send:
            await self._send_last()
        self.dialogue.drop()
        await trio.aclose_forcefully(self._stream)

    async def _send_last(self) -> None:
        data, marks = self.dialogue.data_to_send()
        is_sent = False
        try:
            with trio.move_on_after(GOODBYE_S, shield=True):
                await self._stream.send_all(data)
                is_sent = True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        for mark in marks:
            mark(is_sent)


_DISPATCH: Final[dict[type, Callable[[Channel, Any], None]]] = {
    BodyReceived: Channel._on_body,
    CallCancelled: Channel._on_cancelled,
    Called: Channel._on_called,
    Ended: Channel._on_ended,
    Failed: Channel._on_failed,
    Posted: Channel._on_posted,
    Replied: Channel._on_replied,
}


@asynccontextmanager
async def open_channel(
    stream: trio.abc.Stream,
    *,
    role: Literal["opener", "acceptor"],
    me: Hello,
    limits: ChannelLimits = DEFAULT_LIMITS,
    handler: Handler | None = None,
    inline: Inline | None = None,
    posted: PostHandler | None = None,
    token: Secret | None = None,
    token_required: bool = True,
    uid: int | None = None,
) -> AsyncIterator[Channel]:
    """Shake hands over a stream and run the channel beside a block; the stream is closed in the end.

    The block is not cancelled when the connection ends: `closed` is set, and calls raise. It runs up
    to its first wait before any call or post of the peer is looked at. When it ends, what is queued
    still leaves (for a bounded time), and the handlers are cancelled.

    Args:
        role: "opener" for whoever connected, "acceptor" for the other.
        me: who this side is.
        handler: serves a call in a task of its own; None: an unknown kind is all that is answered.
        inline: asked first, synchronously; True: it has answered, or keeps the call and will.
        posted: takes one-way messages, synchronously and in order.
        token: an opener presents it; an acceptor compares with it, before anything else.
        token_required: False: an acceptor lets in who presents none, as not `authenticated`.
        uid: of the peer's process, for `peer`.

    Raises:
        ChannelLost: the handshake failed or did not end in time; says why.

    Cancelled: the connection is closed.
    """
    dialogue = Dialogue(Role(role), me, limits, token=token, token_required=token_required)
    try:
        welcomed, *events = await shake_hands(stream, dialogue, limits)
        assert isinstance(welcomed, Welcomed)
        peer = PeerInfo(
            role=welcomed.peer.role,
            name=welcomed.peer.name,
            instance=welcomed.peer.instance,
            uid=uid,
            authenticated=welcomed.authenticated,
        )
        channel = Channel(stream, dialogue, peer, limits, handler, inline, posted)
        async with open_background() as background:
            background.start_soon(channel.run, events)
            yield channel
            await channel.flush()
    finally:
        await trio.aclose_forcefully(stream)
