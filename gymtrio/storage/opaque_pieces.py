"""Opaque state too large for one stretch of the loop, written and read piece by piece (STO-5).

No JSON library lets go of the interpreter while it works, so a thread would hold the loop as well. What
is large is taken apart instead: the containers and strings that are large themselves are walked here,
and what they hold goes through `opaque` some hundred items at a time.

- X1 Either way is read by the other one as the same value; what one refuses, the other one refuses
  with the same detail, unless it is its size. (The bytes may differ in the spelling of numbers, where
  one piece is written by one library and another by the other.)
- X2 Between two turns of the loop at most one piece is written or read, or the whole is copied once.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from itertools import islice
from typing import Any, Final, TypeVar

from gymtrio.errors import InvalidCheckpointState
from gymtrio.limits import OPAQUE_NESTING_MAX
from gymtrio.storage import opaque
from gymtrio.storage.bounds import OPAQUE_PIECE_BYTES, OPAQUE_PIECE_ITEMS, RECORD_BYTES_MAX
from gymtrio.storage.opaque import Weight
from gymtrio.storage.slices import LoopSlice

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Work that lets the loop turn where it yields; its result is returned."""

_SPAN_ITEMS: Final = 256
"""Of a large container, looked at together: mostly all of them are small."""

_TAKEN_MAX: Final = 2_000
"""Items that are read one by one in one stretch of the loop."""


_READ_WHOLE_BYTES_MAX: Final = 2 * OPAQUE_PIECE_BYTES
"""Read in one stretch of the loop. In pieces, a level of a deep value may cost as much as a piece."""


class _Odd(Exception):
    """Not for here: what does it in one stretch says what is wrong, if anything is."""


# -- writing ----------------------------------------------------------------------------------


def encode_steps(value: object, where: str) -> Steps[bytes]:
    """As `opaque.encode`, which does it in one stretch.

    The value must not change until the last step.
    """
    weight = opaque.weigh(value)
    if weight is not Weight.LARGE:
        return opaque.encode_weighed(value, where, weight)
    pieces: list[bytes | memoryview] = []
    written_bytes = 0
    try:
        for piece in _pieces_of(value, 1):
            pieces.append(piece)
            written_bytes += len(piece)
            if written_bytes > RECORD_BYTES_MAX:
                raise InvalidCheckpointState(
                    f"{where}: more than {RECORD_BYTES_MAX} bytes of state"
                )
            yield
    except (_Odd, ValueError, RuntimeError):
        # A fault, to which the walk of the whole finds the path; or a dict has grown all the same.
        return opaque.encode(value, where)
    data = b"".join(pieces)
    # Whoever packs it copies it once more, and a copy takes half a millisecond per megabyte.
    yield
    return data


def _pieces_of(large: Any, depth: int) -> Iterator[bytes | memoryview]:
    """
    Args:
        depth: levels down to this container or string, itself included.
    """
    if type(large) is str:
        yield b'"'
        for begin in range(0, len(large), OPAQUE_PIECE_BYTES):
            yield memoryview(opaque.encode_piece(large[begin : begin + OPAQUE_PIECE_BYTES]))[1:-1]
        yield b'"'
        return
    if depth > OPAQUE_NESTING_MAX:
        raise _Odd
    opening, closing = (b"{", b"}") if type(large) is dict else (b"[", b"]")
    before = opening
    for part in _parts_of(large, depth):
        if isinstance(part, _Large):
            yield before + part.key
            yield from _pieces_of(part.item, depth + 1)
        else:
            yield before
            yield memoryview(opaque.encode_piece(part))[1:-1]
        before = b","
    yield closing


class _Large:
    """An item of a container that must be taken apart itself."""

    def __init__(self, item: object, key: bytes = b"") -> None:
        self.item = item
        self.key = key


def _parts_of(large: Any, depth: int) -> Iterator[dict[Any, Any] | list[Any] | _Large]:
    """Cut a container into smaller ones, and items that are large; never an empty one."""
    if type(large) is dict:
        entries = iter(large.items())
        while span := dict(islice(entries, _SPAN_ITEMS)):
            if _is_small(span, depth - 1):
                yield span
                continue
            for key, item in span.items():
                if _is_small(item, depth):
                    yield {key: item}
                elif type(key) is str:
                    yield _Large(item, opaque.encode_piece(key) + b":")
                else:
                    raise _Odd
        return
    length = len(large)
    for begin in range(0, length, _SPAN_ITEMS):
        some = large[begin : begin + _SPAN_ITEMS]
        if _is_small(some, depth - 1):
            yield some
        else:
            yield from ([item] if _is_small(item, depth) else _Large(item) for item in some)
        if len(large) != length:
            # A dict says so by itself.
            raise _Odd


def _is_small(item: object, above: int) -> bool:
    """
    Args:
        above: the levels above it.
    """
    levels = OPAQUE_NESTING_MAX - above
    weight = opaque.weigh_within(item, levels, OPAQUE_PIECE_ITEMS, OPAQUE_PIECE_BYTES)
    if weight is Weight.ODD:
        raise _Odd
    return weight is Weight.PLAIN


# -- reading ----------------------------------------------------------------------------------


def decode_steps(data: bytes, where: str = "opaque state") -> Steps[object]:
    """As `opaque.decode`, which does it in one stretch."""
    if len(data) <= _READ_WHOLE_BYTES_MAX:
        return opaque.decode(data, where)
    try:
        value, end = yield from _read(data, 0, 1)
        if end != len(data):
            raise _Odd
    except (_Odd, ValueError, RecursionError, InvalidCheckpointState):
        # Spelled in another way, or not JSON.
        return opaque.decode(data, where)
    return value


def _read(data: bytes, at: int, depth: int) -> Steps[tuple[object, int]]:
    """Read the value that begins there, which does not end within a piece.

    Args:
        depth: levels down to it, itself included.

    Returns:
        The value, and where it ends.
    """
    opening = data[at : at + 1]
    if opening == b'"':
        return (yield from _read_string(data, at + 1))
    if opening not in (b"{", b"[") or depth > OPAQUE_NESTING_MAX:
        raise _Odd
    made = _Made(is_dict=opening == b"{", depth=depth)
    at += 1
    while True:
        text = _piece_at(data, at)
        end, is_last = made.take(text)
        if not end:
            yield
            key, begin = made.key_at(text, 0)
            item, at = yield from _read(data, at + _bytes_of(text, begin), depth + 1)
            made.add(key, item)
            is_last = data[at : at + 1] == made.closing
            if not is_last and data[at : at + 1] != b",":
                raise _Odd
            at += 1
        else:
            at += _bytes_of(text, end)
            yield
        if is_last:
            return made.value, at


class _Made:
    """A container that is being read."""

    def __init__(self, *, is_dict: bool, depth: int) -> None:
        self.value: dict[str, object] | list[object] = {} if is_dict else []
        self.closing = b"}" if is_dict else b"]"
        self._depth = depth
        self._decoder = opaque.decoder()

    def take(self, text: str) -> tuple[int, bool]:
        """Take the items that are whole in this text.

        Returns:
            How many characters were taken, and whether they end the container.
        """
        closing = self.closing.decode()
        taken: list[object] = []
        at, divider = 0, ","
        while divider == "," and len(taken) < _TAKEN_MAX:
            try:
                key, begin = self.key_at(text, at)
                item, end = self._decoder.raw_decode(text, begin)
            except ValueError:
                # Not whole; or a fault, which is found once nothing is taken any more.
                break
            divider = text[end : end + 1]
            if divider not in (",", closing):
                # It goes on in the next piece, as `1` may where `1.5` is cut; or, again, a fault.
                break
            self.add(key, item)
            taken.append(item)
            at = end + 1
        levels = OPAQUE_NESTING_MAX - self._depth
        # As in `decode`: fewer brackets than levels need no walk.
        if text.count("[") + text.count("{") > levels and opaque.is_deeper(taken, levels + 1):
            raise _Odd
        return at, divider == closing

    def key_at(self, text: str, at: int) -> tuple[str, int]:
        """
        Returns:
            The key that stands there, if there are keys; and where its item begins.

        Raises:
            ValueError: it is not whole, or none.
        """
        if isinstance(self.value, list):
            return "", at
        key, end = self._decoder.raw_decode(text, at)
        if not isinstance(key, str) or text[end : end + 1] != ":":
            raise ValueError("no key")
        return key, end + 1

    def add(self, key: str, item: object) -> None:
        if isinstance(self.value, list):
            self.value.append(item)
        elif key in self.value:
            raise _Odd
        else:
            self.value[key] = item


def _piece_at(data: bytes, at: int) -> str:
    """The text from there on, as long as a piece, whole characters."""
    end = at + OPAQUE_PIECE_BYTES
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end -= 1
    return data[at:end].decode("utf-8", "surrogatepass")


def _bytes_of(text: str, characters: int) -> int:
    return characters if text.isascii() else len(text[:characters].encode("utf-8", "surrogatepass"))


_CHARACTERS: Final = re.compile(rb'[^"\\]*(?:\\(?:[^u]|u[0-9a-fA-F]{4})[^"\\]*)*', re.DOTALL)
"""Of a string, none of them in part, but for the bytes of the last one."""


_HALF: Final = re.compile(rb"\\u[dD][89abAB]..")
"""Escaped, as we never write it. The other half of the pair is in the next piece."""


def _read_string(data: bytes, at: int) -> Steps[tuple[str, int]]:
    pieces: list[str] = []
    while True:
        found = _CHARACTERS.match(data, at, at + OPAQUE_PIECE_BYTES)
        assert found is not None
        end = found.end()
        is_last = data[end : end + 1] == b'"'
        while not is_last and at < end < len(data) and data[end] & 0xC0 == 0x80:
            end -= 1
        if not is_last and (end == at or _HALF.fullmatch(data, max(at, end - 6), end)):
            raise _Odd
        piece = opaque.decode(b'"' + data[at:end] + b'"')
        assert isinstance(piece, str)
        pieces.append(piece)
        at = end
        yield
        if is_last:
            return "".join(pieces), at + 1


# -- driving ----------------------------------------------------------------------------------


async def in_slices(steps: Steps[T], slice_: LoopSlice) -> T:
    """Run steps on the loop, which turns whenever the slice is over.

    Cancelled: between two steps.
    """
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await slice_.turn()
