from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Final

import attrs
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.ids import CaptureKey
from gymtrio.limits import FRAME_NESTING_MAX
from gymtrio.strict import MalformedValue
from gymtrio.wire import codec
from gymtrio.wire.codec import from_json, pack, to_json, unpack, unpack_plain, unpacker_of


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


@attrs.frozen(kw_only=True)
class Flat:
    key: CaptureKey
    data: bytes | None
    count: int
    done: bool


FLAT_VALUES: Final = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.lists(st.integers(0, 3), max_size=2),
    st.just(msgpack.ExtType(5, b"x")),
    st.just(msgpack.Timestamp(1, 2)),
)
FLAT_FIELDS: Final = st.fixed_dictionaries(
    {},
    optional={
        "key": st.text(max_size=8) | FLAT_VALUES,
        "data": st.none() | st.binary(max_size=8) | FLAT_VALUES,
        "count": st.integers(-(2**63), 2**64 - 1) | FLAT_VALUES,
        "done": st.booleans() | FLAT_VALUES,
        "other": FLAT_VALUES,
    },
)


def read_by(reader: Callable[[bytes], Flat], data: bytes) -> Flat | tuple[str, str]:
    try:
        return reader(data)
    except MalformedValue as error:
        return error.path, error.why


@given(
    FLAT_FIELDS,
    st.sampled_from([-1, 0, 0, 0, 0, 1]),
    st.none() | st.tuples(st.integers(0, 60), st.integers(0, 255)),
    st.integers(0, 2),
    st.binary(max_size=2),
)
def test_a_flat_class_is_read_as_the_strict_way_reads_it(
    fields: dict[str, object],
    counted: int,
    changed: tuple[int, int] | None,
    cut: int,
    more: bytes,
) -> None:
    """Values, faults and their paths, whatever the bytes."""
    encoded = bytearray(msgpack.packb(fields))
    encoded[0] = max(0x80, encoded[0] + counted)
    if changed is not None:
        encoded[changed[0] % len(encoded)] = changed[1]
    data = bytes(encoded[: len(encoded) - cut]) + more
    assert read_by(unpacker_of(Flat), data) == read_by(partial(unpack, Flat), data)


@given(st.binary(max_size=40))
def test_bytes_of_any_sort_are_no_flat_class(data: bytes) -> None:
    assert read_by(unpacker_of(Flat), data) == read_by(partial(unpack, Flat), data)


def test_a_field_that_stands_twice_hides_no_other() -> None:
    """As many fields as there are, one of them twice and one of them unknown."""
    pieces = [b"\x84", *(msgpack.packb(each) for each in ("key", "a", "data", None, "count", 1))]
    for last in (("count", 2), ("other", True)):
        data = b"".join([*pieces, *map(msgpack.packb, last)])
        found = read_by(unpacker_of(Flat), data)
        assert found == read_by(partial(unpack, Flat), data)
        assert isinstance(found, tuple)


@pytest.mark.parametrize("cls", [Note, Plain])
def test_what_is_not_flat_is_read_the_strict_way(cls: type[Note | Plain]) -> None:
    """msgspec would skip a field that has a default and is misspelt, and takes lists for tuples."""
    data = msgpack.packb({"text": "x", "numbr": 3})
    with pytest.raises(MalformedValue, match="numbr"):
        unpacker_of(cls)(data)


def test_a_flat_class_is_not_read_the_strict_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an eighth of the time, and thousands are restored at once."""
    monkeypatch.setattr(codec, "structure", None)
    flat = Flat(key=CaptureKey("a"), data=b"x", count=3, done=True)
    assert unpacker_of(Flat)(pack(flat)) == flat


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
