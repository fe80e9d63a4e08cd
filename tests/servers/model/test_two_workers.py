"""A policy server of two worker processes in front of real engines, and callers that nobody here wrote.

The servers are forked from one process that has imported them; every crash is a SIGKILL of the group.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import trio
from openai import AsyncOpenAI

from gymtrio.capture.ledger import LedgerRow
from gymtrio.capture.replies import CallTokens, Route, read_tokens
from gymtrio.checkpoint.coordination import Controller
from gymtrio.cli.demonstration.rollouts import read_ledger
from gymtrio.errors import TransportError
from gymtrio.ids import CaptureKey, CheckpointId, EpisodeId, RolloutId
from gymtrio.serving.client import ServerClient
from gymtrio.serving.controller import open_controller
from gymtrio.serving.deployment import (
    Deployment,
    DeploymentDirectory,
    load_deployment,
    parse_deployment,
)
from gymtrio.serving.supervisor import write_resolved
from gymtrio.serving.transports import open_transport
from gymtrio.settings import Secret
from gymtrio.wire.unix import runtime_directory
from tests.helpers.crashing import kill, serving
from tests.helpers.forked_servers import Forks, open_forks, reserved_addresses
from tests.helpers.llama_cpp_server import llama_cpp_server
from tests.helpers.served_engine import TOKEN, ServedEngine
from tests.helpers.shown_calls import FLAT, NESTED, SHOWN

WORKERS: Final = 2
TIMEOUT_S: Final = 30.0
CURL: Final = shutil.which("curl")

# The SDK leaves its own generators to the collector after the last event of a stream.
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:Async generator '(openai|httpx|httpcore):ResourceWarning"),
]


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    log = tmp_path_factory.mktemp("forks") / "log"
    with open_forks(log, ["servers.model.policy:app"]) as opened:
        yield opened


@attrs.frozen
class Life:
    """The workers from one start to their end."""

    deployment: Deployment
    client: ServerClient
    controller: Controller

    def of_rollout(self, key: str) -> str:
        """What a harness of this rollout is told."""
        return f"{self.deployment.url('policy')}/ng-rollout/{key}"

    async def tokens(self, key: str, route: Route, body: dict[str, Any]) -> CallTokens:
        """One call over frames, which the workers get by turns."""
        reply = await self.client.request(
            "policy", "POST", f"/ng-rollout/{key}{route.value}", json=body, context=None
        )
        return read_tokens(route, reply.raise_for_status().json())  # type: ignore[arg-type]

    async def rows(self, key: str) -> tuple[LedgerRow, ...]:
        return await read_ledger(self.client, CaptureKey(key), Secret(TOKEN))


@attrs.frozen
class Place:
    """A deployment whose processes live several times."""

    forks: Forks
    file: Path
    token_store: Path

    @asynccontextmanager
    async def life(
        self, restored: CheckpointId | None = None, scope: list[EpisodeId] | None = None
    ) -> AsyncIterator[Life]:
        """New processes; at the end of the block they are killed."""
        deployment = load_deployment(self.file)
        async with (
            self.forks.start(self.file, {"policy": None}) as forked,
            serving(deployment),
            open_controller(deployment) as controller,
            open_transport(deployment, "caller") as transport,
        ):
            client = ServerClient(DeploymentDirectory(deployment), transport)
            if restored is None:
                await controller.start_afresh([], timeout_s=TIMEOUT_S)
            else:
                assert deployment.checkpoint.root is not None
                where = str(Path(deployment.checkpoint.root) / restored)
                await controller.restore(restored, where, scope or [], timeout_s=TIMEOUT_S)
            yield Life(deployment, client, controller)
            await kill(forked.values())

    def damage(self, key: str) -> None:
        """Flip a bit of a record in the token store."""
        for segment in self.token_store.iterdir():
            data = bytearray(segment.read_bytes())
            place = data.rfind(key.encode())
            if place >= 0:
                data[place + len(key) + 20] ^= 1
                segment.write_bytes(data)
                return
        raise AssertionError(f"{key} is nowhere")


@asynccontextmanager
async def open_place(
    forks: Forks, directory: Path, token_store: Path, **engine: object
) -> AsyncIterator[Place]:
    (directory / "checkpoints").mkdir()
    settings = {
        "checkpoint_policy": True,
        "checkpoint_generation_cuts": True,
        "num_workers": WORKERS,
        "token_store": str(token_store),
        **engine,
    }
    entry: dict[str, object] = {"app": "servers.model.policy:app", "settings": settings}
    with reserved_addresses(["policy"]) as binds, runtime_directory() as sockets:
        block = {
            "state_dir": str(directory / "state"),
            "socket_dir": str(sockets),
            "checkpoint": {
                "enabled": True,
                "control_auth_token": TOKEN,
                "root": str(directory / "checkpoints"),
                "recover": True,
            },
            "servers": {"policy": entry | {"bind": binds["policy"]}},
        }
        yield Place(forks, write_resolved(parse_deployment(block), directory), token_store)


@pytest.fixture(params=["embedded", "llama.cpp"])
async def place(
    request: pytest.FixtureRequest, forks: Forks, served: ServedEngine, tmp_path: Path
) -> AsyncIterator[Place]:
    if request.param == "embedded":
        store = served.state_dir / "tokens"
        settings = {"backend": served.url, "native_backend": True}
        async with open_place(forks, tmp_path, store, **settings) as opened:
            yield opened
        return
    with llama_cpp_server(tmp_path / "llama.log") as url:
        stock = {"backend": url, "stock_backend": "llama_cpp", "policy_version": 7}
        async with open_place(forks, tmp_path, tmp_path / "tokens", **stock) as opened:
            yield opened


GREEDY: Final[dict[str, Any]] = {"temperature": 0}
SEEDED: Final[dict[str, Any]] = {"temperature": 0.8, "seed": 5}
FIRST: Final[dict[str, Any]] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 4,
    **GREEDY,
}


def _second(said: str) -> list[dict[str, str]]:
    return [
        *FIRST["messages"],
        {"role": "assistant", "content": said},
        {"role": "user", "content": "Write a story about a fox and a cat."},
    ]


def _turns(said: str) -> dict[str, tuple[Route, dict[str, Any]]]:
    """The second calls of the rollouts, each in its own way."""
    chat: dict[str, Any] = {"model": "policy", "messages": _second(said), "max_tokens": 48}
    response: dict[str, Any] = {
        "model": "policy",
        "input": _second(said),
        "max_output_tokens": 48,
    }
    return {
        "whole": (Route.CHAT, chat | GREEDY),
        "streamed": (Route.CHAT, chat | SEEDED),
        "response": (Route.RESPONSES, response | SEEDED),
        "damaged": (Route.RESPONSES, response | GREEDY),
    }


async def _in_vain(life: Life, key: str, route: Route, body: dict[str, Any]) -> None:
    with suppress(TransportError):
        await life.tokens(key, route, body)


async def _prepared_with_cuts(life: Life, count: int) -> CheckpointId:
    """Prepare while so many calls decode, however long their prompts take."""
    with trio.fail_after(2 * TIMEOUT_S):
        number = 0
        while True:
            number += 1
            checkpoint_id = CheckpointId(f"c{number}")
            prepared = await life.controller.prepare(checkpoint_id, timeout_s=TIMEOUT_S)
            assert prepared.ready
            if prepared.reports["policy"].counts["cut"] == count:
                return checkpoint_id
            await life.controller.resume(checkpoint_id, timeout_s=TIMEOUT_S)


async def _by_sdk(life: Life, key: str, route: Route, body: dict[str, Any], *, stream: bool) -> Any:
    """A call through the openai SDK; gives what carries its tokens, as a whole reply has it."""
    url = f"{life.of_rollout(key)}/v1"
    # Not every route of the SDK knows these.
    extra = {name: body[name] for name in ("seed", "grammar") if name in body}
    asked: Any = {n: v for n, v in body.items() if n not in extra} | {"extra_body": extra}
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        if route is Route.RESPONSES:
            if not stream:
                return (await client.responses.create(**asked)).to_dict()
            events = [e async for e in await client.responses.create(**asked, stream=True)]
            return events[-1].response.to_dict()
        if not stream:
            return (await client.chat.completions.create(**asked)).to_dict()
        chunks = [c async for c in await client.chat.completions.create(**asked, stream=True)]
        return {"choices": [{"message": chunks[-1].choices[0].delta.to_dict()}]}


async def test_what_two_workers_had_in_flight_is_continued_for_outside_clients(
    place: Place,
) -> None:
    """WRK-1, CUT-1, CUT-2, CUT-4, CUT-7, POL-7, I16, I25, I26: calls of both workers are cut, killed,
    restored; ids and log-probs are those of uncut ones; of one the tokens were damaged meanwhile."""
    async with place.life() as life:
        reply = await life.client.request(
            "policy", "POST", "/ng-rollout/uncut/v1/chat/completions", json=FIRST, context=None
        )
        told: Any = reply.raise_for_status().json()
        turns = _turns(told["choices"][0]["message"]["content"])
        uncut = {}

        async def leave_alone(name: str) -> None:
            uncut[name] = await life.tokens(f"uncut-{name}", *turns[name])

        async with trio.open_nursery() as nursery:
            for name in turns:
                nursery.start_soon(leave_alone, name)
        for name in turns:
            await life.tokens(name, Route.CHAT, FIRST)
        episodes = [EpisodeId(RolloutId(name)) for name in turns]
        async with trio.open_nursery() as nursery:
            for name, (route, body) in turns.items():
                nursery.start_soon(_in_vain, life, name, route, body)
            checkpoint_id = await _prepared_with_cuts(life, len(turns))
            assert life.deployment.checkpoint.root is not None
            committed = await life.controller.commit(
                checkpoint_id,
                str(Path(life.deployment.checkpoint.root) / checkpoint_id),
                episodes,
                timeout_s=TIMEOUT_S,
            )
            await _whichever_worker_tells_of_the_checkpoint(life, len(turns))
            nursery.cancel_scope.cancel()
    parts: Any = committed["policy"].manifest["parts"]
    assert sorted(part["section"] for part in parts) == ["cuts", "cuts", "ledger"]
    keys: Any = committed["policy"].extra["staging_keys_by_episode"]
    place.damage(next(key for key in keys["damaged"] if not key.endswith("/whole")))
    async with place.life(checkpoint_id, episodes) as life:
        for name, (route, body) in turns.items():
            stream = name in ("streamed", "damaged")
            told = await _by_sdk(life, f"{name}-a1", route, body, stream=stream)
            assert read_tokens(route, told) == uncut[name], name
            first, second = await life.rows(f"{name}-a1")
            assert second.parent_call_id == first.model_call_id
            assert (second.continued_token_count == 0) == (name == "damaged")
        status = (await life.controller.status())["policy"]
        assert status.extra["restored_generation_cuts"] == []
        reply = await life.client.request("policy", "GET", "/metrics", context=None)
        line = 'gymtrio_generation_cuts_not_continued_total{reason="failed"} 1.0'
        assert line in reply.body.decode().splitlines()
    gc.collect()


async def _whichever_worker_tells_of_the_checkpoint(life: Life, cut: int) -> None:
    """SRV-6: over frames calls go to the workers by turns."""
    told = set()
    for _ in range(2 * WORKERS):
        reply = await life.client.request("policy", "GET", "/metrics", context=None)
        lines = reply.raise_for_status().body.decode().splitlines()
        assert 'gymtrio_checkpoint_phase{phase="committed"} 1.0' in lines
        assert f'gymtrio_generation_cuts_total{{outcome="cut"}} {cut}.0' in lines
        assert f'gymtrio_participant_objects{{what="held"}} {cut}.0' in lines
        families = [line for line in lines if line.startswith("# TYPE ")]
        assert len(families) == len(set(families))
        told.add(next(line for line in lines if line.startswith("process_start_time_seconds")))
    assert 1 <= len(told) <= WORKERS


async def test_a_constrained_call_of_two_workers_is_not_cut(forks: Forks, tmp_path: Path) -> None:
    """Trial T7, CUT-6, I27: it is skipped, and what answers after the restore follows its grammar."""
    plain = {**FIRST, "messages": _second("Hello."), "max_tokens": 48}
    bodies = {"plain": plain, "constrained": plain | {"grammar": LETTERS}}
    episodes = [EpisodeId(RolloutId(name)) for name in bodies]
    with llama_cpp_server(tmp_path / "llama.log") as url:
        settings = {"backend": url, "stock_backend": "llama_cpp"}
        async with open_place(forks, tmp_path, tmp_path / "tokens", **settings) as place:
            async with place.life() as life, trio.open_nursery() as nursery:
                for name, body in bodies.items():
                    nursery.start_soon(_in_vain, life, name, Route.CHAT, body)
                checkpoint_id = await _prepared_with_cuts(life, 1)
                status = (await life.controller.status())["policy"]
                counts = status.report.counts
                assert counts | {"cut_failed": 0, "cut_skipped": 1, "held": 2} == counts
                assert life.deployment.checkpoint.root is not None
                where = str(Path(life.deployment.checkpoint.root) / checkpoint_id)
                await life.controller.commit(checkpoint_id, where, episodes, timeout_s=TIMEOUT_S)
                nursery.cancel_scope.cancel()
            async with place.life(checkpoint_id, episodes) as life:
                status = (await life.controller.status())["policy"]
                assert status.extra["restored_generation_cuts"] == ["plain-a1"]
                told = await _by_sdk(
                    life, "constrained-a1", Route.CHAT, bodies["constrained"], stream=False
                )
                assert re.fullmatch("[a-z]{60}", told["choices"][0]["message"]["content"])
                status = (await life.controller.status())["policy"]
                assert status.extra["restored_generation_cuts"] == ["plain-a1"]


LETTERS: Final = "root ::= [a-z]{60}"
SHOWN_CALL: Final[dict[str, Any]] = {"model": "policy", **GREEDY}


@pytest.mark.skipif(CURL is None, reason="there is no curl here")
@pytest.mark.parametrize("workers", [1, WORKERS])
async def test_tools_by_sdk_and_by_plain_curl(
    forks: Forks, served: ServedEngine, tmp_path: Path, workers: int
) -> None:
    """POL-1, WRK-1: chat completions and responses, whole and streamed, at the port that the workers
    share; what is refused is refused alike."""
    chat: dict[str, Any] = {**SHOWN_CALL, "messages": SHOWN, "tools": [NESTED], "max_tokens": 20}
    response: dict[str, Any] = {
        **SHOWN_CALL,
        "input": SHOWN,
        "tools": [FLAT],
        "max_output_tokens": 20,
    }
    settings = {"backend": served.url, "native_backend": True, "num_workers": workers}
    store = served.state_dir / "tokens"
    async with open_place(forks, tmp_path, store, **settings) as place, place.life() as life:
        for route, body in ((Route.CHAT, chat), (Route.RESPONSES, response)):
            for stream in (False, True):
                told = await _by_sdk(life, "sdk", route, body, stream=stream)
                sent = json.dumps(body | {"stream": stream})
                status, shown = await _curl(life.of_rollout("curl") + route.value, sent)
                assert status == 200
                assert r"{\"count\":5}" in shown
                ids = json.dumps(read_tokens(route, told).token_ids, separators=(",", ":"))
                assert f'"generation_token_ids":{ids}' in shown
        status, shown = await _curl(life.of_rollout("curl") + Route.CHAT.value, "{not JSON")
        assert (status, json.loads(shown)["error"]["code"]) == (422, "invalid_request")
    gc.collect()


async def _curl(url: str, body: str) -> tuple[int, str]:
    """The status and the body of an answer."""
    assert CURL is not None
    command = [
        CURL,
        "-sS",
        "--no-buffer",
        "--max-time",
        "30",
        "-w",
        "\n%{http_code}",
        "-d",
        body,
        url,
    ]
    done = await trio.run_process(command, capture_stdout=True)
    text, _, status = done.stdout.decode().rpartition("\n")
    return int(status), text
