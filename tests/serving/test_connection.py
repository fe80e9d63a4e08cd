"""The connection owner against raw peers: malformed, slow, gone, and more than one request at once."""

from __future__ import annotations

import json
import random

import pytest
import trio
import trio.lowlevel

from gymtrio.context import Receive, Scope, Send
from gymtrio.limits import DATA_BODY_BYTES_MAX
from gymtrio.serving.app import open_asgi
from gymtrio.serving.connection import READ_AHEAD_BYTES_MAX, Connection, HttpLimits, Shared
from gymtrio.serving.deployment import Bind
from gymtrio.serving.http import Request, Response, json_response
from tests.helpers.serving import make_app, serve_on_sockets
from tests.serving.raw_peers import everything, one_reply

GET = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"

MALFORMED = [
    b"\x00\x01\x02\x03" * 10 + b"\r\n\r\n",
    b"\xff" * 200,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\nhost: a\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 9,
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n",
    b"GET /\xc3\xa4 HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /%ff%fe HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET ?x HTTP/1.1\r\nhost: a\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n",
    b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n" + b"tunnelled bytes",
    b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
    b"http2-settings: \xff!!\r\n\r\n",
    b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: \xe9\r\nsec-websocket-version: 13\r\n\r\n\x81\x83\x00\x00\x00\x00\xff\xff",
    b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
    GET + b"\xff\xfe garbage that was pipelined \r\n\r\n",
    GET + GET + GET,
    GET + b"\r\n\r\n",
    b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nabcdefgh garbage",
    b"POST /x HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\nabc",
]


async def x(request: Request) -> Response:
    return json_response({"bytes": len(request.body)})


class Parked:
    def __init__(self) -> None:
        self.entered = trio.Event()
        self.release = trio.Event()
        self.cancelled = trio.Event()

    async def __call__(self, request: Request) -> Response:
        self.entered.set()
        try:
            await self.release.wait()
        except trio.Cancelled:
            self.cancelled.set()
            raise
        return json_response({"released": True})


async def connect(bind: Bind) -> trio.SocketStream:
    return await trio.open_tcp_stream(bind.host, bind.port)


async def hurl(bind: Bind, data: bytes) -> bytes:
    stream = await connect(bind)
    async with stream:
        try:
            await stream.send_all(data)
            await stream.send_eof()
        except trio.BrokenResourceError:
            pass
        with trio.fail_after(30):
            return await everything(stream)


async def test_a_malformed_peer_ends_its_own_connection_only() -> None:
    """SRV-1: any bytes, any moment; every other request goes on."""
    parked = Parked()
    app = make_app({("GET", "/park"): parked, ("GET", "/x"): x, ("POST", "/x"): x})
    rnd = random.Random(1)
    async with serve_on_sockets(app) as bind:
        async with await connect(bind) as good:
            await good.send_all(b"GET /park HTTP/1.1\r\nhost: a\r\n\r\n")
            await parked.entered.wait()
            for data in MALFORMED:
                await hurl(bind, data)
            for _ in range(300):
                mutant = bytearray(rnd.choice(MALFORMED)[:4000])
                for _ in range(rnd.randrange(1, 6)):
                    where = rnd.randrange(len(mutant))
                    mutant[where : where + rnd.randrange(3)] = rnd.randbytes(rnd.randrange(3))
                await hurl(bind, bytes(mutant) + rnd.choice(MALFORMED)[: rnd.randrange(400)])
            parked.release.set()
            assert (await one_reply(good))[2] == b'{"released":true}'
            await good.send_all(GET)
            assert (await one_reply(good))[2] == b'{"bytes":0}'


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\xff" * 200 + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 200_000, 431),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n", 501),
        (b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (
            b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
            % (DATA_BODY_BYTES_MAX + 1),
            413,
        ),
    ],
)
async def test_errors_of_the_protocol_are_json(data: bytes, status: int) -> None:
    """SRV-5: what is over a limit is answered with it; errors are JSON, never HTML."""
    async with serve_on_sockets(make_app({("POST", "/x"): x})) as bind:
        async with await connect(bind) as stream:
            await stream.send_all(data)
            with trio.fail_after(30):
                got, headers, body = await one_reply(stream)
        assert got == status
        assert headers["content-type"] == "application/json"
        assert set(json.loads(body)["error"]) == {"code", "detail"}


async def test_a_chunked_body_over_the_limit_is_refused_while_it_is_sent() -> None:
    """SRV-5: a body without a declared length is bounded as well."""
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    async with serve_on_sockets(make_app({("POST", "/x"): x})) as bind:
        async with await connect(bind) as stream:
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    head = b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
                    try:
                        await stream.send_all(head)
                        for _ in range(DATA_BODY_BYTES_MAX // 0x100000 + 8):
                            await stream.send_all(chunk)
                    except trio.BrokenResourceError:
                        pass

                nursery.start_soon(send)
                status, _, body = await one_reply(stream)
                assert status == 413
                assert json.loads(body)["error"]["code"] == "too_large"
                nursery.cancel_scope.cancel()


@pytest.mark.parametrize("after", [b"", b"\r\n", GET, b"\xff\xff garbage"])
@pytest.mark.parametrize("half", [True, False])
async def test_leaving_is_noticed_whatever_was_sent_before(after: bytes, half: bool) -> None:
    """SRV-3: also behind pipelined bytes, of which a stray line end is the commonest."""
    parked = Parked()
    async with serve_on_sockets(make_app({("POST", "/park"): parked})) as bind:
        stream = await connect(bind)
        head = b"POST /park HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nok"
        await stream.send_all(head + after)
        await parked.entered.wait()
        if half:
            await stream.send_eof()
        else:
            await stream.aclose()
        with trio.fail_after(30):
            await parked.cancelled.wait()
        await stream.aclose()


async def test_leaving_within_a_body_is_no_fault_of_the_framework(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SRV-1: it reads in a nursery of its own, and what it raises is a group."""
    was_gone = trio.Event()

    async def framework(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            return
        try:
            async with trio.open_nursery():
                while True:
                    await receive()
        finally:
            was_gone.set()

    async with serve_on_sockets(framework) as bind, await connect(bind) as stream:
        await stream.send_all(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nabc")
        await stream.send_eof()
        with trio.fail_after(30):
            await was_gone.wait()
            await everything(stream)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serve_on_sockets(make_app({("POST", "/x"): x})) as bind:
        async with await connect(bind) as stream:
            for size in (1, 2, 3):
                head = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size
                await stream.send_all(head + b"y" * size)
            received = b""
            while received.count(b"bytes") < 3:
                received += await stream.receive_some()
        assert [part[:1] for part in received.split(b'{"bytes":')[1:]] == [b"1", b"2", b"3"]


async def test_one_who_pipelines_without_end_is_cut_off() -> None:
    """SRV-5: queues are bounded."""
    parked = Parked()
    async with serve_on_sockets(make_app({("GET", "/park"): parked})) as bind:
        stream = await connect(bind)
        await stream.send_all(b"GET /park HTTP/1.1\r\nhost: a\r\n\r\n")
        await parked.entered.wait()
        with trio.fail_after(30):
            with pytest.raises(trio.BrokenResourceError):
                while True:
                    await stream.send_all(GET * 1000)
            await parked.cancelled.wait()
        await stream.aclose()


class Counting(trio.abc.HalfCloseableStream):
    """Passes everything on and keeps what was sent."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.sends: list[bytes] = []

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.sends.append(bytes(data))
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self.stream.receive_some(max_bytes))

    async def send_eof(self) -> None:
        await self.stream.send_eof()

    async def aclose(self) -> None:
        await self.stream.aclose()


async def test_head_and_body_leave_in_one_send() -> None:
    ours, theirs = trio.socket.socketpair()
    stream = Counting(trio.SocketStream(theirs))
    client = trio.SocketStream(ours)
    limits = HttpLimits()
    async with open_asgi(make_app({("GET", "/x"): x})) as app:
        connection = Connection(app, stream, Shared(limits))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run)
            for _ in range(3):
                await client.send_all(GET)
                assert (await one_reply(client))[2] == b'{"bytes":0}'
            await client.aclose()
    assert len(stream.sends) == 3


class Unhurried(Counting):
    """Returns from sending only when the peer has had the answer and gone on."""

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self.received_bytes = 0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await super().send_all(data)
        while len(self.sends) == 1 and self.received_bytes < 2 * READ_AHEAD_BYTES_MAX:
            await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data = await super().receive_some(max_bytes)
        self.received_bytes += len(data)
        return data


async def test_a_large_request_right_behind_an_answer_is_no_pipelining() -> None:
    """SRV-1, SRV-5: the peer has the answer before its sender goes on."""
    ours, theirs = trio.socket.socketpair()
    stream = trio.SocketStream(ours)
    body = b"x" * (3 * READ_AHEAD_BYTES_MAX)
    head = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with open_asgi(make_app({("GET", "/x"): x, ("POST", "/x"): x})) as app:
        connection = Connection(app, Unhurried(stream), Shared(HttpLimits()))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run)
            with trio.fail_after(30):
                async with trio.SocketStream(theirs) as peer:
                    await peer.send_all(GET)
                    assert (await one_reply(peer))[0] == 200
                    await peer.send_all(head + body)
                    status, _, reply = await one_reply(peer)
    assert (status, json.loads(reply)) == (200, {"bytes": len(body)})


async def test_idle_and_slow_peers_are_dropped_and_parked_requests_are_not() -> None:
    """SRV-5: the time of a head is bounded; a parked request is not idle."""
    parked = Parked()
    limits = HttpLimits(keep_alive_s=0.5)
    async with serve_on_sockets(
        make_app({("GET", "/park"): parked, ("GET", "/x"): x}), limits
    ) as bind:
        async with await connect(bind) as good:
            await good.send_all(b"GET /park HTTP/1.1\r\nhost: a\r\n\r\n")
            await parked.entered.wait()
            async with await connect(bind) as slow:
                await slow.send_all(b"GET / HT")
                with trio.fail_after(30):
                    await everything(slow)
            async with await connect(bind) as idle:
                await idle.send_all(GET)
                await one_reply(idle)
                with trio.fail_after(30):
                    assert await everything(idle) == b""
            parked.release.set()
            assert (await one_reply(good))[0] == 200


async def test_a_peer_that_does_not_read_is_given_up() -> None:
    """SRV-5: sends have deadlines, so that nobody holds a server by not reading."""
    told: list[bool] = []

    async def big(request: Request) -> Response:
        return Response(200, b"x" * 50_000_000, on_done=told.append)

    limits = HttpLimits(send_timeout_s=0.2, grace_s=60)
    with trio.fail_after(50):
        async with serve_on_sockets(make_app({("GET", "/x"): big}), limits) as bind:
            stream = await connect(bind)
            await stream.send_all(GET)
            await stream.receive_some(1)
    # Stopping had nobody to wait for, although this peer still holds its end open.
    await stream.aclose()
    assert told == [False]


async def test_stopping_closes_idle_connections_and_lets_requests_end() -> None:
    """SRV-2: requests that run are answered; the connection says that it closes."""
    parked = Parked()
    app = make_app({("GET", "/park"): parked, ("GET", "/x"): x})
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            async with serve_on_sockets(app) as bind:
                idle = await connect(bind)
                await idle.send_all(GET)
                await one_reply(idle)
                busy = await connect(bind)
                await busy.send_all(b"GET /park HTTP/1.1\r\nhost: a\r\n\r\n")
                await parked.entered.wait()

                async def watch() -> None:
                    assert await everything(idle) == b""
                    with pytest.raises(OSError):
                        await connect(bind)
                    parked.release.set()
                    status, headers, _ = await one_reply(busy)
                    assert (status, headers["connection"]) == (200, "close")
                    assert await everything(busy) == b""

                nursery.start_soon(watch)
    await idle.aclose()
    await busy.aclose()


async def test_a_request_that_does_not_end_is_cut_after_the_grace() -> None:
    """SRV-2: hard deadline last."""
    parked = Parked()
    limits = HttpLimits(grace_s=0.1)
    with trio.fail_after(60):
        async with serve_on_sockets(make_app({("GET", "/park"): parked}), limits) as bind:
            stream = await connect(bind)
            await stream.send_all(b"GET /park HTTP/1.1\r\nhost: a\r\n\r\n")
            await parked.entered.wait()
    assert parked.cancelled.is_set()
    await stream.aclose()


async def test_no_header_tells_what_serves() -> None:
    async with serve_on_sockets(make_app({("GET", "/x"): x})) as bind:
        async with await connect(bind) as stream:
            await stream.send_all(GET)
            _, headers, _ = await one_reply(stream)
    assert "server" not in headers
    assert "date" in headers
