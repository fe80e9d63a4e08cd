"""The ASGI application: its life, its routes beside the hot ones, its failures, its control plane."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from hypercorn.utils import LifespanFailureError
from quart import request as quart_request
from quart_trio import QuartTrio
from trio.testing import MockClock

from gymtrio.context import current_episode
from gymtrio.errors import HostError, PeerRefused, SettingsError, StaleAttempt
from gymtrio.ids import CheckpointId
from gymtrio.serving.app import open_asgi
from gymtrio.serving.client import ServerClient, peer_of_url
from gymtrio.serving.controlchannel import HttpControlChannel
from gymtrio.serving.deployment import (
    DEPLOYMENT_VARIABLE,
    Bind,
    DeploymentDirectory,
    load_deployment,
    parse_deployment,
)
from gymtrio.serving.host import HostPorts
from gymtrio.serving.http import Request, Response, json_response
from gymtrio.serving.inprocess import InProcessNetwork, open_network
from gymtrio.serving.lifespan import StartFailed, open_lifespan
from gymtrio.serving.supervisor import _with_state_dir, write_resolved
from gymtrio.settings import Secret
from gymtrio.wire.control import CONTROL_PREFIX, Kind, PrepareRequest, ResumeRequest
from tests.helpers import example_server
from tests.helpers.clocks import FollowingClock
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.scripted_participant import ScriptedParticipant
from tests.helpers.serving import make_app, serve_on_sockets

TOKEN = "0123456789abcdef-token"


async def x(request: Request) -> Response:
    return json_response({"path": request.path})


def client_in(network: InProcessNetwork, **servers: Any) -> ServerClient:
    entries = {name: {"url": f"http://{name}", **entry} for name, entry in servers.items()}
    return ServerClient(DeploymentDirectory(parse_deployment({"servers": entries})), network)


async def test_a_server_reads_its_settings_when_it_starts(tmp_path: Path) -> None:
    """SET-3: the same module, embedded, under a name and settings of its own."""
    entry = {"app": "x:y", "kind": "resources"}
    deployment = parse_deployment(
        {
            "state_dir": str(tmp_path),
            "servers": {
                "one": {**entry, "settings": {"greeting": "hi"}},
                "two": {**entry, "settings": {"mood": "loud"}},
            },
        }
    )
    async with open_network() as network:
        client = client_in(network, one={"kind": "resources"}, two={"kind": "resources"})
        ports = HostPorts(transport=network, directory=client._directory)
        async with (
            open_asgi(example_server.app, deployment=deployment, name="one", ports=ports) as one,
            open_asgi(example_server.app, deployment=deployment, name="two", ports=ports) as two,
        ):
            with network.serving("one", one), network.serving("two", two):
                first: Any = (await client.request("one", "POST", "/greet")).json()
                assert (first["greeting"], first["instance"]) == ("hi", "one")
                # A server calls another one by name.
                second: Any = (await client.request("one", "POST", "/ask?two")).json()
                assert (second["instance"], second["body"]) == ("two", "from a server")


@pytest.mark.parametrize(
    ("servers", "name", "message"),
    [
        (
            {"a": {"app": "x:y", "kind": "resources", "settings": {"greting": "x"}}},
            "a",
            "servers.a.settings.greting: unknown key; did you mean 'greeting'",
        ),
        ({"a": {"app": "x:y", "kind": "model"}}, "a", "its kind is model, but x:y is .* resources"),
        ({"a": {"app": "x:y", "kind": "resources"}}, "b", "no server 'b'"),
    ],
)
async def test_settings_that_do_not_fit_are_refused_at_start(
    servers: Any, name: str, message: str
) -> None:
    """SET-1: with the path of the key."""
    deployment = parse_deployment({"servers": servers})
    with pytest.raises(SettingsError, match=message):
        async with open_asgi(example_server.app, deployment=deployment, name=name):
            pass


async def test_a_fault_at_start_is_a_failed_startup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SET-2: and says why in one line."""
    path = tmp_path / "d.yaml"
    example = {"app": "x:y", "kind": "resources", "settings": {"fail_at_start": True}}
    path.write_text(json.dumps({"servers": {"example": example}}))
    monkeypatch.setenv(DEPLOYMENT_VARIABLE, str(path))
    with pytest.raises(StartFailed, match="RuntimeError: the model file is not there"):
        async with open_lifespan(example_server.app):
            pass
    assert "Traceback" in caplog.text
    caplog.clear()
    example["settings"] = {"gretting": "x"}
    path.write_text(json.dumps({"servers": {"example": example}}))
    with pytest.raises(StartFailed, match="did you mean 'greeting'"):
        async with open_lifespan(example_server.app):
            pass
    assert "did you mean" in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_background_failure_ends_the_server_loudly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fail = trio.Event()

    async def background() -> None:
        await fail.wait()
        raise ValueError("lost the disk")

    app = make_app({("GET", "/x"): x}, background=background)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with serve_on_sockets(app):
            fail.set()
            await trio.sleep_forever()
    assert caught.value.subgroup(LifespanFailureError) is not None
    assert "lost the disk" in caplog.text
    embedded = make_app({("GET", "/x"): x}, background=background)
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="lost the disk")):
        async with open_asgi(embedded):
            await trio.sleep_forever()


async def test_an_error_of_the_block_comes_out_as_it_is() -> None:
    """SET-3: an embedding program catches what it raised, not a group of groups."""
    with pytest.raises(StaleAttempt):
        async with open_asgi(make_app({("GET", "/x"): x})):
            raise StaleAttempt("r-a1")


async def test_routes_of_the_author_go_through_the_framework() -> None:
    seen: list[str] = []

    def add_routes(app: QuartTrio) -> None:
        @app.before_serving
        async def before() -> None:
            seen.append("before")

        @app.after_serving
        async def after() -> None:
            seen.append("after")

        @app.get("/items/<int:number>")
        async def item(number: int) -> Any:
            return {"z": number, "a": str(current_episode())}

        @app.post("/items")
        async def add() -> Any:
            return {"got": await quart_request.get_json()}, 201

        @app.get("/fault")
        async def fault() -> Any:
            raise ValueError("secret detail")

        @app.get("/refused")
        async def refused() -> Any:
            raise StaleAttempt("r-a1 was retired")

    app = make_app({("GET", "/x"): x}, fallback=x, add_routes=add_routes)
    async with open_network() as network, open_asgi(app) as asgi:
        client = client_in(network, peer={"kind": "resources"})
        with network.serving("peer", asgi):
            reply = await client.request("peer", "GET", "/ng-rollout/r-a1/items/7")
            assert reply.body.strip() == b'{"z":7,"a":"r-a1"}'
            added = await client.request("peer", "POST", "/items", json={"b": 1})
            assert (added.status, added.json()) == (201, {"got": {"b": 1}})
            fault = await client.request("peer", "GET", "/fault")
            assert (fault.status, b"secret" in fault.body) == (500, False)
            assert fault.json() == {
                "error": {"code": "internal_error", "detail": "see the server's log"}
            }
            refused: Any = (await client.request("peer", "GET", "/refused")).json()
            assert refused["error"]["code"] == "stale_attempt"
            wrong = await client.request("peer", "DELETE", "/items")
            assert (wrong.status, wrong.header("content-type")) == (405, "application/json")
            bad = await client.request("peer", "POST", "/items", body=b"{")
            assert bad.header("content-type") == "application/json"
            # What nobody has a route for is the fallback's.
            other: Any = (await client.request("peer", "POST", "/any_tool")).json()
            assert other == {"path": "/any_tool"}
    assert seen == ["before", "after"]


async def test_a_server_that_stops_says_so_and_takes_no_work() -> None:
    """SRV-2, SRV-6: new work gets 503 with Retry-After; alive, and not ready."""
    async with open_network() as network, open_asgi(make_app({("GET", "/x"): x})) as asgi:
        client = client_in(network, peer={"kind": "resources"})
        with network.serving("peer", asgi):
            asgi.accepting = False
            refused = await client.request("peer", "GET", "/x")
            assert (refused.status, refused.header("retry-after")) == (503, "1")
            ready: Any = await client.request("peer", "GET", "/ready")
            assert (ready.status, ready.json()["reason"]) == (503, "shutting down")
            assert (await client.request("peer", "GET", "/health")).status == 200


def checkpointed(**more: Any) -> Any:
    return parse_deployment(
        {
            "checkpoint": {"enabled": True, "control_auth_token": TOKEN, "root": "/c", **more},
            "servers": {"peer": {"app": "x:y", "kind": "environment"}},
        }
    )


@attrs.define
class Controlled:
    participant: ScriptedParticipant
    client: ServerClient
    channel: HttpControlChannel
    clock: FollowingClock


async def test_the_control_plane_is_served_where_checkpointing_is_on(
    autojump_clock: MockClock,
) -> None:
    """CTL-1, CTL-2: below its prefix, to whoever has the token; data routes need none."""
    participant = ScriptedParticipant("peer")
    clock = FollowingClock()
    app = make_app({("GET", "/x"): x}, participant=participant, kind=Kind.ENVIRONMENT, fallback=x)
    async with open_network() as network:
        client = client_in(network, peer={"kind": "environment"})
        ports = HostPorts(wall_clock=clock, transport=network, archive=MemoryArchive())
        async with open_asgi(app, deployment=checkpointed(), name="peer", ports=ports) as asgi:
            with network.serving("peer", asgi):
                assert (await client.request("peer", "GET", "/x")).status == 200
                for headers in ([], [("authorization", "Bearer wrong")]):
                    path = f"{CONTROL_PREFIX}/status"
                    reply = await client.request("peer", "GET", path, headers=headers)
                    assert reply.status == 401
                channel = HttpControlChannel(client, Secret(TOKEN))
                deadline = trio.current_time() + 10
                request = PrepareRequest(
                    checkpoint_id=CheckpointId("c1"), deadline_ts=clock.now_s() + 10
                )
                prepared: Any = await channel.call("peer", "prepare", request, deadline)
                assert prepared["phase"] == "prepared"
                status: Any = await channel.call("peer", "status", None, deadline)
                assert (status["kind"], status["instance"]) == ("environment", "peer")
                other = attrs.evolve(request, checkpoint_id=CheckpointId("c2"))
                with pytest.raises(PeerRefused) as caught:
                    await channel.call("peer", "prepare", other, deadline)
                assert caught.value.code == "checkpoint_conflict"
                resume = ResumeRequest(
                    checkpoint_id=CheckpointId("c1"), deadline_ts=clock.now_s() + 10
                )
                await channel.call("peer", "resume", resume, deadline)
    assert participant.closes == 1


@pytest.mark.parametrize("first", ["up", "hypercorn"])
async def test_a_server_of_one_file_runs_once_however_it_is_started(
    first: str, tmp_path: Path
) -> None:
    """HARD-10: by `gymtrio up`, which hands its servers a file of its own, and without it."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "run").mkdir()
    file = tmp_path / "deployment.json"
    block = {"enabled": True, "control_auth_token": TOKEN, "root": "checkpoints"}
    servers = {"peer": {"app": "x:y", "kind": "environment"}}
    file.write_text(json.dumps({"checkpoint": block, "servers": servers}))
    written = load_deployment(file)
    bound = _with_state_dir(written.resolved({"peer": Bind("127.0.0.1", 1)}), tmp_path / "run")
    resolved = load_deployment(write_resolved(bound, tmp_path / "run"))
    ways = {"up": resolved, "hypercorn": written}
    app = make_app({}, participant=ScriptedParticipant("peer"), kind=Kind.ENVIRONMENT)
    async with open_network() as network:
        ports = HostPorts(transport=network)
        async with open_asgi(app, deployment=ways.pop(first), name="peer", ports=ports):
            (second,) = ways.values()
            with pytest.raises(HostError, match="a server that is running already"):
                async with open_asgi(app, deployment=second, name="peer", ports=ports):
                    raise AssertionError


async def test_a_server_that_waits_to_be_restored_is_alive_and_not_ready() -> None:
    """HARD-3, SRV-6: it accepts nothing before the resume that follows restore."""
    app = make_app(
        {("GET", "/x"): x}, participant=ScriptedParticipant("peer"), kind=Kind.ENVIRONMENT
    )
    async with open_network() as network:
        client = client_in(network, peer={"kind": "environment"})
        ports = HostPorts(transport=network, archive=MemoryArchive())
        deployment = checkpointed(recover=True)
        async with open_asgi(app, deployment=deployment, name="peer", ports=ports) as asgi:
            with network.serving("peer", asgi):
                assert (await client.request("peer", "GET", "/health")).status == 200
                ready: Any = await client.request("peer", "GET", "/ready")
                assert (ready.status, ready.json()["reason"]) == (503, "waiting to be restored")


async def test_when_checkpointing_is_off_the_participant_is_not_installed() -> None:
    """SET-1: no participant is installed and no bookkeeping is kept."""
    participant = ScriptedParticipant("peer")
    app = make_app({("GET", "/x"): x}, participant=participant, kind=Kind.ENVIRONMENT)
    async with open_network() as network, open_asgi(app) as asgi:
        client = client_in(network, peer={"kind": "environment"})
        with network.serving("peer", asgi):
            channel = HttpControlChannel(client, Secret(TOKEN))
            with pytest.raises(PeerRefused) as caught:
                await channel.call("peer", "status", None, trio.current_time() + 5)
            assert caught.value.status == 404
    assert participant.closes == 0


async def test_a_websocket_is_refused_before_it_is_accepted() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    async with open_asgi(make_app({("GET", "/x"): x})) as asgi:
        await asgi({"type": "websocket", "path": "/x"}, receive, send)
    assert sent == [{"type": "websocket.close"}]


def test_hosts_in_process_are_names_of_servers() -> None:
    assert peer_of_url("http://My_Server").origin.host == "My_Server"
    assert peer_of_url("http://[::1]:80/a/").origin.host == "::1"
    assert str(peer_of_url("https://h").origin) == "h"
