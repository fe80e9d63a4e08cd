"""Calls between servers over frames: what one connection for all calls changes."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import hypercorn.trio
import pytest
import trio
from hypercorn.config import Config

from gymtrio.background import open_background
from gymtrio.context import AsgiApp, Receive, Scope, Send
from gymtrio.errors import TransportError
from gymtrio.serving import frames_transport
from gymtrio.serving.app import open_asgi
from gymtrio.serving.client import Lane, Outgoing, ServerClient, peer_of_url
from gymtrio.serving.deployment import (
    DEPLOYMENT_VARIABLE,
    Deployment,
    DeploymentDirectory,
    ServerEntry,
    load_deployment,
)
from gymtrio.serving.dispatch import Dispatcher
from gymtrio.serving.frames_head import decode_reply, decode_request, encode_reply, encode_request
from gymtrio.serving.frames_server import FramesServer
from gymtrio.serving.frames_transport import FramesTransport, open_frames
from gymtrio.serving.http import Request, Response, StreamingResponse, json_response
from gymtrio.serving.launch import bind_socket, bound_to
from gymtrio.serving.pool import open_pool
from gymtrio.serving.transports import open_transport
from gymtrio.settings import Secret
from gymtrio.strict import MalformedValue
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.channel import open_channel
from gymtrio.wire.codec import pack_list
from gymtrio.wire.control import Kind
from gymtrio.wire.errors import ChannelRefused
from gymtrio.wire.listening import serve_channels
from gymtrio.wire.messages import Hello
from gymtrio.wire.tcp import listener_port, open_tcp_listener
from gymtrio.wire.unix import connect_unix, open_unix_listener, runtime_directory
from tests.helpers.serving import LOOPBACK, make_app, serve_on_sockets

SERVER = Hello(role="server", name="peer", instance="1")
CALLER = Hello(role="server", name="caller", instance="1")
ORIGIN = peer_of_url("http://peer").origin


class Parking:
    """A handler that waits."""

    def __init__(self) -> None:
        self.parked = 0
        self.cancelled = 0
        self.changed = trio.Event()
        self.release = trio.Event()

    async def __call__(self, request: Request) -> Response:
        self.parked += 1
        self._tell()
        try:
            await self.release.wait()
        except trio.Cancelled:
            self.cancelled += 1
            self._tell()
            raise
        return json_response({"body": request.body.decode()})

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def has(self, count: int) -> bool:
        return self.parked == count

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(60):
            while not condition():
                await self.changed.wait()


async def echo(request: Request) -> Response:
    return json_response({"body": request.body.decode()})


@attrs.define
class Served:
    """An application behind a socket file that can be taken down and put up again."""

    app: AsgiApp
    path: Path
    connections: int = 0
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._scope = trio.CancelScope()
        with self._scope:
            async with open_unix_listener(self.path) as listener, trio.open_nursery() as nursery:
                await nursery.start(FramesServer(self.app, SERVER).serve, listener)
                task_status.started()

    async def restart(self, nursery: trio.Nursery) -> None:
        self._scope.cancel()
        # The lock beside the socket is held until the old one is gone.
        await trio.testing.wait_all_tasks_blocked()
        await nursery.start(self.run)


@asynccontextmanager
async def serving(
    routes: Any, path: Path, **more: Any
) -> AsyncIterator[tuple[ServerClient, Served, trio.Nursery, Dispatcher]]:
    directory = DeploymentDirectory(
        Deployment(servers={"peer": ServerEntry(url="http://peer", kind=Kind.RESOURCES)})
    )
    async with (
        open_asgi(make_app(routes, **more)) as app,
        open_background() as nursery,
        open_pool() as pool,
        open_frames({ORIGIN: (str(path),)}, pool, me=CALLER) as frames,
    ):
        served = Served(app, path)
        await nursery.start(served.run)
        yield ServerClient(directory, frames), served, nursery, app


@pytest.fixture
def path() -> Any:
    with runtime_directory() as made:
        yield made / "peer"


async def test_thousands_of_calls_wait_on_one_connection(path: Path) -> None:
    """SRV-4: neither sockets nor places; a control call is not held up by them (COORD-5)."""
    parking = Parking()
    bodies: set[str] = set()
    count = 2_000
    async with serving({("POST", "/park"): parking}, path) as (client, _, _, _):

        async def call(number: int) -> None:
            reply: Any = (await client.request("peer", "POST", "/park", body=b"%d" % number)).json()
            bodies.add(reply["body"])

        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(call, number)
            await parking.until(lambda: parking.parked == count)
            with trio.fail_after(10):
                assert (await client.request("peer", "GET", "/ready", control=True)).status == 200
            parking.release.set()
    assert bodies == {str(number) for number in range(count)}


async def test_a_lost_connection_is_made_again(path: Path) -> None:
    """F1: by the next call; what waited on the lost one is told, its handlers are cancelled (SRV-3)."""
    parking = Parking()
    lost: list[str] = []
    routes = {("POST", "/park"): parking, ("POST", "/x"): echo}
    async with serving(routes, path) as (client, served, nursery, _):

        async def call() -> None:
            with pytest.raises(TransportError) as caught:
                await client.request("peer", "POST", "/park")
            lost.append(str(caught.value))

        async with trio.open_nursery() as calls:
            for _ in range(3):
                calls.start_soon(call)
            await parking.until(lambda: parking.parked == 3)
            await served.restart(nursery)
        assert len(lost) == parking.cancelled == 3
        assert lost[0].startswith("POST peer/park: ")
        assert (await client.request("peer", "POST", "/x", body=b"y")).json() == {"body": "y"}


@pytest.mark.parametrize(("method", "key"), [("GET", None), ("POST", "once"), ("POST", None)])
async def test_only_what_may_be_repeated_is_sent_again(
    path: Path, method: str, key: str | None
) -> None:
    """F2: by its method or by its idempotency key."""
    parking = Parking()
    routes = {("POST", "/park"): parking, ("GET", "/park"): parking}
    async with serving(routes, path) as (client, served, nursery, _):
        statuses: list[int | None] = []

        async def call() -> None:
            try:
                reply = await client.request("peer", method, "/park", idempotency_key=key)
                statuses.append(reply.status)
            except TransportError:
                statuses.append(None)

        async with trio.open_nursery() as calls:
            calls.start_soon(call)
            await parking.until(lambda: parking.parked == 1)
            parking.release.set()
            await served.restart(nursery)
        repeated = method == "GET" or key is not None
        assert statuses in ([200 if repeated else None], [200])


async def test_nobody_there_is_a_transport_error_until_somebody_is(path: Path) -> None:
    routes = {("POST", "/x"): echo}
    async with serving(routes, path) as (client, served, nursery, _):
        served._scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(2):
            with pytest.raises(TransportError, match=r"POST peer/x: peer: cannot connect"):
                await client.request("peer", "POST", "/x")
        await nursery.start(served.run)
        assert (await client.request("peer", "POST", "/x")).status == 200


async def test_an_answer_that_nobody_could_take_was_not_delivered(path: Path) -> None:
    """HARD-9: also when the connection ends under a reply."""
    told: list[bool] = []
    began = trio.Event()

    async def stream(request: Request) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"first"
            began.set()
            await trio.sleep_forever()

        return StreamingResponse(200, chunks(), on_done=told.append)

    async with serving({("GET", "/x"): stream}, path) as (client, served, nursery, _):
        with pytest.raises(TransportError):
            async with client.stream("peer", "GET", "/x") as reply:
                chunks = reply.chunks()
                assert await anext(chunks) == b"first"
                await began.wait()
                await served.restart(nursery)
                await anext(chunks)
        await trio.testing.wait_all_tasks_blocked()
    assert told == [False]


async def test_a_stopping_server_takes_no_new_call(path: Path) -> None:
    """SRV-2: 503 with Retry-After, as over HTTP."""
    async with serving({("POST", "/x"): echo}, path) as (client, _, _, app):
        app.stop_accepting()
        reply = await client.request("peer", "POST", "/x")
        assert (reply.status, reply.header("retry-after")) == (503, "1")


async def test_a_reply_whose_head_is_none_is_left(path: Path) -> None:
    """SRV-3: its callee would go on sending it, to nobody."""
    began, cancelled = trio.Event(), trio.Event()

    async def handler(call: IncomingCall) -> None:
        await call.begin(b"no head")
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async def serve(stream: trio.SocketStream) -> None:
        async with open_channel(stream, role="acceptor", me=SERVER, handler=handler) as channel:
            await channel.closed.wait()

    directory = DeploymentDirectory(
        Deployment(servers={"peer": ServerEntry(url="http://peer", kind=Kind.RESOURCES)})
    )
    async with (
        open_unix_listener(path) as listener,
        open_background() as nursery,
        open_pool() as pool,
        open_frames({ORIGIN: [str(path)]}, pool, me=CALLER) as frames,
    ):
        await nursery.start(serve_channels, listener, serve)
        with pytest.raises(TransportError, match="not a reply"):
            async with ServerClient(directory, frames).stream("peer", "GET", "/x"):
                pytest.fail("no reply")
        assert began.is_set()
        with trio.fail_after(10):
            await cancelled.wait()


async def test_an_answer_to_head_has_no_body(path: Path) -> None:
    async with serving({("HEAD", "/x"): echo}, path) as (client, _, _, _):
        reply = await client.request("peer", "HEAD", "/x")
        assert (reply.status, reply.body) == (200, b"")


async def test_an_application_that_fails_after_its_answer_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SRV-1: its answer stands, and nothing is wrong with the call."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})
        raise RuntimeError("late")

    async with open_background() as nursery:
        await nursery.start(Served(app, path).run)
        stream = await connect_unix(path)
        async with open_channel(stream, role="opener", me=CALLER) as channel:
            whole = await channel.request("http", b"", head=encode_request("GET", "/x", ()))
            assert whole.body == b"x"
            await trio.testing.wait_all_tasks_blocked()
    assert [record.message for record in caplog.records] == ["error in the application, GET /x"]


async def test_who_waits_for_a_connection_is_told_that_the_transport_ends(path: Path) -> None:
    outgoing = Outgoing("GET", "/x", (), b"", repeatable=True)
    told: list[str] = []

    async with open_background() as nursery, open_unix_listener(path), open_pool() as pool:
        async with open_frames({ORIGIN: [str(path)]}, pool, me=CALLER) as frames:

            async def call() -> None:
                with pytest.raises(TransportError) as caught:
                    await frames.request(ORIGIN, outgoing, Lane.DATA, math.inf)
                told.append(str(caught.value))

            nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
    assert told == [f"{ORIGIN}: cannot connect: the transport ended"]


async def test_what_is_no_request_is_refused(path: Path) -> None:
    """SRV-1: a call of another kind, or with a head that is none, ends that call only."""
    async with serving({("POST", "/x"): echo}, path):
        stream = await connect_unix(path)
        async with open_channel(stream, role="opener", me=CALLER) as channel:
            for kind, head, status in (
                ("nothing", b"", 404),
                ("http", b"", 400),
                ("http", pack_list(("GET", "/x")), 400),
                ("http", pack_list(("GET", "/\xe4", ())), 400),
                ("http", pack_list(("GET", "/x", ((b"a", "b"),))), 400),
                ("http", pack_list(("GET", "/x", [(b"a", b"b")] * 300)), 431),
            ):
                with pytest.raises(ChannelRefused) as caught:
                    await channel.request(kind, b"", head=head)
                assert caught.value.status == status
            whole = await channel.request("http", b"y", head=encode_request("POST", "/x", ()))
            assert decode_reply(whole.head)[0] == 200


def test_heads_come_back_as_they_were() -> None:
    headers = ((b"a", b"\xff"), (b"a", b""))
    assert decode_request(encode_request("PUT", "/x?y", headers)) == ("PUT", "/x?y", headers)
    assert decode_reply(encode_reply(299, headers)) == (299, headers)
    for head in (b"", pack_list((99, ())), pack_list(("200", ())), pack_list((200,))):
        with pytest.raises(MalformedValue):
            decode_reply(head)


async def test_a_foreign_server_takes_frames_as_well(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SET-2: under plain Hypercorn the application listens itself, where its deployment says."""

    async def host(request: Request) -> Response:
        return json_response(request.header("host"))

    sock = bind_socket(LOOPBACK, "peer")
    file = tmp_path / "deployment.yaml"
    entry = {"app": "x:app", "kind": "resources", "bind": str(bound_to(sock))}
    written = {"servers": {"peer": entry}, "socket_dir": str(path.parent / "sockets")}
    file.write_text(json.dumps(written))
    monkeypatch.setenv(DEPLOYMENT_VARIABLE, str(file))
    config = Config()
    config.bind = [f"fd://{sock.detach()}"]
    config.errorlog = logging.getLogger("hypercorn.under.test")
    app: Any = make_app({("GET", "/host"): host})
    stop = trio.Event()
    deployment = load_deployment(file, {})
    async with trio.open_nursery() as nursery:
        serve = partial(hypercorn.trio.serve, app, config, shutdown_trigger=stop.wait)
        await nursery.start(serve)
        async with open_transport(deployment, "test") as transport, open_pool() as pool:
            for over, expected in ((transport, None), (pool, entry["bind"])):
                client = ServerClient(DeploymentDirectory(deployment), over)
                assert (await client.request("peer", "GET", "/host")).json() == expected
        stop.set()


@pytest.mark.parametrize(("presented", "taken"), [("right", True), ("wrong", False), (None, False)])
async def test_other_hosts_present_the_token(presented: str | None, taken: bool) -> None:
    """WRK-2, I35: between hosts a socket file protects nobody."""

    async def call(client: Callable[[], Awaitable[Any]]) -> None:
        if taken:
            assert (await client()).status == 200
            return
        with pytest.raises(TransportError, match="cannot connect"):
            await client()

    directory = DeploymentDirectory(
        Deployment(servers={"peer": ServerEntry(url="http://peer", kind=Kind.RESOURCES)})
    )
    token = None if presented is None else Secret(presented)
    async with (
        open_asgi(make_app({("POST", "/x"): echo})) as app,
        open_tcp_listener("127.0.0.1", 0) as listener,
        open_background() as nursery,
        open_pool() as pool,
    ):
        await nursery.start(FramesServer(app, SERVER).serve, listener, Secret("right"))
        address = f"tcp://127.0.0.1:{listener_port(listener)}"
        async with open_frames({ORIGIN: (address,)}, pool, me=CALLER, token=token) as frames:
            client = ServerClient(directory, frames)
            await call(lambda: client.request("peer", "POST", "/x"))


async def test_what_is_open_is_counted(path: Path) -> None:
    parking = Parking()
    async with serving({("POST", "/park"): parking}, path) as (client, _, _, _):
        frames: Any = client._transport
        assert isinstance(frames, FramesTransport)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.request, "peer", "POST", "/park")
            await parking.until(lambda: parking.parked == 1)
            assert frames.statistics().active == 1
            parking.release.set()
        assert frames.statistics().active == 0


async def test_calls_are_shared_out_among_the_processes_of_a_server(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4: to the one with the fewest under way; one that is gone is left out, until it is back."""
    monkeypatch.setattr(frames_transport, "SHUNNED_S", 0.0)
    parkings = [Parking(), Parking()]
    paths = [path.with_name("peer.0"), path.with_name("peer.1")]
    directory = DeploymentDirectory(
        Deployment(servers={"peer": ServerEntry(url="http://peer", kind=Kind.MODEL)})
    )
    async with (
        open_asgi(make_app({("POST", "/park"): parkings[0]})) as first,
        open_asgi(make_app({("POST", "/park"): parkings[1]})) as second,
        open_background() as nursery,
        open_pool() as pool,
        open_frames({ORIGIN: tuple(map(str, paths))}, pool, me=CALLER) as frames,
    ):
        client = ServerClient(directory, frames)
        served = [Served(first, paths[0]), Served(second, paths[1])]
        await nursery.start(served[0].run)

        statuses: list[int] = []
        all_answered = trio.Event()

        async def call() -> None:
            statuses.append((await client.request("peer", "POST", "/park")).status)
            if statuses == [200] * 10:
                all_answered.set()

        async def park(count: int) -> None:
            for _ in range(count):
                nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()

        await park(3)
        await parkings[0].until(lambda: parkings[0].parked == 3)
        await nursery.start(served[1].run)
        await park(7)
        for parking in parkings:
            await parking.until(partial(parking.has, 5))
        async with client.stream("peer", "GET", "/ready") as streamed:
            assert streamed.status == 200
        for parking in parkings:
            parking.release.set()
        with trio.fail_after(60):
            await all_answered.wait()


async def test_processes_that_take_no_frames_are_called_over_http(path: Path) -> None:
    """F4: they may have been started by other means; also the calls that find out."""
    paths = [str(path.with_name("peer.0")), str(path.with_name("peer.1"))]
    async with (
        serve_on_sockets(make_app({("POST", "/x"): echo})) as bind,
        open_pool() as pool,
        open_frames({peer_of_url(bind.url).origin: paths}, pool, me=CALLER) as frames,
    ):
        client = ServerClient(DeploymentDirectory(Deployment()), frames)
        for _ in range(2):
            assert (await client.request(bind.url, "POST", "/x", body=b"a")).status == 200
        async with client.stream(bind.url, "GET", "/ready") as streamed:
            assert streamed.status == 200
    async with open_pool() as pool, open_frames({ORIGIN: paths}, pool, me=CALLER) as frames:
        client = ServerClient(DeploymentDirectory(Deployment()), frames)
        with pytest.raises(TransportError, match="cannot connect"):
            await client.request("http://peer", "GET", "/ready")
