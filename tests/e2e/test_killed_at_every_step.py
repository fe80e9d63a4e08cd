"""Trial T10: a commit of four servers, one of which is killed after each of its changes to the disk.

An episode plays a game that shows in every call what each server knows: the model asks for the count,
is told it by the tools, and asks for one more. A restored part that is missing, or of another moment
than the others, is found out by the next call: the conversation is the agent's, the count is the
counter's, the rows of delivered calls are the policy server's, and the environment's is that it goes on
at all.

    life n    restored ─ the game goes on ─ prepare ─ commit ─ SIGKILL of one, then of all
    life n+1  restored from what life n has committed, or else from what it was restored from

Processes are real, and new in every life; only the engine behind the policy server survives.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import trio

from gymtrio.checkpoint.coordination import Controller
from gymtrio.checkpoint.members import Failed
from gymtrio.errors import TransportError
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId
from gymtrio.ports import HostRandomness
from gymtrio.serving.client import ServerClient
from gymtrio.serving.controller import open_controller
from gymtrio.serving.deployment import DeploymentDirectory, load_deployment, parse_deployment
from gymtrio.serving.http import Request, Response, json_response
from gymtrio.serving.ledger_route import LEDGER_ROUTE
from gymtrio.serving.pool import open_pool
from gymtrio.serving.supervisor import write_resolved
from gymtrio.storage.manifest import MANIFEST_NAME
from gymtrio.strict import unstructure
from gymtrio.wire.control import Kind
from tests.helpers.forked_servers import Forked, Forks, open_forks, reserved_addresses
from tests.helpers.serving import make_app, serve_on_sockets

APPS: Final = {
    "environment": "servers.environment.single_agent_turn:app",
    "policy": "servers.model.policy:app",
    "agent": "servers.agent.simple_agent:app",
    "counter": "servers.resources.counter:app",
}
ROLLOUT: Final = RolloutId("r")
TIMEOUT_S: Final = 30.0
CHANGES_MAX: Final = 60
"""More than any server makes in one commit."""


class Engine:
    """Plays the game, and stops before a move until it is let go on. Survives every crash."""

    def __init__(self) -> None:
        self.told: list[int] = []
        """The counts that the tools told, in order of the calls."""
        self.moves_max = 0
        self._held = trio.Event()
        self._go_on = trio.Event()

    async def held_at(self, moves: int) -> None:
        """Wait until the game has come so far and stops there."""
        self.moves_max = moves
        self._held = trio.Event()
        self._go_on = trio.Event()
        await self._held.wait()

    def finish(self) -> None:
        self.moves_max = -1
        self._go_on.set()

    async def respond(self, request: Request) -> Response:
        conversation = json.loads(request.body)["input"]
        outputs = [
            json.loads(item["output"])
            for item in conversation
            if item.get("type") == "function_call_output"
        ]
        moves, is_odd = divmod(len(outputs), 2)
        if is_odd:
            self.told.append(outputs[-1]["count"])
            assert outputs[-1] == {"count": moves}, "the tools know another moment than the agent"
            return _call("increment_counter", {"count": 1}, len(outputs))
        if moves == self.moves_max:
            self._held.set()
            await self._go_on.wait()
        if self.moves_max < 0:
            return json_response(
                {"id": "last", "output": [{"type": "message", "role": "assistant", "content": []}]}
            )
        return _call("get_counter_value", {}, len(outputs))


def _call(name: str, arguments: dict[str, int], number: int) -> Response:
    move = {
        "type": "function_call",
        "name": name,
        "call_id": f"c{number}",
        "arguments": json.dumps(arguments),
    }
    return json_response({"id": f"resp_{number}", "output": [move]})


@attrs.frozen
class Saved:
    """A finished checkpoint: what a controller writes down when every server has committed."""

    number: int
    episode: EpisodeId
    moves: int

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(f"c{self.number}")


class Story:
    """The lives of one deployment."""

    def __init__(self, forks: Forks, file: Path, root: Path, engine: Engine) -> None:
        self.forks = forks
        self.deployment = load_deployment(file)
        self._file = file
        self.engine = engine
        self.saved: Saved | None = None
        self._root = root
        self._number = 0

    def directory(self, checkpoint_id: CheckpointId) -> Path:
        return self._root / checkpoint_id

    @asynccontextmanager
    async def life(
        self, victim: str | None = None, changes_max: int | None = None
    ) -> AsyncIterator[Life]:
        """Four new processes; in the end none of them runs."""
        starts = {server: changes_max if server == victim else None for server in APPS}
        async with (
            self.forks.start(self._file, starts) as forked,
            open_controller(self.deployment) as controller,
            open_pool(self.deployment.client) as pool,
            trio.open_nursery() as nursery,
        ):
            client = ServerClient(DeploymentDirectory(self.deployment), pool)
            yield Life(self, forked, controller, client, nursery)
            nursery.cancel_scope.cancel()

    async def commit(self, victim: str | None = None, changes_max: int = 0) -> Saved | None:
        """One life: the game goes on, and a commit in which one server may die.

        Returns:
            What was being committed; None: the server made fewer changes, and everything is saved.
        """
        async with self.life(victim, changes_max) as life:
            episode, moves = await life.go_on()
            self._number += 1
            attempted = Saved(self._number, episode, moves)
            # What is shared is made by whoever comes first; else one server's changes are not the same
            # in every life.
            (self.directory(attempted.id) / "gym").mkdir(parents=True)
            if not await life.commit(attempted, victim):
                return attempted
            self.saved = attempted
            return None


@attrs.frozen
class Life:
    story: Story
    forked: dict[str, Forked]
    controller: Controller
    client: ServerClient
    nursery: trio.Nursery

    async def restore(self, saved: Saved) -> None:
        await self.controller.restore(
            saved.id,
            str(self.story.directory(saved.id)),
            [saved.episode],
            timeout_s=TIMEOUT_S,
        )

    async def go_on(self) -> tuple[EpisodeId, int]:
        """Restore what is saved, and play one move more."""
        saved = self.story.saved
        if saved is None:
            await self.controller.start_afresh([], timeout_s=TIMEOUT_S)
            episode, moves = EpisodeId(ROLLOUT), 0
        else:
            await self.restore(saved)
            episode, moves = saved.episode.next_attempt(), saved.moves
            assert await self.delivered_calls(episode) == 2 * moves
        self.nursery.start_soon(self.run_until_killed, episode)
        await self.story.engine.held_at(moves + 1)
        return episode, moves + 1

    async def run_until_killed(self, episode: EpisodeId) -> None:
        with suppress(TransportError):
            await self.run(episode)
            raise AssertionError("the game ended")

    async def run(self, episode: EpisodeId) -> Any:
        task = {
            "responses_create_params": {
                "input": "count",
                "tools": [
                    {"type": "function", "name": name}
                    for name in ("get_counter_value", "increment_counter")
                ],
            },
            "initial_count": 0,
            "expected_count": 0,
        }
        body = {
            "episode_id": unstructure(episode),
            "task": {"task_id": {"taskset": "count", "task_id": "1"}, "task_input": task},
        }
        reply = await self.client.request("environment", "POST", "/run", json=body, context=None)
        return reply.raise_for_status().json()

    async def delivered_calls(self, episode: EpisodeId) -> int:
        token = self.story.deployment.checkpoint.control_auth_token
        assert token is not None
        reply = await self.client.request(
            "policy",
            "GET",
            f"{LEDGER_ROUTE}/{episode.capture_key}",
            headers=[("authorization", f"Bearer {token.reveal()}")],
            context=None,
            control=True,
        )
        ledger: Any = reply.raise_for_status().json()
        return len(ledger["rows"])

    async def commit(self, attempted: Saved, victim: str | None) -> bool:
        """Commit at all four; says whether all of them have. The others end what they have begun."""
        committed: set[str] = set()
        others_done = trio.Event()
        prepared = await self.controller.prepare(attempted.id, timeout_s=TIMEOUT_S)
        assert prepared.ready, prepared.blocking
        async with trio.open_nursery() as nursery:

            async def commit_at(server: str) -> None:
                members = tuple(m for m in self.controller.members if m.server == server)
                await self.controller.restricted_to(members).commit(
                    attempted.id,
                    str(self.story.directory(attempted.id)),
                    [attempted.episode],
                    timeout_s=TIMEOUT_S,
                )
                committed.add(server)
                if committed >= set(APPS) - {victim}:
                    others_done.set()
                if committed == set(APPS):
                    nursery.cancel_scope.cancel()

            async def end_without(one: Forked) -> None:
                await one.wait_gone()
                await others_done.wait()
                nursery.cancel_scope.cancel()

            for server in APPS:
                nursery.start_soon(commit_at, server)
            if victim is not None:
                nursery.start_soon(end_without, self.forked[victim])
        return committed == set(APPS)

    async def nothing_is_activated(self) -> None:
        """I23: after a restore that failed, every server waits as if there had been none."""
        for server, status in (await self.controller.status()).items():
            counts = status.report.counts
            assert (status.phase, status.awaiting_restore) == ("idle", True), server
            assert {name: n for name, n in counts.items() if n} == {}, server
            assert not status.extra.get("restored_pending"), server


@asynccontextmanager
async def open_story(directory: Path) -> AsyncIterator[Story]:
    engine = Engine()
    root = directory / "checkpoints"
    root.mkdir()
    app = make_app({("POST", "/v1/responses"): engine.respond}, kind=Kind.MODEL, name="engine")
    with reserved_addresses(list(APPS)) as binds:
        async with serve_on_sockets(app) as engine_bind:
            settings: dict[str, dict[str, object]] = {
                "environment": {"default": {"resources": "counter", "agent": "agent"}},
                "policy": {"backend": engine_bind.url, "checkpoint_policy": True},
                "agent": {"model": "policy"},
            }
            deployment = parse_deployment(
                {
                    "state_dir": str(directory / "state"),
                    "checkpoint": {
                        "enabled": True,
                        "control_auth_token": HostRandomness().hex(32),
                        "root": str(root),
                        "recover": True,
                    },
                    "servers": {
                        name: {"app": app, "bind": binds[name], "settings": settings.get(name, {})}
                        for name, app in APPS.items()
                    },
                }
            )
            file = write_resolved(deployment, directory)
            with open_forks(directory / "forks.log", APPS.values()) as forks:
                yield Story(forks, file, root, engine)


def kinds_in(directory: Path) -> set[str]:
    """The kinds of server that have published their part."""
    return {path.parent.parent.name for path in directory.glob(f"gym/*/*/{MANIFEST_NAME}")}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", APPS)
async def test_a_kill_after_any_change_leaves_the_old_checkpoint_or_the_new_one(
    victim: str, tmp_path: Path
) -> None:
    """Trial T10, E2E-1, STO-1, COORD-3, I15, I20, I21, I23: whole, and never a third thing."""
    async with open_story(tmp_path) as story:
        assert await story.commit() is None
        broken: list[Saved] = []
        uses_new: list[bool] = []
        for changes in range(1, CHANGES_MAX):
            attempted = await story.commit(victim, changes)
            if attempted is None:
                break
            there = kinds_in(story.directory(attempted.id))
            uses_new.append(len(there) == len(APPS))
            if uses_new[-1]:
                # The next life goes on from it; else from the one before.
                story.saved = attempted
            else:
                assert len(there) == len(APPS) - 1
                broken.append(attempted)
        else:
            raise AssertionError(f"{victim} makes more than {CHANGES_MAX} changes")
        killed = story.forks.deaths()
        assert {"make_directory", "create", "write", "sync", "rename", "link"} <= set(killed)
        # The one moment at which it changes over is the link of the manifest.
        link = killed.index("link")
        assert uses_new == [False] * link + [True] * (len(killed) - link)
        async with story.life() as life:
            for saved in broken:
                await refused_everywhere(life, saved, victim)


async def refused_everywhere(life: Life, saved: Saved, victim: str) -> None:
    """What is not whole is restored by nobody, though the parts of three servers are."""
    with pytest.raises(Failed) as refused:
        await life.restore(saved)
    assert refused.value.failures.keys() == {victim}
    assert f"{saved.id}/gym/" in str(refused.value)
    await life.nothing_is_activated()


@pytest.mark.timeout(120)
async def test_a_flipped_byte_activates_nothing_and_is_named(tmp_path: Path) -> None:
    """Trial T10, STO-4, I23, COORD-3: in every file, at its ends and in between."""
    async with open_story(tmp_path) as story:
        for _ in range(2):
            assert await story.commit() is None
        saved = story.saved
        assert saved is not None
        files = sorted(p for p in story.directory(saved.id).rglob("*") if p.is_file())
        assert len(files) == 2 * len(APPS)
        async with story.life() as life:
            for file in files:
                whole = file.read_bytes()
                for place in sorted({*range(0, len(whole), len(whole) // 5), len(whole) - 1}):
                    damaged = bytearray(whole)
                    damaged[place] ^= 0x20
                    file.write_bytes(damaged)
                    with pytest.raises(Failed) as refused:
                        await life.restore(saved)
                    assert file.name in str(refused.value), (file, place)
                    await life.nothing_is_activated()
                file.write_bytes(whole)
            await life.restore(saved)
            story.engine.finish()
            reply = await life.run(saved.episode.next_attempt())
            assert reply["result"]["final_count"] == saved.moves
