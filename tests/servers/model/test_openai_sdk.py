"""The engine through the unmodified openai SDK, which is trio-native, over real sockets."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import trio
from openai import AsyncOpenAI

from tests.helpers.served_engine import ServedEngine
from tests.helpers.shown_calls import FLAT, NESTED, SHOWN

MODEL = "smollm2-135m-instruct"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "user", "content": "Write a long story about a fox."}]

# The SDK leaves its own generators to the collector after the last event of every chat stream.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Async generator '(openai|httpx|httpcore):ResourceWarning"
)


@pytest.fixture
async def client(served: ServedEngine) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    gc.collect()


async def test_chat_completions(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=10, logprobs=True
    )
    (choice,) = completion.choices
    assert choice.message.content == "The capital of France is Paris."
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert completion.usage is not None
    assert len(choice.logprobs.content) == completion.usage.completion_tokens
    assert [model.id async for model in client.models.list()] == [MODEL]


async def test_several_at_once(client: AsyncOpenAI) -> None:
    texts: dict[int, str | None] = {}

    async def one(seed: int) -> None:
        reply = await client.chat.completions.create(
            model=MODEL, messages=STORY, seed=seed % 2, max_tokens=5
        )
        texts[seed] = reply.choices[0].message.content

    async with trio.open_nursery() as nursery:
        for seed in range(4):
            nursery.start_soon(one, seed)
    assert texts[0] == texts[2] != texts[1] == texts[3]


async def test_responses(client: AsyncOpenAI) -> None:
    response = await client.responses.create(
        model=MODEL, input=QUESTION, temperature=0, max_output_tokens=10
    )
    assert response.output_text == "The capital of France is Paris."
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    type(response).model_validate(response.to_dict())


async def test_a_streamed_chat_completion_is_the_whole_one(client: AsyncOpenAI) -> None:
    kind: Any = {
        "model": MODEL,
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
    }
    whole = await client.chat.completions.create(**kind, extra_body={"return_token_ids": True})
    async with client.chat.completions.stream(
        **kind, stream_options={"include_usage": True}, extra_body={"return_token_ids": True}
    ) as stream:
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
        final = await stream.get_final_completion()
    told: Any = whole.choices[0]
    assert final.choices[0].message.content == told.message.content
    assert final.choices[0].finish_reason == told.finish_reason == "stop"
    assert final.choices[0].logprobs == told.logprobs
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    streamed: list[int] = []
    for chunk in chunks:
        for choice in chunk.choices:
            streamed += getattr(choice, "token_ids", [])
    assert streamed == told.token_ids
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids  # type: ignore[attr-defined]


async def test_a_streamed_response_is_the_whole_one(client: AsyncOpenAI) -> None:
    kind: Any = {
        "model": MODEL,
        "input": QUESTION,
        "temperature": 0,
        "max_output_tokens": 10,
        "include": ["message.output_text.logprobs"],
    }
    whole = await client.responses.create(**kind)
    async with client.responses.stream(**kind) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == whole.output_text
    assert final.status == whole.status == "completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    assert len(deltas) > 1
    part: Any = whole.output[0].content[0]  # type: ignore[union-attr]
    entries: list[float] = []
    for event in deltas:
        entries += [entry.logprob for entry in event.logprobs]
    # The token that ended the turn comes after the last text.
    assert entries == [entry.logprob for entry in part.logprobs[:-1]]


async def test_a_streamed_function_call(client: AsyncOpenAI) -> None:
    kind: Any = {"model": MODEL, "temperature": 0}
    shown: Any = SHOWN
    async with client.responses.stream(
        **kind, input=shown, tools=[FLAT], max_output_tokens=20
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    (item,) = final.output
    assert item.type == "function_call"
    assert item.arguments == '{"count":5}'
    assert "response.output_text.delta" not in {event.type for event in events}
    async with client.chat.completions.stream(
        **kind, messages=shown, tools=[NESTED], max_tokens=20
    ) as chat:
        completion = await chat.get_final_completion()
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls or []
    assert call.function.arguments == '{"count":5}'


async def test_errors_are_typed_and_say_what_was_wrong(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="presence_penalty") as refused:
        await client.chat.completions.create(model=MODEL, messages=QUESTION, presence_penalty=1)
    assert refused.value.code == "invalid_request"
    assert refused.value.type == "invalid_request_error"


async def test_a_call_and_a_stream_can_be_cancelled(client: AsyncOpenAI) -> None:
    """SRV-3"""
    kind: Any = {"model": MODEL, "messages": STORY, "max_tokens": 450}
    stream = await client.chat.completions.create(**kind, stream=True)
    async with stream:
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
    with trio.move_on_after(0.3) as scope:
        await client.chat.completions.create(**kind)
    assert scope.cancelled_caught
