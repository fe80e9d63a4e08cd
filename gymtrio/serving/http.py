"""Requests and answers as plain values: what a handler takes and returns.

A handler knows neither ASGI nor a framework, so that the same one is served over sockets, in process
and, between our own servers, over frames. It raises a `Refusal` for every answer that is not a
success; the application turns it into `{"error": {"code", "detail"}}`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import attrs

from gymtrio.context import RolloutContext
from gymtrio.errors import InvalidRequest, Refusal
from gymtrio.ids import EpisodeId, is_safe_id
from gymtrio.json_text import dump_json, load_json
from gymtrio.wire.native import EPOCH_HEADER

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""Lower-case names, in the order they came."""

HeadersLike: TypeAlias = Iterable[tuple[str | bytes, str | bytes]]

JSON_CONTENT_TYPE: Final = "application/json"

RETRY_AFTER_S: Final = 1
"""Said with every 503: a server that drains is replaced soon."""

_COOKIE_OCTETS: Final = frozenset(
    chr(c) for c in range(0x21, 0x7F) if chr(c) not in {'"', ",", ";", "\\"}
)


class ClientGone(OSError):
    """The peer left before its answer was sent; raised by the `send` of our own ASGI servers."""


class RequestTimedOut(Refusal):
    """The body did not arrive in time (SRV-5)."""

    status, code = 408, "request_timeout"


class MethodNotAllowed(Refusal):
    """The path is served, under other methods."""

    status, code = 405, "method_not_allowed"

    def __init__(self, path: str, allowed: Sequence[str]) -> None:
        super().__init__(f"{path} takes {', '.join(allowed)}")
        self.allowed = tuple(allowed)


class BadRequest(Refusal):
    """Not a request that any route could take."""

    status, code = 400, "bad_request"


def as_headers(headers: HeadersLike) -> Headers:
    """Normalise headers: bytes, names in lower case."""
    if not headers:
        return ()
    return tuple((_latin(name).lower(), _latin(value)) for name, value in headers)


def _latin(text: str | bytes) -> bytes:
    return text.encode("latin-1") if isinstance(text, str) else text


def first_header(headers: Headers, name: str) -> str | None:
    """The first value of a header, or None."""
    wanted = name.lower().encode("latin-1")
    for candidate, value in headers:
        if candidate == wanted:
            return value.decode("latin-1")
    return None


def epoch_of(headers: Headers) -> str | None:
    """The execution that a request says it belongs to (HARD-11).

    Raises:
        InvalidRequest: it is none that a restore could have issued.
    """
    epoch = first_header(headers, EPOCH_HEADER)
    if epoch is not None and not is_safe_id(epoch):
        raise InvalidRequest(f"{EPOCH_HEADER}: not an epoch of a restore: {epoch[:40]!r}")
    return epoch


def parse_json(body: bytes, what: str) -> object:
    """Parse JSON as the standard library does; NaN and infinities occur in opaque data.

    Args:
        what: names the document in the error, such as "request body".

    Raises:
        InvalidRequest: it is not JSON, or it nests deeper than this Python can read.
    """
    try:
        return load_json(body)
    except RecursionError:
        raise InvalidRequest(f"{what}: JSON nested too deeply") from None
    except ValueError as error:
        # UnicodeDecodeError and JSONDecodeError are both ValueErrors, as is an over-long integer.
        raise InvalidRequest(f"{what}: not JSON: {error}") from None


@attrs.define
class Request:
    """One request, its body read whole and bounded; not to be changed.

    It is not frozen, because every call makes one, and a frozen one takes three times as long.
    """

    method: str
    """Upper case."""
    path: str
    """Decoded, without the rollout prefix."""
    query: str = ""
    """As it stood after the question mark, not decoded."""
    headers: Headers = ()
    body: bytes = b""
    context: RolloutContext | None = None
    """The episode on whose behalf it came; also the current context while a handler runs."""

    @property
    def epoch(self) -> str | None:
        """Which execution it belongs to, if it says so; also without a rollout prefix.

        Raises:
            InvalidRequest: see `epoch_of`.
        """
        return epoch_of(self.headers)

    def context_of(self, episode_id: EpisodeId) -> RolloutContext:
        """Its context; without one, that of the episode which its body or session names."""
        return self.context or RolloutContext(episode_id, epoch=self.epoch)

    def header(self, name: str) -> str | None:
        """The first value of a header, or None."""
        return first_header(self.headers, name)

    def json(self) -> object:
        """The body as JSON; an empty body is not JSON.

        Raises:
            InvalidRequest: see `parse_json`.
        """
        return parse_json(self.body, "request body")

    def cookies(self) -> dict[str, str]:
        """Cookies by name; the first of a repeated name wins, as browsers send the closest first."""
        found: dict[str, str] = {}
        for name, value in self.headers:
            if name == b"cookie":
                for pair in value.decode("latin-1").split(";"):
                    key, equals, text = pair.strip().partition("=")
                    if equals and key:
                        found.setdefault(key, text.strip('"'))
        return found


def set_cookie(name: str, value: str) -> tuple[bytes, bytes]:
    """The header that sets a cookie for the session of a client program.

    Raises:
        ValueError: name or value holds what a cookie may not; a fault of the caller.
    """
    if not name or not set(name + value) <= _COOKIE_OCTETS or "=" in name:
        raise ValueError(f"cookie {name!r} holds characters that a cookie may not")
    return b"set-cookie", f"{name}={value}; Path=/; HttpOnly; SameSite=Lax".encode("ascii")


def cookies_set_by(headers: Headers) -> dict[str, str]:
    """The cookies that an answer sets, by name; the last of a repeated name wins."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name == b"set-cookie":
            key, equals, text = value.decode("latin-1").partition(";")[0].partition("=")
            if equals and key.strip():
                found[key.strip()] = text.strip().strip('"')
    return found


def cookie_header(cookies: Mapping[str, str]) -> tuple[bytes, bytes]:
    """The header that sends cookies back."""
    return b"cookie", "; ".join(f"{name}={value}" for name, value in cookies.items()).encode(
        "latin-1"
    )


@attrs.define
class Response:
    """A whole answer: head and body leave together. Not to be changed, as `Request`."""

    status: int
    body: bytes = b""
    headers: Headers = attrs.field(default=(), converter=as_headers)
    """Without content-type and content-length, which are written from the other fields."""
    content_type: str = JSON_CONTENT_TYPE
    on_done: Callable[[bool], None] | None = None
    """Called once, synchronously. True: the last byte was handed to the peer's connection. False: the
    peer left before, or the server is being stopped. It must not raise."""


@attrs.frozen
class StreamingResponse:
    """An answer that begins before it is whole.

    Leaving of the peer cancels `chunks` at its current await. An error raised by `chunks` cuts the
    connection, because a status was already sent.
    """

    status: int
    chunks: AsyncIterator[bytes]
    headers: Headers = attrs.field(default=(), converter=as_headers)
    content_type: str = "text/event-stream"
    on_done: Callable[[bool], None] | None = None
    """As in `Response`, after the last chunk."""


Answer: TypeAlias = Response | StreamingResponse
Handler: TypeAlias = Callable[[Request], Awaitable[Answer]]


def json_response(
    value: object,
    status: int = 200,
    headers: HeadersLike = (),
    cookies: Mapping[str, str] | None = None,
    on_done: Callable[[bool], None] | None = None,
) -> Response:
    """An answer whose body is `value` as JSON.

    Args:
        cookies: set on the client, each for the whole session.
    """
    if cookies:
        set_by_us = (set_cookie(name, text) for name, text in cookies.items())
        headers = (*as_headers(headers), *set_by_us)
    return Response(status, dump_json(value), headers, on_done=on_done)


def refusal_response(refusal: Refusal) -> Response:
    """The answer that a refusal stands for (CTL-17)."""
    headers: Headers = ()
    if refusal.status == 503:
        headers = ((b"retry-after", b"%d" % RETRY_AFTER_S),)
    elif isinstance(refusal, MethodNotAllowed):
        headers = ((b"allow", ", ".join(refusal.allowed).encode("ascii")),)
    return json_response(refusal.body(), refusal.status, headers)


def internal_error() -> Response:
    """What a caller is told about a fault of ours: nothing but that there was one."""
    error = {"code": "internal_error", "detail": "see the server's log"}
    return json_response({"error": error}, 500)
