"""Opaque state to bytes and back, exactly (STO-3, I24).

The text is JSON without ASCII escapes, in UTF-8 that also takes lone surrogates. Escapes would be
wrong: a string of the two code points D83D DE00, which joining streamed pieces produces, would come
back as the one code point that the escaped pair means. What `gymtrio.json_text` writes and reads
exactly, it does, in a fifth of the time; the rest (NaN, longer integers, lone surrogates) the standard
library.

What comes back has the same types, values and key order, so only exact types are taken: an `IntEnum`,
an `OrderedDict` or a tuple would come back as something else and is refused here, at export, where
the path to it can still be named. Every NaN is one NaN.

- O1 `decode(encode(value))` equals `value` in every type, bit and order, NaN payloads aside.
- O2 What `encode` takes, `decode` takes on every supported Python with its default limits.
- O3 Neither raises anything but `InvalidCheckpointState`, whatever the input; no recursion is left to
  the interpreter's limit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, Final, NoReturn

from gymtrio.errors import InvalidCheckpointState
from gymtrio.json_text import dump_exact_json, load_exact_json
from gymtrio.limits import OPAQUE_INTEGER_DIGITS_MAX, OPAQUE_NESTING_MAX
from gymtrio.storage.bounds import (
    OPAQUE_PIECE_BYTES,
    OPAQUE_PIECE_ITEMS,
    PATH_SHOWN_CHARACTERS_MAX,
    RECORD_BYTES_MAX,
)

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_CONTAINERS: Final = frozenset({dict, list})
_NO_TEXT: Final = _SCALARS - {str}

_ITEMS_MAX: Final = RECORD_BYTES_MAX // 2
"""Each takes two bytes at least. A value that shares its parts can have exponentially many."""

_LONG_FROM: Final = 16
"""A longer list mostly holds numbers, and is left to the interpreter's own loop."""

_KEY_SHOWN_CHARACTERS_MAX: Final = 80

# The walk before has bounded the depth, so a circle cannot reach the encoder.
_encode: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=True, separators=(",", ":")
).encode
_encode_sorted: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=True, separators=(",", ":"), sort_keys=True
).encode


class Weight(Enum):
    """What a walk over a value has found."""

    PLAIN = "every item is of an exact JSON type, and no level is too deep; keys may be any"
    LARGE = "more than was to be walked"
    ODD = "something else"


def encode(value: object, where: str, *, sort_keys: bool = False) -> bytes:
    """Serialise a JSON value.

    One stretch of the loop: about 1 ms per megabyte of text, 30 ms of small objects; see
    `opaque_pieces` for what may be large. The value is neither changed nor kept.

    Args:
        where: whose state it is, for the error: `episode r-a1`.
        sort_keys: give equal objects equal bytes; their key order is then lost.

    Raises:
        InvalidCheckpointState: something in it is not JSON of exact types, has more digits or levels
            than `gymtrio.limits` allow, or would exceed a record; the detail has `where` and its path.
    """
    return encode_weighed(value, where, _weigh_whole(value), sort_keys=sort_keys)


def encode_weighed(value: object, where: str, weight: Weight, *, sort_keys: bool = False) -> bytes:
    """As `encode`, of what was weighed already and is not large."""
    is_plain = weight is Weight.PLAIN
    # Digests are made of sorted text, and compared with those that older releases have written.
    data = dump_exact_json(value) if is_plain and not sort_keys else None
    if data is None:
        if not is_plain or not _has_plain_keys(value) or _digits_need_a_look():
            _refuse_first_fault(value, where)
        data = _encode_slowly(value, where, sort_keys)
    if len(data) > RECORD_BYTES_MAX:
        raise InvalidCheckpointState(f"{where}: {len(data)} bytes, limit {RECORD_BYTES_MAX}")
    return data


def encode_piece(value: object) -> bytes:
    """As `encode`, of a part that was weighed and is plain.

    Raises:
        ValueError: it cannot be kept; `encode` of the whole says why, and where it is.
    """
    data = dump_exact_json(value)
    if data is None:
        if not _has_plain_keys(value) or _digits_need_a_look():
            raise ValueError("a key is no text, or an integer may be too long")
        data = _encode(value).encode("utf-8", "surrogatepass")
    return data


def _encode_slowly(value: object, where: str, sort_keys: bool) -> bytes:
    try:
        text = (_encode_sorted if sort_keys else _encode)(value)
    except (ValueError, RecursionError):
        # An integer over this interpreter's own limit, or a caller near the end of its stack.
        _refuse_first_fault(value, where)
        raise InvalidCheckpointState(f"{where}: too little stack is left to serialise it") from None
    return text.encode("utf-8", "surrogatepass")


def decode(data: bytes, where: str = "opaque state") -> object:
    """Parse what `encode` made.

    Raises:
        InvalidCheckpointState: it is not JSON, has a key twice, or exceeds a limit of `encode`.
    """
    try:
        value = load_exact_json(data)
    except ValueError:
        value = _decode_slowly(data, where)
    # Fewer brackets than levels allowed: the depth need not be walked.
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > OPAQUE_NESTING_MAX and _weigh_whole(value) is not Weight.PLAIN:
        _refuse_first_fault(value, where)
    return value


def _decode_slowly(data: bytes, where: str) -> object:
    try:
        text = data.decode("utf-8", "surrogatepass")
        value: object = decoder().decode(text)
    except RecursionError:
        raise InvalidCheckpointState(f"{where}: nested deeper than {OPAQUE_NESTING_MAX}") from None
    except ValueError as error:
        raise InvalidCheckpointState(f"{where}: not JSON: {error}") from None
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is given twice")
    return made


def _bounded_integer(digits: str) -> int:
    if len(digits.removeprefix("-")) > OPAQUE_INTEGER_DIGITS_MAX:
        raise ValueError(f"an integer has more than {OPAQUE_INTEGER_DIGITS_MAX} digits")
    return int(digits)


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique_keys)
_DIGITS_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_int=_bounded_integer
)


def decoder() -> json.JSONDecoder:
    """The slow way of `decode`, which reads everything that it takes."""
    return _DIGITS_DECODER if _digits_need_a_look() else _DECODER


def _digits_need_a_look() -> bool:
    """Whether this interpreter was told to convert longer integers than our limit."""
    limit = sys.get_int_max_str_digits()
    return limit == 0 or limit > OPAQUE_INTEGER_DIGITS_MAX


def weigh(value: object) -> Weight:
    """Say whether a state can be written in one stretch of the loop."""
    return weigh_within(value, OPAQUE_NESTING_MAX, OPAQUE_PIECE_ITEMS, OPAQUE_PIECE_BYTES)


def is_deeper(value: object, levels: int) -> bool:
    """Whether what `decode` gave has more levels than that."""
    return weigh_within(value, levels, _ITEMS_MAX, RECORD_BYTES_MAX) is Weight.ODD


def _weigh_whole(value: object) -> Weight:
    return weigh_within(value, OPAQUE_NESTING_MAX, _ITEMS_MAX, RECORD_BYTES_MAX)


def weigh_within(value: object, levels: int, items_max: int, characters_max: int) -> Weight:
    """Walk a value, no farther than to the first sign that it is odd or large.

    Level by level, so that no recursion is needed, and plainly: this is most of the time of `encode`.

    Args:
        levels: that it may have, itself included.
        characters_max: of its text; keys do not count.
    """
    if type(value) is str:
        return Weight.LARGE if len(value) > characters_max else Weight.PLAIN
    if type(value) in _SCALARS:
        return Weight.PLAIN
    no_text = _NO_TEXT
    level: list[Any] = [value]
    items = characters = 0
    for _ in range(levels):
        below: list[Any] = []
        for container in level:
            if type(container) is dict:
                inner: Iterable[Any] = container.values()
            elif type(container) is list:
                inner = container
            else:
                return Weight.ODD
            items += len(container)
            if items > items_max or characters > characters_max:
                return Weight.LARGE
            if len(container) > _LONG_FROM and no_text.issuperset(map(type, inner)):
                continue
            for item in inner:
                kind = type(item)
                if kind in no_text:
                    continue
                if kind is str:
                    characters += len(item)
                else:
                    below.append(item)
        if not below:
            return Weight.LARGE if characters > characters_max else Weight.PLAIN
        level = below
    return Weight.ODD


def _has_plain_keys(value: object) -> bool:
    """Say whether every key is text and nothing else, of a value that is plain otherwise."""
    stack = [value]
    while stack:
        container = stack.pop()
        items: Iterable[Any] = ()
        if type(container) is dict:
            if any(type(key) is not str for key in container):
                return False
            items = container.values()
        elif type(container) is list:
            items = container
        stack += [item for item in items if type(item) in _CONTAINERS]
    return True


class _Spot:
    """A place inside the state, as a chain of steps from the top."""

    __slots__ = ("above", "depth", "step", "value")

    def __init__(self, value: object, above: _Spot | None = None, step: str | int = "$") -> None:
        self.value = value
        self.above = above
        self.step = step
        self.depth: int = 1 if above is None else above.depth + 1

    def __str__(self) -> str:
        steps: list[str] = []
        spot: _Spot | None = self
        while spot is not None and spot.above is not None:
            steps.append(_shown_step(spot.step))
            spot = spot.above
        path = "$" + "".join(reversed(steps))
        if len(path) > PATH_SHOWN_CHARACTERS_MAX:
            half = PATH_SHOWN_CHARACTERS_MAX // 2
            path = f"{path[:half]}...{path[-half:]}"
        return path


def _shown_step(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    if step.isascii() and step.isidentifier() and len(step) <= _KEY_SHOWN_CHARACTERS_MAX:
        return f".{step}"
    return f"[{json.dumps(step[:_KEY_SHOWN_CHARACTERS_MAX])}]"


def _refuse_first_fault(value: object, where: str) -> None:
    """Walk in document order and raise at the first value that cannot be kept."""
    first_refused_integer = _first_refused_integer()
    visited = 0
    stack = [_Spot(value)]
    while stack:
        spot = stack.pop()
        visited += 1
        if visited > _ITEMS_MAX:
            raise InvalidCheckpointState(f"{where}: more than {RECORD_BYTES_MAX} bytes of state")
        kind = type(spot.value)
        if kind is int:
            assert isinstance(spot.value, int)
            if abs(spot.value) >= first_refused_integer:
                _refuse(spot, where, "the integer has too many digits")
        elif kind in _CONTAINERS:
            if spot.depth > OPAQUE_NESTING_MAX:
                _refuse(spot, where, f"nested deeper than {OPAQUE_NESTING_MAX}")
            stack.extend(reversed([*_children(spot, where)]))
        elif kind not in _SCALARS:
            _refuse(spot, where, f"a {kind.__module__}.{kind.__qualname__} is not JSON")


def _children(spot: _Spot, where: str) -> Iterator[_Spot]:
    if isinstance(spot.value, dict):
        for key, item in spot.value.items():
            if type(key) is not str:
                _refuse(spot, where, f"a key is {type(key).__name__}, not text")
            yield _Spot(item, spot, key)
    else:
        assert isinstance(spot.value, list)
        for index, item in enumerate(spot.value):
            yield _Spot(item, spot, index)


def _first_refused_integer() -> int:
    limit = sys.get_int_max_str_digits() or OPAQUE_INTEGER_DIGITS_MAX
    return int(10 ** min(limit, OPAQUE_INTEGER_DIGITS_MAX))


def _refuse(spot: _Spot, where: str, why: str) -> NoReturn:
    raise InvalidCheckpointState(f"{where}: {spot}: {why}")
