"""A policy server with two workers as real processes: killed, stopped, replaced (WRK, T13)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from gymtrio.context import RolloutContext
from gymtrio.errors import PeerRefused, TransportError
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.ports import HostClock
from gymtrio.serving.client import Reply
from gymtrio.serving.deployment import Deployment, parse_deployment
from gymtrio.serving.supervisor import RunningDeployment, ServerFailed, open_deployment
from gymtrio.wire.control import CONTROL_PREFIX

TOKEN = "0123456789abcdef-token"
BEARER = (("authorization", f"Bearer {TOKEN}"),)
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
START_S = 60.0
POLL_S = 0.02


def deployment_of(directory: Path, workers: int = 2, **entry: Any) -> Deployment:
    root = directory / "checkpoints"
    root.mkdir(exist_ok=True)
    settings = {
        "backend": "engine",
        "native_backend": True,
        "checkpoint_policy": True,
        "checkpoint_generation_cuts": True,
        "num_workers": workers,
    }
    return parse_deployment(
        {
            "checkpoint": {"enabled": True, "control_auth_token": TOKEN, "root": str(root)},
            "state_dir": str(directory / "state"),
            "servers": {
                "engine": {
                    "app": "tests.helpers.hash_engine:app",
                    "kind": "model",
                    "start_timeout_s": START_S,
                },
                "policy": {
                    "app": "servers.model.policy:app",
                    "settings": settings,
                    "start_timeout_s": START_S,
                    **entry,
                },
            },
        }
    )


@attrs.frozen
class Policy:
    running: RunningDeployment

    async def ask(self, rollout: str, attempt: int = 0, body: Any = HELLO) -> Reply:
        return await self.running.client.request(
            "policy",
            "POST",
            "/v1/chat/completions",
            json=body,
            context=RolloutContext(EpisodeId(RolloutId(rollout), attempt)),
        )

    async def ask_in_vain(self, rollout: str, body: Any = HELLO) -> None:
        """The call's worker is killed before it answers."""
        with suppress(TransportError):
            await self.ask(rollout, body=body)

    async def control(self, operation: str, name: str, timeout_s: float = 10, **more: Any) -> Any:
        reply = await self.running.client.request(
            "policy",
            "POST",
            f"{CONTROL_PREFIX}/{operation}",
            json={
                "checkpoint_id": name,
                "deadline_ts": HostClock().now_s() + timeout_s,
                **more,
            },
            headers=BEARER,
            control=True,
            context=None,
        )
        return reply.raise_for_status().json()

    async def status(self) -> Any:
        path = f"{CONTROL_PREFIX}/status"
        reply = await self.running.client.request(
            "policy", "GET", path, headers=BEARER, control=True, context=None
        )
        return reply.raise_for_status().json()

    async def pace(self, **asked: Any) -> Any:
        reply = await self.running.client.request("engine", "POST", "/pace", json=asked)
        return reply.json()

    async def until_live(self, count: int) -> None:
        async def is_so() -> bool:
            return (await self.pace())["live"] >= count

        await until(is_so)

    async def until_joined(self) -> None:
        async def is_so() -> bool:
            return (await self.status())["workers"] == 2

        await until(is_so)

    def workers(self) -> list[int]:
        """The processes that serve: the children of the coordinator."""
        return children_of(self.running.pid("policy"))


def children_of(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def until(is_so: Callable[[], Awaitable[bool]], seconds: float = START_S) -> None:
    """Ask processes of which there is nothing to wait for."""
    with trio.fail_after(seconds):
        while not await is_so():  # noqa: ASYNC110
            await trio.sleep(POLL_S)


async def gone_within(pids: list[int], seconds: float) -> None:
    """Wait until nothing of these processes is left, their last thread included."""
    with trio.fail_after(seconds):
        for pid in pids:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            await trio.lowlevel.wait_readable(pidfd)
            os.close(pidfd)


@asynccontextmanager
async def open_policy(
    directory: Path, deployment: Deployment | None = None
) -> AsyncIterator[Policy]:
    deployment = deployment or deployment_of(directory)
    async with open_deployment(deployment, run_dir=directory / "run") as running:
        yield Policy(running)


def episodes(*names: str) -> list[dict[str, Any]]:
    return [{"rollout_id": name, "attempt": 0} for name in names]


async def test_a_checkpoint_over_two_workers_is_restored_by_two_others(tmp_path: Path) -> None:
    """WRK-1, STO-6, I16, CUT-4: a delivered call and one in flight, killed, restored, continued."""
    deployment = deployment_of(tmp_path)
    async with open_policy(tmp_path, deployment) as policy:
        await policy.pace(at_once=True)
        for number in range(6):
            assert (await policy.ask(f"r{number}")).status == 200
        await policy.pace(at_once=False)
        async with trio.open_nursery() as nursery:
            for number in range(6):
                more = {"messages": [{"role": "user", "content": f"more {number}"}]}
                nursery.start_soon(policy.ask_in_vain, f"r{number}", more)
            await policy.until_live(6)
            await policy.pace(emit=7)
            prepared = await policy.control("prepare", "c1")
            assert prepared["phase"] == "prepared"
            assert prepared["report"]["counts"]["cut"] == 6
            names = [f"r{number}" for number in range(6)]
            committed = await policy.control(
                "commit", "c1", checkpoint_dir="c1", episode_ids=episodes(*names)
            )
            assert committed["episode_ids"] == names
            sections = {part["section"] for part in committed["manifest"]["parts"]}
            assert sections == {"ledger", "cuts"}
            await policy.running.kill_groups()
            nursery.cancel_scope.cancel()
    async with open_policy(tmp_path, deployment) as policy:
        await policy.control("restore", "x1", checkpoint_dir="c1", episode_ids=episodes(*names))
        assert len((await policy.status())["restored_generation_cuts"]) == 6
        await policy.control("resume", "x1")
        await policy.pace(at_once=True)
        for number in range(6):
            more = {"messages": [{"role": "user", "content": f"more {number}"}]}
            reply = await policy.ask(f"r{number}", 1, more)
            assert reply.status == 200
            path = f"/ng-control/v1/ledger/r{number}-a1"
            rows: Any = await policy.running.client.request("policy", "GET", path, headers=BEARER)
            counts = [row["continued_token_count"] for row in rows.json()["rows"]]
            assert counts == [0, 7]
        assert (await policy.ask("r0")).status == 409
        assert (await policy.status())["restored_generation_cuts"] == []


async def test_no_orphans(tmp_path: Path) -> None:
    """T13, WRK-5, V3: the main process is SIGKILLed, its workers are gone and the port is free."""
    deployment = deployment_of(tmp_path)
    async with open_policy(tmp_path, deployment) as policy:
        await policy.until_joined()
        workers, port = policy.workers(), policy.running.deployment.servers["policy"].bind
        assert len(workers) == 2
        child = policy.running._children["policy"]
        child.expected_to_exit = True
        os.kill(child.process.pid, signal.SIGKILL)
        await gone_within([*workers, child.process.pid], 2)
        host, _, number = port.rpartition(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, int(number)))
        resolved = policy.running.deployment
    async with open_policy(tmp_path, resolved) as policy:
        await policy.pace(at_once=True)
        assert (await policy.ask("r")).status == 200


async def test_a_worker_killed_during_a_checkpoint_blocks_it_and_is_replaced(
    tmp_path: Path,
) -> None:
    """T13, WRK-3, WRK-5: whatever joins, this checkpoint is over; the next one is like any other."""
    async with open_policy(tmp_path) as policy:
        await policy.pace(at_once=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(policy.ask_in_vain, "r")
            await policy.until_live(1)
            assert (await policy.control("prepare", "c1"))["phase"] == "prepared"
            victim = policy.workers()[0]
            os.kill(victim, signal.SIGKILL)

            async def is_lost() -> bool:
                return "policy-worker-lost" in (await policy.status())["report"]["blockers"]

            await until(is_lost)
            await policy.until_joined()
            assert victim not in policy.workers()
            with pytest.raises(PeerRefused, match="policy-worker-lost"):
                await policy.control("commit", "c1", checkpoint_dir="c1", episode_ids=episodes("r"))
            await policy.control("resume", "c1")
            assert (await policy.control("prepare", "c2"))["phase"] == "prepared"
            await policy.control("commit", "c2", checkpoint_dir="c2", episode_ids=episodes("r"))
            await policy.control("resume", "c2")
            nursery.cancel_scope.cancel()


async def test_a_worker_that_is_stopped_is_named_and_comes_back(tmp_path: Path) -> None:
    """WRK-3, I29: SIGSTOP; prepare answers by its deadline, resume at once."""
    async with open_policy(tmp_path) as policy:
        await policy.until_joined()
        stopped, running = policy.workers()
        os.kill(stopped, signal.SIGSTOP)
        try:
            prepared = await ask_until_served(policy, "prepare", "c1")
            assert prepared["phase"] == "preparing"
            assert prepared["report"]["blockers"] == ["policy-workers-unreported:1"]
            resumed = await ask_until_served(policy, "resume", "c1")
            assert resumed["phase"] == "idle"
        finally:
            os.kill(stopped, signal.SIGCONT)
        with trio.fail_after(START_S):
            while (await policy.control("prepare", "c2"))["phase"] != "prepared":
                await policy.control("resume", "c2")
        assert sorted(policy.workers()) == sorted([stopped, running])
        await policy.control("resume", "c2")


async def ask_until_served(policy: Policy, operation: str, name: str) -> Any:
    """A connection may land at the worker that is stopped: a controller asks again."""
    with trio.fail_after(START_S):
        while True:
            with trio.move_on_after(4):
                return await policy.control(operation, name, timeout_s=2)
            # Another connection.


async def test_sigterm_drains_the_workers_and_leaves_nothing(tmp_path: Path) -> None:
    """SRV-2, V2."""
    async with open_policy(tmp_path) as policy:
        await policy.until_joined()
        pids = [*policy.workers(), policy.running.pid("policy")]
        await policy.running.stop(["policy"])
        assert not any(map(is_running, pids))
        assert policy.running._children["policy"].process.returncode == 0
        log = policy.running.log_path("policy").read_text()
        assert "Traceback" not in log


async def test_a_worker_that_cannot_start_fails_the_launch(tmp_path: Path) -> None:
    """WRK-5: with the end of its log, which says why."""
    deployment = deployment_of(tmp_path, env={"PYTHONPATH": ""}, app="servers.model.nothing:app")
    with trio.fail_after(START_S):
        with pytest.raises(ServerFailed, match="no module named 'servers.model.nothing'"):
            async with open_policy(tmp_path, deployment):
                pass


async def test_several_workers_without_a_coordinator_are_refused(tmp_path: Path) -> None:
    """WRK-1: with the ways to have one."""
    deployment = deployment_of(tmp_path)
    async with open_deployment(deployment, run_dir=tmp_path / "run") as running:
        file = running.run_dir / "deployment.json"
        environment = {**os.environ, "GYMTRIO_DEPLOYMENT": str(file), "GYMTRIO_SERVER": "policy"}
        environment.pop("GYMTRIO_COORDINATOR", None)
        ended = await trio.run_process(
            [sys.executable, "-m", "gymtrio.cli", "serve", "servers.model.policy:app"],
            env=environment,
            check=False,
            capture_stdout=True,
            stderr=subprocess.STDOUT,
        )
        assert ended.returncode == 1
        assert b"gymtrio coordinate" in ended.stdout


async def test_hypercorn_starts_the_workers_of_a_coordinator_that_was_started_by_hand(
    tmp_path: Path,
) -> None:
    """SET-2, WRK-1: the same server under other people's supervision."""
    async with open_deployment(deployment_of(tmp_path), run_dir=tmp_path / "run") as running:
        await running.stop(["policy"])
        file = running.run_dir / "deployment.json"
        bind = running.deployment.servers["policy"].bind
        with started("-m", "gymtrio.cli", "coordinate", str(file), "policy") as coordinator:
            assert coordinator.stdout is not None
            lines = [coordinator.stdout.readline().strip() for _ in range(3)]
            variables = dict(line.split("=", 1) for line in lines)
            assert set(variables) == {"GYMTRIO_DEPLOYMENT", "GYMTRIO_SERVER", "GYMTRIO_COORDINATOR"}
            hypercorn = ["-m", "hypercorn", "-k", "trio", "-w", "2", "-b", bind]
            with started(*hypercorn, "servers.model.policy:app", env=variables) as served:
                policy = Policy(running)

                async def is_ready() -> bool:
                    try:
                        reply = await running.client.request("policy", "GET", "/ready")
                    except TransportError:
                        return False
                    return reply.status == 200

                await until(is_ready)
                await policy.pace(at_once=True)
                assert (await policy.ask("r")).status == 200
                assert (await policy.control("prepare", "c1"))["phase"] == "prepared"
                assert (await policy.status())["workers"] == 2
                await policy.control("resume", "c1")
                served.terminate()
                await trio.to_thread.run_sync(served.wait)


async def test_a_worker_ends_within_two_seconds_of_its_coordinator(tmp_path: Path) -> None:
    """WRK-5, I30: also where no kernel kills it, and with a call in flight."""
    async with open_deployment(deployment_of(tmp_path), run_dir=tmp_path / "run") as running:
        await running.stop(["policy"])
        file = running.run_dir / "deployment.json"
        bind = running.deployment.servers["policy"].bind
        with started("-m", "gymtrio.cli", "coordinate", str(file), "policy") as coordinator:
            assert coordinator.stdout is not None
            lines = [coordinator.stdout.readline().strip() for _ in range(3)]
            variables = dict(line.split("=", 1) for line in lines)
            serve = ["-m", "gymtrio.cli", "serve", "servers.model.policy:app", "--bind", bind]
            with started(*serve, env=variables) as worker:
                policy = Policy(running)

                async def is_there() -> bool:
                    try:
                        return (await policy.status())["workers"] == 1
                    except TransportError:
                        return False

                await until(is_there)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(policy.ask_in_vain, "r")
                    await policy.until_live(1)
                    coordinator.kill()
                    await gone_within([worker.pid], 2)
                    assert worker.wait() == 1


@contextmanager
def started(*command: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process for the time of the block."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()
