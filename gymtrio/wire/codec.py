"""Messages to bytes and back: the only module that knows MessagePack.

Closed messages are attrs classes. Inside a frame they are msgpack maps; over HTTP they are JSON
objects: two encodings of one definition. Opaque state is a `bytes` field and stays bytes.

Evolution: new fields have defaults; a field is never retyped, a name never reused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, cast

import attrs
import msgpack
import msgspec

from gymtrio.json_text import dump_finite_json, is_as_written, load_json
from gymtrio.limits import FRAME_NESTING_MAX
from gymtrio.strict import MalformedValue, describe, is_flat, structure, unstructure

T = TypeVar("T")

PlainItem: TypeAlias = "None | bool | int | float | str | bytes | Sequence[PlainItem]"

_SHORT_MAP: Final = 0x80
"""First byte of a msgpack map of up to 15 fields, whose low half is their number."""
_SHORT_MAP_FIELDS_MAX: Final = 15

_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})
_PACKER: Final[Any] = msgpack.Packer()
"""Of the lists of a channel; kept, because making one takes longer than packing a short list. It keeps
a buffer of the largest that it ever packed, and belongs to the thread of the loop."""


def pack(message: object) -> bytes:
    """Encode a closed message (an attrs value) as msgpack.

    Raises:
        MalformedValue: an integer beyond 64 bits or text with lone surrogates: neither belongs
            into a closed message.
    """
    return pack_fields(unstructure(message))


def pack_fields(fields: dict[str, PlainItem]) -> bytes:
    """As `pack`, of a message of plain values that is made by the thousand, by its fields.

    Raises:
        MalformedValue: see `pack`.
    """
    try:
        packed: bytes = msgpack.packb(fields)
    except (OverflowError, ValueError, TypeError) as error:
        raise MalformedValue("", f"cannot be packed: {error}") from None
    return packed


def pack_list(values: Sequence[PlainItem]) -> bytes:
    """Encode a short list of plain values: the payload of a frame that is sent by the thousand.

    Raises:
        MalformedValue: see `pack`.
    """
    try:
        packed: bytes = _PACKER.pack(values)
    except (OverflowError, ValueError, TypeError) as error:
        raise MalformedValue("", f"cannot be packed: {error}") from None
    return packed


def unpack_list(data: bytes) -> list[object]:
    """Decode a list; its items are not looked at: whoever reads them checks the exact type of each.

    Raises:
        MalformedValue: not msgpack, an extension type, too deep, or not a list.
    """
    value = _unpacked(data)
    if type(value) is not list:
        raise MalformedValue("", f"expected a list, got {describe(value)}")
    return value


def unpack_tuple(data: bytes) -> tuple[object, ...]:
    """As `unpack_list`, with every list in it, and itself, a tuple."""
    value = _unpacked(data, use_list=False)
    if type(value) is not tuple:
        raise MalformedValue("", f"expected a list, got {describe(value)}")
    return value


def unpack(cls: type[T], data: bytes) -> T:
    """Decode what `pack` made, strictly.

    Raises:
        MalformedValue: not msgpack, an extension type, too deep, or not a `cls`.
    """
    return structure(cls, unpack_plain(data))


def unpacker_of(cls: type[T]) -> Callable[[bytes], T]:
    """`unpack` of one class that is read by the thousand.

    A flat class is read by msgspec, which takes an eighth of the time: it compares types as exactly as
    we do, and refuses all that msgpack refuses. Two things are left to us. Fields that it does not know
    it would skip; but where all are required, and as many are announced as there are, there are no
    others. And what it refuses is read again, for the path of the fault.
    """
    fields = len(attrs.fields(cast("type[Any]", cls)))
    if fields > _SHORT_MAP_FIELDS_MAX or not is_flat(cls):
        return partial(unpack, cls)
    head = _SHORT_MAP | fields
    decode = msgspec.msgpack.Decoder(cls).decode

    def unpack_flat(data: bytes) -> T:
        try:
            if data[0] == head:
                return decode(data)
        except (msgspec.MsgspecError, ValueError, IndexError):
            pass
        return unpack(cls, data)

    return unpack_flat


def unpack_plain(data: bytes) -> object:
    """Decode msgpack into plain data of the eight kinds we know.

    Raises:
        MalformedValue: see `unpack`.
    """
    value = _unpacked(data)
    _check_plain(value)
    return value


def _unpacked(data: bytes, *, use_list: bool = True) -> object:
    try:
        value: object = msgpack.unpackb(data, use_list=use_list, ext_hook=_refuse_extension)
    except (ValueError, OverflowError, msgpack.exceptions.UnpackException) as error:
        # Covers truncation, trailing bytes, nesting beyond msgpack's own stack, bad UTF-8.
        raise MalformedValue("", f"not a message: {type(error).__name__}") from None
    return value


def _refuse_extension(code: int, data: bytes) -> object:
    raise MalformedValue("", f"extension type {code}")


def _check_plain(value: object) -> None:
    # A timestamp extension does not pass through `ext_hook`, so results are checked by type.
    if type(value) is dict and _PLAIN.issuperset(map(type, value.values())):
        return
    stack: list[tuple[object, int]] = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if type(item) in _PLAIN:
            continue
        if depth > FRAME_NESTING_MAX:
            raise MalformedValue("", f"nested deeper than {FRAME_NESTING_MAX}")
        if type(item) is list:
            inner: Iterable[object] = item
        elif type(item) is dict:
            inner = item.values()
        else:
            raise MalformedValue("", f"unexpected {type(item).__name__}")
        # Lists of thousands, and maps by the thousand, hold nothing but plain values.
        if not _PLAIN.issuperset(map(type, inner)):
            stack.extend((each, depth + 1) for each in inner)


def to_json(message: object) -> bytes:
    """Encode a closed message as a JSON object, keys in field order."""
    return dump_finite_json(unstructure(message))


def from_json(cls: type[T], data: bytes) -> T:
    """Decode a JSON object into a closed message, strictly.

    Raises:
        MalformedValue: not JSON, a key twice (two parsers could read it differently), or not a
        `cls`.
    """
    return structure(cls, json_to_plain(data))


def json_to_plain(data: bytes) -> object:
    """Parse the JSON of a closed message.

    Raises:
        MalformedValue: see `from_json`.
    """
    try:
        value = load_json(data)
        # Ours are; looking for keys that are given twice takes three times as long.
        if not is_as_written(data, value):
            value = json.loads(data, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise MalformedValue("", "nested too deeply") from None
    except ValueError as error:
        raise MalformedValue("", f"not JSON: {error}") from None
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise MalformedValue(key[:80], "key given twice")
            seen.add(key)
    return made
