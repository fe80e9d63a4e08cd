"""The control plane over HTTP, through the framework, with its token and its error bodies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
from quart import typing as quart_typing
from quart_trio import QuartTrio
from trio.testing import MockClock

from gymtrio.checkpoint.routes import serve_control, serving_blueprint
from gymtrio.errors import REFUSALS
from gymtrio.limits import CONTROL_BODY_BYTES_MAX
from gymtrio.wire.control import CONTROL_PREFIX, REQUESTS
from tests.helpers.plane import Plane, episode, open_plane

TOKEN = "a token of thirty-two characters"
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}


@attrs.frozen
class Served:
    plane: Plane
    client: quart_typing.TestClientProtocol

    async def post(self, operation: str, headers: Any = AUTHORIZED, **fields: Any) -> Any:
        base = {"checkpoint_id": "c1", "deadline_ts": self.plane.clock.now_s() + 10}
        return await self.client.post(
            f"{CONTROL_PREFIX}/{operation}", headers=headers, data=json.dumps(base | fields)
        )


@asynccontextmanager
async def open_served() -> AsyncIterator[Served]:
    async with open_plane() as plane:
        app = QuartTrio(__name__)
        serve = partial(serve_control, plane.control)
        app.register_blueprint(serving_blueprint(serve, lambda text: text == TOKEN))
        yield Served(plane, app.test_client())


async def test_the_whole_cycle_by_its_fixed_names(autojump_clock: MockClock) -> None:
    """CTL-1: routes, fields and phases as controllers speak them."""
    async with open_served() as served:
        served.plane.participant.parked[episode("r0")] = "a"
        prepared = await (await served.post("prepare")).get_json()
        assert prepared["phase"] == "prepared"
        assert prepared["report"]["ready"] is True
        renewed = await (await served.post("renew")).get_json()
        lease = pytest.approx(served.plane.clock.now_s() + 610)
        assert renewed == {
            "lease_expires_at": lease,
            "lease_s": pytest.approx(610),
            "incarnation": prepared["incarnation"],
        }
        scope = [{"rollout_id": "r0", "attempt": 0}]
        committed = await (
            await served.post("commit", checkpoint_dir="d", episode_ids=scope)
        ).get_json()
        assert committed["episode_ids"] == ["r0"]
        assert committed["notes"] == 1
        assert await (await served.post("resume")).get_json() == {
            "phase": "idle",
            "idempotent": False,
            "incarnation": prepared["incarnation"],
        }
        assert await (await served.post("retire", episode_ids=scope)).get_json() == {
            "retired": ["r0"]
        }
        status = await (
            await served.client.get(f"{CONTROL_PREFIX}/status", headers=AUTHORIZED)
        ).get_json()
        assert (status["kind"], status["phase"], status["retired_rollouts"]) == (
            "environment",
            "idle",
            1,
        )
        restored = await (
            await served.post("restore", checkpoint_id="x", checkpoint_dir="d", episode_ids=scope)
        ).get_json()
        assert restored["restored"] == ["r0-a1"]
        await served.post("resume", checkpoint_id="x")
        assert await (await served.post("forget", rollout_ids=["r0"])).get_json() == {
            "forgotten": ["r0"]
        }


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {TOKEN[:-1]}"},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": f"bearer {TOKEN}"},
        {"authorization": TOKEN},
        {"cookie": f"authorization=Bearer {TOKEN}"},
        [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer other")],
    ],
)
async def test_without_the_token_every_path_gives_one_answer(
    headers: Any, autojump_clock: MockClock
) -> None:
    """CTL-2: 401 `unauthorized` before anything else is looked at; nothing changes (I35)."""
    async with open_served() as served:
        answers = set()
        for operation in [*REQUESTS, "status", "no-such-thing", "a/b"]:
            answer = await served.post(operation, headers=headers)
            answers.add((answer.status_code, await answer.get_data(), answer.content_type))
            answer = await served.client.get(f"{CONTROL_PREFIX}/{operation}", headers=headers)
            answers.add((answer.status_code, await answer.get_data(), answer.content_type))
        for method, path in (
            ("TRACE", "/status"),
            ("PROPFIND", "/prepare"),
            ("GET", "//status"),
            ("POST", ""),
            ("POST", "/"),
        ):
            answer = await served.client.open(
                f"{CONTROL_PREFIX}{path}", method=method, headers=headers
            )
            answers.add((answer.status_code, await answer.get_data(), answer.content_type))
        (only,) = answers
        assert only[0] == 401
        assert json.loads(only[1])["error"]["code"] == "unauthorized"
        assert served.plane.participant.closes == 0
        assert served.plane.control.status().retired_rollouts == 0


@pytest.mark.parametrize(
    ("operation", "fields", "detail"),
    [
        ("prepare", {"deadline": 1}, "deadline: unknown key; did you mean 'deadline_ts'?"),
        ("prepare", {"deadline_ts": "soon"}, "deadline_ts: expected a number, got str"),
        ("prepare", {"deadline_ts": float("inf")}, "deadline_ts: expected a finite number"),
        ("prepare", {"deadline_ts": True}, "deadline_ts: expected a number, got True"),
        ("prepare", {"checkpoint_id": "../x"}, "checkpoint_id: 1-128 characters"),
        ("prepare", {"checkpoint_id": ""}, "checkpoint_id: 1-128 characters"),
        ("prepare", {"checkpoint_id": 7}, "checkpoint_id: expected str, got 7"),
        ("commit", {}, "checkpoint_dir: missing"),
        ("commit", {"checkpoint_dir": 1}, "checkpoint_dir: expected str"),
        ("commit", {"checkpoint_dir": "d", "episode_ids": ["r0"]}, "episode_ids[0]: expected an"),
        ("restore", {"checkpoint_dir": "d"}, "episode_ids: missing"),
        ("retire", {"episode_ids": []}, "episode_ids: at least one"),
        (
            "retire",
            {"episode_ids": [{"rollout_id": "r", "attempt": 1.5}]},
            "episode_ids[0].attempt: expected int, got 1.5",
        ),
        (
            "retire",
            {"episode_ids": [{"rollout_id": "r"}, {"rollout_id": "s", "attempt": 1.5}]},
            "episode_ids[1].attempt: expected int, got 1.5",
        ),
        ("retire", {"episode_ids": [{"rollout_id": "r"}, 7]}, "episode_ids[1]: expected an object"),
        ("prepare", {"episode_ids": [{"rollout_id": "r"}]}, "episode_ids: unknown key"),
        ("forget", {"rollout_ids": []}, "rollout_ids: at least one"),
    ],
)
async def test_malformed_bodies_are_named_by_path(
    operation: str, fields: dict[str, Any], detail: str, autojump_clock: MockClock
) -> None:
    """CTL-1, CTL-17: 422, the field named, and nothing changes."""
    async with open_served() as served:
        answer = await served.post(operation, **fields)
        assert answer.status_code == 422
        assert (await answer.get_json())["error"]["detail"].startswith(detail)
        assert served.plane.participant.closes == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10**5])
async def test_bodies_that_are_no_object_are_refused(
    body: bytes, autojump_clock: MockClock
) -> None:
    """CTL-1, CTL-17."""
    async with open_served() as served:
        answer = await served.client.post(
            f"{CONTROL_PREFIX}/prepare", headers=AUTHORIZED, data=body
        )
        assert answer.status_code == 422


async def test_refusals_carry_code_and_status(autojump_clock: MockClock) -> None:
    """CTL-17."""
    async with open_served() as served:
        cases = [
            ("commit", {"checkpoint_dir": "d"}, 409, "invalid_phase"),
            ("prepare", {"deadline_ts": 1}, 409, "deadline_exceeded"),
            ("retire", {"episode_ids": [{"rollout_id": "r-a1"}]}, 400, "invalid_rollout_id"),
            ("unknown", {}, 404, "not_found"),
            (
                "restore",
                {"checkpoint_dir": "d", "episode_ids": []},
                422,
                "invalid_checkpoint_state",
            ),
        ]
        for operation, fields, status, code in cases:
            answer = await served.post(operation, **fields)
            assert (answer.status_code, (await answer.get_json())["error"]["code"]) == (
                status,
                code,
            )
        await served.post("resume")
        stale = await served.post("prepare")
        assert (await stale.get_json())["error"]["code"] == "stale_checkpoint"


async def test_a_body_over_the_limit_is_refused(autojump_clock: MockClock) -> None:
    """SRV-5, CTL-17: 413, before it is read."""
    async with open_served() as served:
        answer = await served.client.post(
            f"{CONTROL_PREFIX}/prepare",
            headers=AUTHORIZED | {"content-length": str(CONTROL_BODY_BYTES_MAX + 1)},
            data=b"{}",
        )
        assert answer.status_code == 413


def test_every_code_of_the_protocol_has_its_type() -> None:
    """CTL-17: the fixed codes with their status."""
    fixed = {
        400: ["rollout_id_required", "invalid_rollout_id"],
        401: ["unauthorized"],
        409: [
            "checkpoint_error",
            "stale_checkpoint",
            "checkpoint_conflict",
            "invalid_phase",
            "deadline_exceeded",
            "stale_attempt",
            "admission_closed",
            "retire_incomplete",
            "activation_out_of_order",
        ],
        422: ["invalid_checkpoint_state"],
        503: ["checkpoint_coordinator_unavailable"],
    }
    assert {code: REFUSALS[code].status for codes in fixed.values() for code in codes} == {
        code: status for status, codes in fixed.items() for code in codes
    }
