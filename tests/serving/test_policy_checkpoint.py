"""Checkpoints of a policy server as its callers, its engine and its token store see them, over HTTP."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gymtrio.capture.cuts import CutInventory
from gymtrio.capture.log_store import open_log_store
from gymtrio.capture.replies import Route
from gymtrio.ports import HostRandomness
from gymtrio.serving.app import open_asgi
from gymtrio.serving.client import Reply, ServerClient
from gymtrio.serving.deployment import Deployment, DeploymentDirectory, ServerEntry
from gymtrio.serving.host import HostPorts
from gymtrio.serving.http import Request, Response, json_response
from gymtrio.serving.inprocess import open_network
from gymtrio.serving.ledger_route import LEDGER_ROUTE
from gymtrio.settings import CheckpointSettings, Secret
from gymtrio.strict import structure, unstructure
from gymtrio.wire.control import CONTROL_PREFIX, Kind
from servers.model.policy import app as policy_app
from tests.helpers.clocks import FollowingClock
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.scripted_backend import ScriptedBackend, uncut_tokens
from tests.serving.test_model_server import (
    BEARER,
    HELLO,
    R1,
    SETTINGS,
    TOKEN,
    EngineOverHttp,
    R,
    Running,
    running,
)

Answer: TypeAlias = Callable[[CutInventory], Response]

SCOPE = [{"rollout_id": "r", "attempt": 0}]
ROUTES: list[tuple[Route, dict[str, Any]]] = [
    (Route.CHAT, HELLO),
    (Route.RESPONSES, {"input": "hello"}),
    (Route.MESSAGES, {**HELLO, "max_tokens": 20}),
]


async def counts_of(server: Running) -> dict[str, int]:
    reply = await server.client.request(
        server.name,
        "GET",
        f"{CONTROL_PREFIX}/status",
        headers=(("authorization", BEARER),),
        control=True,
    )
    status: Any = reply.raise_for_status().json()
    counts: dict[str, int] = status["report"]["counts"]
    return counts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "asked"), ROUTES)
async def test_a_held_reply_is_byte_for_byte_the_one_that_was_not_held(
    tmp_path: Path, route: Route, asked: dict[str, Any], stream: bool
) -> None:
    """POL-2, I2: through prepare, cut, commit and resume, in every dialect, told whole or streamed."""
    body = {**asked, "stream": stream}
    async with running(tmp_path / "undisturbed") as server:
        server.engine.backend.at_once = True
        undisturbed = await server.ask(body, context=R, route=route)
    replies: list[Reply] = []
    async with running(tmp_path / "held") as server, trio.open_nursery() as nursery:

        async def ask() -> None:
            replies.append(await server.ask(body, context=R, route=route))

        nursery.start_soon(ask)
        (live,) = await server.engine.backend.wait_live()
        live.emit(7)
        await server.control("prepare")
        live.finish.set()
        await server.control("commit", checkpoint_dir="d", episode_ids=SCOPE)
        await wait_all_tasks_blocked()
        assert not replies
        assert (await counts_of(server))["held"] == 1
        await server.control("resume")
    (held,) = replies
    assert held.status == undisturbed.status == 200
    assert held.body == undisturbed.body
    assert held.header("content-type") == undisturbed.header("content-type")
    assert ("text/event-stream" in (held.header("content-type") or "")) is stream


async def test_a_caller_that_leaves_while_held_costs_nothing(tmp_path: Path) -> None:
    """POL-2, POL-3: it blocks nothing, is in no count and no checkpoint; its episode may ask again."""
    async with running(tmp_path) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: server.ask(context=R))
            (live,) = await server.engine.backend.wait_live()
            await server.control("prepare")
            live.finish.set()
            await wait_all_tasks_blocked()
            assert (await counts_of(server))["held"] == 1
            nursery.cancel_scope.cancel()
        while (counts := await counts_of(server))["inflight"]:
            await trio.lowlevel.checkpoint()
        assert counts["held"] == 0
        committed = await server.control("commit", checkpoint_dir="d", episode_ids=SCOPE)
        assert committed["staging_keys"] == []
        await server.control("resume")
        server.engine.backend.at_once = True
        assert (await server.ask(context=R)).status == 200


async def test_health_is_answered_and_a_new_call_waits_while_a_checkpoint_is_open(
    tmp_path: Path,
) -> None:
    """POL-2, SRV-6, CTL-18: the call has no ticket until the resume."""
    async with running(tmp_path) as server, trio.open_nursery() as nursery:
        server.engine.backend.at_once = True
        await server.control("prepare")
        nursery.start_soon(lambda: server.ask(context=R))
        await wait_all_tasks_blocked()
        assert (await server.client.request("policy", "GET", "/health")).status == 200
        assert (await counts_of(server))["inflight"] == 0
        assert server.engine.requests == []
        refused = await server.ask(context=R, headers=(("x-ng-admission", "refuse"),))
        assert refused.status == 409
        await server.control("resume")


@asynccontextmanager
async def two_policies(
    tmp_path: Path, archive: MemoryArchive
) -> AsyncIterator[tuple[Running, Running]]:
    """Two policy servers of one deployment, in one process, each with an engine of its own."""
    names = ("one", "two")
    servers = {
        name: ServerEntry(
            url=f"http://{name}", kind=Kind.MODEL, settings=SETTINGS | {"backend": f"engine-{name}"}
        )
        for name in names
    } | {f"engine-{n}": ServerEntry(url=f"http://engine-{n}", kind=Kind.MODEL) for n in names}
    deployment = Deployment(
        checkpoint=CheckpointSettings(enabled=True, control_auth_token=Secret(TOKEN), root="/c"),
        state_dir=str(tmp_path),
        servers=servers,
    )
    clock = FollowingClock()
    opened: list[Running] = []
    async with (
        open_network() as network,
        open_log_store(tmp_path / "tokens", randomness=HostRandomness()) as store,
    ):
        client = ServerClient(DeploymentDirectory(deployment), network)
        ports = HostPorts(transport=network, archive=archive, wall_clock=clock)
        engines = {name: EngineOverHttp(ScriptedBackend(store)) for name in names}
        async with (
            open_asgi(engines["one"].app()) as engine_one,
            open_asgi(engines["two"].app()) as engine_two,
            open_asgi(policy_app, deployment=deployment, name="one", ports=ports) as one,
            open_asgi(policy_app, deployment=deployment, name="two", ports=ports) as two,
        ):
            with (
                network.serving("engine-one", engine_one),
                network.serving("engine-two", engine_two),
                network.serving("one", one),
                network.serving("two", two),
            ):
                for name, asgi in (("one", one), ("two", two)):
                    opened.append(
                        Running(client, asgi, engines[name], clock, archive, store, name=name)
                    )
                yield opened[0], opened[1]


async def test_two_apps_in_one_process_share_nothing(tmp_path: Path) -> None:
    """POL-4: the same app twice, the same rollout at both, one checkpoint directory: each holds,
    counts, exports and continues its own calls only, bound to its own engine."""
    archive = MemoryArchive()
    async with two_policies(tmp_path, archive) as (one, two):
        async with trio.open_nursery() as nursery:
            for server, tokens in ((one, 3), (two, 6)):
                server.engine.backend.at_once = True
                assert (await server.ask(context=R)).status == 200
                server.engine.backend.at_once = False
                nursery.start_soon(lambda s=server: s.ask(context=R))
                (live,) = await server.engine.backend.wait_live()
                live.emit(tokens)
            await one.control("prepare")
            assert (await counts_of(one))["held"] == 1
            assert (await counts_of(two))["held"] == 0
            two.engine.backend.at_once = True
            assert (await two.ask(context=R)).status == 200, "its gate is its own"
            two.engine.backend.at_once = False
            await two.control("prepare")
            keys = []
            for server in (one, two):
                committed = await server.control("commit", checkpoint_dir="d", episode_ids=SCOPE)
                keys.append(set(committed["staging_keys"]))
            assert [len(some) for some in keys] == [2, 3]
            assert not keys[0] & keys[1]
            nursery.cancel_scope.cancel()
    async with two_policies(tmp_path, archive) as (one, two):
        for server in (one, two):
            await server.control(
                "restore", checkpoint_id="x1", checkpoint_dir="d", episode_ids=SCOPE
            )
            await server.control("resume", checkpoint_id="x1")
        for server, generated, rows in ((one, 17, 2), (two, 14, 3)):
            server.engine.backend.at_once = True
            reply: Any = (await server.ask(context=R1)).raise_for_status().json()
            message = reply["choices"][0]["message"]
            assert tuple(message["generation_token_ids"]) == uncut_tokens(HELLO)
            assert [call.generated for call in server.engine.backend.calls] == [generated]
            ledger = await server.client.request(
                server.name,
                "GET",
                f"{LEDGER_ROUTE}/r-a1",
                headers=(("authorization", BEARER),),
                context=None,
            )
            read: Any = ledger.raise_for_status().json()
            assert len(read["rows"]) == rows


DURABLE: dict[str, object] = {
    "disposition": "durable_prefix",
    "failure": None,
    "cut_kind": "active_prefix",
    "staging_keys": ["k"],
    "prefix_token_count": 7,
    "prefix_digest": "0" * 64,
    "effective_output_limit": 20,
    "policy_version": 3,
    "engine_digest": "e",
}


def receipt(entry: dict[str, object] | None = None, **changes: object) -> Answer:
    """A receipt that says that nothing could be kept, but for what is changed."""

    def answer(inventory: CutInventory) -> Response:
        (asked,) = inventory.active_prefixes
        named = unstructure(asked)
        assert isinstance(named, dict)
        failed = {**named, "disposition": "durable_failure", "failure": "no"}
        whole = {
            "checkpoint_id": inventory.checkpoint_id,
            "cut_id": "x",
            "inventory_digest": inventory.inventory_digest,
            "prefixes": [failed | (entry or {})],
        }
        return json_response(whole | changes)

    return answer


def plainly(response: Response) -> Answer:
    return lambda _: response


MALFORMED: dict[str, tuple[Answer, str]] = {
    "not JSON": (plainly(Response(200, b"<html>")), "not JSON"),
    "nothing": (plainly(Response(200, b"")), "not JSON"),
    "not an object": (plainly(json_response([1])), "expected an object"),
    "no receipt": (plainly(json_response({})), "missing"),
    "too deep": (plainly(Response(200, b"[" * 100_000)), ""),
    "no such route": (plainly(json_response({"error": {"message": "what?"}}, 404)), "404"),
    "a fault": (plainly(Response(500, b"Traceback")), "500"),
    "more fields": (receipt(new=1), "new"),
    "of another inventory": (receipt(inventory_digest="0" * 64), "another inventory"),
    "of another call": (receipt({"model_call_id": "other"}), "another call"),
    "a number as text": (receipt({"prefix_token_count": "7"}), "prefix_token_count"),
    "an unknown disposition": (receipt({"disposition": "?"}), "disposition"),
    "a version beyond 64 bits": (receipt(DURABLE | {"policy_version": 2**70}), "policy_version"),
    "a text that is none": (receipt(DURABLE | {"engine_digest": "\ud800"}), "engine_digest"),
    "no digest": (receipt(DURABLE | {"prefix_digest": "x"}), "digest"),
}


@pytest.mark.parametrize("what", MALFORMED)
async def test_a_malformed_receipt_costs_a_regeneration_only(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """CUT-7, POL-5: the checkpoint is taken, the failure counted and logged, the call made anew."""
    answer, why = MALFORMED[what]
    async with running(tmp_path) as server:

        async def cut(request: Request) -> Response:
            return answer(structure(CutInventory, request.json()))

        server.engine.cut = cut
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: server.ask(context=R))
            (live,) = await server.engine.backend.wait_live()
            live.emit(7)
            with caplog.at_level(logging.WARNING):
                assert (await server.control("prepare"))["phase"] == "prepared"
            counts = await counts_of(server)
            assert counts | {"cut": 0, "cut_failed": 1, "held": 1} == counts
            told = [record.getMessage() for record in caplog.records]
            assert [why in line for line in told if "1 generations not cut" in line] == [True]
            await server.control("commit", checkpoint_dir="d", episode_ids=SCOPE)
            nursery.cancel_scope.cancel()
        archive = server.archive
    async with running(tmp_path, archive) as server:
        await server.control("restore", checkpoint_id="x1", checkpoint_dir="d", episode_ids=SCOPE)
        await server.control("resume", checkpoint_id="x1")
        server.engine.backend.at_once = True
        reply: Any = (await server.ask(context=R1)).raise_for_status().json()
        message = reply["choices"][0]["message"]
        assert tuple(message["generation_token_ids"]) == uncut_tokens(HELLO)
        assert server.engine.backend.calls[-1].generated == 20


async def test_a_token_store_that_is_down_is_named_and_costs_no_checkpoint(tmp_path: Path) -> None:
    """I17, CUT-7: calls are refused with the reason and leave no row, cuts fail and are counted; with
    the store back everything is served."""
    tokens, away = tmp_path / "tokens", tmp_path / "away"
    async with running(tmp_path) as server:
        tokens.rename(away)
        server.engine.backend.at_once = True
        refused = await server.ask(context=R)
        value: Any = refused.json()
        assert (refused.status, value["error"]["code"]) == (503, "unavailable")
        assert "tokens could not be kept: " in value["error"]["message"]
        assert "No such file or directory" in value["error"]["message"]
        assert refused.header("retry-after") == "1"
        server.engine.backend.at_once = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: server.ask(context=R))
            (live,) = await server.engine.backend.wait_live()
            live.emit(7)
            await server.control("prepare")
            assert (await counts_of(server))["cut_failed"] == 1
            committed = await server.control("commit", checkpoint_dir="d", episode_ids=SCOPE)
            assert (committed["episode_ids"], committed["staging_keys"]) == (["r"], [])
            away.rename(tokens)
            live.finish.set()
            await wait_all_tasks_blocked()
            await server.control("resume")
        committed = await _checkpoint(server, "c2")
        assert len(committed["staging_keys"]) == 1


async def _checkpoint(server: Running, name: str) -> dict[str, Any]:
    await server.control("prepare", checkpoint_id=name)
    return await server.control(
        "commit", checkpoint_id=name, checkpoint_dir=name, episode_ids=SCOPE
    )


async def test_damaged_tokens_cost_a_regeneration_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CUT-7, POL-5: one byte of the prefix has changed on the disk; counted in status and metrics."""
    async with running(tmp_path) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: server.ask(context=R))
            (live,) = await server.engine.backend.wait_live()
            live.emit(7)
            await _checkpoint(server, "c1")
            # A later batch proves that the one before it was whole once.
            live.emit(3)
            await server.control("resume")
            await _checkpoint(server, "c2")
            nursery.cancel_scope.cancel()
        archive = server.archive
    (segment,) = (tmp_path / "tokens").iterdir()
    data = bytearray(segment.read_bytes())
    data[data.index(b"log_probs") + 20] ^= 1
    segment.write_bytes(data)
    async with running(tmp_path, archive) as server:
        await server.control("restore", checkpoint_id="x1", checkpoint_dir="c2", episode_ids=SCOPE)
        await server.control("resume", checkpoint_id="x1")
        server.engine.backend.at_once = True
        reply: Any = (await server.ask(context=R1)).raise_for_status().json()
        message = reply["choices"][0]["message"]
        assert tuple(message["generation_token_ids"]) == uncut_tokens(HELLO)
        assert "the cut is not continued, the call is generated anew" in caplog.text
        assert segment.name in caplog.text
        told = (await server.client.request("policy", "GET", "/metrics")).body.decode()
        assert 'gymtrio_generation_cuts_not_continued_total{reason="failed"} 1.0' in told
