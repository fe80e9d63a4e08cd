"""The message table: every frame type of the dialogue, its payload, and the checks on it.

Messages that are sent by the thousand are msgpack arrays with a check by hand of each item's exact
type; the two of the handshake are maps, because they must be understood across versions. `DESIGN.md`
has the table for readers who write a peer in another language.

Evolution: a frame type and the position of an array's item are never reused. A version of the
protocol fixes the length of every array; a new version may append items. The handshake's maps may
gain keys within a version: keys that the reader does not know are ignored there, and only there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeGuard, TypeVar

import attrs

from gymtrio.strict import MalformedValue, describe, structure
from gymtrio.wire.codec import pack, pack_list, unpack_list, unpack_plain
from gymtrio.wire.frames import encode_frame

PROTOCOL_VERSIONS: Final = (1,)
"""Versions of the dialogue that this side speaks, in ascending order."""

KIND_CHARACTERS_MAX: Final = 64
NAME_CHARACTERS_MAX: Final = 256
"""Of a role, name or instance. They stand in every log line about a channel, and can be printed."""
CODE_CHARACTERS_MAX: Final = 64
DETAIL_CHARACTERS_MAX: Final = 2_000
"""A detail names what is wrong; it is not a place for content."""
VERSIONS_LISTED_MAX: Final = 16
FRAME_BYTES_LEAST: Final = 128 * 2**10
"""Every peer takes at least this: a chunk of a body, or a moderate head, fits."""
COUNT_MAX: Final = 2**53
"""Ids, sizes and times: what every language has as an exact integer."""
HANDSHAKE_BYTES_MAX: Final = 8192
"""Of the payload of hello and welcome, and of a goodbye before them: all that a peer may send before
it is known. The longest valid one fits."""
TOKEN_CHARACTERS_MAX: Final = 1024

M = TypeVar("M")


class Type(IntEnum):
    """Frame types. Below 16: about the connection; from 16 on: about calls and posts."""

    HELLO = 1
    WELCOME = 2
    GOODBYE = 3
    PING = 4
    PONG = 5
    CALL = 16
    REPLY = 17
    ERROR = 18
    DATA = 19
    CREDIT = 20
    CANCEL = 21
    POST = 22
    CONTROL_POST = 23


def _check_text(instance: object, attribute: attrs.Attribute[Any], value: str) -> None:
    if len(value) > NAME_CHARACTERS_MAX:
        raise ValueError(f"{attribute.name}: {len(value)} characters, limit {NAME_CHARACTERS_MAX}")
    if not value.isprintable():
        raise ValueError(f"{attribute.name}: has characters that cannot be printed")


def _check_size(instance: object, attribute: attrs.Attribute[Any], value: int) -> None:
    if not 0 < value <= COUNT_MAX:
        raise ValueError(f"{attribute.name}: {value} is not within 1..2**53")


def _check_frame(instance: object, attribute: attrs.Attribute[Any], value: int) -> None:
    if not FRAME_BYTES_LEAST <= value <= COUNT_MAX:
        raise ValueError(f"{attribute.name}: {value} is not within {FRAME_BYTES_LEAST}..2**53")


def _check_versions(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not 0 < len(value) <= VERSIONS_LISTED_MAX:
        raise ValueError(f"{attribute.name}: {len(value)} listed, limit {VERSIONS_LISTED_MAX}")


def _check_token(instance: object, attribute: attrs.Attribute[Any], value: str | None) -> None:
    if value is not None and len(value) > TOKEN_CHARACTERS_MAX:
        raise ValueError(f"{attribute.name}: over {TOKEN_CHARACTERS_MAX} characters")


@attrs.frozen(kw_only=True)
class Hello:
    """Who speaks."""

    role: str = attrs.field(validator=_check_text)
    """What the process is to its peer, such as `worker`."""
    name: str = attrs.field(validator=_check_text)
    """Which one it is."""
    instance: str = attrs.field(validator=_check_text)
    """Which incarnation of it: a nonce that a restart changes."""


@attrs.frozen(kw_only=True)
class Capacity:
    """What the speaker is willing to take; its peer keeps to it."""

    frame_bytes_max: int = attrs.field(validator=_check_frame)
    head_bytes_max: int = attrs.field(validator=_check_size)
    window_bytes: int = attrs.field(validator=_check_size)
    """Of each body, how much may be sent before the first credit."""
    calls_open_max: int = attrs.field(validator=_check_size)


@attrs.frozen(kw_only=True)
class HelloMessage:
    """Payload of HELLO: the first frame of whoever opened the connection."""

    versions: tuple[int, ...] = attrs.field(validator=_check_versions)
    """Protocol versions it speaks."""
    hello: Hello
    capacity: Capacity
    token: str | None = attrs.field(default=None, validator=_check_token, repr=False)
    """The control token, where the acceptor asks for one."""


@attrs.frozen(kw_only=True)
class WelcomeMessage:
    """Payload of WELCOME: the answer to HELLO."""

    version: int
    """The highest that both speak; from here on it is spoken."""
    hello: Hello
    capacity: Capacity


class Call(NamedTuple):
    """A request. The lowest bit of `call_id` says who makes it (0: who opened the connection), the
    next one its lane (1: control); ids of one maker and lane ascend."""

    call_id: int
    kind: str
    head: bytes
    body: bytes | None
    """None: it comes in DATA frames."""
    timeout_ms: int | None
    """How long the caller still waits; None: it does not say."""


class Reply(NamedTuple):
    """The answer; final if its body is there."""

    call_id: int
    head: bytes
    body: bytes | None


class Error(NamedTuple):
    """The answer, or the end of a reply's body, is an error. Always final."""

    call_id: int
    status: int
    """400..599, as HTTP has it."""
    code: str
    detail: str


class Data(NamedTuple):
    """A piece of the body that flows from the sender of this frame."""

    call_id: int
    is_last: bool
    chunk: bytes
    """Empty only where it is the last."""


class Credit(NamedTuple):
    """So many more bytes of the body may be sent."""

    call_id: int
    size_bytes: int


class Cancel(NamedTuple):
    """The caller waits no more. The callee answers with an ERROR, unless its last frame has left."""

    call_id: int


class Post(NamedTuple):
    """One-way; POST in the data lane, CONTROL_POST in the control lane."""

    kind: str
    body: bytes


class Goodbye(NamedTuple):
    """The last frame of its sender, and why."""

    code: str
    detail: str


class Ping(NamedTuple):
    """To be answered by a PONG with the same number."""

    number: int


def encode(frame_type: Type, message: tuple[Any, ...]) -> bytes:
    """Frame a message that is an array."""
    return encode_frame(frame_type, pack_list(message))


def encode_hello(message: HelloMessage) -> bytes:
    return encode_frame(Type.HELLO, pack(message), payload_bytes_max=HANDSHAKE_BYTES_MAX)


def encode_welcome(message: WelcomeMessage) -> bytes:
    return encode_frame(Type.WELCOME, pack(message), payload_bytes_max=HANDSHAKE_BYTES_MAX)


def decode_hello(payload: bytes) -> HelloMessage:
    """
    Raises:
        MalformedValue: see the other decoders.
    """
    return _known_fields(HelloMessage, payload)


def decode_welcome(payload: bytes) -> WelcomeMessage:
    """
    Raises:
        MalformedValue: see the other decoders.
    """
    return _known_fields(WelcomeMessage, payload)


def decode_call(payload: bytes) -> Call:
    """
    Raises:
        MalformedValue: not such an array, an item of another type or out of range.
    """
    items = _counted("call", payload, 5)
    call_id, kind, head, body, timeout_ms = items
    if (
        type(kind) is str
        and 0 < len(kind) <= KIND_CHARACTERS_MAX
        and type(head) is bytes
        and (body is None or type(body) is bytes)
        and (timeout_ms is None or (type(timeout_ms) is int and 0 <= timeout_ms <= COUNT_MAX))
    ):
        return Call(call_id, kind, head, body, timeout_ms)
    raise _malformed("call", items)


def decode_reply(payload: bytes) -> Reply:
    """
    Raises:
        MalformedValue: see `decode_call`.
    """
    items = _counted("reply", payload, 3)
    call_id, head, body = items
    if type(head) is bytes and (body is None or type(body) is bytes):
        return Reply(call_id, head, body)
    raise _malformed("reply", items)


def decode_error(payload: bytes) -> Error:
    """
    Raises:
        MalformedValue: see `decode_call`.
    """
    items = _counted("error", payload, 4)
    call_id, status, code, detail = items
    if (
        type(status) is int
        and 400 <= status <= 599
        and _is_text(code, CODE_CHARACTERS_MAX)
        and _is_text(detail, DETAIL_CHARACTERS_MAX)
    ):
        return Error(call_id, status, code, detail)
    raise _malformed("error", items)


def decode_data(payload: bytes) -> Data:
    """
    Raises:
        MalformedValue: see `decode_call`.
    """
    items = _counted("data", payload, 3)
    call_id, is_last, chunk = items
    if type(is_last) is bool and type(chunk) is bytes and (chunk or is_last):
        return Data(call_id, is_last, chunk)
    raise _malformed("data", items)


def decode_credit(payload: bytes) -> Credit:
    """
    Raises:
        MalformedValue: see `decode_call`.
    """
    items = _counted("credit", payload, 2)
    call_id, size_bytes = items
    if type(size_bytes) is int and 0 < size_bytes <= COUNT_MAX:
        return Credit(call_id, size_bytes)
    raise _malformed("credit", items)


def decode_cancel(payload: bytes) -> Cancel:
    """
    Raises:
        MalformedValue: see `decode_call`.
    """
    return Cancel(*_counted("cancel", payload, 1))


def decode_ping(payload: bytes) -> Ping:
    """Also of PONG.

    Raises:
        MalformedValue: see `decode_call`.
    """
    return Ping(*_counted("ping", payload, 1))


def decode_post(payload: bytes) -> Post:
    """
    Raises:
        MalformedValue: see `decode_call`.
    """
    items = unpack_list(payload)
    if len(items) == 2:
        kind, body = items
        if type(kind) is str and 0 < len(kind) <= KIND_CHARACTERS_MAX and type(body) is bytes:
            return Post(kind, body)
    raise _malformed("post", items)


def decode_goodbye(payload: bytes) -> Goodbye:
    """
    Raises:
        MalformedValue: see `decode_call`.
    """
    items = unpack_list(payload)
    if len(items) == 2:
        code, detail = items
        if _is_text(code, CODE_CHARACTERS_MAX) and _is_text(detail, DETAIL_CHARACTERS_MAX):
            return Goodbye(code, detail)
    raise _malformed("goodbye", items)


def _known_fields(cls: type[M], payload: bytes) -> M:
    return structure(cls, _without_unknown(cls, unpack_plain(payload)))


def _without_unknown(cls: Any, plain: object) -> object:
    if not isinstance(plain, dict):
        return plain
    attrs.resolve_types(cls)
    types = {field.name: field.type for field in attrs.fields(cls)}
    return {
        key: _without_unknown(types[key], value) if attrs.has(types[key]) else value
        for key, value in plain.items()
        if key in types
    }


def _counted(name: str, payload: bytes, length: int) -> list[Any]:
    """So many items, the first of them an id or another count; the rest is not looked at."""
    items = unpack_list(payload)
    if len(items) == length and type(items[0]) is int and 0 <= items[0] <= COUNT_MAX:
        return items
    raise _malformed(name, items)


def _is_text(value: object, characters_max: int) -> TypeGuard[str]:
    return type(value) is str and len(value) <= characters_max


def _malformed(name: str, items: list[object]) -> MalformedValue:
    shown = ", ".join(describe(item) for item in items[:6])
    return MalformedValue(name, f"{len(items)} items, or one of another type or size: {shown}")


DECODERS: Final[Mapping[int, Callable[[bytes], Any]]] = {
    Type.HELLO: decode_hello,
    Type.WELCOME: decode_welcome,
    Type.GOODBYE: decode_goodbye,
    Type.PING: decode_ping,
    Type.PONG: decode_ping,
    Type.CALL: decode_call,
    Type.REPLY: decode_reply,
    Type.ERROR: decode_error,
    Type.DATA: decode_data,
    Type.CREDIT: decode_credit,
    Type.CANCEL: decode_cancel,
    Type.POST: decode_post,
    Type.CONTROL_POST: decode_post,
}
"""Frame type to what reads its payload, or raises `MalformedValue`."""
assert DECODERS.keys() == set(Type)
