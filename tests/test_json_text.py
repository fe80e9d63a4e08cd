"""What is read and written is what the standard library reads and writes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, IntEnum
from typing import Any
from uuid import UUID

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gymtrio.json_text import (
    dump_ascii_json,
    dump_exact_json,
    dump_finite_json,
    dump_json,
    is_as_written,
    load_exact_json,
    load_json,
)
from tests.helpers.states import STATES, same

FLOATS = st.one_of(
    st.sampled_from((math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308)),
    st.floats(),
    st.binary(min_size=8, max_size=8).map(lambda bits: struct.unpack("<d", bits)[0]),
)
TEXTS = st.text(st.characters())
"""Lone surrogates among them."""
ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**80), 2**80), FLOATS, TEXTS
)
KEYS = st.one_of(TEXTS, TEXTS, TEXTS, st.none(), st.booleans(), st.integers(), FLOATS)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(TEXTS, inner)
        | st.dictionaries(KEYS, inner)
    ),
    max_leaves=20,
)
STRANGE_TEXTS = (
    b"",
    b" ",
    b"-0",
    b"-",
    b"01",
    b"1.",
    b".5",
    b"1e400",
    b"-1e400",
    b"1e-400",
    b"1E5",
    b"0.1e1",
    b"1.0000000000000000000001",
    b"9007199254740993.0",
    b"123456789012345678901234567890",
    b"18446744073709551616",
    b"-9223372036854775809",
    b"9" * 5000,
    b"NaN",
    b"-Infinity",
    b'{"a":1,"a":2}',
    b'"\\ud800"',
    b'"\\ud83d\\ude00"',
    b'"\\u0000"',
    b'"a\x01b"',
    b'"\x7f"',
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b"\xef\xbb\xbf1",
    '"é"'.encode("utf-16"),
    '"é"'.encode("utf-32"),
    b"[1,]",
    b"[1 2]",
    b'{"a":1,}',
    b"1 2",
    b"// 1",
    b"\x0c1",
    b"[" * 100_000,
    b"[" * 300 + b"]" * 300,
)


def outcome(of: Callable[[Any], Any], given: Any) -> tuple[str, Any]:
    try:
        return "value", of(given)
    except RecursionError:
        return "too deep", None
    except (TypeError, ValueError) as error:
        return "refused", type(error)


def stdlib_dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def assert_read_alike(text: bytes) -> None:
    expected, found = outcome(json.loads, text), outcome(load_json, text)
    assert found[0] == expected[0]
    assert same(found[1], expected[1]), (found, expected)


@given(VALUES)
@example({"a": [None, {"b": math.nan}]})
@example([(math.inf, None)])
@example({"\ud800": None, "b": "\udfff"})
def test_what_is_written_reads_as_what_the_standard_library_writes(value: object) -> None:
    expected, found = outcome(stdlib_dump, value), outcome(dump_json, value)
    assert found[0] == expected[0]
    if found[0] == "value":
        assert same(json.loads(found[1]), json.loads(expected[1]))
        assert same(load_json(found[1]), json.loads(expected[1]))


@pytest.mark.parametrize("text", STRANGE_TEXTS, ids=lambda text: repr(text[:20]))
def test_strange_texts_are_read_alike(text: bytes) -> None:
    assert_read_alike(text)


@given(VALUES.map(stdlib_dump), st.data())
def test_damaged_texts_are_read_alike(text: bytes, data: st.DataObject) -> None:
    damaged = bytearray(text)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from((b"", b",", b"]", b"}", b'"', b"\\", b"\\u", b"0", b"-", b"e", b"\xc3"))
        )
    assert_read_alike(bytes(damaged))


@given(st.from_regex(rb"\A-?[0-9]{1,25}(\.[0-9]{1,25})?([eE][-+]?[0-9]{1,3})?\Z"))
def test_numbers_are_read_alike_to_the_last_bit(text: bytes) -> None:
    assert_read_alike(text)


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Word(str):
    __slots__ = ()


class Words(list[str]):
    pass


@attrs.frozen
class Point:
    x: float


@dataclass
class Place:
    x: float


@pytest.mark.parametrize("beside", [(), (None,), (math.nan,)], ids=["alone", "null", "NaN"])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Colour.RED, '"red"'),
        (Level.LOW, "1"),
        (Word("w"), '"w"'),
        (Words("w"), '["w"]'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
    ],
    ids=lambda given: repr(given)[:12],
)
def test_what_json_lacks_is_written_alike_whoever_writes(
    value: object, text: str, beside: tuple[float | None, ...]
) -> None:
    rest = "".join(",null" if each is None else ",NaN" for each in beside)
    assert dump_json([value, *beside]).decode() == f"[{text}{rest}]"


@pytest.mark.parametrize("beside", [(), (None,), (math.nan,)], ids=["alone", "null", "NaN"])
@pytest.mark.parametrize(
    "value",
    [object(), {"a": {(1, 2): 3}}, {1, 2}, b"ab", Point(0.5), Place(0.5), datetime.now(UTC)],
    ids=lambda given: type(given).__name__,
)
def test_what_is_not_json_is_refused(value: object, beside: tuple[float | None, ...]) -> None:
    for dump in (dump_json, dump_finite_json, dump_ascii_json):
        with pytest.raises(TypeError):
            dump([value, *beside])


def test_a_ring_is_refused() -> None:
    ring: list[object] = []
    ring.append(ring)
    with pytest.raises(ValueError, match="Circular"):
        dump_json(ring)


def test_ascii_has_no_line_ends_of_any_reader() -> None:
    value = {"a": "\u2028\x85\x1e\r\né", "b": None}
    assert len(dump_ascii_json(value).decode("ascii").splitlines()) == 1
    assert load_json(dump_ascii_json(value)) == load_json(dump_json(value)) == value


@given(VALUES)
def test_a_text_that_is_as_written_has_no_key_twice(value: object) -> None:
    text = outcome(dump_finite_json, value)[1]
    if isinstance(text, bytes) and is_as_written(text, load_json(text)):
        json.loads(text, object_pairs_hook=unique)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1,"a":1}',
        b'{"a":1e2,"a":1}',
        b'{"a":1.0e1,"a":10.0}',
        b'{"a":"\\u0041","a":"A"}',
        b'[{"b":{"a":null,"a":null}}]',
        b'{"a":1 }',
        b"NaN",
        b'"\\ud800"',
    ],
)
def test_other_texts_are_not_as_written(text: bytes) -> None:
    assert not is_as_written(text, load_json(text))


def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    assert len(made) == len(pairs)
    return made


@given(STATES)
@example([None, math.nan])
@example({"\ud800": 1})
@example([2**64])
def test_what_is_written_as_exact_is_read_as_the_same(value: object) -> None:
    """STO-3."""
    text = dump_exact_json(value)
    if text is not None:
        assert same(load_exact_json(text), value)
        assert same(json.loads(text), value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b" 1",
        b"NaN",
        b"1.50",
        b'"\\u0041"',
        b'{"a":1,"a":1}',
        str(2**64).encode(),
        b'"\xed\xa0\x80"',
        b"[" * 1_000 + b"]" * 1_000,
    ],
)
def test_what_is_written_otherwise_is_not_read_as_exact(text: bytes) -> None:
    """STO-3."""
    with pytest.raises(ValueError, match=r"."):
        load_exact_json(text)
