"""The connection pool: places, reuse, retries, over streams that a test holds both ends of."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair

from gymtrio.errors import SettingsError, TransportError
from gymtrio.serving.client import (
    CallTimedOut,
    ClientSettings,
    Lane,
    ServerClient,
)
from gymtrio.serving.deployment import Deployment, DeploymentDirectory
from gymtrio.serving.http import Request, Response, json_response
from gymtrio.serving.pool import Pool, open_pool
from gymtrio.settings import load_settings
from tests.helpers.serving import client_of, make_app, serve_on_sockets

URL = "http://backend:8000"

Peer = Callable[[trio.abc.Stream, int], Awaitable[None]]


class Backend:
    """A connector whose connections are served by a function of the test."""

    def __init__(self, nursery: trio.Nursery, serve: Peer) -> None:
        self._nursery = nursery
        self._serve = serve
        self.connections = 0
        self.refuse = False

    async def connect(self, host: str, port: int) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if self.refuse:
            raise ConnectionRefusedError("refused")
        ours, theirs = memory_stream_pair()
        self.connections += 1
        self._nursery.start_soon(self._serve, theirs, self.connections)
        return ours


async def read_request(stream: trio.abc.ReceiveStream) -> bytes | None:
    """Read one request whose body, if any, comes with its head."""
    received = b""
    while b"\r\n\r\n" not in received:
        data = await stream.receive_some()
        if not data:
            return None
        received += data
    return received


def reply(body: bytes = b"ok", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%s\r\n%s" % (len(body), more, body)


async def answer_all(stream: trio.abc.Stream, number: int) -> None:
    while await read_request(stream) is not None:
        await stream.send_all(reply(b"connection %d" % number))


@asynccontextmanager
async def open_backend(
    serve: Peer, settings: ClientSettings | None = None
) -> AsyncIterator[tuple[ServerClient, Backend, Pool]]:
    async with trio.open_nursery() as nursery:
        backend = Backend(nursery, serve)
        async with open_pool(settings, backend) as pool:
            directory = DeploymentDirectory(Deployment())
            yield ServerClient(directory, pool, settings), backend, pool
        nursery.cancel_scope.cancel()


async def test_a_connection_is_used_again() -> None:
    async with open_backend(answer_all) as (client, backend, pool):
        for _ in range(5):
            assert (await client.request(URL, "GET", "/")).body == b"connection 1"
        assert backend.connections == 1
        assert pool.statistics().idle == 1
        assert pool.statistics().active == 0


async def test_a_reply_that_was_not_read_whole_ends_its_connection() -> None:
    async with open_backend(answer_all) as (client, backend, pool):
        async with client.stream(URL, "GET", "/"):
            assert pool.statistics().active == 1
            assert pool.statistics().idle == 0
        # Short replies come with their head and are whole whether or not anybody looked.
        assert (await client.request(URL, "GET", "/")).status == 200

        async def endless(stream: trio.abc.Stream, number: int) -> None:
            await read_request(stream)
            await stream.send_all(reply(b"x" * 10)[:-5])
            await trio.sleep_forever()

        backend._serve = endless
        await pool.close_idle()
        async with client.stream(URL, "GET", "/") as streamed:
            assert await anext(streamed.chunks()) == b"x" * 5
        assert pool.statistics().idle == 0


async def test_a_connection_that_the_server_will_close_is_not_kept() -> None:
    async def close_after(stream: trio.abc.Stream, number: int) -> None:
        await read_request(stream)
        await stream.send_all(reply(more=b"connection: close\r\n"))

    async with open_backend(close_after) as (client, backend, pool):
        for _ in range(3):
            assert (await client.request(URL, "POST", "/")).body == b"ok"
        assert backend.connections == 3
        assert pool.statistics().idle == 0


async def once_per_connection(stream: trio.abc.Stream, number: int) -> None:
    """Answers once and closes at the second request, as a server whose keep-alive ran out does."""
    await read_request(stream)
    await stream.send_all(reply(b"connection %d" % number))
    await read_request(stream)
    await stream.aclose()


@pytest.mark.parametrize(
    ("method", "key", "again"),
    [("GET", None, True), ("POST", "k-1", True), ("POST", None, False)],
)
async def test_a_stale_connection_costs_one_retry_where_a_repeat_is_harmless(
    method: str, key: str | None, again: bool
) -> None:
    """COORD-6: a call that is safe to retry is retried, once, before any byte of a reply."""
    async with open_backend(once_per_connection) as (client, _, pool):
        await client.request(URL, "GET", "/")
        if again:
            second = await client.request(URL, method, "/", idempotency_key=key)
            assert second.body == b"connection 2"
        else:
            with pytest.raises(TransportError, match="closed the connection"):
                await client.request(URL, method, "/")
        assert pool.statistics().active == 0


async def test_a_retry_is_not_repeated() -> None:
    async def never(stream: trio.abc.Stream, number: int) -> None:
        await read_request(stream)
        if number == 1:
            await stream.send_all(reply())
            await read_request(stream)
        await stream.aclose()

    async with open_backend(never) as (client, backend, _):
        await client.request(URL, "GET", "/")
        with pytest.raises(TransportError, match="closed the connection"):
            await client.request(URL, "GET", "/")
        assert backend.connections == 2


async def test_nothing_is_sent_twice_once_a_reply_has_begun() -> None:
    async def half(stream: trio.abc.Stream, number: int) -> None:
        await read_request(stream)
        await stream.send_all(reply())
        await read_request(stream)
        await stream.send_all(b"HTTP/1.1 200")
        await stream.aclose()

    async with open_backend(half) as (client, backend, _):
        await client.request(URL, "GET", "/")
        with pytest.raises(TransportError):
            await client.request(URL, "GET", "/")
        assert backend.connections == 1


async def test_a_first_connection_that_dies_is_not_retried() -> None:
    async def die(stream: trio.abc.Stream, number: int) -> None:
        await read_request(stream)
        await stream.aclose()

    async with open_backend(die) as (client, backend, _):
        with pytest.raises(TransportError):
            await client.request(URL, "GET", "/")
        assert backend.connections == 1


@pytest.mark.parametrize(
    "junk",
    [
        b"\x00" * 100,
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort",
    ],
)
async def test_a_peer_that_speaks_no_http_is_a_transport_error(junk: bytes) -> None:
    async def serve(stream: trio.abc.Stream, number: int) -> None:
        await read_request(stream)
        try:
            await stream.send_all(junk)
        except trio.BrokenResourceError:
            pass
        await stream.aclose()

    async with open_backend(serve) as (client, _, pool):
        with pytest.raises(TransportError):
            await client.request(URL, "GET", "/")
        assert (pool.statistics().active, pool.statistics().idle) == (0, 0)


async def test_idle_connections_are_closed_in_time(autojump_clock: MockClock) -> None:
    settings = ClientSettings(idle_s_max=30)
    async with open_backend(answer_all, settings) as (client, backend, pool):
        await client.request(URL, "GET", "/")
        await trio.sleep(20)
        await client.request(URL, "GET", "/")
        assert backend.connections == 1
        await trio.sleep(29)
        assert pool.statistics().idle == 1
        await trio.sleep(2)
        assert pool.statistics().idle == 0
        await client.request(URL, "GET", "/")
        assert backend.connections == 2


async def test_a_place_is_waited_for_and_control_calls_have_their_own(
    autojump_clock: MockClock,
) -> None:
    """COORD-5: parked data calls never delay control calls."""
    release = trio.Event()

    async def park(stream: trio.abc.Stream, number: int) -> None:
        while (request := await read_request(stream)) is not None:
            if b"/run" in request:
                await release.wait()
            await stream.send_all(reply())

    settings = ClientSettings(data_connections_max=4, control_connections_max=2)
    async with open_backend(park, settings) as (client, _, pool):
        async with trio.open_nursery() as nursery:
            for _ in range(504):
                nursery.start_soon(client.request, URL, "POST", "/run")
            await trio.testing.wait_all_tasks_blocked()
            data = pool.statistics(Lane.DATA)
            assert (data.active, data.waiting) == (4, 500)
            began = trio.current_time()
            for path in ("/status", "/prepare", "/commit", "/resume"):
                await client.request(URL, "POST", path, control=True)
            assert trio.current_time() == began
            release.set()
        assert pool.statistics(Lane.DATA).waiting == 0


async def test_zero_is_unlimited_and_a_negative_limit_is_refused() -> None:
    """COORD-5: limits configurable, 0 unlimited, negative refused."""
    release = trio.Event()

    async def park(stream: trio.abc.Stream, number: int) -> None:
        await read_request(stream)
        await release.wait()
        await stream.send_all(reply())

    settings = ClientSettings(data_connections_max=0)
    async with open_backend(park, settings) as (client, _, pool):
        async with trio.open_nursery() as nursery:
            for _ in range(300):
                nursery.start_soon(client.request, URL, "POST", "/run")
            await trio.testing.wait_all_tasks_blocked()
            assert (pool.statistics().active, pool.statistics().waiting) == (300, 0)
            release.set()
    with pytest.raises(SettingsError, match="client: control_connections_max must not be negative"):
        load_settings(ClientSettings, {"control_connections_max": -1}, "client")


async def test_one_task_may_hold_two_exchanges() -> None:
    async with open_backend(answer_all) as (client, _, _):
        async with client.stream(URL, "GET", "/one"):
            assert (await client.request(URL, "GET", "/two")).body == b"connection 2"


async def test_every_call_has_a_deadline(autojump_clock: MockClock) -> None:
    """COORD-6: every call is deadline-bounded, also while it waits for a place or connects."""

    async def deaf(stream: trio.abc.Stream, number: int) -> None:
        await trio.sleep_forever()

    settings = ClientSettings(data_connections_max=1, data_timeout_s=100, control_timeout_s=10)
    async with open_backend(deaf, settings) as (client, _, pool):
        began = trio.current_time()
        with pytest.raises(CallTimedOut, match="GET http://backend:8000/x: no reply"):
            await client.request(URL, "GET", "/x", control=True)
        assert trio.current_time() - began == 10
        async with trio.open_nursery() as nursery:

            async def expect_timeout() -> None:
                with pytest.raises(CallTimedOut):
                    await client.request(URL, "GET", "/x")

            nursery.start_soon(expect_timeout)
            nursery.start_soon(expect_timeout)
        assert trio.current_time() - began == 110
        with pytest.raises(CallTimedOut):
            await client.request(URL, "GET", "/x", deadline=trio.current_time() + 1)
        assert (pool.statistics().active, pool.statistics().waiting) == (0, 0)


async def test_a_connect_that_hangs_is_given_up(autojump_clock: MockClock) -> None:
    class Black:
        async def connect(self, host: str, port: int) -> trio.abc.Stream:
            await trio.sleep_forever()
            raise AssertionError

    async with open_pool(ClientSettings(connect_timeout_s=3), Black()) as pool:
        client = ServerClient(DeploymentDirectory(Deployment()), pool)
        with pytest.raises(TransportError, match="not connected within 3"):
            await client.request(URL, "GET", "/")
        assert pool.statistics().active == 0


async def test_a_cancel_storm_leaks_no_place(autojump_clock: MockClock) -> None:
    """T3: 20 clients on a pool of 10, cancelled at random, also during connect; then all work."""
    rnd = random.Random(3)

    class Slow(Backend):
        async def connect(self, host: str, port: int) -> trio.abc.Stream:
            await trio.sleep(rnd.choice((0, 0.001, 0.01)))
            return await super().connect(host, port)

    async def serve(stream: trio.abc.Stream, number: int) -> None:
        while (request := await read_request(stream)) is not None:
            await trio.sleep(rnd.choice((0, 0.0005, 0.005, 0.05)))
            name = request.split(b" ")[1]
            try:
                await stream.send_all(reply(name)[:20])
                await trio.sleep(rnd.choice((0, 0.001)))
                await stream.send_all(reply(name)[20:])
            except trio.BrokenResourceError:
                return

    done = cancelled = 0
    settings = ClientSettings(data_connections_max=10)
    async with trio.open_nursery() as nursery:
        backend = Slow(nursery, serve)
        async with open_pool(settings, backend) as pool:
            client = ServerClient(DeploymentDirectory(Deployment()), pool, settings)
            end = trio.current_time() + 1

            async def churn(task: int) -> None:
                nonlocal done, cancelled
                while trio.current_time() < end:
                    name = f"/{task}-{rnd.randrange(10**9)}"
                    with trio.move_on_after(rnd.choice((0.0005, 0.002, 0.01, 0.1))) as scope:
                        got = await client.request(URL, "POST", name, context=None)
                        assert got.body.decode() == name
                        done += 1
                    cancelled += scope.cancelled_caught

            async with trio.open_nursery() as storm:
                for task in range(20):
                    storm.start_soon(churn, task)
            assert done > 100
            assert cancelled > 100
            assert pool.statistics().active == 0
            assert pool.statistics().waiting == 0
            with trio.fail_after(1):
                async with trio.open_nursery() as calls:
                    for _ in range(10):
                        calls.start_soon(client.request, URL, "GET", "/after")
        nursery.cancel_scope.cancel()


async def test_lines_to_servers_that_are_not_called_any_more_are_forgotten(
    autojump_clock: MockClock,
) -> None:
    async with open_backend(answer_all) as (client, _, pool):
        for port in range(20):
            await client.request(f"http://backend:{8000 + port}", "GET", "/")
        assert len(pool._lines) == 20
        await trio.sleep(60)
        assert len(pool._lines) == 0


async def test_a_dead_idle_connection_is_noticed_before_it_is_used() -> None:
    """A plain POST survives a server that was restarted in between."""

    async def hello(request: Request) -> Response:
        return json_response({})

    app = make_app({("POST", "/x"): hello})
    async with open_pool() as pool:
        async with serve_on_sockets(app) as bind:
            client = client_of(pool, bind)
            await client.request("peer", "POST", "/x")
            assert pool.statistics().idle == 1
        with pytest.raises(TransportError, match="cannot connect"):
            await client.request("peer", "POST", "/x")
