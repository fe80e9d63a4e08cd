"""JSON: what the standard library reads and writes, in a fifth of the time.

Two libraries do the work wherever they are exact, and the standard library the rest:

- msgspec reads. It refuses all that it would read differently (NaN, infinities, lone surrogates, a byte
  order mark, numbers beyond a float), and what it refuses is read again. orjson would make a float
  of an integer beyond 64 bits.
- orjson writes. It refuses what is not JSON, such integers, lone surrogates and keys that are no text,
  and writes `null` for NaN and infinities: a text in which that word occurs is kept only if every float
  of the value is finite. msgspec would write sets, bytes and dates as well.

Beyond JSON, members of enumerations are written as their values and UUIDs as text.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, Final

import msgspec
import orjson

_DECODER: Final = msgspec.json.Decoder()
_OPTIONS: Final = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME

_ATOMS: Final = frozenset({type(None), bool, int, str})
_NUMBERS_TOO: Final = _ATOMS | {float}


def load_json(text: bytes) -> object:
    """Read a JSON document; NaN and infinities are taken, the last of a repeated key wins.

    Raises:
        ValueError: it is not JSON, not UTF-8, or holds an integer of more digits than Python reads.
        RecursionError: it nests deeper than this Python can read.
    """
    try:
        value: object = _DECODER.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        value = json.loads(text)
    return value


def dump_json(value: object) -> bytes:
    """Write a value compactly, keys in their order.

    Raises:
        TypeError, ValueError, RecursionError: `value` is not JSON; a fault of the caller.
    """
    text = dump_finite_json(value)
    return dump_ascii_json(value) if b"null" in text and not _is_plain(value) else text


def dump_finite_json(value: object) -> bytes:
    """As `dump_json`, of a value whose floats are finite, which is not looked at.

    Messages are such values, and their scopes are long.
    """
    try:
        return _dump(value)
    except TypeError:
        return dump_ascii_json(value)


def dump_ascii_json(value: object) -> bytes:
    """As `dump_json`, in ASCII, for readers that take more characters than LF and CR for line ends."""
    return _ASCII_ENCODER.encode(value).encode("ascii")


def dump_exact_json(value: object) -> bytes | None:
    """As `dump_json`, of a value all of whose items are of exact JSON types; its keys need not be.

    Returns:
        The text from which `load_exact_json` makes the same value, bit by bit; None: there is none,
        because of a key that is no text, an integer beyond 64 bits, a float that is not finite, a
        lone surrogate, or more than 254 levels.
    """
    try:
        text = _dump(value)
    except TypeError:
        return None
    return None if b"null" in text and not _is_plain(value) else text


def load_exact_json(text: bytes) -> object:
    """Read what `dump_exact_json` wrote.

    Raises:
        ValueError: it is something else, which may be JSON.
    """
    try:
        value: object = _DECODER.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not is_as_written(text, value):
        raise ValueError("written by something else")
    return value


def is_as_written(text: bytes, value: object) -> bool:
    """Whether `text` is what is written for `value`, byte by byte.

    If it is what `load_json` made of that text, no key stands twice in one of its objects.
    """
    try:
        return _dump(value) == text
    except TypeError:
        return False


def _dump(value: object) -> bytes:
    return orjson.dumps(value, None, _OPTIONS)


def _plain(value: object) -> Any:
    return orjson.loads(_dump(value))


_ASCII_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), default=_plain)


def _is_plain(value: object) -> bool:
    """Nothing but JSON's own types, and no float that JSON lacks."""
    stack: list[object] = [value]
    while stack:
        item = stack.pop()
        if type(item) is dict:
            inner: list[object] | tuple[object, ...] = list(item.values())
        elif type(item) is list or type(item) is tuple:
            inner = item
        elif type(item) is float:
            if not isfinite(item):
                return False
            continue
        elif type(item) in _ATOMS:
            continue
        else:
            return False
        # Lists of thousands mostly hold nothing but these, or numbers.
        kinds = set(map(type, inner))
        if kinds <= _ATOMS:
            continue
        if not kinds <= _NUMBERS_TOO:
            stack.extend(inner)
        elif not all(isfinite(each) for each in inner if type(each) is float):
            return False
    return True
