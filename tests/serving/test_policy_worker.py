"""Control calls that reach a worker are answered by the coordinator (WRK-1)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from quart_trio import QuartTrio
from trio.testing import wait_all_tasks_blocked

from gymtrio.checkpoint.routes import serve_control, serving_blueprint
from gymtrio.errors import (
    CheckpointConflict,
    CoordinatorUnavailable,
    InvalidRequest,
    NotFound,
    StaleCheckpoint,
)
from gymtrio.participants.policy.worker import CoordinatorLink, PolicyWorker
from gymtrio.ports import HostClock
from gymtrio.serving.policy_worker import FORWARDED_STATUS_S, forward_control
from gymtrio.wire.control import CONTROL_PREFIX
from tests.helpers.plane import episode
from tests.participants.policy.harness import World, chat
from tests.participants.policy.workers import Served, open_served

TOKEN = "0123456789abcdef-token"


async def control(served: Served, worker: int, operation: str, name: str, **more: Any) -> Any:
    body = {"checkpoint_id": name, "deadline_ts": served.clock.now_s() + 10, **more}
    policy = served.workers[worker].policy
    return json.loads(
        await forward_control(policy, served.clock, operation, json.dumps(body).encode())
    )


async def test_a_whole_checkpoint_over_whatever_worker_is_reached(autojump_clock: object) -> None:
    """WRK-1: to a controller the server is one participant."""
    async with open_served(World()) as served:
        await served.workers[1].ask_at_once(episode("r"), chat("a"))
        assert (await control(served, 0, "prepare", "c1"))["phase"] == "prepared"
        status = json.loads(
            await forward_control(served.workers[1].policy, served.clock, "status", b"")
        )
        assert (status["phase"], status["workers"]) == ("prepared", 2)
        scope = [{"rollout_id": "r", "attempt": 0}]
        committed = await control(served, 1, "commit", "c1", checkpoint_dir="d", episode_ids=scope)
        assert committed["episode_ids"] == ["r"]
        # The text itself, in the order in which it was made.
        here = await serve_control(served.control, "status", b"")
        assert await forward_control(served.workers[0].policy, served.clock, "status", b"") == here
        assert (await control(served, 0, "resume", "c1"))["phase"] == "idle"


async def test_refusals_come_through_as_they_are(autojump_clock: object) -> None:
    """CTL-17, WRK-1."""
    async with open_served(World()) as served:
        await control(served, 0, "prepare", "c1")
        with pytest.raises(CheckpointConflict):
            await control(served, 1, "prepare", "c2")
        await control(served, 1, "resume", "c1")
        with pytest.raises(StaleCheckpoint):
            await control(served, 0, "prepare", "c1")
        with pytest.raises(InvalidRequest, match="nonsense"):
            await control(served, 0, "prepare", "c3", nonsense=1)
        with pytest.raises(NotFound):
            await control(served, 0, "explode", "c3")


async def test_a_scope_of_thousands_is_passed_on(autojump_clock: object) -> None:
    """WRK-2: larger than a frame, in both directions."""
    async with open_served(World()) as served:
        await control(served, 0, "prepare", "c1")
        scope = [{"rollout_id": f"r{n:0120}", "attempt": 0} for n in range(16_000)]
        committed = await control(served, 0, "commit", "c1", checkpoint_dir="d", episode_ids=scope)
        assert len(committed["episode_ids"]) == 16_000


async def test_a_worker_without_its_coordinator_answers_503(autojump_clock: object) -> None:
    """WRK-4, CTL-17: it has lost it, or never had it; also over HTTP."""
    async with open_served(World()) as served:
        policy = served.workers[0].policy
        served.workers[0].stream.cut()
        await wait_all_tasks_blocked()
        with pytest.raises(CoordinatorUnavailable):
            await forward_control(policy, served.clock, "status", b"")
        policy.link = CoordinatorLink()
        assert await ask_over_http(policy) == (503, "checkpoint_coordinator_unavailable")


async def test_a_control_call_is_refused_when_the_coordinator_does_not_answer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """WRK-2: by the deadline of the call, and a status soon; silence is noticed much later."""
    async with open_served(World()) as served:
        one = served.workers[0]
        one.stream.stall()
        began = trio.current_time()
        with pytest.raises(CoordinatorUnavailable):
            await forward_control(one.policy, served.clock, "status", b"")
        assert trio.current_time() - began == FORWARDED_STATUS_S
        began = trio.current_time()
        with pytest.raises(CoordinatorUnavailable, match="by the deadline"):
            await control(served, 0, "prepare", "c1", deadline_ts=served.clock.now_s() + 2)
        assert trio.current_time() - began == pytest.approx(2 + FORWARDED_STATUS_S)


@pytest.mark.parametrize(
    "body",
    [
        b"no JSON",
        b"[]",
        b'{"deadline_ts": 1' + b"0" * 400 + b"}",
        b'{"deadline_ts": -1' + b"0" * 400 + b"}",
        b"[" * 5_000,
    ],
)
async def test_what_is_no_control_body_is_refused_by_the_coordinator(
    body: bytes, autojump_clock: object
) -> None:
    """WRK-1: as it is anywhere else."""
    async with open_served(World()) as served:
        with pytest.raises(InvalidRequest):
            await forward_control(served.workers[0].policy, served.clock, "prepare", body)


async def ask_over_http(policy: PolicyWorker) -> tuple[int, str]:
    app = QuartTrio("test")

    async def serve(operation: str, body: bytes) -> bytes:
        return await forward_control(policy, HostClock(), operation, body)

    app.register_blueprint(serving_blueprint(serve, lambda token: token == TOKEN))
    headers = {"authorization": f"Bearer {TOKEN}"}
    reply = await app.test_client().get(f"{CONTROL_PREFIX}/status", headers=headers)
    return reply.status_code, (await reply.get_json())["error"]["code"]
