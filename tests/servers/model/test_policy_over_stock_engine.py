"""The policy server over engines that nobody here wrote: cut, crashed, continued (CUT-2).

llama.cpp's server always; vLLM where `GYMTRIO_VLLM_URL` says where one serves.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import trio

from gymtrio.capture.replies import Route, read_tokens
from gymtrio.checkpoint.coordination import Controller, open_coordination
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId
from gymtrio.ports import HostClock, HostRandomness
from gymtrio.serving.app import open_asgi
from gymtrio.serving.client import ServerClient
from gymtrio.serving.controlchannel import HttpControlChannel
from gymtrio.serving.deployment import DeploymentDirectory, parse_deployment
from gymtrio.serving.host import HostPorts
from gymtrio.serving.inprocess import open_network
from gymtrio.serving.pool import open_pool
from gymtrio.settings import Secret
from servers.model.policy import app as policy_app
from tests.helpers.llama_cpp_server import llama_cpp_server

TOKEN = "token-of-the-tests"
EPISODE = EpisodeId(RolloutId("r"))
VLLM_URL: Final = os.environ.get("GYMTRIO_VLLM_URL")

SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
# llama.cpp counts the prompt among what it penalises, and so the prefix as well.
PENALISED: dict[str, Any] = {"temperature": 0, "repeat_penalty": 1.3, "frequency_penalty": 0.5}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Write a story about a fox and a cat."}],
    "max_tokens": 80,
}
RESPONSES: dict[str, Any] = {
    "instructions": "You are brief.",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "Describe rain."}]}],
    "max_output_tokens": 80,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with llama_cpp_server(tmp_path_factory.mktemp("llama") / "log") as url:
        yield url


@attrs.frozen
class Incarnation:
    """A policy server, as a process would be; the engine lives on when it crashes."""

    client: ServerClient
    controller: Controller

    async def call(self, key: str, route: Route, body: dict[str, Any]) -> Any:
        path = f"/ng-rollout/{key}{route.value}"
        reply = await self.client.request("policy", "POST", path, json=body)
        return reply.raise_for_status().json()


@asynccontextmanager
async def open_incarnation(
    tmp_path: Path, engine: str, *, api: str = "llama_cpp", recover: bool = False
) -> AsyncIterator[Incarnation]:
    policy = {
        "backend": engine,
        "stock_backend": api,
        "checkpoint_policy": True,
        "checkpoint_generation_cuts": True,
        "policy_version": 7,
    }
    where = parse_deployment(
        {
            "state_dir": str(tmp_path / "state"),
            "checkpoint": {
                "enabled": True,
                "control_auth_token": TOKEN,
                "root": str(tmp_path / "checkpoints"),
                "recover": recover,
            },
            "servers": {"policy": {"url": "http://policy", "kind": "model", "settings": policy}},
        }
    )
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    async with open_network() as network, open_pool() as pool:
        client = ServerClient(DeploymentDirectory(where), network)
        ports = HostPorts(transport=pool)
        async with open_asgi(policy_app, deployment=where, name="policy", ports=ports) as policy_:
            with network.serving("policy", policy_):
                async with open_coordination(
                    ["policy"],
                    HttpControlChannel(client, Secret(TOKEN)),
                    wall_clock=HostClock(),
                    randomness=HostRandomness(),
                ) as controller:
                    yield Incarnation(client, controller)


async def prepared_with_a_cut(incarnation: Incarnation) -> tuple[CheckpointId, dict[str, int]]:
    """Prepare while something decodes, however long its prompt takes."""
    number = 0
    while True:
        number += 1
        checkpoint_id = CheckpointId(f"c{number}")
        prepared = await incarnation.controller.prepare(checkpoint_id, timeout_s=20)
        assert prepared.ready
        if prepared.reports["policy"].counts["cut"]:
            return checkpoint_id, prepared.reports["policy"].counts
        await incarnation.controller.resume(checkpoint_id, timeout_s=20)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (Route.CHAT, CHAT | SAMPLED),
        (Route.RESPONSES, RESPONSES | {"temperature": 0}),
        (Route.CHAT, CHAT | PENALISED),
    ],
    ids=["sampled chat", "greedy responses", "penalised chat"],
)
async def test_a_generation_of_a_stock_engine_is_cut_and_continued(
    tmp_path: Path,
    engine: str,
    caplog: pytest.LogCaptureFixture,
    route: Route,
    body: dict[str, Any],
) -> None:
    """CUT-2, CUT-4, I25, I26: ids and log-probs of the continued reply are those of an uncut call."""
    directory = tmp_path / "checkpoints" / "one"

    async def be_interrupted() -> None:
        await first.call(EPISODE.capture_key, route, body)
        pytest.fail("the call ended before it was cut")

    async with open_incarnation(tmp_path, engine) as first:
        uncut = await first.call("other", route, body)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(be_interrupted)
            checkpoint_id, _ = await prepared_with_a_cut(first)
            committed = await first.controller.commit(
                checkpoint_id, str(directory), [EPISODE], timeout_s=20
            )
            nursery.cancel_scope.cancel()
    assert committed
    async with open_incarnation(tmp_path, engine, recover=True) as second:
        await second.controller.restore(checkpoint_id, str(directory), [EPISODE], timeout_s=20)
        status = await second.controller.status()
        assert status["policy"].extra["restored_generation_cuts"] == ["r-a1"]
        told = await second.call(EPISODE.next_attempt().capture_key, route, body)
        assert read_tokens(route, told) == read_tokens(route, uncut)
        status = await second.controller.status()
        assert status["policy"].extra["restored_generation_cuts"] == []
    assert "generated anew" not in caplog.text


ANIMALS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "animals": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "minItems": 10,
            "maxItems": 10,
        }
    },
    "required": ["animals"],
}
SCHEMA: Final[dict[str, Any]] = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "animals", "schema": ANIMALS},
    }
}
ADD_NUMBERS: Final = (
    r'root ::= "{\"name\": \"add\", \"arguments\": {\"numbers\": [" [0-9] (", " [0-9]){19} "]}}"'
)


def check_schema(message: Any) -> None:
    animals = json.loads(message["content"])["animals"]
    assert [type(animal) for animal in animals] == [str] * 10


def check_letters(message: Any) -> None:
    assert re.fullmatch("[a-z]{120}", message["content"])


async def messages_after_a_crash(
    tmp_path: Path,
    engine: str,
    constraints: dict[str, dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    *,
    api: str,
) -> dict[str, Any]:
    """Cut a plain call and constrained ones that all are in flight, crash, and make them again.

    Args:
        constraints: by the reason for which a call is not cut.

    Returns:
        The messages of the constrained ones, by the same.
    """
    bodies = {"plain": ("", CHAT | SAMPLED)} | {
        f"constrained{number}": (reason, CHAT | {"temperature": 0, "max_tokens": 200} | constraint)
        for number, (reason, constraint) in enumerate(constraints.items())
    }
    episodes = [EpisodeId(RolloutId(name)) for name in bodies]
    directory = tmp_path / "checkpoints" / "one"
    async with open_incarnation(tmp_path, engine, api=api) as first:
        async with trio.open_nursery() as nursery:
            for name, (_, body) in bodies.items():
                nursery.start_soon(first.call, name, Route.CHAT, body)
            with caplog.at_level(logging.INFO):
                checkpoint_id, counts = await prepared_with_a_cut(first)
            expected = {"cut": 1, "cut_failed": 0, "cut_skipped": len(constraints)}
            assert counts | expected == counts
            for reason in constraints:
                assert f"1 generations left to be generated anew: {reason}" in caplog.text
            await first.controller.commit(checkpoint_id, str(directory), episodes, timeout_s=20)
            nursery.cancel_scope.cancel()
    async with open_incarnation(tmp_path, engine, api=api, recover=True) as second:
        await second.controller.restore(checkpoint_id, str(directory), episodes, timeout_s=20)
        status = await second.controller.status()
        assert status["policy"].extra["restored_generation_cuts"] == ["plain-a1"]
        messages = {}

        async def ask(name: str, reason: str, body: dict[str, Any]) -> None:
            told = await second.call(f"{name}-a1", Route.CHAT, body)
            messages[reason] = told["choices"][0]["message"]

        async with trio.open_nursery() as nursery:
            for name, (reason, body) in bodies.items():
                nursery.start_soon(ask, name, reason, body)
    assert messages.pop("")["content"]
    return messages


async def test_no_cut_goes_through_a_grammar(
    tmp_path: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Trial T7, CUT-6, I27: of four calls in flight only the plain one is cut; after the restore all of
    them answer, and what was constrained parses, nothing within itself."""
    constraints = {
        "response_format:json_schema": SCHEMA,
        # This model's template knows no tools, so that the grammar of the call is given.
        "tool_choice:required": {"tool_choice": "required", "grammar": ADD_NUMBERS},
        "grammar": {"grammar": "root ::= [a-z]{120}"},
    }
    messages = await messages_after_a_crash(tmp_path, engine, constraints, caplog, api="llama_cpp")
    check_schema(messages["response_format:json_schema"])
    added = json.loads(messages["tool_choice:required"]["content"])
    assert added["name"] == "add"
    assert added["arguments"].keys() == {"numbers"}
    assert [type(number) for number in added["arguments"]["numbers"]] == [int] * 20
    check_letters(messages["grammar"])


@pytest.mark.skipif(VLLM_URL is None, reason="GYMTRIO_VLLM_URL names no vLLM server")
async def test_no_cut_goes_through_a_grammar_of_vllm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trial T7, CUT-6, I27: as above; whether vLLM enforces `tool_choice` depends on its parser."""
    assert VLLM_URL is not None
    constraints = {
        "response_format:json_schema": SCHEMA,
        "structured_outputs": {"structured_outputs": {"regex": "[a-z]{120}"}},
    }
    messages = await messages_after_a_crash(tmp_path, VLLM_URL, constraints, caplog, api="vllm")
    check_schema(messages["response_format:json_schema"])
    check_letters(messages["structured_outputs"])


@pytest.mark.skipif(VLLM_URL is None, reason="GYMTRIO_VLLM_URL names no vLLM server")
@pytest.mark.parametrize(
    ("settings", "continues"),
    [
        ({"temperature": 0}, True),
        (SAMPLED, True),
        ({"temperature": 0, "min_tokens": 60}, True),
        ({"temperature": 0, "frequency_penalty": 0.5}, False),
    ],
    ids=["greedy", "sampled", "at least", "penalised"],
)
async def test_a_generation_of_vllm_is_cut_and_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], continues: bool
) -> None:
    """CUT-2, CUT-4, I25: the reply is the very prefix that was cut, and a tail within the budget. What
    the tail says is its own affair: batches of vLLM are not bit for bit the same."""
    assert VLLM_URL is not None
    caplog.set_level(logging.INFO)
    body = CHAT | settings | {"max_tokens": 60, "ignore_eos": True}
    directory = tmp_path / "checkpoints" / "one"

    async def be_interrupted() -> None:
        await first.call(EPISODE.capture_key, Route.CHAT, body)
        pytest.fail("the call ended before it was cut")

    async with open_incarnation(tmp_path, VLLM_URL, api="vllm") as first:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(be_interrupted)
            checkpoint_id, _ = await prepared_with_a_cut(first)
            await first.controller.commit(checkpoint_id, str(directory), [EPISODE], timeout_s=20)
            nursery.cancel_scope.cancel()
    (manifest,) = directory.glob("gym/model/*/manifest.json")
    assert json.loads(manifest.read_text())["fields"]["engine"]["fingerprint"]["engine"] == "vllm"
    async with open_incarnation(tmp_path, VLLM_URL, api="vllm", recover=True) as second:
        await second.controller.restore(checkpoint_id, str(directory), [EPISODE], timeout_s=20)
        told = await second.call(EPISODE.next_attempt().capture_key, Route.CHAT, body)
        tokens = read_tokens(Route.CHAT, told)
        assert len(tokens.token_ids) == 60
        ledger = await second.client.request(
            "policy",
            "GET",
            f"/ng-control/v1/ledger/{EPISODE.next_attempt().capture_key}",
            headers=[("authorization", f"Bearer {TOKEN}")],
        )
        rows: Any = ledger.raise_for_status().json()
        (row,) = rows["rows"]
        assert (0 < row["continued_token_count"] < 60) == continues
        assert row["policy_version"] == 7
    assert ("the call is generated anew: frequency_penalty" in caplog.text) != continues
    resampled = continues and settings.get("temperature") != 0
    assert ("a sampled generation is resampled from its token" in caplog.text) == resampled
