"""The control protocol over frames: the same messages, replies and refusals as over HTTP (WIRE-1)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from quart_trio import QuartTrio

from gymtrio.checkpoint.routes import serve_control
from gymtrio.errors import PeerRefused, Refusal, TransportError
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId
from gymtrio.serving import control_frames, control_frames_server, controlchannel, controlplane
from gymtrio.serving.client import ServerClient
from gymtrio.serving.control_frames import FramesControlChannel, open_control_frames
from gymtrio.serving.control_frames_server import CONTROL_FAMILY, control_handler
from gymtrio.serving.deployment import Deployment, DeploymentDirectory
from gymtrio.serving.frames_server import FramesServer
from gymtrio.serving.inprocess import open_network
from gymtrio.settings import CheckpointSettings, Secret
from gymtrio.wire.channel import Channel, open_channel
from gymtrio.wire.codec import pack, to_json
from gymtrio.wire.control import (
    REPLIES,
    CommitRequest,
    ControlRequest,
    ForgetRequest,
    PrepareRequest,
    RenewRequest,
    RestoreRequest,
    ResumeRequest,
    RetireRequest,
    reply_from_plain,
)
from gymtrio.wire.errors import ChannelLost, ChannelRefused
from gymtrio.wire.messages import Hello
from gymtrio.wire.tcp import connect_tcp, listener_port, open_tcp_listener
from gymtrio.wire.unix import connect_unix, open_unix_listener, runtime_directory
from tests.helpers.plane import Plane, open_plane

TOKEN: Final = Secret("0123456789abcdef")
SERVER: Final = "counter"
EPISODES: Final = tuple(EpisodeId(RolloutId(f"r{n}")) for n in range(3))
ME: Final = Hello(role="server", name=SERVER, instance="1")
STRANGER: Final = Hello(role="stranger", name="x", instance="1")


class Nowhere:
    """The channel for servers that have no socket here."""

    async def call(
        self, server: str, operation: str, request: ControlRequest | None, deadline: float
    ) -> object:
        raise TransportError(f"{server} is elsewhere")


async def no_app(*_: Any) -> None:
    raise AssertionError("no request was made")


@asynccontextmanager
async def serving(plane: Plane | None, path: Path) -> AsyncIterator[None]:
    """A server whose socket file is there for as long as the block runs."""
    handler = control_handler(None if plane is None else plane.control)
    server = FramesServer(no_app, ME, {CONTROL_FAMILY: handler})
    async with open_unix_listener(path) as listener, trio.open_nursery() as nursery:
        await nursery.start(
            lambda **started: server.serve(listener, TOKEN, token_required=False, **started)
        )
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def controlled() -> AsyncIterator[tuple[FramesControlChannel, Plane, Path]]:
    with runtime_directory() as directory:
        path = directory / SERVER
        async with (
            open_plane() as plane,
            serving(plane, path),
            open_control_frames({SERVER: path}, TOKEN, Nowhere(), nonce="n") as channel,
        ):
            yield channel, plane, path


def soon() -> float:
    return trio.current_time() + 10


def story(plane: Plane) -> list[tuple[str, ControlRequest | None]]:
    """Every operation, and some that are refused."""
    base: dict[str, Any] = {
        "checkpoint_id": CheckpointId("c1"),
        "deadline_ts": plane.clock.now_s() + 60,
    }
    again = base | {"checkpoint_id": CheckpointId("c2")}
    return [
        ("status", None),
        ("prepare", PrepareRequest(**base)),
        ("renew", RenewRequest(**base)),
        ("commit", CommitRequest(**base, checkpoint_dir="d", episode_ids=None)),
        ("status", None),
        ("prepare", PrepareRequest(**again)),
        ("resume", ResumeRequest(**base)),
        ("resume", ResumeRequest(**base)),
        ("prepare", PrepareRequest(**base)),
        ("retire", RetireRequest(**again, episode_ids=(EPISODES[1],))),
        ("forget", ForgetRequest(**again, rollout_ids=("r1",))),
        ("restore", RestoreRequest(**again, checkpoint_dir="d", episode_ids=(EPISODES[0],))),
        ("resume", ResumeRequest(**again)),
        ("restore", RestoreRequest(**again, checkpoint_dir="nowhere", episode_ids=())),
        ("status", None),
    ]


def comparable(plain: Any) -> Any:
    """Without what differs between two lives of the same server."""
    times = {"incarnation", "lease_expires_at", "lease_s"}
    return {key: value for key, value in plain.items() if key not in times}


async def test_every_operation_says_the_same_over_http_and_over_frames() -> None:
    """WIRE-1, CTL-1"""
    over_http: list[object] = []
    async with open_plane() as plane:
        for episode in EPISODES:
            plane.participant.parked[episode] = "note"
        for operation, request in story(plane):
            body = b"" if request is None else to_json(request)
            try:
                plain = json.loads(await serve_control(plane.control, operation, body))
                over_http.append((operation, comparable(plain)))
            except Refusal as refusal:
                over_http.append((operation, refusal.status, refusal.code, refusal.detail))
    over_frames: list[object] = []
    async with controlled() as (channel, plane, _):
        for episode in EPISODES:
            plane.participant.parked[episode] = "note"
        for operation, request in story(plane):
            try:
                plain = await channel.call(SERVER, operation, request, soon())
                reply_from_plain(REPLIES[operation], plain)
                over_frames.append((operation, comparable(plain)))
            except PeerRefused as refused:
                over_frames.append((operation, refused.status, refused.code, refused.detail))
    assert over_frames == over_http
    assert {step[0] for step in over_http} == REPLIES.keys()  # type: ignore[index]
    assert any(len(step) == 4 for step in over_http)  # type: ignore[arg-type]


@asynccontextmanager
async def stranger(path: Path, token: Secret | None) -> AsyncIterator[Channel]:
    stream = await connect_unix(path)
    async with open_channel(stream, role="opener", me=STRANGER, token=token) as channel:
        yield channel


@pytest.mark.parametrize("kind", ["control/prepare", "control/status", "control/x", "control"])
async def test_without_the_token_nothing_changes_and_nothing_is_revealed(kind: str) -> None:
    """I35"""
    async with controlled() as (_, plane, path):
        async with stranger(path, None) as channel:
            for body in (b"", b"\xff", pack({"checkpoint_id": "c1", "deadline_ts": 1.0})):
                with pytest.raises(ChannelRefused) as caught:
                    await channel.request(kind, body)
                assert (caught.value.status, caught.value.code) == (401, "unauthorized")
                assert caught.value.detail == "a valid bearer token is required"
        with pytest.raises(ChannelLost, match="unauthorized"):
            async with stranger(path, Secret("wrong" * 4)):
                pytest.fail("let in")
        assert plane.phase == "idle"


async def test_who_is_not_of_this_host_cannot_control_over_frames() -> None:
    """I35: the kernel does not say who it is, though it has the token."""
    async with open_plane() as plane, open_tcp_listener("127.0.0.1", 0) as listener:
        server = FramesServer(no_app, ME, {CONTROL_FAMILY: control_handler(plane.control)})
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, listener, TOKEN)
            stream = await connect_tcp("127.0.0.1", listener_port(listener))
            async with open_channel(stream, role="opener", me=STRANGER, token=TOKEN) as channel:
                with pytest.raises(ChannelRefused, match="401 unauthorized"):
                    await channel.request("control/status")
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("kind", "body", "status", "told"),
    [
        ("control/nonsense", b"", 404, "no control operation 'nonsense'"),
        ("control/prepare", b"", 422, "not a message"),
        ("control/prepare", b"\x90", 422, "expected an object"),
        ("control/prepare", pack({"checkpoint_id": "c"}), 422, "deadline_ts: missing"),
        (
            "control/commit",
            pack(
                {
                    "checkpoint_id": "c",
                    "deadline_ts": 1.0,
                    "checkpoint_dir": "d",
                    "episode_ids": [{"rollout_id": "r", "attempt": "1"}],
                }
            ),
            422,
            "episode_ids[0].attempt: expected int",
        ),
        ("control/prepare", bytes(17 * 2**20), 413, "limit of 16777216"),
    ],
)
async def test_what_is_wrong_with_a_call_is_said_with_its_path(
    kind: str, body: bytes, status: int, told: str
) -> None:
    """CTL-17, SRV-5"""
    async with controlled() as (_, plane, path), stranger(path, TOKEN) as channel:
        with pytest.raises(ChannelRefused) as caught:
            await channel.request(kind, body)
        assert caught.value.status == status
        assert told in caught.value.detail
        assert plane.phase == "idle"


async def test_a_server_without_a_participant_is_absent() -> None:
    """COORD-4"""
    with runtime_directory() as directory:
        path = directory / SERVER
        async with (
            serving(None, path),
            open_control_frames({SERVER: path}, TOKEN, Nowhere(), nonce="n") as channel,
        ):
            with pytest.raises(PeerRefused) as caught:
                await channel.call(SERVER, "status", None, soon())
            assert caught.value.status == 404


async def test_a_server_that_is_gone_is_an_error_and_found_again_when_it_is_back() -> None:
    """COORD-4"""
    with runtime_directory() as directory:
        path = directory / SERVER
        async with open_control_frames({SERVER: path}, TOKEN, Nowhere(), nonce="n") as channel:
            for _ in range(2):
                with pytest.raises(TransportError, match="counter: cannot connect"):
                    await channel.call(SERVER, "status", None, soon())
                async with open_plane() as plane, serving(plane, path):
                    told = await channel.call(SERVER, "status", None, soon())
                    assert isinstance(told, dict)
                    assert told["phase"] == "idle"
            with pytest.raises(TransportError, match="elsewhere"):
                await channel.call("other", "status", None, soon())


async def test_a_call_ends_at_its_deadline_and_what_it_began_goes_on() -> None:
    """CTL-8, CTL-9"""
    async with controlled() as (channel, plane, _):
        plane.participant.running.add(EPISODES[0])
        request = PrepareRequest(
            checkpoint_id=CheckpointId("c1"), deadline_ts=plane.clock.now_s() + 60
        )
        with pytest.raises(TransportError):
            await channel.call(SERVER, "prepare", request, trio.current_time() - 1)
        assert plane.phase == "idle", "nothing was sent"
        with pytest.raises(TransportError, match="deadline"):
            await channel.call(SERVER, "prepare", request, trio.current_time() + 0.05)
        assert plane.phase == "preparing"
        plane.participant.finish(EPISODES[0], "note")
        await channel.call(SERVER, "prepare", request, soon())
        assert plane.phase == "prepared"


async def test_thousands_of_ids_fit_into_a_call() -> None:
    """STO-5"""
    async with controlled() as (channel, plane, _):
        ids = tuple(EpisodeId(RolloutId(f"rollout-{n:020d}")) for n in range(16_000))
        base: dict[str, Any] = {
            "checkpoint_id": CheckpointId("c"),
            "deadline_ts": plane.clock.now_s() + 60,
        }
        reply = await channel.call(SERVER, "retire", RetireRequest(**base, episode_ids=ids), soon())
        assert isinstance(reply, dict)
        assert len(reply["retired"]) == 16_000


async def test_a_request_is_noted_before_it_is_written_and_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """STO-5: over frames and over HTTP, what is young is set aside before thousands of ids are made."""
    noted: list[str] = []
    for module in (control_frames, control_frames_server, controlchannel, controlplane):
        monkeypatch.setattr(module, "note_message", partial(noted.append, module.__name__))
    async with controlled() as (channel, plane, _):
        request = ResumeRequest(
            checkpoint_id=CheckpointId("c1"), deadline_ts=plane.clock.now_s() + 60
        )
        await channel.call(SERVER, "resume", request, soon())
        assert noted == [control_frames.__name__, control_frames_server.__name__]
        framework = QuartTrio(__name__)
        settings = CheckpointSettings(enabled=True, root="/", control_auth_token=TOKEN)
        controlplane.add_control_routes(framework, partial(serve_control, plane.control), settings)
        async with open_network() as network:
            with network.serving(SERVER, framework):
                client = ServerClient(DeploymentDirectory(Deployment()), network)
                over_http = controlchannel.HttpControlChannel(client, TOKEN)
                await over_http.call(f"http://{SERVER}", "resume", request, soon())
        assert noted[2:] == [controlchannel.__name__, controlplane.__name__]
