"""How a server calls another one: by its name in the deployment, on behalf of the current episode.

The client decides what is asked (path, prefix, headers, deadline); a `Transport` carries it, over
sockets (`gymtrio.serving.pool`) or inside the process (`gymtrio.serving.inprocess`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, NamedTuple, Protocol, runtime_checkable
from urllib.parse import quote, urlsplit

import attrs
import trio

from gymtrio.context import ROLLOUT_PREFIX, RolloutContext, current_context
from gymtrio.errors import InvalidRequest, PeerRefused, Refusal, SettingsError, TransportError
from gymtrio.json_text import dump_json
from gymtrio.limits import DATA_BODY_BYTES_MAX, DEADLINE_AHEAD_S_MAX
from gymtrio.serving.http import (
    Headers,
    HeadersLike,
    as_headers,
    cookie_header,
    cookies_set_by,
    first_header,
    parse_json,
)
from gymtrio.wire.native import EPOCH_HEADER

MODEL_ROUTES: Final = frozenset({"/v1/responses", "/v1/chat/completions", "/v1/messages"})
"""What a policy model is called under; these carry the rollout prefix (ID-5)."""

IDEMPOTENT_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS"})
"""Methods that by their definition may be sent twice (RFC 9110, section 9.2.2)."""

_TARGET_SAFE: Final = "/:?#[]@!$&'()*+,;=%~"
NO_REPLY: Final = "no reply before the deadline"

_PLAIN_TARGET: Final = re.compile(r"[-A-Za-z0-9._~/:?=&]*")
"""Most targets, which need no second look."""
JSON_ONLY: Final[Headers] = ((b"content-type", b"application/json"),)
_ERROR_SHOWN_CHARACTERS_MAX: Final = 500


class _Current(enum.Enum):
    CONTEXT = enum.auto()


CURRENT: Final = _Current.CONTEXT
"""The context of the running task, whatever it is at the time of the call."""


class CallTimedOut(TransportError):
    """The deadline of a call passed before its reply was whole."""


class Lane(enum.Enum):
    """Which connections a call may use: parked data calls never hold up control calls (COORD-5)."""

    DATA = "data"
    CONTROL = "control"


def _count(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 0:
        raise ValueError(f"{attribute.name} must not be negative (0: unlimited), got {value}")


def _seconds(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not value > 0:
        raise ValueError(f"{attribute.name} must be more than 0 seconds, got {value}")


@attrs.frozen(kw_only=True)
class ClientSettings:
    """The `client` block of a deployment: bounds of outgoing calls."""

    data_connections_max: int = attrs.field(default=4096, validator=_count)
    """Per called server; calls beyond it wait. 0: unlimited."""
    control_connections_max: int = attrs.field(default=16, validator=_count)
    """Per called server, besides the data connections. 0: unlimited."""
    connect_timeout_s: float = attrs.field(default=10.0, validator=_seconds)
    data_timeout_s: float = attrs.field(default=DEADLINE_AHEAD_S_MAX, validator=_seconds)
    """Deadline of a data call that names none. Long, because a call may be parked by a checkpoint."""
    control_timeout_s: float = attrs.field(default=60.0, validator=_seconds)
    """Deadline of a control call that names none."""
    idle_s_max: float = attrs.field(default=30.0, validator=_seconds)
    """An idle connection is closed after this; must stay below the servers' own keep-alive (75 s)."""
    reply_bytes_max: int = attrs.field(default=DATA_BODY_BYTES_MAX, validator=_count)


class Origin(NamedTuple):
    """Where connections go."""

    # A tuple, since every call looks its connection up by it.
    host: str
    port: int
    tls: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.tls else 80
        return host if self.port == default else f"{host}:{self.port}"


@attrs.frozen
class Peer:
    """A server that can be called."""

    name: str
    """For messages: its name in the deployment, or its URL."""
    origin: Origin
    base_path: str = ""
    """Put before every path; without a slash at its end."""
    carries_context: bool = False
    """Every call to it carries the rollout prefix: it is a resources server (ID-5)."""

    @property
    def url(self) -> str:
        scheme = "https" if self.origin.tls else "http"
        return f"{scheme}://{self.origin}{self.base_path}"


def peer_of_url(url: str, *, name: str | None = None, carries_context: bool = False) -> Peer:
    """Take a base URL apart.

    Raises:
        SettingsError: it is not an http or https URL with a host.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"{url!r} is not a URL: {error}") from None
    # Not `parts.hostname`, which folds case: in process, hosts are server names.
    host = parts.netloc.rpartition("@")[2]
    host = host[1 : host.index("]")] if host.startswith("[") else host.partition(":")[0]
    if parts.scheme not in {"http", "https"} or not host:
        raise SettingsError(f"{url!r} is not an http or https URL")
    tls = parts.scheme == "https"
    origin = Origin(host, (443 if tls else 80) if port is None else port, tls)
    return Peer(name or url, origin, parts.path.rstrip("/"), carries_context)


class Directory(Protocol):
    """Knows the servers of a deployment."""

    def find(self, server: str) -> Peer:
        """Resolve the name of a server, or a base URL.

        Raises:
            SettingsError: there is no such server, or its address is not known.
        """
        ...


class Outgoing(NamedTuple):
    """One request as a transport sends it; `content-length` and `host` are the transport's."""

    # A tuple, since every call makes one.
    method: str
    target: str
    """Path and query, percent-encoded."""
    headers: Headers
    body: bytes
    repeatable: bool
    """It may be sent a second time when a reused connection turns out to be dead."""


class Incoming(Protocol):
    """A reply whose head has arrived."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    async def receive_some(self) -> bytes:
        """The next piece of the body; empty at its end.

        Raises:
            TransportError: the connection ended before the body was whole.
        """
        ...


class RefusedHere:
    """An `Incoming` that answers in place of the server, which was not asked or did not answer."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.headers: Headers = JSON_ONLY
        self._body = body

    @classmethod
    def by(cls, refusal: Refusal) -> RefusedHere:
        return cls(refusal.status, dump_json(refusal.body()))

    async def receive_some(self) -> bytes:
        await trio.lowlevel.checkpoint()
        body, self._body = self._body, b""
        return body


class Transport(Protocol):
    """Carries requests to origins."""

    def exchange(
        self, origin: Origin, outgoing: Outgoing, lane: Lane
    ) -> AbstractAsyncContextManager[Incoming]:
        """Send a request and enter once the head of its reply has come.

        Leaving the block before the body was read whole, or by cancellation, tells the peer that the
        caller is gone; a whole reply keeps the connection for others.

        Raises:
            TransportError: the peer cannot be reached, or ended the connection early.

        Cancelled: no connection and no place in the lane stays taken.
        """
        ...


class WholeReply(NamedTuple):
    """A reply that has come whole."""

    status: int
    headers: Headers
    body: bytes


@runtime_checkable
class WholeTransport(Protocol):
    """A transport for which a whole reply costs less than one that is read while it comes."""

    async def request(
        self, origin: Origin, outgoing: Outgoing, lane: Lane, deadline: float
    ) -> WholeReply | None:
        """Send a request and wait for its whole reply; None: not to this origin, use `exchange`.

        Raises:
            TransportError: see `Transport.exchange`.
            CallTimedOut: the deadline passed.

        Cancelled: the peer is told.
        """
        ...


@attrs.define
class Reply:
    """A whole reply, of whatever status; not to be changed.

    It is not frozen, because every call makes one, and a frozen one takes three times as long.
    """

    status: int
    headers: Headers
    body: bytes
    where: str = ""
    """Which call this answers, for messages: `POST counter/verify`."""

    def header(self, name: str) -> str | None:
        """The first value of a header, or None."""
        return first_header(self.headers, name)

    def json(self) -> object:
        """
        Raises:
            TransportError: the body is not JSON.
        """
        try:
            return parse_json(self.body, "reply")
        except InvalidRequest as error:
            raise TransportError(f"{self.where}: {error.detail}") from None

    def cookies(self) -> dict[str, str]:
        """The cookies that this reply sets."""
        return cookies_set_by(self.headers)

    def raise_for_status(self) -> Reply:
        """Itself, when the status is 2xx.

        Raises:
            PeerRefused: it is not; carries the peer's code and detail where it gave them.
        """
        if 200 <= self.status < 300:
            return self
        code, detail = self._error()
        raise PeerRefused(self.where, self.status, code, detail)

    def _error(self) -> tuple[str | None, str]:
        try:
            value = self.json()
        except TransportError:
            value = None
        error = value.get("error") if isinstance(value, dict) else None
        if isinstance(error, dict):
            code, detail = error.get("code"), error.get("detail", error.get("message"))
            return (
                code if isinstance(code, str) else None,
                str(detail)[:_ERROR_SHOWN_CHARACTERS_MAX],
            )
        return None, self.body[:_ERROR_SHOWN_CHARACTERS_MAX].decode("utf-8", "replace")


class _Chunks:
    # Not a generator: one that is left in the middle must be closed by whoever left it.
    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming

    def __aiter__(self) -> _Chunks:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._incoming.receive_some()
        if not chunk:
            raise StopAsyncIteration
        return chunk


class StreamedReply:
    """A reply that is read while it arrives; valid inside the block that opened it."""

    def __init__(self, incoming: Incoming, where: str) -> None:
        self._incoming = incoming
        self.where = where
        self.status = incoming.status
        self.headers = incoming.headers

    def header(self, name: str) -> str | None:
        """The first value of a header, or None."""
        return first_header(self.headers, name)

    def chunks(self) -> AsyncIterator[bytes]:
        """The body, piece by piece, as it comes. It may be iterated once.

        Raises:
            TransportError: while iterating: the connection ended before the body was whole.
        """
        return _Chunks(self._incoming)

    async def read(self, bytes_max: int) -> Reply:
        """The rest of the body at once.

        Raises:
            TransportError: it is over `bytes_max`, or the connection ended early.
        """
        parts: list[bytes] = []
        size = 0
        while chunk := await self._incoming.receive_some():
            size += len(chunk)
            if size > bytes_max:
                raise TransportError(f"{self.where}: reply over the limit of {bytes_max} bytes")
            parts.append(chunk)
        return Reply(self.status, self.headers, b"".join(parts), self.where)


class ServerClient:
    """Calls servers by name. Owns nothing: whoever opened the transport closes it."""

    def __init__(
        self, directory: Directory, transport: Transport, settings: ClientSettings | None = None
    ) -> None:
        self._directory = directory
        self._transport = transport
        self._whole = transport if isinstance(transport, WholeTransport) else None
        self._settings = settings or ClientSettings()

    def url_of(self, server: str) -> str:
        """The base URL of a server, to hand to somebody else.

        Raises:
            SettingsError: see `Directory.find`.
        """
        return self._directory.find(server).url

    async def request(
        self,
        server: str,
        method: str,
        path: str,
        *,
        json: object = None,
        body: bytes | None = None,
        headers: HeadersLike = (),
        cookies: Mapping[str, str] | None = None,
        context: RolloutContext | None | _Current = CURRENT,
        control: bool = False,
        deadline: float | None = None,
        idempotency_key: str | None = None,
    ) -> Reply:
        """Call a server and read its whole reply, whatever its status.

        Args:
            server: a name of the deployment, or a base URL.
            path: with its query, starting with a slash; put behind the base URL's own path.
            json: sent as the JSON body; None sends `body`, or no body.
            context: the episode this call is for. Its prefix is put before the path when `server` is
                a resources server or `path` is a model route (ID-5); its epoch goes along to every
                server (HARD-11). None: on nobody's behalf.
            control: use the connections reserved for control calls.
            deadline: absolute, on the clock of `trio.current_time()`. None: that of the settings.
            idempotency_key: sent as a header; it makes the call repeatable, see `Outgoing.repeatable`.

        Raises:
            TransportError: no whole reply came (`CallTimedOut`: not before the deadline).
            SettingsError: the server is not known.

        Cancelled: the peer is told, its handler is cancelled.
        """
        peer = self._directory.find(server)
        where = f"{method} {peer.name}{path}"
        outgoing = _outgoing(
            peer, method, path, json, body, headers, cookies, context, idempotency_key
        )
        lane = Lane.CONTROL if control else Lane.DATA
        deadline = self._deadline(deadline, control)
        bytes_max = self._settings.reply_bytes_max
        try:
            if self._whole is not None:
                whole = await self._whole.request(peer.origin, outgoing, lane, deadline)
                if whole is not None:
                    status, received, content = whole
                    if len(content) > bytes_max:
                        raise TransportError(f"reply over the limit of {bytes_max} bytes")
                    return Reply(status, received, content, where)
            with trio.CancelScope(deadline=deadline):
                async with self._transport.exchange(peer.origin, outgoing, lane) as incoming:
                    return await StreamedReply(incoming, where).read(bytes_max)
        except TransportError as error:
            raise _saying(where, error) from error
        raise _timed_out(where)

    @asynccontextmanager
    async def stream(
        self,
        server: str,
        method: str,
        path: str,
        *,
        json: object = None,
        body: bytes | None = None,
        headers: HeadersLike = (),
        cookies: Mapping[str, str] | None = None,
        context: RolloutContext | None | _Current = CURRENT,
        control: bool = False,
        deadline: float | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncIterator[StreamedReply]:
        """As `request`, but entered with the head of the reply; the deadline covers the whole block."""
        peer = self._directory.find(server)
        where = f"{method} {peer.name}{path}"
        outgoing = _outgoing(
            peer, method, path, json, body, headers, cookies, context, idempotency_key
        )
        lane = Lane.CONTROL if control else Lane.DATA
        try:
            with trio.CancelScope(deadline=self._deadline(deadline, control)) as scope:
                async with self._transport.exchange(peer.origin, outgoing, lane) as incoming:
                    yield StreamedReply(incoming, where)
        except TransportError as error:
            raise _saying(where, error) from error
        if scope.cancelled_caught:
            raise _timed_out(where)

    def _deadline(self, deadline: float | None, control: bool) -> float:
        if deadline is not None:
            return deadline
        settings = self._settings
        allowed_s = settings.control_timeout_s if control else settings.data_timeout_s
        return trio.current_time() + allowed_s


def _saying(where: str, error: TransportError) -> TransportError:
    """The error as one of this call; one that says so already, as it is."""
    if str(error).startswith(where):
        return error
    return type(error)(f"{where}: {error}")


def _timed_out(where: str) -> CallTimedOut:
    return CallTimedOut(f"{where}: {NO_REPLY}")


def _outgoing(
    peer: Peer,
    method: str,
    path: str,
    json: object,
    body: bytes | None,
    headers: HeadersLike,
    cookies: Mapping[str, str] | None,
    context: RolloutContext | None | _Current,
    idempotency_key: str | None,
) -> Outgoing:
    behalf = current_context() if context is CURRENT else context
    epoch = None if behalf is None else behalf.epoch
    return Outgoing(
        method=method,
        target=_target(peer, path, behalf),
        headers=_headers(headers, cookies, json is not None, idempotency_key, epoch),
        body=dump_json(json) if json is not None else body or b"",
        repeatable=idempotency_key is not None or method in IDEMPOTENT_METHODS,
    )


def _target(peer: Peer, path: str, context: RolloutContext | None) -> str:
    target = peer.base_path + path
    carries = peer.carries_context or path.partition("?")[0] in MODEL_ROUTES
    if carries and context is not None and not target.startswith(ROLLOUT_PREFIX):
        target = context.path(target)
    return target if _PLAIN_TARGET.fullmatch(target) else quote(target, safe=_TARGET_SAFE)


def _headers(
    headers: HeadersLike,
    cookies: Mapping[str, str] | None,
    is_json: bool,
    idempotency_key: str | None,
    epoch: str | None,
) -> Headers:
    if is_json and epoch is None and not headers and not cookies and idempotency_key is None:
        return JSON_ONLY
    made = list(as_headers(headers)) if headers else []
    if cookies:
        made.append(cookie_header(cookies))
    if is_json:
        made += JSON_ONLY
    if idempotency_key is not None:
        made.append((b"idempotency-key", idempotency_key.encode("ascii")))
    if epoch is not None:
        made.append((EPOCH_HEADER.encode("ascii"), epoch.encode("ascii")))
    return tuple(made)
