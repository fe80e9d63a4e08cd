"""Games by tools, and that a restored game is the same game."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

import pytest

from gymtrio.errors import InvalidCheckpointState, SettingsError
from gymtrio.participants.resources import SessionId
from gymtrio.storage import opaque
from servers.resources.gymnasium_bridge import GymnasiumServer, GymnasiumSettings, app
from servers.resources.gymnasium_games import GAMES, Game
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.plane import episode
from tests.helpers.resources_server import ResourcesClient, open_resources_server

R0, R1 = episode("r"), episode("r", 1)
S: Final = SessionId("s")
DATA: Final = Path(__file__).parents[3] / "servers/resources/data"

GAMES_TRIED: Final = {
    "Blackjack-v1": {"rounds": 12, "score": "sum"},
    "FrozenLake-v1": {"rounds": 6},
    "Taxi-v4": {"kwargs": {"is_rainy": True, "fickle_passenger": True}},
}
SEEDS_TRIED: Final = {"Blackjack-v1": 200, "FrozenLake-v1": 200, "Taxi-v4": 20}
"""A taxi that may slip takes long to make."""
STEPS_MAX: Final = 60


def server_of(*env_ids: str) -> GymnasiumServer:
    return GymnasiumServer(GymnasiumSettings(environments={env_id: {} for env_id in env_ids}))


async def play(server: GymnasiumServer, actions: list[int]) -> list[dict[str, Any]]:
    """Every reply, as the model reads it, and what verify says at the end."""
    game = server.states[S]
    seen: list[dict[str, Any]] = []
    for action in actions:
        if game.is_over():
            break
        seen.append(game.act(action))
    return [*seen, game.look(), await server.verify(S, {})]


@pytest.mark.parametrize("env_id", GAMES_TRIED)
async def test_a_restored_game_gives_every_reply_of_the_uninterrupted_one(env_id: str) -> None:
    """RES-8, E2E-1: cut in the middle; the control without a restore gives other replies."""
    lost_differs = 0
    seeds = SEEDS_TRIED[env_id]
    for seed in range(seeds):
        chance = random.Random(seed)
        actions = [chance.randrange(len(GAMES[env_id].actions)) for _ in range(STEPS_MAX)]
        cut = chance.randint(1, 5)
        task = {"env_id": env_id, "seed": seed, **GAMES_TRIED[env_id]}
        whole, before, after, lost = (server_of(env_id) for _ in range(4))
        for server in (whole, before, lost):
            await server.seed(S, task)
        expected = await play(whole, actions)
        await play(before, actions[:cut])
        states = await before.export_session_states([S])
        kept = opaque.encode(states[S], "s")
        await after.restore_session_states({S: opaque.decode(kept)})
        rest = await play(after, actions[cut:])
        assert rest == expected[-len(rest) :]
        assert after.states[S].rewards == whole.states[S].rewards
        # The process went on where it was cut, but with the state as it was seeded.
        lost_rest = await play(lost, actions[cut:])
        lost_differs += lost_rest[:-1] != expected[-len(lost_rest) : -1]
    assert lost_differs >= seeds * 0.98, "the comparison notices a lost state"


@pytest.mark.parametrize("env_id", sorted(GAMES))
async def test_exporting_changes_nothing_and_a_restored_game_exports_the_same(env_id: str) -> None:
    """I9, I24."""
    one, other = server_of(env_id), server_of(env_id)
    await one.seed(S, {"env_id": env_id, "seed": 3, "rounds": 2})
    one.states[S].act(0)
    first = opaque.encode((await one.export_session_states([S]))[S], "s")
    assert opaque.encode((await one.export_session_states([S]))[S], "s") == first
    await other.restore_session_states({S: opaque.decode(first)})
    assert opaque.encode((await other.export_session_states([S]))[S], "s") == first
    assert other.states[S].look() == one.states[S].look()


async def test_a_game_over_http_survives_a_crash() -> None:
    """RES-6, RES-8: by the old cookie; the cards are those that would have come."""

    async def start(client: ResourcesClient) -> Any:
        await client.seed("s", R0, env_id="Blackjack-v1", seed=115, rounds=3)
        return await client.json("/observe", episode_id=R0)

    async def rest(client: ResourcesClient) -> list[Any]:
        replies = [await client.json(f"/{name}") for name in ("hit", "stick", "hit", "stick")]
        return [*replies, await client.json("/observe")]

    async with open_resources_server(app) as client:
        first = await start(client)
        assert first == {
            "round": 1,
            "of_rounds": 3,
            "your_sum": 12,
            "usable_ace": False,
            "dealer_shows": 9,
        }
        await client.json("/hit")
        expected = await rest(client)
    archive = MemoryArchive()
    async with open_resources_server(app, archive=archive) as client:
        assert await start(client) == first
        await client.json("/hit")
        assert await client.checkpoint() == ["r"]
        cookies = dict(client.cookies)
    async with open_resources_server(app, archive=archive, recover=True) as client:
        client.cookies = cookies
        await client.restore(R0)
        await client.control("resume", "x1")
        assert await rest(client) == expected


async def test_rounds_share_one_generator_and_a_game_ends() -> None:
    """RES-8: the next round begins in the same reply; after the last there is nothing to play."""
    async with open_resources_server(app) as client:
        await client.seed("s", R0, env_id="Blackjack-v1", seed=120, rounds=2, score="mean")
        first = await client.json("/stick")
        assert first["round_over"]
        assert first["next"]["round"] == 2
        assert {"reward", "dealer_sum", "your_sum"} <= set(first)
        second = await client.json("/stick")
        assert second["game_over"]
        assert (await client.json("/observe"))["game_over"]
        reply = await client.call("/hit", {})
        assert reply.status == 422
        assert "the game is over" in reply.json()["error"]["detail"]
        verdict = await client.json("/verify", {"seed": 120})
        rewards = [first["reward"], second["reward"]]
        assert verdict == {
            "seed": 120,
            "reward": sum(rewards) / 2,
            "rounds_played": 2,
            "round_rewards": rewards,
            "final_state": await client.json("/observe", {}),
        }


async def test_a_lake_is_walked_by_name_or_by_number() -> None:
    """RES-8: the shortest way over a lake that is not slippery."""
    async with open_resources_server(app) as client:
        task = {"env_id": "FrozenLake-v1", "seed": 21, "kwargs": {"is_slippery": False}}
        await client.seed("s", R0, **task)
        assert await client.json("/observe") == {"row": 0, "column": 0, "you_stand_on": "start"}
        for name in ("down", "down", "right", "right", "down"):
            await client.json(f"/{name}")
        reply = await client.json("/step", {"action": 2})
        assert reply == {
            "row": 3,
            "column": 3,
            "you_stand_on": "goal",
            "round_over": True,
            "reward": 1.0,
            "game_over": True,
        }
        assert (await client.json("/verify", task))["reward"] == 1.0


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        ("/hit", {}, "hit is no action of FrozenLake-v1: it has left, down, right, up"),
        ("/step", {"action": 4}, "action 4 is not one of: 0 left, 1 down, 2 right, 3 up"),
        ("/step", {"action": -1}, "action -1 is not one of"),
        ("/step", {"action": "up"}, "action: expected int"),
        ("/jump", {}, "no tool named 'jump'"),
    ],
)
async def test_what_cannot_be_played_is_told_to_the_model(
    path: str, body: object, detail: str
) -> None:
    async with open_resources_server(app) as client:
        await client.seed("s", R0, env_id="FrozenLake-v1", seed=21)
        reply = await client.call(path, body)
        assert (reply.status, reply.json()["error"]["code"]) == (422, "invalid_request")
        assert detail in reply.json()["error"]["detail"]


@pytest.mark.parametrize(
    ("task", "detail"),
    [
        ({"env_id": "Blackjack-v2"}, "'Blackjack-v2' is not offered here; did you mean"),
        ({"env_id": "Taxi-v4"}, "'Taxi-v4' is not offered here"),
        ({"env_id": "Blackjack-v1", "seed": -1}, "seed: 0.."),
        ({"env_id": "Blackjack-v1", "seed": 2**63}, "seed: 0.."),
        ({"env_id": "Blackjack-v1", "rounds": 0}, "rounds: 1..100, got 0"),
        ({"env_id": "Blackjack-v1", "rounds": 101}, "rounds: 1..100"),
        ({"env_id": "Blackjack-v1", "score": "max"}, "expected one of 'mean', 'sum'"),
        ({"env_id": "Blackjack-v1", "kwargs": {"render_mode": "human"}}, "render_mode: unknown"),
        ({"env_id": "FrozenLake-v1", "kwargs": {"map_name": "9x9"}}, "kwargs: "),
        ({}, "env_id: missing"),
    ],
)
async def test_a_task_that_cannot_be_played_is_refused(task: dict[str, Any], detail: str) -> None:
    """RES-8: the allow-list of the deployment, and bounds."""
    async with open_resources_server(app) as client:
        reply = await client.call("/seed_session", {"seed": 1, **task}, R0)
        assert (reply.status, reply.json()["error"]["code"]) == (422, "invalid_request")
        assert detail in reply.json()["error"]["detail"]


async def test_a_deployment_says_what_may_be_played_and_how() -> None:
    """RES-8: the task's arguments go before those of the deployment."""
    settings = {"environments": {"FrozenLake-v1": {"is_slippery": False}, "CliffWalking-v1": {}}}
    async with open_resources_server(app, settings=settings) as client:
        await client.seed("s", R0, env_id="FrozenLake-v1", seed=1)
        assert (await client.json("/right"))["column"] == 1
        await client.seed("t", R0, env_id="CliffWalking-v1", seed=1)
        assert await client.json("/up") == {"row": 2, "column": 0}
        reply = await client.call("/seed_session", {"env_id": "Blackjack-v1", "seed": 1}, R0)
        assert reply.status == 422


@pytest.mark.parametrize(
    ("environments", "message"),
    [
        ({"Blackjack": {}}, "environment 'Blackjack'; did you mean 'Blackjack-v1'"),
        ({"Blackjack-v1": {"natural": 1}}, "environments: Blackjack-v1: kwargs: natural"),
    ],
)
async def test_a_wrong_setting_fails_at_start(environments: Any, message: str) -> None:
    """SET-1."""
    with pytest.raises(SettingsError, match=message):
        async with open_resources_server(app, settings={"environments": environments}):
            pass


@pytest.mark.parametrize(
    "change",
    [
        {"env_id": "Chess"},
        {"kwargs": {"render_mode": "human"}},
        {"rewards": ["1"]},
        {"env": None},
        {"observation": {"tuple": 3}},
    ],
    ids=repr,
)
async def test_a_state_that_is_not_a_game_is_not_restored(change: dict[str, Any]) -> None:
    """STO-4."""
    server = server_of("Blackjack-v1")
    await server.seed(S, {"env_id": "Blackjack-v1", "seed": 1})
    dumped: Any = (await server.export_session_states([S]))[S]
    with pytest.raises(InvalidCheckpointState):
        Game.load({**dumped, **change})


def prompt_of(row: dict[str, Any]) -> str:
    return row["responses_create_params"]["input"][0]["content"]


@pytest.mark.parametrize("name", ["blackjack", "frozen_lake"])
async def test_the_rows_show_what_the_environment_shows(name: str) -> None:
    """RES-8: the view in the prompt is that of the seed, and every tool it offers exists."""
    rows = [json.loads(line) for line in (DATA / name / "example.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    async with open_resources_server(app) as client:
        tools = {tool.name for tool in server_of("Blackjack-v1", "FrozenLake-v1").tools()}
        for number, row in enumerate(rows):
            await client.json("/seed_session", row, episode_id=episode(f"r{number}"))
            view = await client.json("/observe")
            assert json.dumps(view) in prompt_of(row)
            offered = {tool["name"] for tool in row["responses_create_params"]["tools"]}
            assert offered <= tools
            assert "observe" in offered
