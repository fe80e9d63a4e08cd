"""Deployments as real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
import trio

from gymtrio.errors import HostError, TransportError
from gymtrio.serving.client import ServerClient
from gymtrio.serving.deployment import (
    Deployment,
    DeploymentDirectory,
    parse_deployment,
)
from gymtrio.serving.pool import open_pool
from gymtrio.serving.supervisor import ServerFailed, open_deployment
from gymtrio.settings import Secret

TOKEN = "0123456789abcdef-token"
EXAMPLE = "tests.helpers.example_server:app"


def deployment_of(**servers: Any) -> Deployment:
    entries = {
        name: {"app": EXAMPLE, "kind": "resources", "start_timeout_s": 60, **entry}
        for name, entry in servers.items()
    }
    return parse_deployment({"checkpoint": {"control_auth_token": TOKEN}, "servers": entries})


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


async def gone(pids: Iterable[int]) -> None:
    """Wait until none of these processes, which are not children of ours, runs any more."""
    with trio.fail_after(30):
        for pid in pids:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            await trio.lowlevel.wait_readable(pidfd)
            os.close(pidfd)


def read(path: Path | str) -> str:
    return Path(path).read_text()


def start_up(file: Path, run_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gymtrio.cli", "up", str(file), "--run-dir", str(run_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def test_servers_find_each_other_and_end_with_the_block(tmp_path: Path) -> None:
    """SET-2: from one deployment file, with health checks and port 0."""
    deployment = deployment_of(one={"settings": {"greeting": "hi"}}, two={"env": {"A": "b"}})
    async with open_deployment(deployment, run_dir=tmp_path / "run") as running:
        assert set(running.urls) == {"one", "two"}
        assert all(not url.endswith(":0") for url in running.urls.values())
        first: Any = (await running.client.request("one", "POST", "/greet")).json()
        assert (first["greeting"], first["instance"]) == ("hi", "one")
        second: Any = (await running.client.request("one", "POST", "/ask?two")).json()
        assert second["instance"] == "two"
        socket_dir = Path(str(running.deployment.socket_dir))
        assert stat.S_IMODE(socket_dir.stat().st_mode) == 0o700
        assert all(stat.S_IMODE((socket_dir / n).stat().st_mode) == 0o600 for n in ("one", "two"))
        pids = [running.pid(name) for name in running.urls]
        assert first["pid"] in pids
        assert all(os.getpgid(pid) == pid for pid in pids)
        for pid in pids:
            assert TOKEN not in read(f"/proc/{pid}/cmdline")
        assert TOKEN not in (tmp_path / "run/deployment.json").read_text()
        with pytest.raises(HostError, match="is used by a deployment that runs"):
            async with open_deployment(deployment, run_dir=tmp_path / "run"):
                pass
    assert not any(is_running(pid) for pid in pids)
    assert not socket_dir.exists()
    assert "stopping after SIGTERM" in (tmp_path / "run/logs/one.log").read_text()


@pytest.mark.parametrize("transport", ["frames", "http"])
async def test_servers_call_each_other_as_the_deployment_says(
    tmp_path: Path, transport: Literal["frames", "http"]
) -> None:
    """Frames between servers of one host, unless HTTP is asked for."""
    deployment = attrs.evolve(deployment_of(one={}, two={}), transport=transport)
    async with open_deployment(deployment, run_dir=tmp_path / "run") as running:
        for reach in (lambda name: name, lambda name: running.urls[name]):
            asked: Any = (await running.client.request(reach("one"), "POST", "/ask?two")).json()
            assert asked["instance"] == "two"
            # Only HTTP has such a header.
            assert (asked["host"] is None) is (transport == "frames")


async def test_killed_groups_are_gone_and_their_ports_can_be_had_again(tmp_path: Path) -> None:
    """E2E-1: SIGKILL of process groups, then the same deployment on the same ports."""
    async with open_deployment(deployment_of(one={}, two={}), run_dir=tmp_path / "a") as running:
        await running.kill_groups()
        assert not any(is_running(running.pid(name)) for name in ("one", "two"))
        with pytest.raises(TransportError, match="cannot connect"):
            await running.client.request("one", "POST", "/greet")
        again = running.deployment
        urls = running.urls
    async with open_deployment(again, run_dir=tmp_path / "a") as running:
        assert running.urls == urls
        assert (await running.client.request("one", "POST", "/greet")).status == 200
        await running.kill_groups(["one"])
        assert (await running.client.request("two", "POST", "/greet")).status == 200


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"settings": {"fail_at_start": True}},
            r"server 'bad' ended with status 1; end of its log:\n(.*\n)*.*the model file is not the",
        ),
        ({"settings": {"greting": "x"}}, r"(.*\n)*.*did you mean 'greeting'"),
        ({"app": "tests.helpers.gone:app"}, r"(.*\n)*.*no module named 'tests.helpers.gone'"),
        (
            {"settings": {"never_ready": True}, "start_timeout_s": 2.5},
            "server 'bad' was not ready within 2.5 s",
        ),
    ],
)
async def test_a_server_that_does_not_start_fails_the_launch(
    tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    """SET-2: a start failure is reported within 5 s with the log tail; everything is stopped."""
    deployment = deployment_of(good={}, bad=entry)
    with pytest.raises(ServerFailed, match=message):
        async with open_deployment(deployment, run_dir=tmp_path):
            pytest.fail("it started")
    assert "Traceback" not in (tmp_path / "logs/good.log").read_text()


async def test_a_port_in_use_is_told_in_one_line(tmp_path: Path) -> None:
    """SET-2: naming host:port and the server; nothing was started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        deployment = deployment_of(one={}, two={"bind": address})
        with pytest.raises(HostError) as caught:
            async with open_deployment(deployment, run_dir=tmp_path):
                pytest.fail("it started")
    expected = f"cannot listen on {address} for server 'two': Address already in use"
    assert str(caught.value) == expected
    assert not list((tmp_path / "logs").iterdir())


@pytest.mark.parametrize("how", ["killed", "background failure"])
async def test_a_server_that_dies_ends_the_block_with_its_log(tmp_path: Path, how: str) -> None:
    pids: list[int] = []
    with pytest.raises(ServerFailed) as caught:
        async with open_deployment(deployment_of(one={}, two={}), run_dir=tmp_path) as running:
            pids += [running.pid("one"), running.pid("two")]
            if how == "killed":
                os.kill(running.pid("one"), signal.SIGKILL)
            else:
                try:
                    await running.client.request("one", "POST", "/break-down")
                except TransportError:
                    pass
            await trio.sleep_forever()
    assert caught.value.name == "one"
    if how == "killed":
        assert "ended with signal SIGKILL" in str(caught.value)
    else:
        assert "a background task failed" in str(caught.value)
    assert not any(is_running(pid) for pid in pids)


async def test_an_error_of_the_block_comes_out_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        async with open_deployment(deployment_of(one={}), run_dir=tmp_path):
            raise KeyError


async def test_servers_die_with_their_supervisor(tmp_path: Path) -> None:
    """T13: SIGKILL the parent; the servers are gone at once and their ports are free."""
    file = tmp_path / "d.yaml"
    entry = {"app": EXAMPLE, "kind": "resources", "start_timeout_s": 60}
    servers = {"one": entry, "two": entry}
    file.write_text(json.dumps({"servers": servers}))
    process = start_up(file, tmp_path / "r")
    assert process.stdout is not None
    try:
        lines: list[str] = []
        while not lines or not lines[-1].startswith("ready"):
            lines.append(process.stdout.readline())
            assert lines[-1], process.communicate()
        url = lines[0].split()[2]
        async with open_pool() as pool:
            client = ServerClient(DeploymentDirectory(Deployment()), pool)
            reply: Any = (await client.request(url, "POST", "/greet")).json()
        assert reply["instance"] == "one"
        assert is_running(reply["pid"])
    finally:
        process.kill()
        process.communicate()
    await gone([reply["pid"]])


async def test_a_secret_given_by_value_reaches_the_servers_by_file(tmp_path: Path) -> None:
    deployment = attrs.evolve(deployment_of(one={}), session_secret=Secret("session secret"))
    async with open_deployment(deployment, run_dir=tmp_path) as running:
        environment = read(f"/proc/{running.pid('one')}/environ")
        assert TOKEN not in environment
        assert (tmp_path / "control-token").read_text() == TOKEN
        assert (tmp_path / "session-secret").stat().st_mode & 0o777 == 0o600
