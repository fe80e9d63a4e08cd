"""Whatever a peer sends, and however it is cut, becomes events; whatever both say, every call ends."""

from __future__ import annotations

from typing import Any

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.wire.dialogue import Dialogue
from gymtrio.wire.events import (
    BodyReceived,
    CallCancelled,
    Called,
    Ended,
    Event,
    Failed,
    Posted,
    Replied,
)
from gymtrio.wire.frames import encode_frame
from gymtrio.wire.messages import Type
from tests.helpers.dialogues import SMALL, Ends, open_ends

SIZES = st.sampled_from([0, 1, 99, 100, 101, 999, 1000, 1001, 3000])
MESSAGES = st.lists(
    st.one_of(
        st.tuples(st.just("call"), SIZES, st.booleans()),
        st.tuples(st.just("post"), SIZES, st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 5), st.booleans()),
    ),
    max_size=8,
)


def stream_of(messages: list[tuple[str, int, bool]]) -> bytes:
    """All that an opener says, its hello included."""
    ends = Ends()
    data = bytearray(ends.opener.data_to_send().data)
    ends.acceptor.receive_data(bytes(data))
    ends.opener.receive_data(ends.acceptor.data_to_send().data)
    ids: list[int] = []
    for what, number, control in messages:
        if what == "call":
            ids.append(ends.opener.open_call("k", b"h", b"x" * number, control=control))
        elif what == "post":
            ends.opener.post("p", b"y" * number, control=control)
        elif number < len(ids):
            ends.opener.cancel(ids[number])
        data += ends.opener.data_to_send().data
    return bytes(data)


def told(pieces: list[bytes]) -> list[Event]:
    acceptor = Ends().acceptor
    events: list[Event] = []
    for piece in pieces:
        events += acceptor.receive_data(piece)
    return events


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ordered = sorted(place % (len(data) + 1) for place in places)
    return [data[a:b] for a, b in zip([0, *ordered], [*ordered, len(data)], strict=True)]


@given(MESSAGES, st.lists(st.integers(0, 2**20), max_size=12))
def test_the_events_do_not_depend_on_how_the_bytes_were_cut(
    messages: list[tuple[str, int, bool]], places: list[int]
) -> None:
    """D2"""
    data = stream_of(messages)
    expected = told([data])
    assert not any(isinstance(event, Ended) for event in expected)
    assert told(cut(data, places)) == expected
    assert told([data[at : at + 1] for at in range(len(data))]) == expected


@given(MESSAGES, st.data())
def test_a_flipped_bit_ends_the_connection_after_what_came_before_it(
    messages: list[tuple[str, int, bool]], data: st.DataObject
) -> None:
    """I36, D2"""
    stream = bytearray(stream_of(messages))
    expected = told([bytes(stream)])
    bit = data.draw(st.integers(0, len(stream) * 8 - 1))
    stream[bit // 8] ^= 1 << bit % 8
    events = told(cut(bytes(stream), data.draw(st.lists(st.integers(0, 2**20), max_size=4))))
    if events and isinstance(events[-1], Ended):
        events.pop()
    # A length that became larger is awaited; everything else is found.
    assert events == expected[: len(events)]
    assert len(events) < len(expected) or not expected


@given(MESSAGES, st.data())
def test_a_truncated_stream_is_told_up_to_its_end(
    messages: list[tuple[str, int, bool]], data: st.DataObject
) -> None:
    """WRK-2"""
    stream = stream_of(messages)
    acceptor = Ends().acceptor
    events = acceptor.receive_data(stream[: data.draw(st.integers(0, len(stream)))])
    assert events == told([stream])[: len(events)]
    (ended,) = acceptor.receive_eof()
    assert isinstance(ended, Ended)
    assert ended.code in {"closed", "truncated"}


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_garbage_is_never_more_than_the_end(pieces: list[bytes]) -> None:
    """SRV-1"""
    for acceptor in (Ends().acceptor, open_ends().acceptor):
        for piece in pieces:
            check(acceptor, acceptor.receive_data(piece))


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
    st.builds(msgpack.Timestamp, st.integers(0, 2**33)),
)
ITEMS = st.lists(
    st.one_of(st.integers(-1, 13), st.sampled_from(["k", b"", b"x", None, True, False, 500]), ODD),
    max_size=6,
)
PAYLOADS = st.one_of(
    ITEMS.map(lambda items: bytes(msgpack.packb(items))),
    st.recursive(ODD, lambda inner: st.lists(inner, max_size=2), max_leaves=8).map(
        lambda value: bytes(msgpack.packb(value))
    ),
    st.integers(0, 2000).map(lambda depth: b"\x91" * depth + b"\x90"),
    st.binary(max_size=12),
)


@given(st.lists(st.tuples(st.sampled_from([*Type, 0, 99]), PAYLOADS), max_size=8), st.data())
def test_well_framed_nonsense_is_never_more_than_the_end(
    frames: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    """I36: any type, any order, any value, on both sides and in the midst of calls."""
    ends = open_ends()
    for side in (ends.opener, ends.acceptor):
        for control in (False, True):
            side.open_call("k", b"", b"x" * data.draw(SIZES), control=control)
    ends.carry()
    ends.acceptor.begin(0, b"")
    for side in (ends.opener, ends.acceptor):
        for frame_type, payload in frames:
            check(side, side.receive_data(encode_frame(frame_type, payload)))
        side.data_to_send()


def check(side: Dialogue, events: list[Event]) -> None:
    for event in events[:-1]:
        assert not isinstance(event, Ended)
    if events and isinstance(events[-1], Ended):
        assert side.is_over
        assert side.open_calls == 0
        assert side.receive_data(b"more") == []


# --- both sides at once -------------------------------------------------------------------------


class Side:
    """One end with a program that does what it is told, and remembers what must come of it."""

    def __init__(self, dialogue: Dialogue, events: list[Event]) -> None:
        self.dialogue = dialogue
        self.events = events
        self.seen = 0
        self.asked: dict[int, bytes] = {}
        self.left: set[int] = set()
        self.answers: dict[int, list[object]] = {}
        self.reply_bytes: dict[int, bytearray] = {}
        self.their: dict[int, bytearray] = {}
        self.whole: set[int] = set()
        self.begun: set[int] = set()
        self.posts: list[bytes] = []
        self.told_marks: list[bool] = []
        self.marks = 0

    def mark(self) -> Any:
        self.marks += 1
        return self.told_marks.append

    def look(self) -> None:
        """Take the events that came, and read every body at once."""
        while self.seen < len(self.events):
            event = self.events[self.seen]
            self.seen += 1
            match event:
                case Called(call, _):
                    self.their[call.call_id] = bytearray(call.body or b"")
                    if call.body is not None:
                        self.whole.add(call.call_id)
                case CallCancelled(call_id):
                    self.their.pop(call_id, None)
                    self.begun.discard(call_id)
                case BodyReceived(call_id, is_last, chunk):
                    if call_id in self.asked:
                        self.reply_bytes[call_id] += chunk
                        if is_last:
                            self.answers[call_id].append(bytes(self.reply_bytes[call_id]))
                    elif call_id in self.their:
                        self.their[call_id] += chunk
                        if is_last:
                            self.whole.add(call_id)
                    self.dialogue.consume(call_id, len(chunk))
                case Replied(call_id, _, body):
                    assert call_id not in self.left
                    if body is None:
                        self.reply_bytes[call_id] = bytearray()
                    else:
                        self.answers[call_id].append(body)
                case Failed(call_id, status, _, _):
                    self.answers[call_id].append(status)
                case Posted(_, body):
                    self.posts.append(body)
                case _:
                    raise AssertionError(event)


ACTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["call", "cancel", "reply", "begin", "send", "finish", "fail", "post", "carry"]
        ),
        st.booleans(),
        st.booleans(),
        SIZES,
        st.integers(0, 2**16),
    ),
    max_size=60,
)


@given(ACTS, st.integers(1, 3000))
def test_every_call_ends_once_and_with_what_was_answered(
    acts: list[tuple[str, bool, bool, int, int]], batch_bytes: int
) -> None:
    """D3, D4, D6: commands of both sides in any order, carried in batches of any size."""
    ends = open_ends()
    sides = (Side(ends.opener, ends.told_opener), Side(ends.acceptor, ends.told_acceptor))
    sent_posts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, (what, first, control, size, pick) in enumerate(acts):
        side, other = sides if first else sides[::-1]
        body = (b"%d." % number) * (size // 4)
        act(side, what, control, body, pick)
        if what == "post" and not control:
            ends_posts = sent_posts[0 if first else 1]
            side.dialogue.post("p", body, control=False)
            ends_posts.append(body)
        if what == "carry":
            ends.to_acceptor(batch_bytes) if first else ends.to_opener(batch_bytes)
            other.look()
    for side in sides:
        for call_id in list(side.their):
            if call_id in side.begun:
                side.dialogue.finish(call_id, side.mark())
            else:
                side.dialogue.reply(call_id, b"", b"end", side.mark())
            side.their.pop(call_id)
    while ends.opener.has_data_to_send or ends.acceptor.has_data_to_send:
        ends.to_acceptor(batch_bytes)
        sides[1].look()
        ends.to_opener(batch_bytes)
        sides[0].look()
        for side in sides:
            for call_id in list(side.their):
                side.dialogue.reply(call_id, b"", b"end", side.mark())
                side.their.pop(call_id)
    for side, posts in zip(sides, reversed(sent_posts), strict=True):
        assert side.dialogue.open_calls == 0
        assert side.posts == posts
        assert len(side.told_marks) == side.marks
        for call_id in side.asked:
            assert len(side.answers[call_id]) == (0 if call_id in side.left else 1)


def act(side: Side, what: str, control: bool, body: bytes, pick: int) -> None:
    dialogue = side.dialogue
    theirs = sorted(side.their)
    call_id = theirs[pick % len(theirs)] if theirs else None
    match what:
        case "call" if dialogue.open_calls < SMALL.calls_open_max and not dialogue.is_congested:
            made = dialogue.open_call("k", b"", body, control=control)
            side.asked[made] = body
            side.answers[made] = []
        case "cancel" if side.asked:
            mine = sorted(side.asked)[pick % len(side.asked)]
            if not side.answers[mine]:
                side.left.add(mine)
            dialogue.cancel(mine)
        case "reply" if call_id is not None and call_id not in side.begun:
            dialogue.reply(call_id, b"", body, side.mark())
            del side.their[call_id]
        case "begin" if call_id is not None and call_id not in side.begun:
            dialogue.begin(call_id, b"h")
            side.begun.add(call_id)
        case "send" if call_id in side.begun:
            assert call_id is not None
            dialogue.send(call_id, body)
        case "finish" if call_id in side.begun:
            assert call_id is not None
            dialogue.finish(call_id, side.mark())
            side.begun.discard(call_id)
            del side.their[call_id]
        case "fail" if call_id is not None:
            dialogue.fail(call_id, 500, "c", "d")
            side.begun.discard(call_id)
            del side.their[call_id]


@given(MESSAGES, st.integers(0, 2000))
def test_what_a_peer_makes_us_keep_is_bounded(
    messages: list[tuple[str, int, bool]], more: int
) -> None:
    """D5: unread bodies stay within their windows, whatever is still to come."""
    ends = open_ends()
    for what, size, control in messages:
        if what == "call" and ends.opener.open_calls < SMALL.calls_open_max:
            ends.opener.open_call("k", b"", b"x" * (size + more), control=control)
    ends.carry()
    kept: dict[int, int] = {}
    for event in ends.told_acceptor:
        if isinstance(event, BodyReceived):
            kept[event.call_id] = kept.get(event.call_id, 0) + len(event.chunk)
    assert all(size <= SMALL.window_bytes for size in kept.values())
