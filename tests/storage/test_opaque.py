"""Opaque state comes back in every type, bit and order, or is refused with its path."""

from __future__ import annotations

import datetime
import enum
import json
import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.errors import InvalidCheckpointState
from gymtrio.limits import OPAQUE_INTEGER_DIGITS_MAX, OPAQUE_NESTING_MAX
from gymtrio.storage import opaque
from tests.helpers.states import STATES, same


@given(STATES)
def test_every_json_value_comes_back_exactly(state: object) -> None:
    """STO-3, I24."""
    assert same(opaque.decode(opaque.encode(state, "x")), state)


@pytest.mark.parametrize(
    "state",
    [
        math.nan,
        math.inf,
        -math.inf,
        -0.0,
        5e-324,
        1e16,
        1,
        1.0,
        True,
        2**64,
        -(2**4000),
        10**OPAQUE_INTEGER_DIGITS_MAX - 1,
        "\ud800",
        "\udc00\ud800",
        "\ud83d" + "\ude00",
        "\U0001f600",
        "a\0\x7f\u2028\ufeff",
        {"": {"": []}},
        {"b": 1, "a": 2, "\ud800": 3},
        [],
        {},
        [[], {}, None],
    ],
    ids=repr,
)
def test_odd_values_come_back_exactly(state: object) -> None:
    """STO-3."""
    assert same(opaque.decode(opaque.encode(state, "x")), state)


def test_two_halves_of_a_pair_are_not_joined() -> None:
    """STO-3: streamed pieces that were joined have such strings, and escapes would merge them."""
    state = "\ud83d" + "\ude00"
    assert json.loads(json.dumps(state)) != state
    assert opaque.decode(opaque.encode(state, "x")) == state


def test_the_deepest_state_that_is_taken_comes_back() -> None:
    """STO-3."""
    state: object = 1
    for _ in range(OPAQUE_NESTING_MAX):
        state = [state]
    assert opaque.decode(opaque.encode(state, "x")) == state
    with pytest.raises(InvalidCheckpointState, match=r"^x: \$(\[0\])+.*: nested deeper than 200$"):
        opaque.encode([state], "x")
    with pytest.raises(InvalidCheckpointState, match="nested deeper than 200"):
        opaque.decode(b"[" + opaque.encode(state, "x") + b"]")


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("state", "detail"),
    [
        ({"a": [0, 1, 2, {"x y": datetime.date(2020, 1, 1)}]}, r'$.a[3]["x y"]: a datetime.date'),
        ([{1, 2}], "$[0]: a builtins.set is not JSON"),
        ({"t": (1, 2)}, "$.t: a builtins.tuple is not JSON"),
        ({"b": b"x"}, "$.b: a builtins.bytes is not JSON"),
        (bytearray(), "$: a builtins.bytearray is not JSON"),
        ({"c": {"d": [Colour.RED]}}, "$.c.d[0]: a "),
        ([Name("x")], "$[0]: a "),
        ({"o": OrderedDict(a=1)}, "$.o: a collections.OrderedDict is not JSON"),
        ([defaultdict(list)], "$[0]: a collections.defaultdict is not JSON"),
        ({"k": {1: 2}}, "$.k: a key is int, not text"),
        ({"k": {None: 2}}, "$.k: a key is NoneType, not text"),
        ([{Name("x"): 2}], "$[0]: a key is Name, not text"),
        ({"n": [10**OPAQUE_INTEGER_DIGITS_MAX]}, "$.n[0]: the integer has too many digits"),
        ({"\n\ud800": object()}, '$["\\n\\ud800"]: a builtins.object is not JSON'),
        ({"a": 1, "b": [object()], "c": [{}, set()]}, "$.b[0]: a builtins.object is not JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_json_is_refused_with_its_path(state: object, detail: str) -> None:
    """STO-3: the first fault in the order of the document."""
    with pytest.raises(InvalidCheckpointState) as caught:
        opaque.encode(state, "episode r-a1")
    assert caught.value.detail.startswith(f"episode r-a1: {detail}")


def test_a_long_path_is_shown_by_its_ends() -> None:
    state: object = object()
    for number in range(100):
        state = {f"key-{number}": state}
    with pytest.raises(InvalidCheckpointState) as caught:
        opaque.encode(state, "x")
    detail = caught.value.detail
    assert len(detail) < 400
    assert detail.startswith('x: $["key-99"]["key-98"]')
    assert '["key-0"]: a builtins.object' in detail


def test_a_value_that_contains_itself_is_refused() -> None:
    """STO-3: without exhausting stack or memory."""
    state: list[object] = []
    state.append(state)
    with pytest.raises(InvalidCheckpointState, match="nested deeper than 200"):
        opaque.encode(state, "x")
    mapping: dict[str, object] = {}
    mapping["a"] = [mapping]
    with pytest.raises(InvalidCheckpointState, match="nested deeper than 200"):
        opaque.encode(mapping, "x")


def test_a_value_with_exponentially_many_parts_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opaque, "_ITEMS_MAX", 10_000)
    state: object = [1]
    for _ in range(OPAQUE_NESTING_MAX - 1):
        state = [state, state]
    with pytest.raises(InvalidCheckpointState, match=r"more than .* bytes of state"):
        opaque.encode(state, "x")


def test_what_exceeds_a_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opaque, "RECORD_BYTES_MAX", 10)
    assert opaque.encode("x" * 8, "x")
    with pytest.raises(InvalidCheckpointState, match=r"^x: 11 bytes, limit 10$"):
        opaque.encode("x" * 9, "x")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"1 2", "Extra data"),
        (b"\xff", "not JSON"),
        (b"\xef\xbb\xbf1", "not JSON"),
        (b'{"a":1,"a":2}', "a key is given twice"),
        (b'[{"b":{"a":1,"a":1}}]', "a key is given twice"),
        (b"[" * 100_000, "nested deeper than 200"),
        (b'{"":' * 100_000, "nested deeper than 200"),
        (b"[" * 201 + b"]" * 201, "nested deeper than 200"),
        (b"9" * (OPAQUE_INTEGER_DIGITS_MAX + 1), "limit"),
        (b"[-" + b"9" * 100_000 + b"]", "limit"),
        (b'"\n"', "not JSON"),
        (b"nan", "not JSON"),
    ],
    ids=range(14),
)
def test_bytes_that_are_no_state_are_refused(data: bytes, why: str) -> None:
    """STO-4: as a refusal, never as another exception."""
    with pytest.raises(InvalidCheckpointState, match=why):
        opaque.decode(data, "episode r")


@given(st.binary() | st.text(alphabet='{}[]",:0123456789.eE+-truefalsnINy\\ud8').map(str.encode))
def test_any_bytes_give_a_value_or_a_refusal(data: bytes) -> None:
    """STO-4."""
    try:
        state = opaque.decode(data)
    except InvalidCheckpointState:
        return
    assert same(opaque.decode(opaque.encode(state, "x")), state)


@pytest.fixture
def _restored_digits_limit() -> Iterator[None]:
    limit = sys.get_int_max_str_digits()
    yield
    sys.set_int_max_str_digits(limit)


@pytest.mark.usefixtures("_restored_digits_limit")
@pytest.mark.parametrize("limit", [0, 100_000])
def test_an_interpreter_that_takes_more_digits_changes_nothing(limit: int) -> None:
    """STO-3: a checkpoint must be readable where that limit is as usual."""
    sys.set_int_max_str_digits(limit)
    largest = 10**OPAQUE_INTEGER_DIGITS_MAX - 1
    for state in ([largest], [-largest]):
        assert opaque.decode(opaque.encode(state, "x")) == state
    for state in ([largest + 1], [-largest - 1]):
        with pytest.raises(
            InvalidCheckpointState, match=r"\$\[0\]: the integer has too many digits"
        ):
            opaque.encode(state, "x")
        with pytest.raises(InvalidCheckpointState, match="more than 4300 digits"):
            opaque.decode(str(state).encode())


@pytest.mark.usefixtures("_restored_digits_limit")
def test_an_interpreter_that_takes_fewer_digits_refuses_with_the_path() -> None:
    """STO-3."""
    sys.set_int_max_str_digits(640)
    with pytest.raises(InvalidCheckpointState, match=r"\$\[1\]: the integer has too many digits"):
        opaque.encode([1, 10**640], "x")
    with pytest.raises(InvalidCheckpointState, match="not JSON"):
        opaque.decode(b"1" * 641)


@given(STATES)
def test_what_an_earlier_release_wrote_comes_back_exactly(state: object) -> None:
    """STO-3: it was all written by the standard library, which prints numbers in other forms."""
    text = json.dumps(state, ensure_ascii=False, separators=(",", ":"))
    assert same(opaque.decode(text.encode("utf-8", "surrogatepass")), state)


def test_sorted_keys_give_equal_bytes_for_equal_objects() -> None:
    one = opaque.encode({"b": {"y": 1, "x": 2}, "a": 3}, "x", sort_keys=True)
    other = opaque.encode({"a": 3, "b": {"x": 2, "y": 1}}, "x", sort_keys=True)
    assert one == other == b'{"a":3,"b":{"x":2,"y":1}}'


def test_a_caller_deep_in_its_stack_is_refused_and_not_ended() -> None:
    """STO-3."""
    state: object = 1
    for _ in range(OPAQUE_NESTING_MAX):
        state = [state]
    data = opaque.encode(state, "x")

    def dive(call: Any) -> Any:
        try:
            return dive(call)
        except RecursionError:
            return call()

    for call in (lambda: opaque.encode(state, "x"), lambda: opaque.decode(data)):
        try:
            dive(call)
        except InvalidCheckpointState:
            pass
