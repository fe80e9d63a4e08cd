"""Large opaque state goes through in pieces: the same values and refusals as in one stretch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st

from gymtrio.errors import InvalidCheckpointState
from gymtrio.limits import OPAQUE_INTEGER_DIGITS_MAX, OPAQUE_NESTING_MAX
from gymtrio.storage import opaque, opaque_pieces
from gymtrio.storage.bounds import OPAQUE_PIECE_BYTES
from gymtrio.storage.opaque_pieces import Steps, decode_steps, encode_steps, in_slices
from gymtrio.storage.slices import LoopSlice
from tests.helpers.states import STATES, same
from tests.helpers.ticking import TickingClock

ROWS: Final = [
    {"id": number, "name": f"näme {number}", "tags": ["a", "b"], "at": number / 3, "n": None}
    for number in range(20_000)
]
LARGE: Final[dict[str, object]] = {
    "objects": ROWS,
    "objects in an object": {"in": {row["name"]: row for row in ROWS[:5_000]}},
    "numbers": list(range(50_000)),
    "numbers by name": {f"k{number}": number for number in range(20_000)},
    "text": 'a "quoted" lïne\n' * 50_000,
    "texts": [f"é{number}" * 20_000 for number in range(30)],
    "text under a long name": {"n" * 50_000: "x" * (2 * OPAQUE_PIECE_BYTES)},
    "what the standard library writes": [math.nan, 2**70, "\ud800", -0.0] * 5_000,
    "half of it deep": [[[[[[ROWS]]]]], ROWS],
    "empty ones": [[], {}, [[], {}]] * 5_000,
}


def driven(steps: Steps[Any]) -> tuple[Any, int]:
    """Their result, and how many there were."""
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, count
        count += 1


@contextmanager
def tiny_pieces(size_bytes: int = 8) -> Iterator[None]:
    """Everything that is not a handful of characters is large."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (opaque, opaque_pieces):
            patch.setattr(module, "OPAQUE_PIECE_BYTES", size_bytes)
            patch.setattr(module, "OPAQUE_PIECE_ITEMS", 3)
        patch.setattr(opaque_pieces, "_READ_WHOLE_BYTES_MAX", size_bytes)
        patch.setattr(opaque_pieces, "_SPAN_ITEMS", 2)
        patch.setattr(opaque_pieces, "_TAKEN_MAX", 2)
        yield


@pytest.mark.parametrize("name", LARGE)
def test_large_states_come_back_exactly_and_in_steps(name: str) -> None:
    """STO-3, STO-5."""
    state = LARGE[name]
    data, steps = driven(encode_steps(state, "x"))
    assert data == opaque.encode(state, "x")
    assert steps > 2
    value, steps = driven(decode_steps(data))
    assert same(value, state)
    assert steps > 1 or len(data) <= 2 * OPAQUE_PIECE_BYTES


def test_no_piece_is_longer_than_a_stretch_allows() -> None:
    """STO-5: whatever it is of."""
    longest = max(len(piece) for piece in opaque_pieces._pieces_of(LARGE, 1))
    # A character may take three bytes, or six where it is escaped.
    assert longest <= 6 * OPAQUE_PIECE_BYTES


@given(STATES)
def test_pieces_of_any_size_make_the_same(state: object) -> None:
    """STO-3, I24: written and read, each in pieces and in one stretch."""
    whole = opaque.encode(state, "x")
    with tiny_pieces():
        pieces = driven(encode_steps(state, "x"))[0]
        assert same(driven(decode_steps(whole))[0], state)
        assert same(driven(decode_steps(pieces))[0], state)
    assert same(opaque.decode(pieces), state)


JSON_LIKE: Final = st.text(st.sampled_from('[]{}",:\\ud8nae01. -é'), max_size=40)


@given(JSON_LIKE)
@example('["aaaaaaa\\ud83d\\ude00aaaaaa"]')
@example('["a\\uD83D\\uDE00aaaaaa\\uD83D\\uDE00"]')
@example("[1000,1.5,2e5,-0.25,100.5,1e10,1.25e-7]")
@example('{"a":1,"aaaaaaaaa":2,"a":3}')
@example('{"aaaaaaaaa":[1],"aaaaaaaaa":[2,3,4]}')
@example("[1, 2,3,4,5,6,7,8]")
@example("[1,2,3,4,5,6,7,8")
@example("[1,2,3,4,5,6,7,8]]")
@example("[1,2,3,4,5,6,7,8}")
@example('["aaaaaaaaaaaa')
@example('["aaaaaaa\\\\","aaaaa\\"aa",1]')
@example('{"aaaaaaaa":{"bbbbbbbb":[1,2,3,4,5]}')
def test_any_text_is_read_or_refused_as_in_one_stretch(text: str) -> None:
    """STO-4."""
    data = text.encode()
    try:
        expected: object = opaque.decode(data, "x")
    except InvalidCheckpointState as error:
        expected = error.detail
    with tiny_pieces():
        try:
            found = driven(decode_steps(data, "x"))[0]
        except InvalidCheckpointState as error:
            found = error.detail
    assert same(found, expected)


@pytest.mark.parametrize(
    "state",
    [
        [1000, 1.5, 2e50, -0.25, 1.25e-70, True, False, None, -1, math.nan, -math.inf, 0],
        {"aaa": 1000, "b": [1, 2.5, 3, [4.75, 5e60]], "ccc": "dddddddddd", "e": {}},
        ['"' * 3 + "\\" * 6, "aaaaaaaaa\0\n\n\x1fbbbb", "é" * 7 + "€" * 3, "\ud83d\ude00" * 3],
    ],
)
def test_nothing_that_we_write_is_read_in_one_stretch_after_all(
    state: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STO-5: wherever it is cut, in a number, an escape or a character."""
    data = opaque.encode(state, "x")
    decode = opaque.decode

    def some(piece: bytes, where: str = "") -> object:
        assert len(piece) <= 20
        return decode(piece)

    monkeypatch.setattr(opaque, "decode", some)
    with tiny_pieces(16):
        assert same(driven(decode_steps(data))[0], state)


@pytest.mark.parametrize(
    "odd",
    [
        {1: "a key"},
        (1, 2),
        {"set": {1}},
        10 ** (OPAQUE_INTEGER_DIGITS_MAX + 1),
        json.loads("[" * OPAQUE_NESTING_MAX + "]" * OPAQUE_NESTING_MAX),
    ],
    ids=["key", "tuple", "set", "digits", "depth"],
)
@pytest.mark.parametrize("around", [lambda odd: [*ROWS, odd], lambda odd: {"a": ROWS, "b": [odd]}])
def test_what_is_refused_is_refused_with_its_path(odd: object, around: Any) -> None:
    """STO-3: also in the middle of what was large."""
    state = around(odd)
    with pytest.raises(InvalidCheckpointState) as expected:
        opaque.encode(state, "episode r")
    with pytest.raises(InvalidCheckpointState) as found:
        driven(encode_steps(state, "episode r"))
    assert found.value.detail == expected.value.detail


def test_the_deepest_state_is_taken_however_it_is_cut() -> None:
    """STO-3: the limit of levels is that of the whole."""
    text = b'["aaaaaaaaaa",' * (OPAQUE_NESTING_MAX - 1) + b"[]" + b"]" * (OPAQUE_NESTING_MAX - 1)
    state = opaque.decode(text)
    with tiny_pieces():
        assert driven(encode_steps(state, "x"))[0] == text
        assert driven(decode_steps(text))[0] == state
        with pytest.raises(InvalidCheckpointState, match="nested deeper"):
            driven(encode_steps([state], "x"))
        with pytest.raises(InvalidCheckpointState, match="nested deeper"):
            driven(decode_steps(b"[" + text + b"]"))


def test_a_state_that_contains_itself_or_has_no_end_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """O3: as large as it may look."""
    monkeypatch.setattr(opaque, "_ITEMS_MAX", 10_000)
    monkeypatch.setattr(opaque_pieces, "RECORD_BYTES_MAX", 100_000)
    around: list[object] = []
    around.append(around)
    doubled: object = "a text"
    for _ in range(100):
        doubled = [doubled, doubled]
    for state in (around, doubled):
        with pytest.raises(InvalidCheckpointState, match="x: "):
            driven(encode_steps(state, "x"))


def test_a_state_that_changes_meanwhile_ends_nothing() -> None:
    """A fault of its author; it is encoded as it is then, or refused."""
    state: dict[str, object] = {f"k{number}": number for number in range(20_000)}
    steps = encode_steps(state, "x")
    next(steps)
    state["another"] = 1
    assert opaque.decode(driven(steps)[0]) == state


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.clear(),
        lambda rows: rows.__delitem__(slice(500, None)),
        lambda rows: rows.append({"id": -1}),
    ],
)
def test_a_list_that_changes_meanwhile_is_read_as_it_is_then(change: Any) -> None:
    """Never text that is none, which a restore would find out."""
    rows = [{"id": number, "tags": ["a", "b"]} for number in range(20_000)]
    steps = encode_steps(rows, "x")
    next(steps)
    change(rows)
    assert opaque.decode(driven(steps)[0]) == rows


def test_a_deep_and_large_state_lets_the_loop_turn_at_every_level() -> None:
    """STO-5: each level is looked at, and none of them alone is small."""
    state: object = None
    for number in range(OPAQUE_NESTING_MAX - 1):
        state = {"text": "x" * 5_000, "number": number, "next": state}
    data, steps = driven(encode_steps(state, "x"))
    assert steps > OPAQUE_NESTING_MAX / 2
    value, steps = driven(decode_steps(data))
    assert value == state
    assert steps > OPAQUE_NESTING_MAX / 2


def test_the_loop_turns_whenever_a_slice_is_over() -> None:
    """STO-5."""
    turns = 0

    async def main() -> object:
        async def turn() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(turn)
            await trio.lowlevel.checkpoint()
            data = await in_slices(encode_steps(ROWS, "x"), LoopSlice())
            written = turns
            value = await in_slices(decode_steps(data), LoopSlice())
            assert turns - written > 10 < written
            nursery.cancel_scope.cancel()
        return value

    assert trio.run(main, clock=TickingClock()) == ROWS
