from __future__ import annotations

import tracemalloc

import attrs
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.limits import FRAME_NESTING_MAX
from gymtrio.strict import MalformedValue
from gymtrio.wire.codec import from_json, pack, to_json, unpack, unpack_plain


@attrs.frozen
class Note:
    text: str
    number: int = 0
    data: bytes = b""
    opaque: object = None


@attrs.frozen
class Plain:
    text: str
    numbers: tuple[int, ...] = ()


@given(st.text().filter(lambda t: t.isprintable()), st.integers(-(2**63), 2**64 - 1), st.binary())
def test_a_closed_message_comes_back(text: str, number: int, data: bytes) -> None:
    note = Note(text, number, data, {"a": [1, None, 2.5]})
    assert unpack(Note, pack(note)) == note


def test_nothing_is_kept_of_a_large_message() -> None:
    """Memory follows what is being packed, not the largest message that ever was."""
    tracemalloc.start()
    try:
        pack(Note("x", data=bytes(2**23)))
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 2**20


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_malformed(data: bytes) -> None:
    try:
        unpack_plain(data)
    except MalformedValue:
        pass


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (msgpack.packb(msgpack.ExtType(5, b"x")), "extension type 5"),
        (msgpack.packb(msgpack.Timestamp(1)), "unexpected Timestamp"),
        (msgpack.packb({1: 2}), "not a message"),
        (msgpack.packb("x") + b"y", "not a message"),
        (b"\x91" * 100_000, "not a message"),
        (b"\x91" * 100 + b"\x01", f"nested deeper than {FRAME_NESTING_MAX}"),
        (b"\xa2\xff\xfe", "not a message"),
        (b"\xdd\xff\xff\xff\xff", "not a message"),
    ],
)
def test_what_we_never_send_is_malformed(data: bytes, why: str) -> None:
    with pytest.raises(MalformedValue, match=why):
        unpack(Note, data)


@pytest.mark.parametrize("note", [Note("x", 2**64), Note("\ud800")])
def test_what_a_closed_message_cannot_hold_is_refused_when_packed(note: Note) -> None:
    with pytest.raises(MalformedValue, match="cannot be packed"):
        pack(note)


def test_json_is_the_same_definition() -> None:
    assert to_json(Plain("x", (1, 2))) == b'{"text":"x","numbers":[1,2]}'
    assert from_json(Note, b'{"text": "x", "number": 3}') == Note("x", 3)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"text": "x", "text": "y"}', "text: key given twice"),
        (b'{"text": 1}', "text: expected str"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text": "x", "number": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_bad_json_is_malformed(body: bytes, why: str) -> None:
    with pytest.raises(MalformedValue, match=why):
        from_json(Note, body)
