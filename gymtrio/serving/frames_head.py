"""The heads of calls of kind `http`: what HTTP says before a body, as msgpack arrays. No I/O.

    call    [method, target, [[name, value], ...]]      target: path and query, percent-encoded
    reply   [status, [[name, value], ...]]

Names and values are byte strings, names in lower case. Lengths, connections and encodings are the
channel's matter: no header says anything of them.
"""

from __future__ import annotations

from typing import Final

from gymtrio.serving.http import Headers
from gymtrio.serving.http1 import HEADERS_MAX
from gymtrio.strict import MalformedValue
from gymtrio.wire.codec import pack_list, unpack_tuple

KIND: Final = "http"
BROKEN_OFF: Final = "broken_off"
"""Code of the error with which a reply ends whose body will not be whole."""


def encode_request(method: str, target: str, headers: Headers) -> bytes:
    return pack_list((method, target, headers))


def decode_request(head: bytes) -> tuple[str, str, Headers]:
    """Method, target, headers.

    Raises:
        MalformedValue: it is not such an array.
    """
    items = unpack_tuple(head)
    if len(items) == 3:
        method, target, headers = items
        if type(method) is str and type(target) is str and target.isascii():
            return method, target, _headers(headers)
    raise MalformedValue("head", "not a method, a target and headers")


def encode_reply(status: int, headers: Headers) -> bytes:
    return pack_list((status, headers))


def decode_reply(head: bytes) -> tuple[int, Headers]:
    """Status and headers.

    Raises:
        MalformedValue: it is not such an array.
    """
    items = unpack_tuple(head)
    if len(items) == 2:
        status, headers = items
        if type(status) is int and 200 <= status <= 999:
            return status, _headers(headers)
    raise MalformedValue("head", "not a status and headers")


def _headers(value: object) -> Headers:
    if type(value) is not tuple or len(value) > HEADERS_MAX:
        raise MalformedValue("head", f"not a list of at most {HEADERS_MAX} headers")
    for item in value:
        if (
            type(item) is not tuple
            or len(item) != 2
            or type(item[0]) is not bytes
            or type(item[1]) is not bytes
        ):
            raise MalformedValue("head", "a header is not a name and a value")
    return value
