"""A client that shares no code with ours, written from the design note alone (WIRE-1): bare frames to a
channel, and the kinds in use to processes as `gymtrio up` starts them.
"""

from __future__ import annotations

import ast
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from gymtrio.serving.deployment import parse_deployment
from gymtrio.serving.supervisor import RunningDeployment, open_deployment
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.channel import open_channel
from gymtrio.wire.listening import serve_channels
from gymtrio.wire.unix import open_unix_listener
from tests.helpers.crashing import until
from tests.helpers.dialogues import ACCEPTOR
from tests.wire import foreign_peer
from tests.wire.foreign_peer import (
    CALL,
    CANCEL,
    CONTROL_POST,
    CREDIT,
    DATA,
    ERROR,
    GOODBYE,
    HELLO,
    INTRODUCTION,
    PING,
    PONG,
    REPLY,
    WELCOME,
    Foreigner,
    Refused,
    open_foreigner,
)

TOKEN: Final = "0123456789abcdef-token"


def test_the_foreigner_knows_nothing_of_ours() -> None:
    tree = ast.parse(Path(foreign_peer.__file__).read_text())
    named = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not named & {"gymtrio", "servers", "tests"}


async def handler(call: IncomingCall) -> None:
    if call.kind == "park":
        await trio.sleep_forever()
    body = await call.read(2**20)
    call.reply(call.head, body * 3)


async def test_the_design_note_suffices(tmp_path: Path) -> None:
    posted: list[tuple[str, bytes]] = []

    async def serve(stream: trio.SocketStream) -> None:
        async with open_channel(
            stream,
            role="acceptor",
            me=ACCEPTOR,
            handler=handler,
            posted=lambda kind, body: posted.append((kind, body)),
        ) as channel:
            reply = await channel.request("greet", b"hi", control=True)
            posted.append(("answered", reply.body))
            await channel.closed.wait()

    path = tmp_path / "run" / "s"
    async with open_unix_listener(path) as listener, trio.open_nursery() as nursery:
        await nursery.start(serve_channels, listener, serve)
        peer = Foreigner(await trio.open_unix_socket(str(path)))
        capacity = {
            "frame_bytes_max": 131_072,
            "head_bytes_max": 1024,
            "window_bytes": 1000,
            "calls_open_max": 10,
        }
        await peer.say(HELLO, {"versions": [1, 2], "hello": INTRODUCTION, "capacity": capacity})
        frame_type, welcome = await peer.hear()
        assert frame_type == WELCOME
        assert welcome["version"] == 1
        # A call of theirs, in the control lane, with an id of an acceptor.
        assert await peer.hear() == (CALL, [3, "greet", b"", b"hi", None])
        await peer.say(REPLY, [3, b"", b"hello"])
        await peer.say(CONTROL_POST, ["note", b"\x00"])
        # A call with a body in chunks; its reply waits for credit after a window.
        await peer.say(CALL, [0, "triple", b"h", None, 60_000])
        await peer.say(DATA, [0, False, b"x" * 60_000])
        await peer.say(DATA, [0, True, b"x" * 20_000])
        assert await peer.hear() == (REPLY, [0, b"h", None])
        size, window, is_last = 0, 1000, False
        while not is_last:
            frame_type, (call_id, is_last, chunk) = await peer.hear()
            assert (frame_type, call_id) == (DATA, 0)
            size += len(chunk)
            window -= len(chunk)
            assert window >= 0
            if not window and not is_last:
                window = 50_000
                await peer.say(CREDIT, [0, window])
        assert size == 240_000
        await peer.say(CALL, [4, "park", b"", b"", None])
        await peer.say(CANCEL, [4])
        assert await peer.hear() == (ERROR, [4, 499, "cancelled", "the caller waits no more"])
        await peer.say(PING, [9])
        assert await peer.hear() == (PONG, [9])
        await peer.say(REPLY, [7, b"", b""])
        frame_type, (code, _) = await peer.hear()
        assert (frame_type, code) == (GOODBYE, "unexpected_answer")
        await peer._stream.aclose()
        nursery.cancel_scope.cancel()
    assert sorted(posted) == [("answered", b"hello"), ("note", b"\x00")]


@asynccontextmanager
async def started(tmp_path: Path, **servers: Any) -> AsyncIterator[RunningDeployment]:
    root = tmp_path / "checkpoints"
    root.mkdir()
    deployment = parse_deployment(
        {
            "checkpoint": {"enabled": True, "control_auth_token": TOKEN, "root": str(root)},
            "servers": {
                name: {"start_timeout_s": 60.0, **entry} for name, entry in servers.items()
            },
        }
    )
    async with open_deployment(deployment, run_dir=tmp_path / "run") as running:
        yield running


def socket_dir(tmp_path: Path) -> Path:
    """As the note says."""
    return Path(json.loads((tmp_path / "run" / "deployment.json").read_text())["socket_dir"])


def hold() -> dict[str, Any]:
    return {"checkpoint_id": "c1", "deadline_ts": time.time() + 60}


@pytest.mark.timeout(180)
async def test_requests_and_control_calls_to_a_real_server(tmp_path: Path) -> None:
    """WIRE-1: the kinds in use, by their description."""
    async with started(tmp_path, counter={"app": "servers.resources.counter:app"}):
        path = socket_dir(tmp_path) / "counter"
        async with open_foreigner(path, TOKEN) as peer:
            status, headers, body = await peer.http("GET", "/health")
            assert (status, headers[b"content-type"]) == (200, b"application/json")
            assert json.loads(body)["instance"] == "counter"
            assert (await peer.http("POST", "/nowhere", b"{}"))[0] == 404

            before = await peer.control("status")
            assert (before["kind"], before["phase"]) == ("resources", "idle")
            assert (before["report"]["ready"], before["report"]["blockers"]) == (True, [])
            with pytest.raises(Refused) as caught:
                await peer.control("prepare", **hold(), deadline="soon")
            assert caught.value.args[:2] == (422, "invalid_request")
            assert caught.value.args[2].startswith("deadline: unknown")
            assert (await peer.control("prepare", **hold()))["phase"] == "prepared"
            assert (await peer.control("status"))["checkpoint_id"] == "c1"
            assert await peer.control("resume", **hold()) == {
                "phase": "idle",
                "idempotent": False,
                "incarnation": before["incarnation"],
            }
        async with open_foreigner(path) as peer:
            assert (await peer.http("GET", "/ready"))[0] == 200
            with pytest.raises(Refused) as caught:
                await peer.control("status")
            assert caught.value.args[:2] == (401, "unauthorized")


@pytest.mark.timeout(180)
async def test_control_calls_at_a_worker_are_passed_on_to_its_coordinator(tmp_path: Path) -> None:
    """WRK-1, COORD-4: whichever worker is asked, over frames as over HTTP."""
    settings = {"backend": "http://127.0.0.1:9", "checkpoint_policy": True, "num_workers": 2}
    policy = {"app": "servers.model.policy:app", "settings": settings}
    async with started(tmp_path, policy=policy):
        one, other = (socket_dir(tmp_path) / f"policy.{number}" for number in range(2))

        async def both_listen() -> bool:
            return one.exists() and other.exists()

        # The server is up with the first of them.
        await until(both_listen)
        async with open_foreigner(one, TOKEN) as first, open_foreigner(other, TOKEN) as second:
            prepare = hold()
            assert (await first.control("prepare", **prepare))["phase"] == "prepared"
            status = await second.control("status")
            assert (status["phase"], status["workers"]) == ("prepared", 2)
            route = "/ng-control/v1/checkpoint/status"
            http = await second.http("GET", route, authorization=f"Bearer {TOKEN}")
            there = json.loads(http[2])
            assert (http[0], there["phase"], there["workers"]) == (200, "prepared", 2)
            assert there.keys() == status.keys()
            for operation, request, refusal in (
                ("prepare", {**hold(), "checkpoint_id": "c2"}, (409, "checkpoint_conflict")),
                ("prepare", {**prepare, "scope": 1}, (422, "invalid_request")),
                ("explode", hold(), (404, "not_found")),
            ):
                with pytest.raises(Refused) as caught:
                    await second.control(operation, **request)
                assert caught.value.args[:2] == refusal
            assert (await second.control("resume", **prepare))["phase"] == "idle"
        async with open_foreigner(one) as peer:
            with pytest.raises(Refused) as caught:
                await peer.control("status")
            assert caught.value.args[:2] == (401, "unauthorized")
