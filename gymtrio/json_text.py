"""JSON of the data plane: exactly what the standard library reads and writes, at a fifth of the time.

msgspec does the work wherever it is exact, and the standard library the rest, so that nothing changes
but the time:

- Reading, msgspec refuses all that it would read differently (NaN, infinities, lone surrogates, a
  byte order mark, numbers beyond a float), and what it refuses is read again.
- Writing, it refuses lone surrogates and unusual keys, and writes `null` for NaN and infinities: a
  text in which that word occurs is kept only if every float of the value is finite.

Beyond JSON it knows dates, UUIDs, sets, bytes (as base64) and attrs classes; those are written as it
writes them, whichever of the two writes the rest. Only floats as keys are spelled by whoever writes.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Final

import msgspec

_DECODER: Final = msgspec.json.Decoder()
_ENCODER: Final = msgspec.json.Encoder()
_EXACT_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), default=msgspec.to_builtins)

_ATOMS: Final = frozenset({type(None), bool, int, str})


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
    try:
        text = _ENCODER.encode(value)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return _dump_exactly(value)
    return _dump_exactly(value) if b"null" in text and not _is_plain(value) else text


def _dump_exactly(value: object) -> bytes:
    return _EXACT_ENCODER.encode(value).encode("ascii")


def _is_plain(value: object) -> bool:
    """Nothing but JSON's own types, and no float that JSON lacks."""
    stack: list[object] = [value]
    while stack:
        item = stack.pop()
        if type(item) is dict:
            if not all(type(key) is str for key in item):
                return False
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
        # Lists of thousands mostly hold nothing but these.
        if not _ATOMS.issuperset(map(type, inner)):
            stack.extend(inner)
    return True
