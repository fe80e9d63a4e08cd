"""The dialogue of two processes over one stream of bytes: bytes in, events out; commands in, bytes out.

No I/O, no clock. Both ends run the same object with opposite roles. The rules of this file:

- D1 Before the handshake nothing but it is taken; what it may send is bounded by
  `HANDSHAKE_BYTES_MAX`.
- D2 The events do not depend on how the bytes were cut. A broken rule is the last event, after
  everything that came before it.
- D3 Every call that is opened ends once: with the last of a reply, an error, or the connection.
- D4 Each side queues one final frame per call, so that no call id is ever in doubt (see `calls`).
- D5 What a peer can make this side keep is bounded by what this side announced.
- D6 What one side queues in one lane arrives in that order; control overtakes data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gymtrio.settings import Secret
from gymtrio.strict import MalformedValue
from gymtrio.wire.bounds import ChannelLimits
from gymtrio.wire.errors import ProtocolViolation
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
from gymtrio.wire.frames import Frame, FrameDecoder, FrameError
from gymtrio.wire.messages import (
    DECODERS,
    HANDSHAKE_BYTES_MAX,
    PROTOCOL_VERSIONS,
    Call,
    Cancel,
    Capacity,
    Credit,
    Data,
    Error,
    Goodbye,
    Hello,
    HelloMessage,
    Ping,
    Post,
    Reply,
    Type,
    WelcomeMessage,
    encode_hello,
    encode_welcome,
)
from gymtrio.wire.speaking import OurCall, Speaking, TheirCall
from gymtrio.wire.tables import (
    ACCEPTOR_BIT,
    CALLEE,
    CALLER,
    CONTROL_BIT,
    Ours,
    Role,
    Said,
    State,
    Theirs,
)

CLOSED: Final = "closed"
"""The code of an end at which nothing is wrong."""


class Dialogue(Speaking):
    """One side of one connection.

    Args:
        hello: who we are.
        token: what an opener presents; what an acceptor compares with.
        token_required: an acceptor refuses who presents none. Who presents a wrong one is always
            refused.
    """

    def __init__(
        self,
        role: Role,
        hello: Hello,
        limits: ChannelLimits,
        *,
        token: Secret | None = None,
        token_required: bool = True,
    ) -> None:
        super().__init__(role, limits)
        self.frames_received = 0
        """Whole ones; that it does not grow is silence."""
        self._hello = hello
        self._token = token
        self._token_required = token_required
        self._decoder = FrameDecoder(payload_bytes_max=HANDSHAKE_BYTES_MAX)
        self._last_id = {0: -1, CONTROL_BIT: -1}
        """Of the peer's calls, by lane."""
        if role is Role.OPENER:
            message = HelloMessage(
                versions=PROTOCOL_VERSIONS,
                hello=hello,
                capacity=limits.capacity(),
                token=None if token is None else token.reveal(),
            )
            self._outgoing.control.put(encode_hello(message))

    # --- bytes in -------------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray) -> list[Event]:
        """Take what arrived; nothing is raised, a broken rule is an `Ended`."""
        events: list[Event] = []
        if self.state is State.ENDED:
            return events
        self._decoder.receive_data(data)
        try:
            while not self.is_open:
                frame = self._decoder.next_frame()
                if frame is None:
                    return events
                self.frames_received += 1
                self._receive(frame, events)
                if self.is_over:
                    return events
            # More than once, since a broken frame is found only after those before it were given.
            while frames := self._decoder.whole_frames():
                self.frames_received += len(frames)
                for frame in frames:
                    self._receive(frame, events)
                    if self.is_over:
                        return events
        except ProtocolViolation as violation:
            self._break(violation.code, violation.detail, events)
        except FrameError as error:
            self._break("bad_frame", str(error), events)
        except MalformedValue as error:
            self._break("bad_message", str(error), events)
        return events

    def receive_eof(self) -> list[Event]:
        """The peer closed its side."""
        if self.state is State.ENDED:
            return []
        events: list[Event] = []
        if self._decoder.pending_bytes:
            self._end(Ended("truncated", "the connection ended within a frame", False), events)
        else:
            self._end(Ended(CLOSED, "the connection ended", False), events)
        return events

    def _receive(self, frame: Frame, events: list[Event]) -> None:
        frame_type, payload = frame
        to = self._taken.get(frame_type)
        if to is None:
            raise ProtocolViolation(
                "unexpected_frame", f"frame type {frame_type} while {self.state.value}"
            )
        _RECEIVERS[frame_type](self, DECODERS[frame_type](payload), events)
        if to is not self.state:
            self._enter(to)

    def _on_hello(self, message: HelloMessage, events: list[Event]) -> None:
        # The token first: who has none learns nothing, not even which versions are spoken.
        if self._token is not None:
            matches = self._token.matches(message.token or "")
            if not matches and (self._token_required or message.token is not None):
                raise ProtocolViolation("unauthorized", "a valid token is required")
        spoken = set(message.versions) & set(PROTOCOL_VERSIONS)
        if not spoken:
            ours = ", ".join(map(str, PROTOCOL_VERSIONS))
            raise ProtocolViolation("version", f"this side speaks {ours}")
        welcome = WelcomeMessage(
            version=max(spoken), hello=self._hello, capacity=self.limits.capacity()
        )
        self._outgoing.control.put(encode_welcome(welcome))
        self._meet(message.capacity)
        authenticated = self._token is not None and message.token is not None
        events.append(Welcomed(message.hello, authenticated))

    def _on_welcome(self, message: WelcomeMessage, events: list[Event]) -> None:
        if message.version not in PROTOCOL_VERSIONS:
            raise ProtocolViolation("version", "the peer chose a version that was not offered")
        self._meet(message.capacity)
        events.append(Welcomed(message.hello, False))

    def _meet(self, capacity: Capacity) -> None:
        self._know(capacity)
        self._decoder.payload_bytes_max = self.limits.frame_bytes_max

    def _on_goodbye(self, goodbye: Goodbye, events: list[Event]) -> None:
        self._end(Ended(goodbye.code, goodbye.detail, True), events)

    def _on_ping(self, ping: Ping, events: list[Event]) -> None:
        self._outgoing.put_pong(ping.number)

    def _on_pong(self, pong: Ping, events: list[Event]) -> None:
        """That it came is all that it says."""

    def _on_post(self, post: Post, events: list[Event]) -> None:
        events.append(Posted(*post))

    def _on_call(self, call: Call, events: list[Event]) -> None:
        call_id = call.call_id
        lane = call_id & CONTROL_BIT
        if call_id & ACCEPTOR_BIT == self._our_bit:
            raise ProtocolViolation("bad_call_id", "a call with an id of this side")
        if call_id <= self._last_id[lane]:
            raise ProtocolViolation("bad_call_id", "the ids of a lane's calls do not ascend")
        if len(self._theirs) >= self.limits.calls_open_max:
            raise ProtocolViolation(
                "too_many_calls", f"more than {self.limits.calls_open_max} calls open"
            )
        self._check_head(call.head)
        self._last_id[lane] = call_id
        state = Theirs.RECEIVING if call.body is None else Theirs.WHOLE
        self._theirs[call_id] = TheirCall(state, self.limits.window_bytes)
        events.append(Called(call, lane != 0))

    def _on_reply(self, reply: Reply, events: list[Event]) -> None:
        self._check_head(reply.head)
        said = Said.REPLY_BEGINS if reply.body is None else Said.REPLY_WHOLE
        if self._move_ours(reply.call_id, said):
            events.append(Replied(*reply))

    def _on_error(self, error: Error, events: list[Event]) -> None:
        if self._move_ours(error.call_id, Said.ERROR):
            events.append(Failed(*error))

    def _on_data(self, data: Data, events: list[Event]) -> None:
        said = Said.DATA_LAST if data.is_last else Said.DATA
        call: OurCall | TheirCall | None
        if data.call_id & ACCEPTOR_BIT == self._our_bit:
            call = self._ours.get(data.call_id)
            wanted = self._move_ours(data.call_id, said)
            assert call is not None
        else:
            call = self._move_theirs(data.call_id, said)
            wanted = call is not None
            if call is None:
                return
        call.window_bytes -= len(data.chunk)
        if call.window_bytes < 0:
            raise ProtocolViolation("flow_control", "more of a body than was given credit for")
        if wanted:
            events.append(BodyReceived(*data))

    def _on_credit(self, credit: Credit, events: list[Event]) -> None:
        call: OurCall | TheirCall | None
        if credit.call_id & ACCEPTOR_BIT == self._our_bit:
            self._move_ours(credit.call_id, Said.CREDIT)
            call = self._ours[credit.call_id]
        else:
            call = self._move_theirs(credit.call_id, Said.CREDIT)
        if call is not None and call.body is not None:
            call.body.give_credit(credit.size_bytes)

    def _on_cancel(self, cancel: Cancel, events: list[Event]) -> None:
        call_id = cancel.call_id
        if call_id & ACCEPTOR_BIT == self._our_bit:
            raise ProtocolViolation("bad_call_id", "a cancel of a call of this side")
        if self._move_theirs(call_id, Said.CANCEL) is not None:
            self._confirm_cancel(call_id)
            events.append(CallCancelled(call_id))

    def _check_head(self, head: bytes) -> None:
        if len(head) > self.limits.head_bytes_max:
            raise ProtocolViolation(
                "head_too_large", f"{len(head)} bytes, limit {self.limits.head_bytes_max}"
            )

    def _move_ours(self, call_id: int, said: Said) -> bool:
        """Note what was said about a call of ours, and say whether anybody wants to know."""
        call = self._ours.get(call_id)
        to = None if call is None else CALLER.get((call.state, said))
        if call is None or to is None:
            where = "no open call" if call is None else call.state.name.lower()
            raise ProtocolViolation("unexpected_answer", f"{said.name.lower()} for {where}")
        wanted = call.state is Ours.AWAITING or call.state is Ours.RECEIVING
        call.state = to
        if to is Ours.GONE:
            self._forget_ours(call_id, call)
        return wanted

    def _move_theirs(self, call_id: int, said: Said) -> TheirCall | None:
        """Note what was said about a call of the peer; None: it crossed with our answer."""
        call = self._theirs.get(call_id)
        if call is None:
            if call_id > self._last_id[call_id & CONTROL_BIT]:
                raise ProtocolViolation("bad_call_id", f"{said.name.lower()} for a call never made")
            return None
        to = CALLEE.get((call.state, said))
        if to is None:
            raise ProtocolViolation("unexpected_frame", f"{said.name.lower()} after the last data")
        call.state = to
        return call

    def _break(self, code: str, detail: str, events: list[Event]) -> None:
        self._end(Ended(code, detail, False), events)
        self._put_goodbye(code, detail)

    def _end(self, ended: Ended, events: list[Event]) -> None:
        self.drop()
        events.append(ended)


_RECEIVERS: Final[Mapping[int, Callable[[Dialogue, Any, list[Event]], None]]] = {
    Type.HELLO: Dialogue._on_hello,
    Type.WELCOME: Dialogue._on_welcome,
    Type.GOODBYE: Dialogue._on_goodbye,
    Type.PING: Dialogue._on_ping,
    Type.PONG: Dialogue._on_pong,
    Type.CALL: Dialogue._on_call,
    Type.REPLY: Dialogue._on_reply,
    Type.ERROR: Dialogue._on_error,
    Type.DATA: Dialogue._on_data,
    Type.CREDIT: Dialogue._on_credit,
    Type.CANCEL: Dialogue._on_cancel,
    Type.POST: Dialogue._on_post,
    Type.CONTROL_POST: Dialogue._on_post,
}
assert _RECEIVERS.keys() == DECODERS.keys()
