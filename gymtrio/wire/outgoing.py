"""What one side has queued for its peer, in two lanes; bodies are cut when they leave. No I/O.

The rules of this file:

- O1 In one lane, frames leave in the order in which they were put.
- O2 A control frame leaves before every data frame that has not left yet.
- O3 A body's chunks leave after the frame that announces it, never more of them than the peer gave
  credit for, and the bodies of a lane take turns.
- O4 A mark is handed out with the batch that holds the last byte of what it was put with, or it is told
  that it will not be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from gymtrio.wire.bounds import CHUNK_BYTES_MAX
from gymtrio.wire.messages import Type, encode

Mark = Callable[[bool], None]
"""Told once whether what it was put with has left."""


class Batch(NamedTuple):
    data: bytes
    marks: list[Mark]


class Body:
    """A body that is being sent.

    Args:
        credit_bytes: what may be sent before the peer says more.
    """

    __slots__ = (
        "announced",
        "call_id",
        "chunks",
        "credit_bytes",
        "dead",
        "error",
        "is_whole",
        "lane",
        "mark",
        "on_room",
        "pending_bytes",
        "queued",
    )

    def __init__(self, call_id: int, lane: Lane, credit_bytes: int) -> None:
        self.call_id = call_id
        self.lane = lane
        self.credit_bytes = credit_bytes
        self.chunks: deque[memoryview] = deque()
        self.pending_bytes = 0
        self.is_whole = False
        """No chunk will be added."""
        self.announced = False
        self.queued = False
        self.dead = False
        self.error: bytes | None = None
        """The frame that ends it instead of the last of its chunks."""
        self.mark: Mark | None = None
        self.on_room: Callable[[], None] | None = None
        """Called when less than a chunk is pending."""

    def add(self, chunk: bytes) -> None:
        if chunk:
            self.chunks.append(memoryview(chunk))
            self.pending_bytes += len(chunk)
        self.lane.may_send(self)

    def finish(self, mark: Mark | None) -> None:
        self.is_whole = True
        self.mark = mark
        self.lane.may_send(self)

    def fail(self, frame: bytes) -> None:
        """Let an error follow what was added."""
        self.is_whole = True
        self.error = frame
        self.lane.may_send(self)

    def give_credit(self, size_bytes: int) -> None:
        self.credit_bytes += size_bytes
        self.lane.may_send(self)

    def drop(self) -> None:
        """Nothing of it leaves any more; its mark is told so, who waits for room is woken."""
        if self.dead:
            return
        self.dead = True
        self.chunks.clear()
        self.pending_bytes = 0
        mark, self.mark = self.mark, None
        on_room, self.on_room = self.on_room, None
        if mark is not None:
            mark(False)
        if on_room is not None:
            on_room()

    def can_send(self) -> bool:
        if self.dead or not self.announced:
            return False
        if self.pending_bytes:
            return self.credit_bytes > 0
        return self.is_whole

    def take(self) -> tuple[bytes, bool]:
        """Cut the next DATA frame, or end with the error; say whether it is the last."""
        if self.error is not None and not self.pending_bytes:
            return self.error, True
        size = min(self.pending_bytes, self.credit_bytes, CHUNK_BYTES_MAX)
        parts = []
        left = size
        while left:
            chunk = self.chunks.popleft()
            if len(chunk) > left:
                self.chunks.appendleft(chunk[left:])
                chunk = chunk[:left]
            parts.append(chunk)
            left -= len(chunk)
        self.pending_bytes -= size
        self.credit_bytes -= size
        is_last = self.is_whole and not self.pending_bytes and self.error is None
        return encode(Type.DATA, (self.call_id, is_last, b"".join(parts))), is_last


class Lane:
    """Frames in order, and the bodies that take turns between them."""

    __slots__ = ("bodies", "frames", "size_bytes")

    def __init__(self) -> None:
        self.frames: deque[tuple[bytes, Mark | None, Body | None]] = deque()
        self.bodies: deque[Body] = deque()
        self.size_bytes = 0

    def __bool__(self) -> bool:
        return bool(self.frames or self.bodies)

    def put(self, frame: bytes, mark: Mark | None = None, body: Body | None = None) -> None:
        """Queue a frame; `body` is the one that it announces."""
        self.frames.append((frame, mark, body))
        self.size_bytes += len(frame)

    def may_send(self, body: Body) -> None:
        if not body.queued and body.can_send():
            body.queued = True
            self.bodies.append(body)


class Outgoing:
    """The queue of one connection.

    Args:
        on_last: told the call id when the last chunk of a body has been taken.
    """

    def __init__(self, on_last: Callable[[int], None]) -> None:
        self.control: Final = Lane()
        self.data: Final = Lane()
        self._lanes: Final = (self.control, self.data)
        self._on_last = on_last
        self._credits: dict[int, int] = {}
        self._pong: int | None = None

    @property
    def size_bytes(self) -> int:
        """Of the frames that are queued; bodies in chunks stay with those who gave them."""
        return self.control.size_bytes + self.data.size_bytes

    def __bool__(self) -> bool:
        return bool(self.control or self.data or self._credits or self._pong is not None)

    def put_credit(self, call_id: int, size_bytes: int) -> None:
        """Credits of one body that have not left yet are one."""
        self._credits[call_id] = self._credits.get(call_id, 0) + size_bytes

    def drop_credit(self, call_id: int) -> None:
        if self._credits:
            self._credits.pop(call_id, None)

    def put_pong(self, number: int) -> None:
        """The last ping is answered: a peer that only pings makes us queue one frame."""
        self._pong = number

    def take(self, size_bytes_max: int) -> Batch:
        """Take what leaves next, some `size_bytes_max` of it."""
        parts: list[bytes] = []
        marks: list[Mark] = []
        if self._pong is not None:
            parts.append(encode(Type.PONG, (self._pong,)))
            self._pong = None
        if self._credits:
            parts += [encode(Type.CREDIT, credit) for credit in self._credits.items()]
            self._credits.clear()
        left = size_bytes_max - sum(map(len, parts))
        for lane in self._lanes:
            while left > 0 and lane:
                left = self._take_frames(lane, left, parts, marks)
                left = self._take_chunk(lane, left, parts, marks)
        return Batch(b"".join(parts), marks)

    def _take_frames(self, lane: Lane, left: int, parts: list[bytes], marks: list[Mark]) -> int:
        # With bodies waiting, frames get as much of a batch at a time as a chunk gets.
        until = max(0, left - CHUNK_BYTES_MAX) if lane.bodies else 0
        frames, taken = lane.frames, 0
        while frames and left - taken > until:
            frame, mark, body = frames.popleft()
            parts.append(frame)
            taken += len(frame)
            if mark is not None:
                marks.append(mark)
            if body is not None:
                body.announced = True
                lane.may_send(body)
        lane.size_bytes -= taken
        return left - taken

    def _take_chunk(self, lane: Lane, left: int, parts: list[bytes], marks: list[Mark]) -> int:
        if left <= 0 or not lane.bodies:
            return left
        body = lane.bodies.popleft()
        body.queued = False
        if not body.can_send():
            return left
        frame, is_last = body.take()
        parts.append(frame)
        if is_last:
            body.dead = True
            if body.mark is not None:
                marks.append(body.mark)
                body.mark = None
            self._on_last(body.call_id)
        else:
            lane.may_send(body)
        if body.on_room is not None and body.pending_bytes < CHUNK_BYTES_MAX:
            on_room, body.on_room = body.on_room, None
            on_room()
        return left - len(frame)

    def drop(self) -> None:
        """The connection is gone: every mark that was not handed out is told so."""
        self._credits.clear()
        self._pong = None
        for lane in self._lanes:
            frames, bodies = list(lane.frames), list(lane.bodies)
            lane.frames.clear()
            lane.bodies.clear()
            lane.size_bytes = 0
            for _, mark, body in frames:
                if body is not None:
                    bodies.append(body)
                if mark is not None:
                    mark(False)
            for body in bodies:
                body.drop()
