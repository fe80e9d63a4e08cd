"""What a server tells Prometheus: what there is, under names with units, and nothing secret."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.context import RolloutContext
from gymtrio.ids import parse_capture_key
from gymtrio.serving.app import open_asgi
from gymtrio.serving.client import ClientSettings, Lane, ServerClient
from gymtrio.serving.deployment import DeploymentDirectory, parse_deployment
from gymtrio.serving.host import HostPorts
from gymtrio.serving.http import Request, Response, json_response
from gymtrio.serving.inprocess import open_network
from gymtrio.serving.metrics import ServerMetrics
from gymtrio.serving.pool import open_pool
from gymtrio.wire.control import CONTROL_PREFIX, Kind
from tests.helpers.clocks import FollowingClock
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.scripted_participant import ScriptedParticipant
from tests.helpers.serving import client_of, make_app, over_sockets, serve_on_sockets

TOKEN = "0123456789abcdef-token"


async def x(request: Request) -> Response:
    return json_response({}, 200 if request.body else 422)


def found_in(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample, by its name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Scraped:
    """What one scrape has told."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._samples = found_in(text)

    def value(self, name: str, **labels: str) -> float | None:
        return self._samples.get((name, frozenset(labels.items())))


@attrs.frozen
class Watched:
    """A server, and whoever scrapes it."""

    client: ServerClient
    clock: FollowingClock
    participant: ScriptedParticipant

    async def scrape(self) -> Scraped:
        reply = await self.client.request("peer", "GET", "/metrics", context=None)
        assert reply.status == 200
        assert reply.header("content-type") == "text/plain; version=0.0.4; charset=utf-8"
        return Scraped(reply.body.decode())

    async def control(self, operation: str, **fields: Any) -> int:
        body = {"checkpoint_id": "c1", "deadline_ts": self.clock.now_s() + 10, **fields}
        reply = await self.client.request(
            "peer",
            "POST",
            f"{CONTROL_PREFIX}/{operation}",
            json=body,
            headers=[("authorization", f"Bearer {TOKEN}")],
            control=True,
        )
        return reply.status


@asynccontextmanager
async def open_watched(**more: Any) -> AsyncIterator[Watched]:
    participant = ScriptedParticipant("peer")
    clock = FollowingClock()
    checkpoint = {"enabled": True, "control_auth_token": TOKEN, "root": "/c"}
    entry = {"app": "x:y", "kind": "environment"}
    deployment = parse_deployment({"checkpoint": checkpoint, "servers": {"peer": entry}, **more})
    known = {"servers": {"peer": {"url": "http://peer", "kind": "resources"}}}
    app = make_app({("POST", "/x"): x}, fallback=x, participant=participant, kind=Kind.ENVIRONMENT)
    async with open_network() as network:
        ports = HostPorts(wall_clock=clock, transport=network, archive=MemoryArchive())
        async with open_asgi(app, deployment=deployment, name="peer", ports=ports) as asgi:
            with network.serving("peer", asgi):
                client = ServerClient(DeploymentDirectory(parse_deployment(known)), network)
                yield Watched(client, clock, participant)


async def test_requests_are_counted_by_route_and_status(autojump_clock: MockClock) -> None:
    """SRV-6: what a caller has chosen is no label."""
    async with open_watched() as server:
        context = RolloutContext(parse_capture_key("secret-rollout-a1"))
        for body in (b"1", b"2", b""):
            await server.client.request("peer", "POST", "/x", body=body, context=context)
        for path in ("/made-up-1", "/made-up-2", "/health", "/ng-control/v1/checkpoint/nothing"):
            await server.client.request("peer", "POST", path, body=b"1", context=None)
        await server.client.request("peer", "GET", "/x", context=None)
        told = await server.scrape()
    name = "gymtrio_requests_total"
    assert told.value(name, route="/x", status="200") == 2
    assert told.value(name, route="/x", status="422") == 1
    assert told.value(name, route="fallback", status="200") == 2
    assert told.value(name, route="/health", status="405") == 1
    assert told.value(name, route="control", status="401") == 1
    assert told.value(name, route="none", status="405") == 1
    for chosen in ("secret", "made-up", "nothing", TOKEN):
        assert chosen not in told.text
    assert told.value("gymtrio_server", kind="environment", instance="peer") == 1


async def test_a_checkpoint_is_told_as_it_goes(autojump_clock: MockClock) -> None:
    """SRV-6: phases, blockers, durations, cuts by outcome."""
    async with open_watched() as server:
        idle = await server.scrape()
        assert idle.value("gymtrio_checkpoint_phase", phase="idle") == 1
        assert idle.value("gymtrio_checkpoint_phase", phase="prepared") == 0
        assert await server.control("prepare") == 200
        prepared = await server.scrape()
        assert prepared.value("gymtrio_checkpoint_phase", phase="prepared") == 1
        assert prepared.value("gymtrio_checkpoint_blockers") == 0
        assert prepared.value("gymtrio_gate_waiting_requests") == 0
        for _ in range(2):
            assert await server.control("commit", checkpoint_dir="/c/1") == 200
        assert await server.control("commit", checkpoint_dir="/c/2") == 409
        assert await server.control("resume") == 200
        told = await server.scrape()
    name = "gymtrio_checkpoint_operation_duration_seconds_count"
    assert told.value(name, operation="prepare", status="200") == 1
    assert told.value(name, operation="commit", status="200") == 2
    assert told.value(name, operation="commit", status="409") == 1
    assert told.value("gymtrio_checkpoint_phase", phase="idle") == 1
    assert told.value("gymtrio_generation_cuts_total", outcome="cut") == 0
    assert told.value("gymtrio_checkpoint_awaiting_restore") == 0


async def test_metrics_can_be_switched_off() -> None:
    async with open_watched(metrics=False) as server:
        assert (await server.client.request("peer", "GET", "/metrics")).status == 404
        assert (await server.client.request("peer", "GET", "/health")).status == 200


async def test_two_servers_of_one_process_share_nothing() -> None:
    """SRV-6: a registry each, none of the library's."""
    one, two = ServerMetrics(kind="a", instance="1"), ServerMetrics(kind="a", instance="2")
    one.request_ended("/x", 200)
    assert "gymtrio_requests_total" in one.render().decode()
    assert 'status="200"' not in two.render().decode()


async def test_names_have_units_and_the_process_is_told() -> None:
    async with over_sockets(make_app({("POST", "/x"): x})) as client:
        text = (await client.request("peer", "GET", "/metrics")).body.decode()
    families = list(text_string_to_metric_families(text))
    names = {family.name for family in families}
    assert {"process_resident_memory_bytes", "process_open_fds", "gymtrio_pool_calls"} <= names
    assert all(family.documentation for family in families)
    assert not [name for name in names if name.endswith(("_ms", "_time", "_size"))]


@pytest.mark.parametrize("lane", Lane)
async def test_waits_for_a_connection_are_counted(lane: Lane) -> None:
    """SRV-6: how many calls of a lane waited, and how long."""
    release = trio.Event()

    async def wait(request: Request) -> Response:
        await release.wait()
        return json_response({})

    settings = ClientSettings(data_connections_max=1, control_connections_max=1)
    async with serve_on_sockets(make_app({("GET", "/wait"): wait})) as bind:
        async with open_pool(settings) as pool:
            client = client_of(pool, bind, settings=settings)

            async def call() -> None:
                await client.request("peer", "GET", "/wait", control=lane is Lane.CONTROL)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(call)
                nursery.start_soon(call)
                while pool.statistics(lane).waiting == 0:
                    await wait_all_tasks_blocked()
                release.set()
            other = Lane.DATA if lane is Lane.CONTROL else Lane.CONTROL
            assert pool.statistics(lane).waits == 1
            assert pool.statistics(lane).waited_s > 0
            assert pool.statistics(other).waits == 0
