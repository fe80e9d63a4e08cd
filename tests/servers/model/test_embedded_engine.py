"""The engine's data routes, over sockets, with the real model."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from gymtrio.errors import SettingsError
from gymtrio.serving.client import Reply
from gymtrio.serving.lifespan import StartFailed, open_lifespan
from gymtrio.settings import load_settings
from servers.model.embedded_engine import EmbeddedEngineSettings, app
from tests.helpers.served_engine import (
    SETTINGS,
    EngineClient,
    ServedEngine,
    open_engine_client,
)
from tests.helpers.shown_calls import FLAT, NESTED, SHOWN

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
PARIS = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10}
CALLING: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
STORY = [{"role": "user", "content": "Write a long story about a fox."}]


@pytest.fixture
async def engine(served: ServedEngine) -> AsyncIterator[EngineClient]:
    async with open_engine_client(served.url) as client:
        yield client


def choice_of(reply: Any) -> Any:
    (choice,) = reply["choices"]
    return choice


async def test_a_chat_completion_has_ids_and_log_probs_where_asked(engine: EngineClient) -> None:
    plain = await engine.answer(CHAT, {"messages": PARIS, **GREEDY})
    full = await engine.answer(
        CHAT, {"messages": PARIS, **GREEDY, "logprobs": True, "return_token_ids": True}
    )
    choice = choice_of(full)
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert plain["choices"][0]["message"] == choice["message"]
    assert choice_of(plain)["logprobs"] is None
    assert not {"prompt_token_ids", "gymtrio"} & plain.keys()
    assert "token_ids" not in choice_of(plain)
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(choice["token_ids"]) == full["usage"]["completion_tokens"]
    assert len(full["prompt_token_ids"]) == full["usage"]["prompt_tokens"]
    assert entries[-1]["token"] == "<|im_end|>"
    assert "".join(entry["token"] for entry in entries[:-1]) == choice["message"]["content"]
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert text == choice["message"]["content"]
    assert all(entry["logprob"] <= 0 for entry in entries)


async def test_both_apis_read_and_generate_the_same(engine: EngineClient) -> None:
    system = {"role": "system", "content": "You answer questions."}
    chat = await engine.answer(
        CHAT, {"messages": [system, *PARIS], **GREEDY, "return_token_ids": True}
    )
    asked = {
        "instructions": system["content"],
        "input": PARIS[0]["content"],
        "temperature": 0,
        "max_output_tokens": 10,
        "return_token_ids": True,
        "include": ["message.output_text.logprobs"],
    }
    response = await engine.answer(RESPONSES, asked)
    (item,) = response["output"]
    (part,) = item["content"]
    assert part["text"] == choice_of(chat)["message"]["content"]
    assert item["prompt_token_ids"] == chat["prompt_token_ids"]
    assert item["generation_token_ids"] == choice_of(chat)["token_ids"]
    assert [entry["logprob"] for entry in part["logprobs"]] == item["generation_log_probs"]
    assert response["status"] == item["status"] == "completed"
    assert response["instructions"] == asked["instructions"]


async def test_a_response_that_meets_its_limit_is_incomplete(engine: EngineClient) -> None:
    response = await engine.answer(RESPONSES, {"input": STORY, "max_output_tokens": 3})
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["output_tokens"] == 3


async def test_a_seed_repeats_a_sample_and_its_absence_does_not(engine: EngineClient) -> None:
    body = {"messages": STORY, "max_tokens": 6, "return_token_ids": True}
    seeded = [await engine.answer(CHAT, {**body, "seed": 7}) for _ in range(2)]
    # So short a sample comes twice by chance, once in some hundred times; six of them do not.
    unseeded = [await engine.answer(CHAT, body) for _ in range(6)]
    ids = [tuple(choice_of(reply)["token_ids"]) for reply in (*seeded, *unseeded)]
    assert ids[0] == ids[1]
    assert len(set(ids[2:])) > 1


async def test_choices_differ_and_the_first_is_that_of_a_single_call(engine: EngineClient) -> None:
    body = {"messages": STORY, "max_tokens": 6, "seed": 7}
    single = await engine.answer(CHAT, body)
    several = await engine.answer(CHAT, {**body, "n": 3})
    texts = [choice["message"]["content"] for choice in several["choices"]]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert texts[0] == choice_of(single)["message"]["content"]
    assert len(set(texts)) == 3
    assert several["usage"]["completion_tokens"] == 18


async def test_a_stop_string_is_left_out_of_the_text(engine: EngineClient) -> None:
    reply = await engine.answer(CHAT, {"messages": PARIS, **GREEDY, "stop": [" France"]})
    choice = choice_of(reply)
    assert choice["message"]["content"] == "The capital of"
    assert choice["finish_reason"] == "stop"


async def test_a_function_call_is_read_in_both_apis(engine: EngineClient) -> None:
    chat = await engine.answer(CHAT, {"messages": SHOWN, **CALLING, "tools": [NESTED]})
    choice = choice_of(chat)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"count":5}'}
    asked = {"input": SHOWN, "max_output_tokens": 20, "temperature": 0, "tools": [FLAT]}
    response = await engine.answer(RESPONSES, asked)
    (item,) = response["output"]
    assert item["type"] == "function_call"
    assert {name: item[name] for name in call["function"]} == call["function"]
    assert response["tools"] == [FLAT]


async def test_tools_are_told_in_the_system_turn(engine: EngineClient) -> None:
    async def tokens(**more: object) -> int:
        reply = await engine.answer("/tokenize", {"messages": PARIS, **more})
        count: int = reply["count"]
        return count

    assert await tokens(tools=[NESTED]) > await tokens()
    assert await tokens(tools=[NESTED], tool_choice="none") == await tokens()


async def test_tokenize_tells_what_a_completion_reads(engine: EngineClient) -> None:
    told = await engine.answer("/tokenize", {"model": "any", "messages": PARIS})
    reply = await engine.answer(
        CHAT, {"messages": PARIS, "max_tokens": 1, "return_token_ids": True}
    )
    assert told["tokens"] == reply["prompt_token_ids"]
    assert told["count"] == len(told["tokens"])
    assert told["max_model_len"] == SETTINGS["context_tokens"]
    text = await engine.answer("/tokenize", {"prompt": "Paris"})
    assert text["count"] == len(text["tokens"]) > 0


async def test_models_are_listed(engine: EngineClient) -> None:
    listed = (await engine.get("/v1/models")).raise_for_status().json()
    (model,) = listed["data"]  # type: ignore[index]
    assert (await engine.get(f"/v1/models/{model['id']}")).json() == model
    assert (await engine.get("/v1/models/other")).status == 404


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"temprature": 0}, "temprature: unknown field; did you mean 'temperature'?"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": "0"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 17}, "n"),
        ({"gymtrio": {"model_call_id": "c", "rollout_id": "r"}}, "gymtrio.attempt: missing"),
        (
            {"gymtrio": {"model_call_id": "a/b", "rollout_id": "r", "attempt": 0}},
            "gymtrio.model_call_id",
        ),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    engine: EngineClient, more: dict[str, Any], field: str
) -> None:
    reply = await engine.post(CHAT, {"messages": PARIS, **more})
    error: Any = reply.json()
    assert reply.status == 422
    assert error["error"]["code"] == "invalid_request"
    assert error["error"]["detail"].startswith(field)
    assert error["error"]["message"] == error["error"]["detail"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_fit_the_context_is_refused(engine: EngineClient, stream: bool) -> None:
    """SRV-5: with the limit; also where it would take long to count."""
    for messages in (
        [{"role": "user", "content": "word " * 600}],
        [{"role": "user", "content": "word " * 1_000_000}],
        [{"role": "user", "content": "a"}] * 200,
        [{"role": "user", "content": "a"}] * 20_000,
    ):
        reply = await engine.post(CHAT, {"messages": messages, "stream": stream})
        assert reply.status == 422
        assert re.search(r"\b(512|10000)\b", str(reply.json()))


async def test_more_calls_than_may_wait_are_refused_with_the_limit(engine: EngineClient) -> None:
    """SRV-3, SRV-5: and slots of callers that leave are free at once."""
    refused: dict[bool, Reply] = {}

    async def call(stream: bool, done: trio.CancelScope) -> None:
        body = {"messages": STORY, "max_tokens": 400, "stream": stream}
        refused[stream] = await engine.post(CHAT, body)
        if len(refused) == 2:
            done.cancel()

    async with trio.open_nursery() as nursery:
        # Of each kind more than could be taken altogether.
        for number in range(32):
            nursery.start_soon(call, bool(number % 2), nursery.cancel_scope)
    for reply in refused.values():
        error: Any = reply.json()
        assert reply.status == 503
        assert error["error"]["code"] == "unavailable"
        assert "wait for a slot" in error["error"]["message"]
        assert reply.header("retry-after") == "1"
    # It would have to wait for minutes behind the others.
    with trio.fail_after(20):
        await engine.answer(CHAT, {"messages": PARIS, **GREEDY})


def test_settings_are_checked() -> None:
    """SET-1: unknown keys with the nearest name."""
    with pytest.raises(SettingsError, match="did you mean 'policy_version'"):
        load_settings(EmbeddedEngineSettings, {"policy_versoin": 1}, "engine")
    with pytest.raises(SettingsError, match="policy_version must not be negative"):
        load_settings(EmbeddedEngineSettings, {"policy_version": -1}, "engine")
    with pytest.raises(SettingsError, match="parallel_calls is 0"):
        load_settings(EmbeddedEngineSettings, {"parallel_calls": 0}, "engine")
    assert load_settings(EmbeddedEngineSettings, SETTINGS, "engine").policy_version == 3


async def test_too_little_memory_fails_the_start_in_one_line(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what to lower; nothing is loaded."""
    sizes = {"parallel_calls": 64, "cached_sequences": 192, "context_tokens": 8192}
    entry = {"app": "servers.model.embedded_engine:app", "settings": sizes}
    file = tmp_path / "deployment.yaml"
    file.write_text(json.dumps({"servers": {"engine": entry}}))
    monkeypatch.setenv("GYMTRIO_DEPLOYMENT", str(file))
    with pytest.raises(StartFailed, match="the embedded engine needs") as failed:
        async with open_lifespan(app):
            pass
    assert "lower parallel_calls, cached_sequences or context_tokens" in str(failed.value)
    assert "\n" not in str(failed.value)
