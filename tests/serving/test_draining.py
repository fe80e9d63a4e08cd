"""A server that stops: what waits and what runs is answered, and it ends."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from quart_trio import QuartTrio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.context import Receive, Scope, Send
from gymtrio.limits import WAKE_SLICE_TASKS
from gymtrio.serving.app import open_asgi
from gymtrio.serving.client import Reply
from gymtrio.serving.connection import HttpLimits
from gymtrio.serving.deployment import parse_deployment
from gymtrio.serving.dispatch import Dispatcher
from gymtrio.serving.draining import InWork
from gymtrio.serving.frames_head import KIND, decode_reply, encode_request
from gymtrio.serving.host import HostPorts
from gymtrio.serving.http import Request, Response, json_response
from gymtrio.serving.pool import open_pool
from gymtrio.serving.transports import open_frames_server
from gymtrio.wire.channel import open_channel
from gymtrio.wire.control import CONTROL_PREFIX, Kind
from gymtrio.wire.messages import Hello
from gymtrio.wire.unix import connect_unix, runtime_directory
from tests.helpers.channels import HeldStream
from tests.helpers.clocks import FollowingClock
from tests.helpers.every_kind import AUTHORIZATION, SORTS, TOKEN, control, open_waiting
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.scripted_participant import ScriptedParticipant
from tests.helpers.serving import client_of, make_app, serve_on_sockets

LONG = HttpLimits(grace_s=1_000)
SHORT = HttpLimits(grace_s=0.05)


async def forever(request: Request) -> Response:
    await trio.sleep_forever()
    raise AssertionError


def check_drained(reply: Reply) -> None:
    error: Any = reply.json()
    assert (reply.status, reply.header("retry-after")) == (503, "1")
    assert error["error"]["code"] == "unavailable"
    assert reply.header("connection") == "close"


@pytest.mark.parametrize("kind", SORTS)
async def test_what_is_parked_at_the_gate_is_answered_at_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SRV-2: 503 with Retry-After, without waiting for the grace; the server ends."""
    sort = SORTS[kind]
    replies: list[Reply] = []
    with trio.fail_after(60):
        async with open_pool() as pool, trio.open_nursery() as nursery:
            async with serve_on_sockets(sort.make_app(tmp_path, monkeypatch), LONG) as bind:
                client = client_of(pool, bind, sort.kind)
                wait = await open_waiting(client, sort)
                await control(client, "prepare")

                async def park() -> None:
                    replies.append(await wait())

                for _ in range(3):
                    nursery.start_soon(park)
                while (await waiting(client)) < 3:
                    pass
    assert len(replies) == 3
    for reply in replies:
        check_drained(reply)


async def waiting(client: Any) -> float:
    """How many requests wait at the gate."""
    text = (await client.request("peer", "GET", "/metrics", context=None)).body.decode()
    line = next(part for part in text.splitlines() if part.startswith("gymtrio_gate_waiting"))
    return float(line.split()[1])


async def test_what_runs_when_the_grace_is_over_cleans_up_and_is_answered() -> None:
    """SRV-2: also when cleaning up takes a while; hot routes, the fallback and an author's routes."""
    cleaned: list[str] = []
    running: list[str] = []

    async def run(name: str) -> None:
        running.append(name)
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 10):
                await trio.sleep(0.05)
            cleaned.append(name)

    async def handler(request: Request) -> Response:
        await run(request.path)
        raise AssertionError

    def add_routes(app: QuartTrio) -> None:
        @app.get("/author")
        async def author() -> None:
            await run("/author")

    paths = ["/hot", "/any", "/author"]
    app = make_app({("GET", "/hot"): handler}, fallback=handler, add_routes=add_routes)
    replies: list[Reply] = []
    with trio.fail_after(60):
        async with open_pool() as pool, trio.open_nursery() as nursery:
            async with serve_on_sockets(app, SHORT) as bind:
                client = client_of(pool, bind)

                async def call(path: str) -> None:
                    replies.append(await client.request("peer", "GET", path))

                for path in paths:
                    nursery.start_soon(call, path)
                while len(running) < 3:
                    await wait_all_tasks_blocked()
    assert sorted(cleaned) == sorted(paths)
    assert len(replies) == 3
    for reply in replies:
        check_drained(reply)


async def test_what_ends_within_the_grace_is_answered_as_ever() -> None:
    """SRV-2: running requests are let go on."""
    release = trio.Event()

    async def handler(request: Request) -> Response:
        await release.wait()
        return json_response({"done": True})

    async with open_pool() as pool, trio.open_nursery() as nursery:
        async with serve_on_sockets(make_app({("GET", "/x"): handler}), LONG) as bind:
            client = client_of(pool, bind)

            async def call() -> None:
                reply = await client.request("peer", "GET", "/x")
                assert (reply.status, reply.json()) == (200, {"done": True})

            nursery.start_soon(call)
            await wait_all_tasks_blocked(0.05)
            nursery.start_soon(release_later, release)


async def release_later(release: trio.Event) -> None:
    await wait_all_tasks_blocked(0.05)
    release.set()


async def test_a_body_that_does_not_come_holds_nothing_up() -> None:
    """SRV-2: hard deadline last."""
    with trio.fail_after(30):
        async with serve_on_sockets(make_app({("POST", "/x"): forever}), SHORT) as bind:
            stream = await trio.open_tcp_stream(bind.host, bind.port)
            await stream.send_all(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n")
            await wait_all_tasks_blocked(0.05)
    await stream.aclose()


async def test_work_is_ended_in_slices_and_waited_for(autojump_clock: MockClock) -> None:
    """SRV-2, SRV-4: thousands at once would stall the loop."""
    in_work = InWork()
    count = 2 * WAKE_SLICE_TASKS + 1
    ended: list[float] = []

    async def work(delay_s: float) -> None:
        scope = trio.CancelScope()
        in_work.enter(scope)
        try:
            with scope:
                await trio.sleep_forever()
            with trio.CancelScope(shield=True):
                await trio.sleep(delay_s)
            ended.append(trio.current_time())
        finally:
            in_work.leave(scope)

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(work, 5.0 if number == 7 else 0.0)
        await wait_all_tasks_blocked()
        assert len(in_work) == count
        await in_work.drain()
        assert len(ended) == count
        assert trio.current_time() >= 5
        # What begins now ends at once.
        await work(0.0)
        await in_work.drain()


async def test_work_that_has_ended_is_not_cut_by_a_drain_that_began_before() -> None:
    """SRV-2: it is only being answered any more, perhaps in pieces."""
    in_work = InWork()

    class Work:
        """Ends when it is cancelled, and another one with it."""

        def __init__(self, other: Work | None = None) -> None:
            self.other = other
            self.cancelled = False
            in_work.enter(self)

        def cancel(self) -> None:
            self.cancelled = True
            in_work.leave(self)
            if self.other is not None:
                in_work.leave(self.other)

    first = Work()
    for _ in range(WAKE_SLICE_TASKS):
        last = first.other = Work()
    await in_work.drain()
    assert first.cancelled
    assert not last.cancelled


async def test_all_who_drain_hear_of_the_end(autojump_clock: MockClock) -> None:
    """SRV-2: who hears of it late keeps the server until `DRAIN_S`."""
    in_work = InWork()

    async def work() -> None:
        scope = trio.CancelScope()
        in_work.enter(scope)
        try:
            with scope:
                await trio.sleep_forever()
            with trio.CancelScope(shield=True):
                await trio.sleep(5)
        finally:
            in_work.leave(scope)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        await wait_all_tasks_blocked()
        nursery.start_soon(in_work.drain)
        nursery.start_soon(in_work.drain)
    assert trio.current_time() == 5


async def test_work_begun_while_draining_is_ended_too() -> None:
    in_work = InWork()
    await in_work.drain()
    scope = trio.CancelScope()
    in_work.enter(scope)
    with scope:
        await trio.sleep_forever()
    in_work.leave(scope)
    assert scope.cancelled_caught


class Started:
    """A running server as a launcher wants it: it is started already."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.take = dispatcher.take
        self.stop_accepting = dispatcher.stop_accepting
        self.drain = dispatcher.drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._dispatcher(scope, receive, send)
            return
        for what in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{what}.complete"})


@pytest.mark.parametrize("published", [False, True])
async def test_a_commit_that_outlasts_the_grace_is_aborted_whole_or_finishes(
    published: bool,
) -> None:
    """SRV-2, CTL-13: its caller is told 503, never 200; what has begun to appear appears whole."""
    archive, clock = MemoryArchive(), FollowingClock()
    door = archive.publishing if published else archive.writing
    door.shut()
    token = {"enabled": True, "control_auth_token": TOKEN, "root": "/c"}
    entry = {"app": "x:y", "kind": "environment"}
    deployment = parse_deployment({"checkpoint": token, "servers": {"peer": entry}})
    app = make_app({}, participant=ScriptedParticipant("peer"), kind=Kind.ENVIRONMENT)
    ports = HostPorts(wall_clock=clock, archive=archive)
    statuses: list[int] = []
    with trio.fail_after(60):
        async with open_pool() as pool, trio.open_nursery() as nursery:
            async with open_asgi(app, deployment=deployment, name="peer", ports=ports) as asgi:
                async with serve_on_sockets(Started(asgi), SHORT) as bind:
                    client = client_of(pool, bind, Kind.ENVIRONMENT)

                    async def call(operation: str, **fields: str) -> None:
                        deadline_ts = clock.now_s() + 60
                        reply = await client.request(
                            "peer",
                            "POST",
                            f"{CONTROL_PREFIX}/{operation}",
                            json={"checkpoint_id": "c1", "deadline_ts": deadline_ts, **fields},
                            headers=[AUTHORIZATION],
                        )
                        statuses.append(reply.status)

                    await call("prepare")
                    nursery.start_soon(partial(call, "commit", checkpoint_dir="/c/1"))
                    await door.reached.wait()
                # Its connections are gone; what it still does is done before it ends.
                if published:
                    door.let_go()
    assert statuses == [200, 503]
    assert len(archive.parts) == int(published)


async def test_every_answer_of_a_drain_leaves_over_frames() -> None:
    """SRV-2: thousands on one connection, whose peer does not read for a moment."""
    parked, count = 0, 4_000
    full, drained, listening = trio.Event(), trio.Event(), trio.Event()

    async def park(request: Request) -> Response:
        nonlocal parked
        parked += 1
        if parked == count:
            full.set()
        return await forever(request)

    async def serve() -> None:
        async with (
            open_asgi(make_app({("POST", "/run"): park})) as app,
            open_frames_server(app, deployment, "peer"),
        ):
            listening.set()
            await full.wait()
            app.stop_accepting()
            held.hold()
            await app.drain()
            drained.set()

    statuses: list[int] = []
    with runtime_directory() as directory, trio.fail_after(60):
        peer = {"app": "a:b", "kind": "resources", "bind": "127.0.0.1:1"}
        deployment = parse_deployment(
            {"transport": "frames", "socket_dir": str(directory), "servers": {"peer": peer}},
            where="test",
            environment={},
        )
        path = deployment.socket_path("peer")
        assert path is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            await listening.wait()
            held = HeldStream(await connect_unix(path))
            me = Hello(role="server", name="caller", instance="1")
            async with open_channel(held, role="opener", me=me) as channel:

                async def call() -> None:
                    reply = await channel.request(KIND, head=encode_request("POST", "/run", ()))
                    statuses.append(decode_reply(reply.head)[0])

                async with trio.open_nursery() as calls:
                    for _ in range(count):
                        calls.start_soon(call)
                    await drained.wait()
                    await wait_all_tasks_blocked()
                    held.let_go()
    assert statuses == [503] * count
