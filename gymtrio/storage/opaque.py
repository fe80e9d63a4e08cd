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
from typing import Any, Final, NoReturn

from gymtrio.errors import InvalidCheckpointState
from gymtrio.json_text import dump_exact_json, load_exact_json
from gymtrio.limits import OPAQUE_INTEGER_DIGITS_MAX, OPAQUE_NESTING_MAX
from gymtrio.storage.bounds import PATH_SHOWN_CHARACTERS_MAX, RECORD_BYTES_MAX

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_CONTAINERS: Final = frozenset({dict, list})

_CONTAINERS_MAX: Final = RECORD_BYTES_MAX // 2
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


def encode(value: object, where: str, *, sort_keys: bool = False) -> bytes:
    """Serialise a JSON value.

    One stretch of the loop: about 1 ms per megabyte of text, 6 ms of numbers. The value is neither
    changed nor kept.

    Args:
        where: whose state it is, for the error: `episode r-a1`.
        sort_keys: give equal objects equal bytes; their key order is then lost.

    Raises:
        InvalidCheckpointState: something in it is not JSON of exact types, has more digits or levels
            than `gymtrio.limits` allow, or would exceed a record; the detail has `where` and its path.
    """
    # Digests are made of sorted text, and compared with those that older releases have written.
    is_plain = _has_plain_values(value)
    data = dump_exact_json(value) if is_plain and not sort_keys else None
    if data is None:
        if not is_plain or not _has_plain_keys(value) or _digits_need_a_look():
            _refuse_first_fault(value, where)
        data = _encode_slowly(value, where, sort_keys)
    if len(data) > RECORD_BYTES_MAX:
        raise InvalidCheckpointState(f"{where}: {len(data)} bytes, limit {RECORD_BYTES_MAX}")
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
    if brackets > OPAQUE_NESTING_MAX and not _has_plain_values(value):
        _refuse_first_fault(value, where)
    return value


def _decode_slowly(data: bytes, where: str) -> object:
    try:
        text = data.decode("utf-8", "surrogatepass")
        value: object = (_DIGITS_DECODER if _digits_need_a_look() else _DECODER).decode(text)
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


def _digits_need_a_look() -> bool:
    """Whether this interpreter was told to convert longer integers than our limit."""
    limit = sys.get_int_max_str_digits()
    return limit == 0 or limit > OPAQUE_INTEGER_DIGITS_MAX


def _has_plain_values(value: object) -> bool:
    """Say whether every value is of an exact JSON type and no level is too deep; keys may be any.

    Level by level, so that no recursion is needed, and plainly: this is most of the time of `encode`.
    """
    if type(value) in _SCALARS:
        return True
    level: list[Any] = [value]
    containers = 0
    for _ in range(OPAQUE_NESTING_MAX):
        containers += len(level)
        if containers > _CONTAINERS_MAX:
            return False
        below: list[Any] = []
        for container in level:
            if type(container) is dict:
                items: Iterable[Any] = container.values()
            elif type(container) is not list:
                return False
            elif len(container) > _LONG_FROM and _SCALARS.issuperset(map(type, container)):
                continue
            else:
                items = container
            for item in items:
                if type(item) not in _SCALARS:
                    below.append(item)
        if not below:
            return True
        level = below
    return False


def _has_plain_keys(value: object) -> bool:
    """Say whether every key is text and nothing else, of a value that `_has_plain_values`."""
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
        if visited > _CONTAINERS_MAX:
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
