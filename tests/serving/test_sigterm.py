"""SIGTERM to the real process of a server: while requests are parked, and in the middle of a commit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from gymtrio.errors import PeerRefused, TransportError
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.serving.client import Reply
from gymtrio.serving.deployment import parse_deployment
from gymtrio.serving.supervisor import RunningDeployment, open_deployment
from gymtrio.storage.disk import ThreadDisk
from gymtrio.storage.manifest import MANIFEST_NAME
from gymtrio.storage.reader import read_checkpoint
from gymtrio.storage.root import CheckpointRoot
from gymtrio.strict import unstructure
from tests.helpers.every_kind import SORTS, control, open_waiting

SESSIONS = 300


@asynccontextmanager
async def running(kind: str, directory: Path) -> AsyncIterator[RunningDeployment]:
    """One server of this kind, in a process of its own."""
    plain = SORTS[kind].deployment(directory, root=str(directory / "checkpoints"))
    plain["state_dir"] = str(directory / "state")
    plain["servers"]["peer"]["start_timeout_s"] = 60
    deployment = parse_deployment(plain)
    async with open_deployment(deployment, run_dir=directory / "run") as opened:
        yield opened


def log_of(deployment: RunningDeployment) -> str:
    return deployment.log_path("peer").read_text()


@pytest.mark.parametrize("kind", ["environment", "resources"])
async def test_parked_requests_are_answered_and_the_process_ends(kind: str, tmp_path: Path) -> None:
    """SRV-2: 503 with Retry-After, without waiting for the grace; exit status 0."""
    replies: list[Reply] = []
    async with running(kind, tmp_path) as deployment:
        client = deployment.client
        wait = await open_waiting(client, SORTS[kind])
        await control(client, "prepare")

        async def park() -> None:
            replies.append(await wait())

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(park)
            while await waiting(deployment) < 5:
                pass
            began = trio.current_time()
            await deployment.stop(["peer"])
        assert trio.current_time() - began < 4.5
        assert "stopping after SIGTERM" in log_of(deployment)
        assert "Traceback" not in log_of(deployment)
    assert [(reply.status, reply.header("retry-after")) for reply in replies] == [(503, "1")] * 5


async def waiting(deployment: RunningDeployment) -> float:
    """How many requests wait at the gate."""
    reply = await deployment.client.request("peer", "GET", "/metrics", control=True)
    lines = reply.body.decode().splitlines()
    line = next(part for part in lines if part.startswith("gymtrio_gate_waiting"))
    return float(line.split()[1])


async def seed(deployment: RunningDeployment) -> set[str]:
    """Begin sessions of as many episodes; their capture keys."""
    episodes = [EpisodeId(RolloutId(f"r{number}"), 0) for number in range(SESSIONS)]
    limiter = trio.CapacityLimiter(20)

    async def one(episode_id: EpisodeId) -> None:
        async with limiter:
            body = {
                "resources_session_id": f"s-{episode_id.capture_key}",
                "episode_id": unstructure(episode_id),
                "task_id": {"taskset": "t", "task_id": "1"},
                "task_data": {"initial_count": 1},
            }
            reply = await deployment.client.request("peer", "POST", "/seed_session", json=body)
            reply.raise_for_status()

    async with trio.open_nursery() as nursery:
        for episode_id in episodes:
            nursery.start_soon(one, episode_id)
    return {episode_id.capture_key for episode_id in episodes}


@pytest.mark.parametrize("moment", ["at once", "begun", "nearly whole", "acknowledged"])
async def test_a_commit_is_whole_or_not_there(moment: str, tmp_path: Path) -> None:
    """SRV-2, STO-1: what was acknowledged is there, also when the signal came right after it began."""
    target = tmp_path / "checkpoints" / "c1"
    acknowledged: list[Any] = []
    async with running("resources", tmp_path) as deployment:
        keys = await seed(deployment)
        await control(deployment.client, "prepare")

        async def commit() -> None:
            try:
                acknowledged.append(
                    await control(deployment.client, "commit", checkpoint_dir=str(target))
                )
            except (TransportError, PeerRefused):
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(commit)
            files = {"begun": 1, "nearly whole": 2}.get(moment, 0)
            with trio.fail_after(60):
                while not acknowledged and len(list(target.parent.rglob("*"))) < files:
                    await trio.lowlevel.checkpoint()
                while moment == "acknowledged" and not acknowledged:
                    await trio.lowlevel.checkpoint()
            await deployment.stop(["peer"])
        assert "Traceback" not in log_of(deployment)
    stored = await stored_keys(target)
    assert stored in (None, keys)
    if acknowledged:
        assert set(acknowledged[0]["episode_ids"]) == keys
        assert stored == keys


async def stored_keys(target: Path) -> set[str] | None:
    """What the checkpoint holds; None: there is none."""
    disk = ThreadDisk()
    if not list(target.rglob(MANIFEST_NAME)):
        return None
    place = await CheckpointRoot(str(target.parent)).accept(disk, str(target))
    found = await read_checkpoint(disk, place, kind="resources", instance="peer", scope=None)
    return {record.episode_id.capture_key for record in found.every_record()}


SPINNING = """
import os, signal
from gymtrio.serving import launch
from gymtrio.serving.connection import HttpLimits
from gymtrio.serving.deployment import Bind

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        for what in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{what}.complete"})
        return
    print("spinning", flush=True)
    while True:
        pass

launch.DRAIN_S_MAX = launch.SHUTDOWN_S_MAX = 0.1
sock = launch.bind_socket(Bind("127.0.0.1", 0), "peer")
print(launch.bound_to(sock).port, flush=True)
raise SystemExit(launch.run_server(app, sock, limits=HttpLimits(grace_s=0.1)))
"""


async def test_a_process_whose_loop_does_not_go_on_ends_all_the_same() -> None:
    """SRV-2: hard deadline last, and the log says where it was."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", SPINNING], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        port = int(await line_of(process.stdout))
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            assert await line_of(process.stdout) == b"spinning\n"
            process.terminate()
            with trio.fail_after(30):
                assert await process.wait() == 1
        told = b""
        while data := await process.stderr.receive_some():
            told += data
        assert b"in app" in told
    finally:
        process.kill()
        await process.wait()


async def line_of(stream: trio.abc.ReceiveStream) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        data = await stream.receive_some(1)
        assert data, line
        line += data
    return line


FEW_FILES = """
import resource
from gymtrio.serving.launch import allow_many_files
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
allow_many_files()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
"""


async def test_a_server_has_as_many_files_as_it_may() -> None:
    """SRV-4: thousands of connections under the limits that a machine comes with."""
    await trio.run_process([sys.executable, "-c", FEW_FILES])


SERVED_WITH_FEW_FILES = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.argv[1:] = ["serve", "servers.resources.counter:app"]
runpy.run_module("gymtrio.cli", run_name="__main__")
"""


async def test_more_connections_than_files_are_waited_for(tmp_path: Path) -> None:
    """SRV-1: who is connected is served meanwhile, and so is everybody once others have left."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", SERVED_WITH_FEW_FILES],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdout is not None
    try:
        port = int((await line_of(process.stdout)).rpartition(b":")[2])
        with trio.fail_after(60):
            first = await trio.open_tcp_stream("127.0.0.1", port)
            await health(first)
            others = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(100)]
            await health(first)
            for other in others[:-1]:
                await other.aclose()
            # It had to wait until others left.
            await health(others[-1])
            await health(first)
        process.terminate()
        with trio.fail_after(30):
            assert await process.wait() == 0
        await first.aclose()
        await others[-1].aclose()
    finally:
        process.kill()
        await process.wait()


async def health(stream: trio.SocketStream) -> None:
    await stream.send_all(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
    answer = b""
    while b'"alive"' not in answer:
        data = await stream.receive_some()
        assert data
        answer += data
