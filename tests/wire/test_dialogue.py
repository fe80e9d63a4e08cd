"""The pure dialogue: what each side hears of what the other says."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from gymtrio.settings import Secret
from gymtrio.strict import unstructure
from gymtrio.wire.bounds import ChannelLimits
from gymtrio.wire.codec import pack
from gymtrio.wire.errors import ChannelFull, ChannelLost
from gymtrio.wire.events import (
    BodyReceived,
    CallCancelled,
    Called,
    Ended,
    Failed,
    Posted,
    Replied,
    Welcomed,
)
from gymtrio.wire.frames import encode_frame
from gymtrio.wire.messages import (
    DECODERS,
    FRAME_BYTES_LEAST,
    HANDSHAKE_BYTES_MAX,
    NAME_CHARACTERS_MAX,
    TOKEN_CHARACTERS_MAX,
    Call,
    Capacity,
    Hello,
    HelloMessage,
    Type,
    WelcomeMessage,
    encode,
    encode_hello,
    encode_welcome,
)
from gymtrio.wire.tables import CALLEE, CALLER, TAKES, Ours, Role, Said, State, Theirs
from tests.helpers.dialogues import ACCEPTOR, OPENER, SMALL, Ends, frames_of, open_ends

CAPACITY = SMALL.capacity()


def last(events: list[Any]) -> Ended:
    assert isinstance(events[-1], Ended)
    assert not any(isinstance(event, Ended) for event in events[:-1])
    return events[-1]


# --- handshake --------------------------------------------------------------------------------


def test_both_learn_who_the_other_is() -> None:
    ends = Ends()
    ends.carry()
    assert ends.told_acceptor == [Welcomed(OPENER, False)]
    assert ends.told_opener == [Welcomed(ACCEPTOR, False)]
    assert ends.opener.state is ends.acceptor.state is State.OPEN


@pytest.mark.parametrize("presented", [None, "", "wrong" * 8, "right" * 7, "right" * 9])
def test_without_the_right_token_nothing_is_accepted_and_nothing_revealed(
    presented: str | None,
) -> None:
    """I35"""
    given = None if presented is None else Secret(presented)
    ends = Ends(token=Secret("right" * 8), presented=given)
    sent = ends.acceptor.data_to_send().data
    ends.to_acceptor()
    sent += ends.acceptor.data_to_send().data
    assert ends.told_acceptor == [Ended("unauthorized", "a valid token is required", False)]
    assert ACCEPTOR.name.encode() not in sent
    assert ACCEPTOR.role.encode() not in sent
    assert [frame.type for frame in frames_of(sent)] == [Type.GOODBYE]


def test_who_presents_the_token_is_authenticated() -> None:
    """I35"""
    token = Secret("right" * 8)
    ends = Ends(token=token, presented=token)
    ends.carry()
    assert ends.told_acceptor == [Welcomed(OPENER, True)]


@pytest.mark.parametrize(("presented", "enters"), [(None, True), ("wrong" * 8, False)])
def test_where_the_token_is_optional_a_wrong_one_is_still_refused(
    presented: str | None, enters: bool
) -> None:
    """I35"""
    given = None if presented is None else Secret(presented)
    ends = Ends(token=Secret("right" * 8), presented=given, token_required=False)
    ends.carry()
    if enters:
        assert ends.told_acceptor == [Welcomed(OPENER, False)]
    else:
        assert last(ends.told_acceptor).code == "unauthorized"


def hello(**changes: Any) -> HelloMessage:
    fields: dict[str, Any] = {"versions": (1,), "hello": OPENER, "capacity": CAPACITY}
    return HelloMessage(**(fields | changes))


def test_no_common_version_is_said_and_a_newer_peer_that_speaks_ours_is_welcome() -> None:
    ends = Ends()
    told = ends.acceptor.receive_data(encode_hello(hello(versions=(2, 3))))
    assert last(told) == Ended("version", "this side speaks 1", False)
    ends = Ends()
    told = ends.acceptor.receive_data(encode_hello(hello(versions=(9, 1, 2))))
    assert told == [Welcomed(OPENER, False)]


def test_an_opener_refuses_a_version_it_did_not_offer() -> None:
    ends = Ends()
    welcome = encode_welcome(WelcomeMessage(version=2, hello=ACCEPTOR, capacity=CAPACITY))
    assert last(ends.opener.receive_data(welcome)).code == "version"


def test_a_key_that_a_later_hello_has_is_ignored() -> None:
    plain = unstructure(hello())
    plain["compression"] = ["zstd"]
    plain["hello"]["region"] = "x"
    plain["capacity"]["streams"] = 1
    told = Ends().acceptor.receive_data(encode_frame(Type.HELLO, pack(plain)))
    assert told == [Welcomed(OPENER, False)]


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": ()},
        {"versions": tuple(range(17))},
        {"hello": {"role": "r" * 257, "name": "", "instance": ""}},
        {"hello": None},
        {"capacity": {"frame_bytes_max": 10}},
        {"token": 5},
        {"versions": ("1",)},
    ],
)
def test_a_hello_that_is_none_ends_the_connection(changes: dict[str, Any]) -> None:
    payload = pack(unstructure(hello()) | changes)
    told = Ends().acceptor.receive_data(encode_frame(Type.HELLO, payload))
    assert last(told).code == "bad_message"


@pytest.mark.parametrize("frame_type", [t for t in Type if t not in {Type.HELLO, Type.GOODBYE}])
def test_before_the_handshake_nothing_else_is_taken(frame_type: Type) -> None:
    told = Ends().acceptor.receive_data(encode_frame(frame_type, b"\x90"))
    assert last(told).code == "unexpected_frame"


def test_before_the_handshake_little_is_buffered() -> None:
    """D1"""
    told = Ends().acceptor.receive_data(
        encode_frame(Type.HELLO, bytes(HANDSHAKE_BYTES_MAX + 1))[:12]
    )
    assert last(told).code == "bad_frame"


def test_the_longest_hello_fits() -> None:
    longest = "\U0001f600" * NAME_CHARACTERS_MAX
    long = Hello(role=longest, name=longest, instance=longest)
    token = "\U0001f600" * TOKEN_CHARACTERS_MAX
    data = encode_hello(hello(hello=long, token=token, versions=tuple(range(1, 17))))
    assert Ends().acceptor.receive_data(data) == [Welcomed(long, False)]


def test_a_second_hello_or_welcome_ends_the_connection() -> None:
    for data, which in [
        (encode_hello(hello()), "acceptor"),
        (encode_welcome(WelcomeMessage(version=1, hello=ACCEPTOR, capacity=CAPACITY)), "opener"),
    ]:
        told = getattr(open_ends(), which).receive_data(data)
        assert last(told).code == "unexpected_frame"


# --- calls ------------------------------------------------------------------------------------


def test_a_call_and_its_reply() -> None:
    ends = open_ends()
    call_id = ends.opener.open_call("claim", b"head", b"body", timeout_ms=1500)
    ends.carry()
    assert ends.told_acceptor == [
        Called(Call(call_id, "claim", b"head", b"body", 1500), control=False)
    ]
    ends.acceptor.reply(call_id, b"h", b"b")
    ends.carry()
    assert ends.told_opener == [Replied(call_id, b"h", b"b")]
    assert ends.opener.open_calls == 0


def test_both_sides_call_in_both_lanes_with_ids_that_never_meet() -> None:
    ends = open_ends()
    ids = [
        side.open_call("k", b"", b"", control=control)
        for side in (ends.opener, ends.acceptor)
        for control in (False, True)
        for _ in range(3)
    ]
    assert ids == [0, 4, 8, 2, 6, 10, 1, 5, 9, 3, 7, 11]
    ends.carry()
    assert [event.control for event in ends.told_acceptor] == [True] * 3 + [False] * 3
    assert [event.call.call_id for event in ends.told_opener] == [3, 7, 11, 1, 5, 9]


def test_an_error_is_the_answer() -> None:
    ends = open_ends()
    call_id = ends.acceptor.open_call("close", b"", b"")
    ends.carry()
    ends.opener.fail(call_id, 409, "invalid_phase", "\ud800" + "x" * 3000)
    ends.carry()
    assert ends.told_acceptor == [Failed(call_id, 409, "invalid_phase", "?" + "x" * 1999)]


def body_of(events: list[Any]) -> bytes:
    pieces = [event for event in events if isinstance(event, BodyReceived)]
    assert [piece.is_last for piece in pieces[:-1]] == [False] * (len(pieces) - 1)
    assert pieces[-1].is_last
    return b"".join(piece.chunk for piece in pieces)


def test_a_large_body_waits_for_credit() -> None:
    ends = open_ends()
    body = bytes(range(250)) * 10
    call_id = ends.opener.open_call("put", b"", body)
    ends.carry()
    assert [type(event) for event in ends.told_acceptor] == [Called, BodyReceived]
    assert ends.told_acceptor[1] == BodyReceived(call_id, False, body[:1000])
    ends.acceptor.consume(call_id, 400)
    ends.carry()
    assert len(ends.told_acceptor) == 2, "less than half a window is not announced"
    ends.acceptor.consume(call_id, 600)
    ends.carry()
    ends.acceptor.consume(call_id, 1000)
    ends.carry()
    assert body_of(ends.told_acceptor) == body
    ends.acceptor.reply(call_id, b"", body)
    ends.carry()
    ends.opener.consume(call_id, 1000)
    ends.carry()
    ends.opener.consume(call_id, 1000)
    ends.carry()
    assert ends.told_opener[0] == Replied(call_id, b"", None)
    assert body_of(ends.told_opener) == body
    assert ends.opener.open_calls == 0


def test_a_body_that_is_sent_in_pieces() -> None:
    ends = open_ends()
    call_id = ends.opener.open_call("stream", b"", b"")
    ends.carry()
    ends.acceptor.begin(call_id, b"head")
    ends.carry()
    for piece in (b"a", b"", b"b"):
        ends.acceptor.send(call_id, piece)
    ends.carry()
    ends.acceptor.finish(call_id)
    ends.carry()
    assert ends.told_opener == [
        Replied(call_id, b"head", None),
        BodyReceived(call_id, False, b"ab"),
        BodyReceived(call_id, True, b""),
    ]


def test_bodies_take_turns_and_control_overtakes_them() -> None:
    limits = ChannelLimits(window_bytes=2**20)
    ends = open_ends(limits)
    first = ends.opener.open_call("put", b"", b"a" * 300_000)
    second = ends.opener.open_call("put", b"", b"b" * 300_000)
    ends.to_acceptor(100_000)
    control = ends.opener.open_call("control", b"", b"c" * 300_000, control=True)
    ends.opener.post("p", b"", control=True)
    ends.carry()
    order = [
        event.call.call_id if isinstance(event, Called) else event.call_id
        for event in ends.told_acceptor
        if not isinstance(event, Posted)
    ]
    assert order[:4] == [first, second, first, second]
    assert order[4:10] == [control] * 6
    assert order[10:] == [first, second] * 3 + [first, second]


def test_a_body_follows_the_frame_that_announces_it_whatever_is_queued_before() -> None:
    """O1, O3"""
    ends = open_ends(ChannelLimits(window_bytes=2**20))
    ends.opener.open_call("first", b"", b"a" * 300_000)
    for _ in range(100):
        ends.opener.post("p", b"x" * 2000, control=False)
    ends.opener.open_call("second", b"", b"b" * 300_000)
    ends.carry(70_000)
    assert ends.acceptor.is_open
    assert body_of([e for e in ends.told_acceptor if getattr(e, "call_id", None) == 4])


def test_a_queue_that_has_left_has_room_again() -> None:
    ends = open_ends()
    with pytest.raises(ChannelFull):
        for _ in range(1000):
            ends.opener.post("p", b"x" * 100, control=False)
    assert ends.opener.is_congested
    ends.carry()
    assert not ends.opener.is_congested
    ends.opener.open_call("k", b"", b"")


def test_no_more_than_a_window_is_unread_however_much_was_read() -> None:
    """D5"""
    ends = open_ends()
    up = ends.opener.open_call("put", b"", b"x" * 20_000)
    ends.carry()
    read = 0
    while read < 20_000:
        came = sum(len(e.chunk) for e in ends.told_acceptor if isinstance(e, BodyReceived))
        assert came - read <= SMALL.window_bytes
        step = min(700, came - read)
        ends.acceptor.consume(up, step)
        read += step
        ends.carry()


def test_a_reply_with_a_head_over_the_limit_ends_the_connection() -> None:
    ends = open_ends()
    call_id = ends.opener.open_call("k", b"", b"")
    told = ends.opener.receive_data(encode(Type.REPLY, (call_id, b"x" * 1001, b"")))
    assert last(told).code == "head_too_large"


def test_a_body_that_grows_often_gets_no_more_turns_than_another() -> None:
    ends = open_ends(ChannelLimits(window_bytes=2**20))
    ids = [ends.opener.open_call("get", b"", b"") for _ in range(2)]
    ends.carry()
    for call_id in ids:
        ends.acceptor.begin(call_id, b"")
    ends.carry()
    for _ in range(4):
        ends.acceptor.send(ids[0], b"x" * 65_536)
    ends.acceptor.send(ids[1], b"y" * 4 * 65_536)
    ends.forget()
    ends.carry()
    order = [event.call_id for event in ends.told_opener if isinstance(event, BodyReceived)]
    assert order == ids * 4


def test_a_cancelled_call_is_answered_at_once_and_nothing_more_is_told() -> None:
    """SRV-3"""
    ends = open_ends()
    call_id = ends.opener.open_call("park", b"", b"")
    ends.carry()
    ends.opener.cancel(call_id)
    assert ends.opener.open_calls == 1, "until the peer has confirmed"
    ends.carry()
    assert ends.told_acceptor[1:] == [CallCancelled(call_id)]
    assert ends.told_opener == []
    assert ends.opener.open_calls == 0
    sent: list[bool] = []
    ends.acceptor.reply(call_id, b"", b"late", sent.append)
    ends.acceptor.fail(call_id, 500, "x", "y")
    ends.acceptor.begin(call_id, b"")
    assert ends.acceptor.send(call_id, b"x") is None
    ends.acceptor.finish(call_id, sent.append)
    assert sent == [False, False]
    assert not ends.acceptor.has_data_to_send


def test_a_cancel_that_crosses_the_answer_is_ignored() -> None:
    ends = open_ends()
    call_id = ends.opener.open_call("k", b"", b"")
    ends.carry()
    ends.acceptor.reply(call_id, b"", b"")
    ends.opener.cancel(call_id)
    ends.carry()
    assert ends.told_opener == []
    assert [type(event) for event in ends.told_acceptor] == [Called]
    assert ends.opener.is_open
    assert ends.acceptor.is_open


def test_a_caller_that_leaves_a_body_half_way_stops_both_bodies() -> None:
    ends = open_ends()
    sent: list[bool] = []
    up = ends.opener.open_call("put", b"", b"x" * 5000)
    down = ends.opener.open_call("get", b"", b"")
    ends.carry()
    ends.acceptor.reply(down, b"", b"y" * 5000, sent.append)
    ends.carry()
    ends.opener.cancel(up)
    ends.opener.cancel(down)
    ends.carry()
    assert sent == [False]
    assert ends.opener.open_calls == 0
    assert ends.told_acceptor[-2:] == [CallCancelled(up), CallCancelled(down)]
    ends.acceptor.consume(up, 1000)
    ends.carry()
    assert ends.opener.is_open


def test_an_answer_before_the_body_was_read_stops_the_body() -> None:
    ends = open_ends()
    call_id = ends.opener.open_call("put", b"", b"x" * 5000)
    ends.to_acceptor()
    ends.acceptor.fail(call_id, 413, "too_large", "limit 10")
    ends.carry()
    assert ends.told_opener == [Failed(call_id, 413, "too_large", "limit 10")]
    assert ends.opener.open_calls == 0
    assert not ends.opener.has_data_to_send


def test_an_error_follows_what_was_sent_of_a_body() -> None:
    ends = open_ends()
    call_id = ends.opener.open_call("stream", b"", b"")
    ends.carry()
    ends.acceptor.begin(call_id, b"")
    ends.acceptor.send(call_id, b"x" * 1500)
    ends.acceptor.fail(call_id, 502, "backend_failed", "gone")
    ends.carry()
    assert len(ends.told_opener) == 2
    ends.opener.consume(call_id, 1000)
    ends.carry()
    assert ends.told_opener[2:] == [
        BodyReceived(call_id, False, b"x" * 500),
        Failed(call_id, 502, "backend_failed", "gone"),
    ]
    assert ends.opener.open_calls == 0
    assert not ends.acceptor.is_wanted(call_id)


def test_a_mark_is_told_when_the_last_byte_has_left() -> None:
    ends = open_ends()
    ids = [ends.opener.open_call("get", b"", b"") for _ in range(2)]
    ends.carry()
    sent: list[str] = []
    ends.acceptor.reply(ids[0], b"", b"small", lambda ok: sent.append(f"small {ok}"))
    ends.acceptor.reply(ids[1], b"", b"x" * 1500, lambda ok: sent.append(f"large {ok}"))
    ends.to_opener()
    assert sent == ["small True"]
    ends.opener.consume(ids[1], 1000)
    ends.carry()
    assert sent == ["small True", "large True"]


def test_a_lost_connection_tells_every_mark_once() -> None:
    ends = open_ends()
    ids = [ends.opener.open_call("get", b"", b"") for _ in range(4)]
    ends.carry()
    sent: list[tuple[int, bool]] = []
    sizes = {ids[0]: 10, ids[1]: 5000, ids[2]: 5000, ids[3]: 10}
    for call_id, size in sizes.items():
        ends.acceptor.reply(
            call_id, b"", b"x" * size, lambda ok, call_id=call_id: sent.append((call_id, ok))
        )
        if call_id == ids[1]:
            ends.to_opener()
    ends.acceptor.receive_eof()
    assert sorted(sent) == [(ids[0], True), (ids[1], False), (ids[2], False), (ids[3], False)]
    ends.acceptor.drop()
    assert len(sent) == 4


def test_what_the_peer_does_not_take_is_not_sent() -> None:
    """D5"""
    ends = open_ends()
    with pytest.raises(ChannelFull, match="a head of 1001 bytes"):
        ends.opener.open_call("k", b"x" * 1001, b"")
    with pytest.raises(ChannelFull, match="does not fit"):
        ends.opener.post("k", bytes(FRAME_BYTES_LEAST), control=True)
    for _ in range(8):
        ends.opener.open_call("k", b"", b"")
    with pytest.raises(ChannelFull, match="8 calls are open"):
        ends.opener.open_call("k", b"", b"")
    ends.carry()
    ends.acceptor.reply(0, b"x" * 1001, b"")
    ends.carry()
    assert isinstance(ends.told_opener[0], Failed)
    assert ends.told_opener[0].code == "reply_too_large"
    ends.opener.open_call("k", b"", b"")


def test_a_peer_that_does_not_read_is_refused_more_and_then_given_up() -> None:
    ends = open_ends()
    with pytest.raises(ChannelFull, match="reads slowly"):
        for _ in range(1000):
            ends.acceptor.post("p", b"x" * 100, control=False)
    assert not ends.acceptor.is_stuck
    for _ in range(200):
        call_id = ends.opener.open_call("k", b"", b"")
        ends.to_acceptor()
        ends.acceptor.reply(call_id, b"", b"x" * 90)
        ends.opener._ours.clear()  # It makes calls and takes no answer.
    assert ends.acceptor.is_stuck


def test_an_answer_leaves_whole_in_the_control_lane_however_much_is_queued() -> None:
    """D6: whoever was answered in line has heard it before what is said later."""
    ends = open_ends(attrs.evolve(SMALL, body_inline_bytes_max=5_000))
    for control in (False, True):
        ends.opener.open_call("k", b"", b"", control=control)
    ends.to_acceptor()
    with pytest.raises(ChannelFull):
        for _ in range(1000):
            ends.acceptor.post("p", b"x" * 100, control=False)
    for call_id in (0, 2):
        ends.acceptor.reply(call_id, b"", b"x" * 2_000)
    replies = [
        DECODERS[Type.REPLY](frame.payload)
        for frame in frames_of(ends.acceptor.data_to_send(10**6).data)
        if frame.type == Type.REPLY
    ]
    assert [(r.call_id, r.body is None) for r in replies] == [(2, False), (0, True)]


def test_pings_are_answered_by_one_pong() -> None:
    ends = open_ends()
    for number in range(1000):
        ends.opener.ping(number)
    ends.to_acceptor()
    frames = frames_of(ends.acceptor.data_to_send().data)
    assert [frame.type for frame in frames] == [Type.PONG]
    assert ends.told_acceptor == []


def test_goodbye_is_the_last_word() -> None:
    ends = open_ends()
    call_id = ends.opener.open_call("k", b"", b"")
    ends.opener.say_goodbye("closed", "done")
    ends.carry()
    assert [type(event) for event in ends.told_acceptor] == [Called, Ended]
    assert ends.told_acceptor[-1] == Ended("closed", "done", True)
    ends.acceptor.reply(call_id, b"", b"")
    assert not ends.acceptor.has_data_to_send
    for side in (ends.opener, ends.acceptor):
        with pytest.raises(ChannelLost):
            side.open_call("k", b"", b"")
        with pytest.raises(ChannelLost):
            side.post("k", b"", control=True)
        assert side.receive_data(encode(Type.PING, (1,))) == []
        assert side.receive_eof() == []


@pytest.mark.parametrize(("rest", "code"), [(b"", "closed"), (b"gy\x01", "truncated")])
def test_the_end_of_the_stream_is_told(rest: bytes, code: str) -> None:
    """WRK-2"""
    ends = open_ends()
    assert ends.acceptor.receive_data(rest) == []
    assert last(ends.acceptor.receive_eof()).code == code


# --- the tables ---------------------------------------------------------------------------------


def frame_for(said: Said, call_id: int) -> bytes:
    return {
        Said.REPLY_WHOLE: encode(Type.REPLY, (call_id, b"", b"")),
        Said.REPLY_BEGINS: encode(Type.REPLY, (call_id, b"", None)),
        Said.DATA: encode(Type.DATA, (call_id, False, b"x")),
        Said.DATA_LAST: encode(Type.DATA, (call_id, True, b"")),
        Said.ERROR: encode(Type.ERROR, (call_id, 500, "c", "d")),
        Said.CREDIT: encode(Type.CREDIT, (call_id, 1)),
        Said.CANCEL: encode(Type.CANCEL, (call_id,)),
    }[said]


@pytest.mark.parametrize("state", list(Ours))
@pytest.mark.parametrize("said", list(Said))
def test_every_cell_of_the_callers_table(state: Ours, said: Said) -> None:
    ends = open_ends()
    call_id = ends.opener.open_call("k", b"", b"x" * 200)
    if state in {Ours.RECEIVING, Ours.LEFT_RECEIVING}:
        ends.opener.receive_data(frame_for(Said.REPLY_BEGINS, call_id))
    if state in {Ours.LEFT, Ours.LEFT_RECEIVING}:
        ends.opener.cancel(call_id)
    if state is Ours.GONE:
        ends.opener.receive_data(frame_for(Said.REPLY_WHOLE, call_id))
    else:
        assert ends.opener._ours[call_id].state is state
    told = ends.opener.receive_data(frame_for(said, call_id))
    to = CALLER.get((state, said))
    if to is None:
        assert last(told).code in {"unexpected_answer", "bad_call_id"}
        return
    assert ends.opener.is_open
    call = ends.opener._ours.get(call_id)
    assert (Ours.GONE if call is None else call.state) is to
    silent = said is Said.CREDIT or state in {Ours.LEFT, Ours.LEFT_RECEIVING}
    assert bool(told) is not silent


@pytest.mark.parametrize("state", [None, *Theirs])
@pytest.mark.parametrize("said", list(Said))
def test_every_cell_of_the_callees_table(state: Theirs | None, said: Said) -> None:
    """None: a call that was never made."""
    acceptor = open_ends().acceptor
    if state is not None:
        body = b"" if state is Theirs.WHOLE else None
        acceptor.receive_data(encode(Type.CALL, (4, "k", b"", body, None)))
    if state is Theirs.CANCELLED:
        acceptor.receive_data(frame_for(Said.CANCEL, 4))
    told = acceptor.receive_data(frame_for(said, 4))
    about_ours = said in {Said.REPLY_WHOLE, Said.REPLY_BEGINS, Said.ERROR}
    if state is Theirs.CANCELLED and not about_ours:
        assert told == []
        assert acceptor.is_open
        return
    to = None if state is None else CALLEE.get((state, said))
    if to is None:
        assert last(told).code in {"unexpected_frame", "bad_call_id", "unexpected_answer"}
        return
    assert acceptor.is_open
    call = acceptor._theirs.get(4)
    assert (Theirs.CANCELLED if call is None else call.state) is to


def test_every_state_of_a_connection_has_its_frames() -> None:
    assert TAKES.keys() == set(State)
    assert set(TAKES[State.OPEN]) == set(Type) - {Type.HELLO, Type.WELCOME}


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (encode(Type.CALL, (1, "k", b"", b"", None)), "bad_call_id"),
        (encode(Type.CALL, (8, "k", b"", b"", None)) * 2, "bad_call_id"),
        (
            encode(Type.CALL, (8, "k", b"", b"", None))
            + encode(Type.CALL, (4, "k", b"", b"", None)),
            "bad_call_id",
        ),
        (
            b"".join(encode(Type.CALL, (4 * n, "k", b"", b"", None)) for n in range(9)),
            "too_many_calls",
        ),
        (encode(Type.CALL, (0, "k", b"x" * 1001, b"", None)), "head_too_large"),
        (
            encode(Type.CALL, (0, "k", b"", None, None))
            + encode(Type.DATA, (0, False, b"x" * 1001)),
            "flow_control",
        ),
        (encode(Type.CALL, (0, "", b"", b"", None)), "bad_message"),
        (encode(Type.CALL, (0, "k" * 65, b"", b"", None)), "bad_message"),
        (encode(Type.CALL, (-4, "k", b"", b"", None)), "bad_message"),
        (encode(Type.CALL, (True, "k", b"", b"", None)), "bad_message"),
        (encode(Type.CALL, (2**53 + 4, "k", b"", b"", None)), "bad_message"),
        (encode(Type.CALL, (0, "k", "text", b"", None)), "bad_message"),
        (encode(Type.CALL, (0, "k", b"", b"", 1.5)), "bad_message"),
        (encode(Type.CALL, (0, "k", b"", b"")), "bad_message"),
        (encode(Type.DATA, (0, False, b"")), "bad_message"),
        (encode(Type.CREDIT, (0, 0)), "bad_message"),
        (encode(Type.ERROR, (1, 200, "c", "d")), "bad_message"),
        (encode(Type.ERROR, (1, 500, "c" * 65, "d")), "bad_message"),
        (encode(Type.CANCEL, (1,)), "bad_call_id"),
        (encode_frame(Type.PING, b"\x81\xa1a\x01"), "bad_message"),
        (encode_frame(200, b""), "unexpected_frame"),
        (encode_frame(Type.POST, bytes(SMALL.frame_bytes_max + 1)), "bad_frame"),
        (b"GET / HTTP/1.1\r\n\r\n", "bad_frame"),
    ],
)
def test_a_broken_rule_ends_the_connection_and_is_said(data: bytes, code: str) -> None:
    """WRK-2, I36"""
    ends = open_ends()
    told = ends.acceptor.receive_data(data)
    assert last(told).code == code
    assert not last(told).by_peer
    ends.carry()
    assert last(ends.told_opener).code == code
    assert last(ends.told_opener).by_peer
    with pytest.raises(ChannelLost):
        ends.acceptor.open_call("k", b"", b"")


def test_what_came_before_a_broken_rule_is_told() -> None:
    """D2"""
    data = encode(Type.POST, ("a", b"1")) + encode(Type.POST, ("b", b"2"))
    for broken in (b"xxxx", encode(Type.POST, ("", b"")), encode_frame(Type.PING, b"")):
        ends = open_ends()
        told = ends.acceptor.receive_data(data + broken)
        assert told[:2] == [Posted("a", b"1"), Posted("b", b"2")]
        last(told)


def test_a_peer_with_small_frames_gets_bodies_in_chunks() -> None:
    limits = ChannelLimits()
    acceptor = Ends(limits).acceptor
    capacity = Capacity(
        frame_bytes_max=FRAME_BYTES_LEAST,
        head_bytes_max=2**30,
        window_bytes=2**30,
        calls_open_max=1,
    )
    acceptor.receive_data(encode_hello(hello(capacity=capacity)))
    acceptor.data_to_send()
    acceptor.open_call("k", b"h" * 100_000, b"b" * 60_000)
    frames = frames_of(acceptor.data_to_send().data)
    assert [frame.type for frame in frames] == [Type.CALL, Type.DATA]
    assert all(len(frame.payload) <= FRAME_BYTES_LEAST for frame in frames)
    with pytest.raises(ChannelFull):
        acceptor.open_call("k", b"h" * 130_000, b"")
    assert acceptor.role is Role.ACCEPTOR
