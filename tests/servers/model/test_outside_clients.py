"""The policy server through SDKs that nobody here wrote, over sockets, and through a checkpoint."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import attrs
import openai
import pytest
import trio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from gymtrio.capture.replies import Route, read_tokens
from gymtrio.checkpoint.coordination import Controller, open_coordination
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId
from gymtrio.ports import HostClock, HostRandomness
from gymtrio.serving.app import open_asgi
from gymtrio.serving.client import ServerClient
from gymtrio.serving.controlchannel import HttpControlChannel
from gymtrio.serving.deployment import Deployment, DeploymentDirectory, parse_deployment
from gymtrio.serving.pool import open_pool
from gymtrio.settings import Secret
from servers.model.policy import app as policy_app
from tests.helpers.served_engine import TOKEN, ServedEngine, started
from tests.helpers.serving import serve_on_sockets
from tests.helpers.shown_calls import FLAT, NESTED, SHOWN

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
SHORT: Any = {"model": "policy", "temperature": 0}
EPISODE = EpisodeId(RolloutId("r"))

# These SDKs leave their own generators to the collector after the last event of a stream.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Async generator '(openai|anthropic|httpx|httpcore):ResourceWarning"
)


@attrs.frozen
class Served:
    url: str
    controller: Controller

    def of_rollout(self, key: str = "r") -> str:
        """The base URL that a harness of this rollout is given."""
        return f"{self.url}/ng-rollout/{key}"


@pytest.fixture
async def served_policy(served: ServedEngine, tmp_path: Path) -> AsyncIterator[Served]:
    (tmp_path / "checkpoints").mkdir()
    settings = {
        "backend": served.url,
        "native_backend": True,
        "checkpoint_policy": True,
        "checkpoint_generation_cuts": True,
        "token_store": str(served.state_dir / "tokens"),
    }
    deployment = parse_deployment(
        {
            "state_dir": str(served.state_dir / tmp_path.name),
            "checkpoint": {
                "enabled": True,
                "control_auth_token": TOKEN,
                "root": str(tmp_path / "checkpoints"),
            },
            "servers": {"policy": {"app": "servers.model.policy:app", "settings": settings}},
        }
    )
    async with _serving(deployment) as served_at:
        yield served_at
    gc.collect()


@asynccontextmanager
async def _serving(deployment: Deployment) -> AsyncIterator[Served]:
    async with (
        open_asgi(policy_app, deployment=deployment, name="policy") as asgi,
        serve_on_sockets(started(asgi)) as bind,
        open_pool() as pool,
        open_coordination(
            [bind.url],
            HttpControlChannel(ServerClient(DeploymentDirectory(deployment), pool), Secret(TOKEN)),
            wall_clock=HostClock(),
            randomness=HostRandomness(),
        ) as controller,
    ):
        yield Served(bind.url, controller)


@pytest.fixture
async def client(served_policy: Served) -> AsyncIterator[AsyncOpenAI]:
    base_url = f"{served_policy.of_rollout()}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


async def test_chat_completions_whole_and_streamed(client: AsyncOpenAI) -> None:
    kind: Any = {**SHORT, "messages": QUESTION, "max_tokens": 10}
    whole = await client.chat.completions.create(**kind)
    assert whole.choices[0].message.content == ANSWER
    async with client.chat.completions.stream(
        **kind, stream_options={"include_usage": True}
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    chunks = [chunk async for chunk in await client.chat.completions.create(**kind, stream=True)]
    told: Any = {"choices": [{"message": chunks[-1].choices[0].delta.model_dump()}]}
    assert read_tokens(Route.CHAT, told) == read_tokens(Route.CHAT, whole.model_dump())


async def test_responses_whole_and_streamed(client: AsyncOpenAI) -> None:
    kind: Any = {**SHORT, "input": QUESTION, "max_output_tokens": 10}
    whole = await client.responses.create(**kind)
    assert whole.output_text == ANSWER
    type(whole).model_validate(whole.to_dict())
    async with client.responses.stream(**kind) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == ANSWER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert read_tokens(Route.RESPONSES, final.to_dict()) == read_tokens(
        Route.RESPONSES, whole.to_dict()
    )


async def test_tools_streamed(client: AsyncOpenAI) -> None:
    shown: Any = SHOWN
    async with client.responses.stream(
        **SHORT, input=shown, tools=[FLAT], max_output_tokens=20
    ) as stream:
        (item,) = (await stream.get_final_response()).output
    assert item.type == "function_call"
    assert item.arguments == '{"count":5}'
    async with client.chat.completions.stream(
        **SHORT, messages=shown, tools=[NESTED], max_tokens=20
    ) as chat:
        completion = await chat.get_final_completion()
    (call,) = completion.choices[0].message.tool_calls or []
    assert call.function.arguments == '{"count":5}'


async def test_the_anthropic_sdk(served_policy: Served) -> None:
    """POL-1: `/v1/messages`, whole, streamed and with a tool."""
    async with AsyncAnthropic(
        base_url=served_policy.of_rollout(), api_key="none", max_retries=0
    ) as client:
        greedy: Any = {"temperature": 0}
        kind: Any = {
            "model": "policy",
            "messages": QUESTION,
            "max_tokens": 10,
            "extra_body": greedy,
        }
        whole = await client.messages.create(**kind)
        (block,) = whole.content
        assert block.type == "text"
        assert block.text == ANSWER
        assert whole.stop_reason == "end_turn"
        async with client.messages.stream(**kind) as stream:
            final = await stream.get_final_message()
        assert [part.model_dump(include={"type", "text"}) for part in final.content] == [
            {"type": "text", "text": ANSWER}
        ]
        assert final.usage.output_tokens == whole.usage.output_tokens
        with pytest.raises(anthropic.UnprocessableEntityError, match="tool_choice"):
            await client.messages.create(**kind, tool_choice={"type": "some"})  # type: ignore[call-overload]
    gc.collect()


async def test_a_stream_is_held_through_a_checkpoint(
    served_policy: Served, client: AsyncOpenAI
) -> None:
    """POL-2, I2: nothing of it leaves between prepare and resume, and prepare does not wait for it."""
    texts: list[str | None] = []

    async def ask() -> None:
        stream = await client.chat.completions.create(
            **SHORT, messages=QUESTION, max_tokens=10, stream=True
        )
        parts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
        texts.append("".join(parts))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        checkpoint_id = CheckpointId("c1")
        while True:
            prepared = await served_policy.controller.prepare(checkpoint_id, timeout_s=20)
            assert prepared.ready
            (report,) = prepared.reports.values()
            if report.counts["held"]:
                break
            await served_policy.controller.resume(checkpoint_id, timeout_s=20)
            checkpoint_id = CheckpointId(f"{checkpoint_id}x")
        assert texts == []
        await served_policy.controller.resume(checkpoint_id, timeout_s=20)
    assert texts == [ANSWER]


async def test_errors_are_typed(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="n: a call of a rollout"):
        await client.chat.completions.create(**SHORT, messages=QUESTION, n=2)
