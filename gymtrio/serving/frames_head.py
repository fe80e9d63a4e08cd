"""The heads of calls of kind `http`: what HTTP says before a body, as msgpack arrays. No I/O.

    call    [method, target, [[name, value], ...]]      target: path and query, percent-encoded
    reply   [status, [[name, value], ...]]

Names and values are byte strings, names in lower case. Lengths, connections and encodings are the
channel's matter: no request says anything of them, and what a reply says of them means nothing.

What h11 would not read is no head here either: nobody's line end, zero or space gets into the scope of
an application, or into the headers of a caller who may pass them on. Every call is read twice, here and
at its caller, so what nearly all of them say is recognised whole, and looked at byte by byte only if it
is something else.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

from gymtrio.context import decode_path
from gymtrio.errors import Refusal
from gymtrio.serving.http import JSON_CONTENT_TYPE, BadRequest, Headers
from gymtrio.serving.http1 import HEAD_BYTES_MAX, HEADERS_MAX, BadAnswer
from gymtrio.strict import MalformedValue
from gymtrio.wire.codec import pack_list, unpack_tuple
from gymtrio.wire.native import (
    ACTIVATION_HEADER,
    ADMISSION_HEADER,
    EPOCH_HEADER,
    ONLY_SESSION_HEADER,
    RESULT_ACK_HEADER,
    VERIFY_HEADER,
)

KIND: Final = "http"
BROKEN_OFF: Final = "broken_off"
"""Code of the error with which a reply ends whose body will not be whole."""

_USUAL_HEADERS: Final[Headers] = ((b"content-type", JSON_CONTENT_TYPE.encode("ascii")),)
_USUAL_REPLY: Final = pack_list((200, _USUAL_HEADERS))
_USUAL_METHODS: Final = frozenset({"GET", "POST"})
_USUAL_NAMES: Final = frozenset(
    {
        b"authorization",
        b"content-type",
        b"cookie",
        b"idempotency-key",
        b"retry-after",
        b"set-cookie",
        *(
            name.encode("ascii")
            for name in (
                ACTIVATION_HEADER,
                ADMISSION_HEADER,
                EPOCH_HEADER,
                ONLY_SESSION_HEADER,
                RESULT_ACK_HEADER,
                VERIFY_HEADER,
            )
        ),
    }
)

_METHOD: Final = re.compile(r"[-!#$%&'*+.^_`|~0-9A-Za-z]+")
_NAME: Final = re.compile(rb"[-!#$%&'*+.^_`|~0-9a-z]+")
_NOT_IN_A_VALUE: Final = b"\0\n\v\f\r"
"""As in h11. Taking them out and looking at the length costs less than a pattern does."""

_ONCE: Final = (b"authorization", b"host")
_FRAMING: Final = frozenset({b"connection", b"content-length", b"transfer-encoding"})
_NOTHING: Final[frozenset[bytes]] = frozenset()


class HeadersTooLarge(Refusal):
    """A head over a limit that our HTTP has as well, and answers in the same words (SRV-5)."""

    status, code = 431, "headers_too_large"

    @classmethod
    def in_bytes(cls) -> HeadersTooLarge:
        return cls(f"a head of more than {HEAD_BYTES_MAX} bytes")


def encode_request(method: str, target: str, headers: Headers) -> bytes:
    """
    Raises:
        HeadersTooLarge: no server of ours would take it.
    """
    head = pack_list((method, target, headers))
    if len(head) > HEAD_BYTES_MAX:
        raise HeadersTooLarge.in_bytes()
    return head


def decode_request(head: bytes) -> tuple[str, str, Headers]:
    """Method, target, headers.

    Raises:
        HeadersTooLarge: it has too many bytes or headers.
        BadRequest: it is no such array, or holds what no request of HTTP may.
    """
    if len(head) > HEAD_BYTES_MAX:
        raise HeadersTooLarge.in_bytes()
    try:
        items = unpack_tuple(head)
    except MalformedValue as error:
        raise BadRequest(f"head: {error}") from None
    if len(items) != 3:
        raise BadRequest("head: not a method, a target and headers")
    method, target, headers = items
    if type(method) is not str or not (method in _USUAL_METHODS or _METHOD.fullmatch(method)):
        raise BadRequest("head: not a method")
    if type(target) is not str or not _is_target(target):
        raise BadRequest("head: not a target: a path and query, percent-encoded")
    if type(headers) is tuple and len(headers) > HEADERS_MAX:
        raise HeadersTooLarge(f"{len(headers)} headers, limit {HEADERS_MAX}")
    try:
        checked = _checked(headers, _FRAMING)
    except MalformedValue as error:
        raise BadRequest(str(error)) from None
    if len(checked) > 1:
        for name in _ONCE:
            if head.count(name) > 1 and sum(each == name for each, _ in checked) > 1:
                # As over HTTP: two readers could take different ones.
                raise BadRequest(f"two {name.decode('ascii')}s")
    return method, target, checked


class RequestHead(NamedTuple):
    """A head as its server uses it."""

    method: str
    raw_path: str
    query: str
    path: str
    headers: Headers


def read_request(head: bytes) -> RequestHead:
    """As `decode_request`. A caller says much the same again and again: short heads are remembered."""
    return _read_again(head) if len(head) <= _REMEMBERED_BYTES_MAX else _read(head)


def _read(head: bytes) -> RequestHead:
    method, target, headers = decode_request(head)
    raw_path, _, query = target.partition("?")
    return RequestHead(method, raw_path, query, decode_path(raw_path), headers)


_REMEMBERED_BYTES_MAX: Final = 512
_read_again: Final = lru_cache(maxsize=1024)(_read)


def encode_reply(status: int, headers: Headers) -> bytes:
    """
    Raises:
        BadAnswer: it cannot be written over HTTP either; the application's own fault.
    """
    if status == 200 and headers == _USUAL_HEADERS:
        return _USUAL_REPLY
    if not 200 <= status <= 999:
        raise BadAnswer(f"status {status}")
    try:
        return pack_list((status, _checked(headers, _NOTHING)))
    except MalformedValue as error:
        raise BadAnswer(str(error)) from None


def decode_reply(head: bytes) -> tuple[int, Headers]:
    """Status and headers.

    Raises:
        MalformedValue: it is no such array, or holds what no reply of HTTP may.
    """
    if head == _USUAL_REPLY:
        return 200, _USUAL_HEADERS
    if len(head) > HEAD_BYTES_MAX:
        raise MalformedValue("head", f"more than {HEAD_BYTES_MAX} bytes")
    items = unpack_tuple(head)
    if len(items) == 2:
        status, headers = items
        if type(status) is int and 200 <= status <= 999:
            return status, _checked(headers, _NOTHING)
    raise MalformedValue("head", "not a status and headers")


def _checked(headers: object, not_these: frozenset[bytes]) -> Headers:
    """Headers as they are.

    Raises:
        MalformedValue: one is none, or has one of these names.
    """
    if headers == _USUAL_HEADERS:
        return _USUAL_HEADERS
    if headers == ():
        return ()
    if type(headers) is not tuple:
        raise MalformedValue("head", "not a list of headers")
    for header in headers:
        if type(header) is not tuple or len(header) != 2:
            raise MalformedValue("head", "a header is not a name and a value")
        name, value = header
        if type(name) is not bytes or type(value) is not bytes:
            raise MalformedValue("head", "a header's name or value is not binary")
        if name not in _USUAL_NAMES and (name in not_these or not _NAME.fullmatch(name)):
            raise MalformedValue("head", f"a header's name may not be {name[:40]!r}")
        if len(value.translate(None, _NOT_IN_A_VALUE)) != len(value):
            raise MalformedValue("head", "a header's value holds a line end or a zero byte")
    return headers


def _is_target(text: str) -> bool:
    # Half of what a pattern takes; of ASCII, what is printable and no space is what h11 takes.
    return bool(text) and text.isascii() and text.isprintable() and " " not in text
