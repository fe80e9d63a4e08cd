"""What one side of a dialogue may say, and what it keeps of the calls that are open. No I/O.

The commands are the program's, so a misuse of them is an assertion; what depends on the peer (whether
it still waits, how much it takes) is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gymtrio.wire.bounds import (
    BATCH_BYTES_MAX,
    FRAME_ROOM_BYTES,
    SMALL_ANSWER_BYTES_MAX,
    ChannelLimits,
)
from gymtrio.wire.errors import ChannelFull, ChannelLost
from gymtrio.wire.messages import (
    CODE_CHARACTERS_MAX,
    DETAIL_CHARACTERS_MAX,
    KIND_CHARACTERS_MAX,
    Capacity,
    Error,
    Goodbye,
    Type,
    encode,
)
from gymtrio.wire.outgoing import Batch, Body, Lane, Mark, Outgoing
from gymtrio.wire.tables import (
    ACCEPTOR_BIT,
    BEGIN,
    CONTROL_BIT,
    ID_STEP,
    TAKES,
    Ours,
    Role,
    State,
    Theirs,
)

CANCELLED: Final = (499, "cancelled", "the caller waits no more")
"""What a cancelled call is answered with."""


class OurCall:
    """A call that we made and whose last frame has not come."""

    __slots__ = ("body", "consumed_bytes", "state", "window_bytes")

    def __init__(self, window_bytes: int) -> None:
        self.state = Ours.AWAITING
        self.window_bytes = window_bytes
        """What the peer may still send of the reply's body."""
        self.consumed_bytes = 0
        self.body: Body | None = None
        """The request's, while it is being sent."""


class TheirCall:
    """A call of the peer whose last frame we have not queued, or whose reply's body is being sent."""

    __slots__ = ("body", "consumed_bytes", "state", "window_bytes")

    def __init__(self, state: Theirs, window_bytes: int) -> None:
        self.state = state
        self.window_bytes = window_bytes
        """What the peer may still send of the request's body."""
        self.consumed_bytes = 0
        self.body: Body | None = None
        """The reply's, once begun."""


class Speaking:
    """The commands of a dialogue, and its state."""

    def __init__(self, role: Role, limits: ChannelLimits) -> None:
        self.role: Final = role
        self.limits: Final = limits
        self._enter(BEGIN[role])
        self._know(limits.capacity())
        self._outgoing: Final = Outgoing(self._sent_last)
        self._our_bit: Final = ACCEPTOR_BIT if role is Role.ACCEPTOR else 0
        self._next_id = {bit: self._our_bit | bit for bit in (0, CONTROL_BIT)}
        """Of our calls, by lane."""
        self._ours: dict[int, OurCall] = {}
        self._theirs: dict[int, TheirCall] = {}

    def _know(self, capacity: Capacity) -> None:
        """What the peer takes: as much as this side, until it has said so."""
        self._capacity = capacity
        frame_bytes_max = capacity.frame_bytes_max - FRAME_ROOM_BYTES
        self._head_bytes_max = min(capacity.head_bytes_max, frame_bytes_max)
        self._body_inline_bytes_max = min(self.limits.body_inline_bytes_max, frame_bytes_max)
        self._inline_bytes_max = frame_bytes_max
        """Of head and body together."""

    def _enter(self, state: State) -> None:
        self.state = state
        self._taken: Mapping[int, State] = TAKES[state]

    @property
    def is_open(self) -> bool:
        return self.state is State.OPEN

    @property
    def is_over(self) -> bool:
        return self.state is State.ENDED

    # --- commands in ----------------------------------------------------------------------------

    @property
    def is_congested(self) -> bool:
        """The peer does not read: calls and posts are refused until it does."""
        return self._outgoing.size_bytes >= self.limits.outgoing_bytes_max

    @property
    def is_stuck(self) -> bool:
        """The peer does not read and makes us queue all the same: it is to be given up."""
        return self._outgoing.size_bytes >= 2 * self.limits.outgoing_bytes_max

    @property
    def open_calls(self) -> int:
        """Calls of ours whose last frame has not come."""
        return len(self._ours)

    def open_call(
        self,
        kind: str,
        head: bytes,
        body: bytes,
        *,
        timeout_ms: int | None = None,
        control: bool = False,
    ) -> int:
        """Queue a call and give its id.

        Raises:
            ChannelFull: too much is queued, too many calls are open, or the head is over what the
                peer takes.
            ChannelLost: the dialogue is over.
        """
        assert type(head) is bytes
        assert type(body) is bytes
        self._check_open()
        if len(self._ours) >= self._capacity.calls_open_max:
            raise ChannelFull(f"{len(self._ours)} calls are open, the peer takes no more")
        if len(head) > self._head_bytes_max:
            raise ChannelFull(f"a head of {len(head)} bytes, the peer takes {self._head_bytes_max}")
        bit = CONTROL_BIT if control else 0
        call_id = self._next_id[bit]
        lane = self._lane(call_id)
        assert 0 < len(kind) <= KIND_CHARACTERS_MAX
        call = OurCall(self.limits.window_bytes)
        if self._is_inline(head, body):
            frame = encode(Type.CALL, (call_id, kind, head, body, timeout_ms))
            lane.put(frame)
        else:
            frame = encode(Type.CALL, (call_id, kind, head, None, timeout_ms))
            call.body = Body(call_id, lane, self._capacity.window_bytes)
            call.body.add(body)
            call.body.finish(None)
            lane.put(frame, None, call.body)
        self._next_id[bit] = call_id + ID_STEP
        self._ours[call_id] = call
        return call_id

    def cancel(self, call_id: int) -> None:
        """Say that nobody waits for a call's answer any more; no event of it follows."""
        call = self._ours.get(call_id)
        if call is None or self.state is not State.OPEN:
            return
        if call.state is Ours.AWAITING:
            call.state = Ours.LEFT
        elif call.state is Ours.RECEIVING:
            call.state = Ours.LEFT_RECEIVING
        else:
            return
        if call.body is not None:
            call.body.drop()
        # The rest of a body that nobody reads still fits into the window and needs no credit.
        self._lane(call_id).put(encode(Type.CANCEL, (call_id,)))

    def post(self, kind: str, body: bytes, *, control: bool) -> None:
        """Queue a one-way message.

        Raises:
            ChannelFull: too much is queued, or the body is over what one frame of the peer takes.
            ChannelLost: the dialogue is over.
        """
        assert 0 < len(kind) <= KIND_CHARACTERS_MAX
        assert type(body) is bytes
        self._check_open()
        if len(body) + FRAME_ROOM_BYTES > self._capacity.frame_bytes_max:
            raise ChannelFull(f"a post of {len(body)} bytes does not fit into a frame of the peer")
        lane = self._outgoing.control if control else self._outgoing.data
        lane.put(encode(Type.CONTROL_POST if control else Type.POST, (kind, body)))

    def is_wanted(self, call_id: int) -> bool:
        """Whether the peer still waits for the answer to its call."""
        return call_id in self._theirs

    def reply(self, call_id: int, head: bytes, body: bytes, mark: Mark | None = None) -> None:
        """Queue a whole answer; if nobody wants it any more, only the mark is told.

        A head that the peer does not take becomes an error: a call always ends.
        """
        assert type(head) is bytes
        assert type(body) is bytes
        call = self._theirs.get(call_id)
        if call is None:
            if mark is not None:
                mark(False)
            return
        assert call.body is None, "answered twice"
        if len(head) > self._head_bytes_max:
            self._refuse_reply(call_id, len(head))
            if mark is not None:
                mark(False)
        elif self._is_inline(head, body) and not self._waits_in_chunks(call_id, body):
            self._lane(call_id).put(encode(Type.REPLY, (call_id, head, body)), mark)
            self._forget_theirs(call_id)
        else:
            self._begin(call_id, call, head).add(body)
            self.finish(call_id, mark)

    def begin(self, call_id: int, head: bytes) -> None:
        """Queue the head of an answer whose body comes by `send` and `finish`."""
        call = self._theirs.get(call_id)
        if call is None:
            return
        assert call.body is None, "answered twice"
        if len(head) > self._head_bytes_max:
            self._refuse_reply(call_id, len(head))
        else:
            self._begin(call_id, call, head)

    def send(self, call_id: int, chunk: bytes) -> Body | None:
        """Add to the body of an answer; None: nobody wants it any more."""
        assert type(chunk) is bytes
        call = self._theirs.get(call_id)
        if call is None:
            return None
        assert call.body is not None, "not begun"
        assert not call.body.is_whole, "finished before"
        call.body.add(chunk)
        return call.body

    def finish(self, call_id: int, mark: Mark | None = None) -> None:
        """No more of the body follows; if nobody wants it any more, only the mark is told."""
        call = self._theirs.get(call_id)
        if call is None:
            if mark is not None:
                mark(False)
            return
        assert call.body is not None, "not begun"
        assert not call.body.is_whole, "finished before"
        call.body.finish(mark)

    def fail(self, call_id: int, status: int, code: str, detail: str) -> None:
        """Queue an error as answer, or to follow what was sent of an answer's body."""
        call = self._theirs.get(call_id)
        if call is None:
            return
        assert 400 <= status <= 599
        frame = encode(Type.ERROR, Error(call_id, status, *_told(code, detail)))
        if call.body is None:
            self._forget_theirs(call_id)
            self._lane(call_id).put(frame)
        else:
            assert not call.body.is_whole, "finished before"
            call.body.fail(frame)

    def _confirm_cancel(self, call_id: int) -> None:
        call = self._forget_theirs(call_id)
        assert call is not None
        if call.body is not None:
            call.body.drop()
        self._lane(call_id).put(encode(Type.ERROR, (call_id, *CANCELLED)))

    def consume(self, call_id: int, size_bytes: int) -> None:
        """So much of a body was read, so the peer may send more of it."""
        call: OurCall | TheirCall | None
        if call_id & ACCEPTOR_BIT == self._our_bit:
            call = self._ours.get(call_id)
            if call is not None and call.state is not Ours.RECEIVING:
                return
        else:
            call = self._theirs.get(call_id)
            if call is not None and call.state is not Theirs.RECEIVING:
                return
        if call is None:
            return
        call.consumed_bytes += size_bytes
        if 2 * call.consumed_bytes >= self.limits.window_bytes:
            call.window_bytes += call.consumed_bytes
            self._outgoing.put_credit(call_id, call.consumed_bytes)
            call.consumed_bytes = 0

    def ping(self, number: int) -> None:
        """Ask the peer whether it is there."""
        if self.state is State.OPEN:
            self._outgoing.control.put(encode(Type.PING, (number,)))

    def say_goodbye(self, code: str, detail: str) -> None:
        """Queue the last frame of this side, after all that is queued; nothing is taken any more."""
        if self.state is not State.ENDED:
            self._enter(State.ENDED)
            self._put_goodbye(code, detail)

    def drop(self) -> None:
        """The connection is gone: every mark that was not handed out is told so."""
        self._enter(State.ENDED)
        self._outgoing.drop()
        calls: list[OurCall | TheirCall] = [*self._ours.values(), *self._theirs.values()]
        for call in calls:
            if call.body is not None:
                call.body.drop()
        self._ours.clear()
        self._theirs.clear()

    # --- bytes out ------------------------------------------------------------------------------

    @property
    def has_data_to_send(self) -> bool:
        return bool(self._outgoing)

    def data_to_send(self, size_bytes_max: int = BATCH_BYTES_MAX) -> Batch:
        """Take what leaves next, in one piece."""
        return self._outgoing.take(size_bytes_max)

    # --- inside ---------------------------------------------------------------------------------

    def _lane(self, call_id: int) -> Lane:
        return self._outgoing.control if call_id & CONTROL_BIT else self._outgoing.data

    def _is_inline(self, head: bytes, body: bytes) -> bool:
        size = len(body)
        return size <= self._body_inline_bytes_max and len(head) + size <= self._inline_bytes_max

    def _waits_in_chunks(self, call_id: int, body: bytes) -> bool:
        # In the control lane answers are few, and their order is what others rely on.
        is_large = len(body) > SMALL_ANSWER_BYTES_MAX
        return is_large and not call_id & CONTROL_BIT and self.is_congested

    def _begin(self, call_id: int, call: TheirCall, head: bytes) -> Body:
        lane = self._lane(call_id)
        call.body = Body(call_id, lane, self._capacity.window_bytes)
        lane.put(encode(Type.REPLY, (call_id, head, None)), None, call.body)
        return call.body

    def _sent_last(self, call_id: int) -> None:
        if call_id & ACCEPTOR_BIT == self._our_bit:
            call = self._ours.get(call_id)
            if call is not None:
                call.body = None
        else:
            self._forget_theirs(call_id)

    def _refuse_reply(self, call_id: int, size: int) -> None:
        detail = f"the head of the answer has {size} bytes, the caller takes {self._head_bytes_max}"
        self.fail(call_id, 500, "reply_too_large", detail)

    def _check_open(self) -> None:
        if self.state is not State.OPEN:
            raise ChannelLost(f"the channel is not open: {self.state.value}")
        if self.is_congested:
            raise ChannelFull(
                f"{self._outgoing.size_bytes} bytes wait for a peer that reads slowly"
            )

    def _put_goodbye(self, code: str, detail: str) -> None:
        # In the data lane, so that it is the last in truth.
        self._outgoing.data.put(encode(Type.GOODBYE, Goodbye(*_told(code, detail))))

    def _forget_ours(self, call_id: int, call: OurCall) -> None:
        del self._ours[call_id]
        self._outgoing.drop_credit(call_id)
        if call.body is not None:
            call.body.drop()

    def _forget_theirs(self, call_id: int) -> TheirCall | None:
        call = self._theirs.pop(call_id, None)
        if call is not None:
            self._outgoing.drop_credit(call_id)
        return call


def _told(code: str, detail: str) -> tuple[str, str]:
    """Cut to what a peer takes; a lone surrogate, which it would not, becomes a question mark."""
    told = detail[:DETAIL_CHARACTERS_MAX].encode("utf-8", "replace").decode()
    return code[:CODE_CHARACTERS_MAX], told
