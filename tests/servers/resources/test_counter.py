"""The counter: what its tools do, and that a checkpoint carries the count and nothing else does."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import pytest

from gymtrio.errors import InvalidCheckpointState
from servers.resources.counter import Counter, app
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.plane import episode
from tests.helpers.resources_server import ResourcesClient, open_resources_server

R0, R1, Q0 = episode("r"), episode("r", 1), episode("q")

DATA: Final = Path(__file__).parents[3] / "servers/resources/data/counter/example.jsonl"
DATA_SHA256: Final = "d38e9cb4336983afd0926a94f6c21004b15f833b19ea9cb5c1d7016d743ac50e"


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in DATA.read_text().splitlines()]


async def play(client: ResourcesClient, row: dict[str, Any]) -> float:
    """What the row's prompt asks: two increments and a look; the reward."""
    words = row["responses_create_params"]["input"][0]["content"].split()
    for number in (words[1], words[4]):
        reply = await client.json("/increment_counter", {"count": int(number)})
        assert reply == {"success": True}
    await client.json("/get_counter_value", {})
    return (await client.json("/verify", {**row, "response": {}}))["reward"]


def test_the_rows_are_the_public_ones() -> None:
    """RES-8: byte for byte; their origin stands beside them."""
    assert hashlib.sha256(DATA.read_bytes()).hexdigest() == DATA_SHA256
    assert DATA_SHA256 in DATA.with_name("README.md").read_text()


@pytest.mark.parametrize("checkpointing", [True, False])
async def test_every_public_row_is_solved_by_doing_what_it_says(checkpointing: bool) -> None:
    """RES-8."""
    async with open_resources_server(app, checkpointing=checkpointing) as client:
        for number, row in enumerate(rows()):
            client.cookies = {}
            await client.json("/seed_session", row, episode_id=episode(f"r{number}"))
            assert await play(client, row) == 1.0


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        ("/increment_counter", {"count": "1"}, "count: expected int, got str"),
        ("/increment_counter", {"count": True}, "count: expected int, got True"),
        ("/increment_counter", {"count": 1.0}, "count: expected int, got 1.0"),
        ("/increment_counter", {"cuont": 1}, "cuont: unknown key; did you mean 'count'?"),
        ("/get_counter_value", {"count": 1}, "takes no arguments"),
        ("/get_counter", {}, "no tool named 'get_counter'; did you mean 'get_counter_value'?"),
    ],
)
async def test_a_wrong_call_says_what_is_wrong_and_counts_nothing(
    path: str, body: object, detail: str
) -> None:
    """RES-8: in JSON, for the model."""
    async with open_resources_server(app) as client:
        await client.seed("s", R0, initial_count=3)
        reply = await client.call(path, body)
        assert reply.status == 422
        assert detail in reply.json()["error"]["detail"]
        assert await client.json("/get_counter_value") == {"count": 3}


@pytest.mark.parametrize("task", [{}, {"initial_count": "3"}, {"initial_count": None}])
async def test_a_task_without_a_count_is_refused(task: dict[str, Any]) -> None:
    async with open_resources_server(app) as client:
        reply = await client.call("/seed_session", task, R0)
        assert (reply.status, reply.json()["error"]["code"]) == (422, "invalid_request")


async def test_a_verify_without_its_session_is_no_reward() -> None:
    """RES-6: a lost session shows."""
    async with open_resources_server(app) as client:
        assert (await client.call("/verify", {"expected_count": 0}, R0)).status == 404


async def test_a_restored_count_goes_on_and_a_lost_one_does_not() -> None:
    """RES-1, RES-6, E2E-1: the counts are compared, with the control that skips the restore."""
    archive = MemoryArchive()
    async with open_resources_server(app, archive=archive) as client:
        await client.seed("s", R0, initial_count=3)
        await client.json("/increment_counter", {"count": 1}, episode_id=R0)
        assert await client.checkpoint() == ["r"]
        # Between the commit and the crash nothing is answered, so nothing is lost.
        cookies = dict(client.cookies)
    counts: dict[bool, Any] = {}
    for restored in (True, False):
        async with open_resources_server(app, archive=archive, recover=restored) as client:
            client.cookies = dict(cookies)
            if restored:
                await client.restore(R0)
                await client.control("resume", "x1")
            else:
                await client.seed("s", R1, initial_count=3)
            await client.json("/increment_counter", {"count": 2}, episode_id=R1)
            counts[restored] = await client.json("/get_counter_value", episode_id=R1)
            reply = await client.json("/verify", {"expected_count": 6}, episode_id=R1)
            assert reply == {
                "expected_count": 6,
                "reward": 1.0 if restored else 0.0,
                "final_count": counts[restored]["count"],
            }
    assert counts == {True: {"count": 6}, False: {"count": 5}}


async def test_sessions_do_not_touch_each_other() -> None:
    async with open_resources_server(app) as client:
        await client.seed("s", R0, initial_count=3)
        first = dict(client.cookies)
        await client.seed("t", Q0, initial_count=10)
        await client.json("/increment_counter", {"count": 1})
        client.cookies = first
        assert await client.json("/get_counter_value") == {"count": 3}


async def test_it_says_that_its_verify_may_run_again() -> None:
    """RES-4."""
    async with open_resources_server(app) as client:
        reply = await client.seed("s", R0, initial_count=3)
        assert reply.header("x-ng-checkpoint-verify") == "replay"


@pytest.mark.parametrize("state", [None, "3", 3.0, True, [3]])
async def test_only_a_count_is_restored(state: object) -> None:
    """STO-4 (scenario 4): and of several sessions all or none."""
    counter = Counter()
    with pytest.raises(InvalidCheckpointState, match="session 't': a count is an integer"):
        await counter.restore_session_states({"s": 1, "t": state})
    assert counter.states == {}
