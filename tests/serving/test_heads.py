"""What our servers take as the head of a request, and give as that of an answer: over HTTP and over
frames the same, since a caller does not know what carries its call (SRV-5).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import h11
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.background import open_background
from gymtrio.errors import TransportError
from gymtrio.serving.app import open_asgi
from gymtrio.serving.client import Lane, Outgoing, Reply, ServerClient, peer_of_url
from gymtrio.serving.frames_head import decode_request, encode_request
from gymtrio.serving.frames_server import FramesServer
from gymtrio.serving.frames_transport import open_frames
from gymtrio.serving.http import BadRequest, Headers, Request, Response, json_response
from gymtrio.serving.http1 import HEAD_BYTES_MAX, HEADERS_MAX
from gymtrio.serving.pool import open_pool
from gymtrio.wire.bounds import ChannelLimits
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.channel import open_channel
from gymtrio.wire.codec import PlainItem, pack_list
from gymtrio.wire.errors import ChannelRefused
from gymtrio.wire.listening import serve_channels
from gymtrio.wire.messages import Hello
from gymtrio.wire.unix import connect_unix, open_unix_listener, runtime_directory
from tests.helpers.serving import TRANSPORTS, Transported, make_app

ME: Final = Hello(role="server", name="peer", instance="1")
OWN: Final = ["sockets", "frames"]
"""Under a foreign server its own limits count, and within a process nobody is guarded from himself."""

BEYOND_FRAMES: Final = ChannelLimits().head_bytes_max


async def echo(request: Request) -> Response:
    return json_response({"path": request.path})


async def ask(
    client: ServerClient, method: str, path: str, headers: Any, *, streamed: bool
) -> Reply:
    if not streamed:
        return await client.request("peer", method, path, headers=headers)
    async with client.stream("peer", method, path, headers=headers) as reply:
        return await reply.read(10_000)


@pytest.fixture(params=OWN)
def open_client(request: pytest.FixtureRequest) -> Transported:
    return TRANSPORTS[request.param]


@pytest.mark.parametrize(
    ("headers", "query"),
    [
        ([(f"x-{number}", "y") for number in range(HEADERS_MAX + 1)], ""),
        ([("x", "y" * HEAD_BYTES_MAX)], ""),
        ([("x", "y" * BEYOND_FRAMES)], ""),
        ([], "y" * HEAD_BYTES_MAX),
        ([], "y" * BEYOND_FRAMES),
    ],
    ids=["headers", "a header", "a huge header", "a target", "a huge target"],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_head_over_the_limits_is_refused_alike(
    open_client: Transported, headers: Any, query: str, streamed: bool
) -> None:
    """SRV-5: 431, the limit named; the next call is none the wiser."""
    async with open_client(make_app({}, fallback=echo)) as client:
        whole = await ask(client, "POST", f"/x?{query}", headers, streamed=streamed)
        error: Any = whole.json()
        assert (whole.status, error["error"]["code"]) == (431, "headers_too_large")
        assert str(HEADERS_MAX if len(headers) > 1 else HEAD_BYTES_MAX) in error["error"]["detail"]
        assert (await client.request("peer", "POST", "/x")).status == 200


async def test_a_head_within_the_limits_is_served_alike(open_client: Transported) -> None:
    headers = [(f"x-{number}", "y" * 200) for number in range(HEADERS_MAX - 6)]
    async with open_client(make_app({}, fallback=echo)) as client:
        assert (await client.request("peer", "POST", "/x", headers=headers)).status == 200
        assert (await client.request("peer", "POST", "/x?" + "y" * 60_000)).status == 200


async def test_two_authorizations_are_refused_alike(open_client: Transported) -> None:
    """I35: two readers could take different ones."""
    async with open_client(make_app({}, fallback=echo)) as client:
        once = [("authorization", "authorization")]
        assert (await client.request("peer", "POST", "/x", headers=once)).status == 200
        reply = await client.request("peer", "POST", "/x", headers=once * 2)
        assert reply.json() == {"error": {"code": "bad_request", "detail": "two authorizations"}}
        assert reply.status == 400


BAD_REQUESTS: Final[dict[str, tuple[str, tuple[tuple[bytes, bytes], ...]]]] = {
    "a line end in a value": ("POST", ((b"x", b"a\r\nauthorization: b"),)),
    "a newline in a value": ("POST", ((b"x", b"a\nb"),)),
    "a zero in a value": ("POST", ((b"x", b"a\0b"),)),
    "a space in a name": ("POST", ((b"x y", b"a"),)),
    "no name": ("POST", ((b"", b"a"),)),
    "the length of a body": ("POST", ((b"content-length", b"5"),)),
    "two hosts": ("POST", ((b"host", b"a"), (b"host", b"b"))),
    "a space in the method": ("PO ST", ()),
    "no method": ("", ()),
}


@pytest.mark.parametrize("what", BAD_REQUESTS)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_whose_head_cannot_be_is_refused_alike(
    open_client: Transported, what: str, streamed: bool
) -> None:
    """A caller who passes on what somebody gave him gets an answer; nothing of it arrives."""
    method, headers = BAD_REQUESTS[what]
    reached: list[str] = []

    async def note(request: Request) -> Response:
        reached.append(request.path)
        return json_response({})

    async with open_client(make_app({}, fallback=note)) as client:
        whole = await ask(client, method, "/bad", headers, streamed=streamed)
        error: Any = whole.json()
        assert (whole.status, error["error"]["code"]) == (400, "bad_request")
        assert error["error"]["detail"]
        assert (await client.request("peer", "POST", "/x")).status == 200
        assert reached == ["/x"]


BAD_ANSWERS: Final[dict[str, tuple[int, Headers]]] = {
    "a line end in a value": (200, ((b"x", b"a\r\nset-cookie: a=b"),)),
    "a newline in a value": (200, ((b"x", b"a\nb"),)),
    "a zero in a value": (200, ((b"x", b"a\0b"),)),
    "a line end in a name": (200, ((b"x\r\ny", b"a"),)),
    "a space in a name": (200, ((b"x y", b"a"),)),
    "no name": (200, ((b"", b"a"),)),
    "no status": (99, ()),
    "another status": (1000, ()),
}


@pytest.mark.parametrize("what", BAD_ANSWERS)
async def test_an_answer_whose_head_cannot_be_is_a_fault_alike(
    open_client: Transported, what: str
) -> None:
    """SRV-1, HARD-9: the application's own fault; who answered is told that nothing was delivered."""
    told: list[bool] = []
    status, headers = BAD_ANSWERS[what]

    async def answer(request: Request) -> Response:
        return Response(status, b"{}", headers, on_done=told.append)

    async with open_client(make_app({("POST", "/bad"): answer}, fallback=echo)) as client:
        reply = await client.request("peer", "POST", "/bad")
        error: Any = reply.json()
        assert (reply.status, error["error"]["code"]) == (500, "internal_error")
        assert told == [False]
        assert (await client.request("peer", "POST", "/x")).status == 200


async def test_an_answer_may_have_many_headers_alike(open_client: Transported) -> None:
    async def answer(request: Request) -> Response:
        return Response(200, b"{}", [(f"x-{number}", "y") for number in range(1000)])

    async with open_client(make_app({("GET", "/x"): answer})) as client:
        assert (await client.request("peer", "GET", "/x")).header("x-999") == "y"


def head(
    method: PlainItem = "GET", target: PlainItem = "/x", headers: PlainItem = ()
) -> tuple[PlainItem, PlainItem, PlainItem]:
    return method, target, headers


NO_HEADS: Final[dict[str, tuple[PlainItem, ...]]] = {
    "a space in the method": head("GE T"),
    "a line end in the method": head("GET\r\n"),
    "no method": head(""),
    "a method that is no text": head(b"GET"),
    "a space in the target": head(target="/x y"),
    "a line end in the target": head(target="/x\r\nhost: b"),
    "a newline in the target": head(target="/x\n"),
    "a zero in the target": head(target="/x\0"),
    "a delete in the target": head(target="/x\x7f"),
    "a target that is not ASCII": head(target="/\xe4"),
    "no target": head(target=""),
    "a line end in a name": head(headers=[[b"x\r\n", b"y"]]),
    "a newline behind a name": head(headers=[[b"cookie\n", b"y"]]),
    "a space in a name": head(headers=[[b"x y", b"y"]]),
    "a colon in a name": head(headers=[[b"x:", b"y"]]),
    "a name in upper case": head(headers=[[b"Authorization", b"y"]]),
    "no name": head(headers=[[b"", b"y"]]),
    "a line end in a value": head(headers=[[b"x", b"y\r\nauthorization: z"]]),
    "a newline behind a value": head(headers=[[b"x", b"y\n"]]),
    "a zero in a value": head(headers=[[b"cookie", b"y\0"]]),
    "the length of a body": head(headers=[[b"content-length", b"5"]]),
    "an encoding of a body": head(headers=[[b"transfer-encoding", b"chunked"]]),
    "a connection's end": head(headers=[[b"connection", b"close"]]),
    "a value that is text": head(headers=[[b"x", "y"]]),
    "a header that is a map": head(headers=[{b"x": b"y", b"z": b"w"}]),  # type: ignore[list-item]
    "headers that are a map": head(headers={b"x": b"y"}),  # type: ignore[arg-type]
    "two hosts": head(headers=[[b"host", b"a"], [b"host", b"a"]]),
    "two items": ("GET", "/x"),
}


@asynccontextmanager
async def over_socket_file(app: Any) -> AsyncIterator[Path]:
    with runtime_directory() as directory:
        path = directory / "peer"
        async with (
            open_asgi(app) as asgi,
            open_unix_listener(path) as listener,
            open_background() as nursery,
        ):
            await nursery.start(FramesServer(asgi, ME).serve, listener)
            yield path


@pytest.mark.parametrize("what", NO_HEADS)
async def test_what_no_reader_of_http_would_take_is_refused_over_frames(what: str) -> None:
    """SRV-1: no line end, zero or space of a peer gets into the scope of an application."""
    reached: list[str] = []

    async def note(request: Request) -> Response:
        reached.append(request.path)
        return json_response({})

    async with (
        over_socket_file(make_app({}, fallback=note)) as path,
        open_channel(await connect_unix(path), role="opener", me=ME) as channel,
    ):
        with pytest.raises(ChannelRefused) as caught:
            await channel.request("http", b"", head=pack_list(NO_HEADS[what]))
        assert (caught.value.status, caught.value.code) == (400, "bad_request")
        assert reached == []
        good = ((b"x", b"tab\tand \xff"), (b"x", b""), (b"cookie", b"a=b"))
        await channel.request("http", b"", head=encode_request("get", "/ok?%0d%0a", good))
        assert reached == ["/ok"]


text = st.text(st.characters(max_codepoint=0x180), max_size=4)
binary = st.binary(max_size=4)
a_header = st.tuples(st.sampled_from([b"x", b"cookie"]) | binary, binary)


@given(text | st.just("GET"), text | st.just("/x"), st.lists(a_header, max_size=3))
def test_what_is_taken_over_frames_could_be_read_over_http(
    method: str, target: str, headers: list[tuple[bytes, bytes]]
) -> None:
    """SRV-1: and the other way round, but for names in upper case."""
    try:
        taken = decode_request(pack_list((method, target, headers)))
    except BadRequest:
        taken = None
    try:
        # A reader of HTTP takes the spaces off a value before it looks at it.
        stripped = [(name, value.strip(b" \t")) for name, value in headers]
        h11.Request(method=method, target=target, headers=[(b"host", b"a"), *stripped])
        readable = all(name == name.lower() for name, _ in headers)
    except (h11.LocalProtocolError, UnicodeEncodeError):
        readable = False
    assert (taken is not None) == readable
    assert taken in (None, (method, target, tuple(headers)))


NO_ANSWERS: Final[dict[str, PlainItem]] = {
    "a line end in a value": (200, [[b"set-cookie", b"a=b\r\nx: y"]]),
    "a newline behind a value": (200, [[b"x", b"y\n"]]),
    "a zero in a value": (200, [[b"x", b"y\0"]]),
    "a line end in a name": (200, [[b"x\r\ny", b"z"]]),
    "a name in upper case": (200, [[b"Set-Cookie", b"a=b"]]),
    "a name that is text": (200, [["x", b"y"]]),
    "an interim status": (100, ()),
    "more than HTTP takes": (200, [[b"x", b"y" * HEAD_BYTES_MAX]]),
}


@pytest.mark.parametrize("what", NO_ANSWERS)
async def test_what_no_reader_of_http_would_take_is_no_answer_over_frames(what: str) -> None:
    """SRV-1: nor does it get from a server into the headers of a caller, who may pass them on."""

    async def handler(call: IncomingCall) -> None:
        call.reply(pack_list(NO_ANSWERS[what]), b"{}")  # type: ignore[arg-type]

    async def serve(stream: trio.SocketStream) -> None:
        async with open_channel(stream, role="acceptor", me=ME, handler=handler) as channel:
            await channel.closed.wait()

    origin = peer_of_url("http://peer").origin
    asked = Outgoing("GET", "/x", (), b"", repeatable=True)
    with runtime_directory() as directory:
        path = directory / "peer"
        async with (
            open_unix_listener(path) as listener,
            open_background() as nursery,
            open_pool() as pool,
            open_frames({origin: [str(path)]}, pool, me=ME) as frames,
        ):
            await nursery.start(serve_channels, listener, serve)
            with pytest.raises(TransportError, match="not a reply"):
                await frames.request(origin, asked, Lane.DATA, trio.current_time() + 10)
            with pytest.raises(TransportError, match="not a reply"):
                async with frames.exchange(origin, asked, Lane.DATA):
                    pytest.fail("a reply")
