"""HTTP/1.1 of the server's side: bytes in, requests out; answers in, bytes out. No I/O.

h11 reads heads and chunked bodies. What it would spend most of its time on is done here instead: a body
with a length is cut off the buffer, and answers are written directly, without a state machine that
checks what this module has made itself. Each request is read by an `h11.Connection` of its own: one is
made in a microsecond, while recycling one takes the answer through it as well.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Final

import attrs
import h11

from gymtrio.serving.http import Headers

HEAD_BYTES_MAX: Final = 65536
HEADERS_MAX: Final = 256
"""A request of ours has ten; looking at each costs its handler."""

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"

_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode("ascii"))
    for status in HTTPStatus
    if status >= 200
}
_BODILESS: Final = frozenset({204, 304})
_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FRAMING: Final = frozenset({b"connection", b"content-length", b"transfer-encoding"})
"""What this module writes itself."""


class Malformed(Exception):
    """What came is no request; the connection can be answered once more, and read no further."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class BadAnswer(ValueError):
    """An application's answer cannot be written; its own fault."""


@attrs.frozen
class Head:
    """The head of a request."""

    method: str
    target: bytes
    headers: Headers
    content_length: int | None
    """None: the body is chunked."""
    keeps_alive: bool
    """Another request may follow."""
    expects_continue: bool
    """The client waits for leave to send its body."""
    is_1_0: bool


class RequestReader:
    """Reads one request after the other: `head`, then `body` until `whole`, then `head` again.

    A head is refused where two readers could take it for different ones, since one of them may stand in
    front of us: line ends other than CRLF, folded lines, a length beside chunks, two authorizations.
    """

    def __init__(self) -> None:
        self._http: h11.Connection | None = None
        """Of a chunked body."""
        self._left = 0
        """Of a body with a length."""
        self._rest = b""
        self.whole = True
        """The request whose head was given last is read to its end."""

    def feed(self, data: bytes) -> None:
        """Take what has arrived."""
        if self._http is not None:
            self._http.receive_data(data)
        else:
            self._rest = self._rest + data if self._rest else data

    @property
    def begun(self) -> bool:
        """Part of a head has come."""
        return self.whole and bool(self._rest)

    def head(self) -> Head | None:
        """The next request's head; None: more has to arrive. Only when the last one is `whole`.

        Raises:
            Malformed: see there; nothing may be called afterwards.
        """
        # An empty line before a request is to be ignored (RFC 9112, section 2.2).
        data = self._rest.lstrip(b"\r\n") if self._rest[:1] in b"\r\n" else self._rest
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._check_begun(data)
            self._rest = data
            return None
        head, self._rest = data[: end + 4], data[end + 4 :]
        self._check_begun(head)
        lines = head.count(b"\n")
        if lines - 2 > HEADERS_MAX:
            raise Malformed(431, f"{lines - 2} headers, limit {HEADERS_MAX}")
        if b"\n " in head or b"\n\t" in head:
            raise Malformed(400, "a header is folded over several lines")
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        http.receive_data(head)
        event = self._event(http)
        assert isinstance(event, h11.Request)
        return self._begin(http, event)

    @staticmethod
    def _check_begun(data: bytes) -> None:
        """Refuse what cannot become a head, or not one of ours, without waiting for its end."""
        if len(data) > HEAD_BYTES_MAX:
            raise Malformed(431, f"a head of more than {HEAD_BYTES_MAX} bytes")
        if (data[:1] < b"!" and data) or data.count(b"\n") != data.count(b"\r\n"):
            raise Malformed(400, "the request is not HTTP/1.1")

    def _begin(self, http: h11.Connection, event: h11.Request) -> Head:
        headers = tuple(event.headers)
        is_1_0 = event.http_version < b"1.1"
        length: int | None = None
        chunked = authorized = False
        options = b""
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                chunked = True
            elif name == b"connection":
                options += b"," + value.lower()
            elif name == b"authorization":
                if authorized:
                    raise Malformed(400, "two authorizations")
                authorized = True
        if chunked:
            if length is not None:
                raise Malformed(400, "a content-length beside a transfer-encoding")
            self._http = http
            if self._rest:
                # Nothing would mean that the peer has closed.
                http.receive_data(self._rest)
            self._rest = b""
        else:
            length = length or 0
            self._left = length
        self.whole = length == 0
        return Head(
            method=event.method.decode("ascii"),
            target=event.target,
            headers=headers,
            content_length=length,
            keeps_alive=not is_1_0 and b"close" not in map(bytes.strip, options.split(b",")),
            expects_continue=http.they_are_waiting_for_100_continue,
            is_1_0=is_1_0,
        )

    @property
    def at_hand(self) -> int:
        """Bytes that have come of a body with a length, or behind it."""
        return len(self._rest)

    def body(self) -> bytes | None:
        """The next piece of the body; None: more has to arrive, or, when `whole`, nothing will.

        Raises:
            Malformed: see there.
        """
        if self.whole:
            return None
        if self._http is not None:
            return self._chunk(self._http)
        data, left = self._rest, self._left
        if not data:
            return None
        if len(data) <= left:
            piece, self._rest = data, b""
        else:
            piece, self._rest = data[:left], data[left:]
        self._left = left - len(piece)
        self.whole = not self._left
        return piece

    def _chunk(self, http: h11.Connection) -> bytes | None:
        while True:
            event = self._event(http)
            if isinstance(event, h11.Data):
                if event.data:
                    return bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self._rest = http.trailing_data[0]
                self._http = None
                self.whole = True
                return None
            else:
                return None

    @staticmethod
    def _event(http: h11.Connection) -> h11.Event | type:
        try:
            return http.next_event()
        except h11.RemoteProtocolError as error:
            raise Malformed(error.error_status_hint, str(error)) from None


@attrs.frozen(kw_only=True)
class Framing:
    """How an answer's end is told."""

    length: int | None
    """None: in chunks, or, to an HTTP/1.0 client, by closing."""
    chunked: bool
    bodiless: bool
    """Nothing follows the head, whatever it says."""
    closes: bool


def framing_of(head: Head, status: int, length: int | None, *, closes: bool) -> Framing:
    """Decide how an answer to `head` is sent.

    Args:
        length: of the body; None: not known.
        closes: the connection is to end after it in any case.
    """
    bodiless = head.method == "HEAD" or status in _BODILESS
    chunked = length is None and not bodiless and not head.is_1_0
    endless = length is None and not bodiless and not chunked
    return Framing(length=length, chunked=chunked, bodiless=bodiless, closes=closes or endless)


def encode_head(status: int, headers: Headers, framing: Framing, date: bytes) -> bytes:
    """Write the head of an answer.

    Args:
        headers: those about the framing are left out, they are written from `framing`.
        date: a whole header line, or nothing.

    Raises:
        BadAnswer: a header or the status cannot be written.
    """
    line = _STATUS_LINES.get(status)
    if line is None:
        if not 200 <= status <= 999:
            raise BadAnswer(f"status {status}")
        line = b"HTTP/1.1 %d \r\n" % status
    parts = [line]
    for name, value in headers:
        if name not in _FRAMING:
            if not _TOKEN.fullmatch(name):
                raise BadAnswer(f"header name {name!r}")
            parts.append(b"%s: %s\r\n" % (name, value))
    if framing.length is not None and status not in _BODILESS:
        parts.append(b"content-length: %d\r\n" % framing.length)
    elif framing.chunked:
        parts.append(b"transfer-encoding: chunked\r\n")
    if framing.closes:
        parts.append(b"connection: close\r\n")
    parts.append(date)
    text = b"".join(parts)
    lines = len(parts) if date else len(parts) - 1
    if text.count(b"\n") != lines or text.count(b"\r") != lines or b"\0" in text:
        raise BadAnswer("a header holds a line end or a zero byte")
    return text + b"\r\n"


def encode_chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; an empty one would end it."""
    return b"%x\r\n%s\r\n" % (len(data), data)
