"""Replies and streams of both APIs, checked against the SDK's own models, strictly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gymtrio.capture.replies import Route
from gymtrio.errors import Unavailable
from servers.model.embedded.generation import Emission, Generated, Generation, GenerationRequest
from servers.model.embedded.sampling import Sampled
from servers.model.embedded.vocabulary import Vocabulary
from servers.model.engine_api.chat import chat_reply
from servers.model.engine_api.chat_stream import ChatStream
from servers.model.engine_api.logprobs import TokenNames
from servers.model.engine_api.outputs import Envelope
from servers.model.engine_api.reply_stream import ReplyStream
from servers.model.engine_api.requests import ModelCall, parse_call
from servers.model.engine_api.responses import responses_reply
from servers.model.engine_api.responses_stream import ResponsesStream

PROMPT = (1, 2, 3)
CALL = '{"name": "add", "arguments": {"count": 5}}'
NESTED: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
FLAT: dict[str, Any] = {"type": "function", "name": "add"}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
END = 256

texts = st.sampled_from(["", "a", "Paris.", "é漢🙂", CALL, " " + CALL, "{", '{"name": 1}', "{}x"])


class Maker:
    """Makes replies to one text, whole and streamed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.envelope = Envelope(
            reply_id="f" * 24,
            created_s=5,
            model="m",
            system_fingerprint="fp",
            names=TokenNames(vocabulary),
        )

    def generate(self, text: str, *, cut_short: bool = False) -> tuple[list[Emission], Generated]:
        ids = [*text.encode(), *([] if cut_short else [END])]
        request = GenerationRequest(PROMPT, max(1, len(ids)) if cut_short else 500)
        generation = Generation(request, self.vocabulary, 1000)
        emissions = [generation.append(Sampled(i, -i / 1000)) for i in ids]
        return emissions, generation.snapshot()

    def events(self, stream: ReplyStream, *choices: tuple[list[Emission], Generated]) -> list[Any]:
        data = stream.begin()
        for index, (emissions, generated) in enumerate(choices):
            data += b"".join(stream.emit(index, emission) for emission in emissions)
            data += stream.finish(index, generated)
        return events_of(data + stream.end())


def events_of(data: bytes) -> list[Any]:
    found = []
    for block in data.decode("ascii").removesuffix("\n\n").split("\n\n"):
        *name, line = block.split("\n")
        value = line.removeprefix("data: ")
        assert line != value
        found.append(value if value == "[DONE]" else json.loads(value))
        assert name == ([f"event: {found[-1]['type']}"] if name else [])
    return found


@pytest.fixture(scope="session")
def maker(byte_vocabulary: Vocabulary) -> Maker:
    return Maker(byte_vocabulary)


def chat(**more: Any) -> ModelCall:
    return parse_call(Route.CHAT, {"messages": [{"role": "user", "content": "hi"}], **more})


def responses(**more: Any) -> ModelCall:
    return parse_call(Route.RESPONSES, {"input": "hi", **more})


@given(text=texts, short=st.booleans(), asked=st.booleans(), with_tools=st.booleans())
def test_a_streamed_chat_completion_adds_up_to_the_whole_one(
    maker: Maker, text: str, short: bool, asked: bool, with_tools: bool
) -> None:
    call = chat(
        tools=[NESTED] if with_tools else [],
        logprobs=asked,
        return_token_ids=asked,
        n=2,
        stream_options={"include_usage": True},
    )
    short = short and bool(text)
    choices = [maker.generate(text, cut_short=short), maker.generate("other")]
    whole: Any = chat_reply(call, maker.envelope, PROMPT, [result for _, result in choices])
    ChatCompletion.model_validate(whole, strict=True)
    *chunks, done = maker.events(ChatStream(call, maker.envelope, PROMPT), *choices)
    assert done == "[DONE]"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert chunks[-1]["usage"] == whole["usage"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[0].get("prompt_token_ids") == whole.get("prompt_token_ids")
    for told in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == told["index"]]
        deltas = [part["delta"] for part in parts]
        content = "".join(delta.get("content", "") for delta in deltas)
        assert content == (told["message"]["content"] or "")
        assert deltas[0]["role"] == "assistant"
        calls = [tool for delta in deltas for tool in delta.get("tool_calls", [])]
        assert [{**tool, "index": 0} for tool in told["message"].get("tool_calls", [])] == calls
        assert parts[-1]["finish_reason"] == told["finish_reason"]
        assert {part["finish_reason"] for part in parts[:-1]} == {None}
        if asked:
            ids = [i for part in parts for i in part.get("token_ids", [])]
            assert ids == told["token_ids"]
            entries = [e for part in parts for e in (part["logprobs"] or {}).get("content", [])]
            assert entries == told["logprobs"]["content"]


@given(text=texts, short=st.booleans(), asked=st.booleans(), with_tools=st.booleans())
def test_a_streamed_response_adds_up_to_the_whole_one(
    maker: Maker, text: str, short: bool, asked: bool, with_tools: bool
) -> None:
    call = responses(
        tools=[FLAT] if with_tools else None,
        include=["message.output_text.logprobs"] if asked else [],
        return_token_ids=asked,
        metadata={"a": "b"},
    )
    emissions, generated = maker.generate(text, cut_short=short and bool(text))
    whole: Any = responses_reply(call, maker.envelope, PROMPT, generated)
    Response.model_validate(whole)
    events = maker.events(ResponsesStream(call, maker.envelope, PROMPT), (emissions, generated))
    for event in events:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert events[-1]["response"] == whole
    assert kinds[-1] == whole["status"]
    (item,) = whole["output"]
    assert events[-2] == events[-2] | {"type": "response.output_item.done", "item": item}
    assert {event["item_id"] for event in events if "item_id" in event} <= {item["id"]}
    middle = [kind for kind in kinds[2:-2] if not kind.endswith(".delta")]
    deltas = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    if item["type"] == "function_call":
        assert middle == ["output_item.added", "function_call_arguments.done"]
        assert deltas == item["arguments"]
    else:
        assert middle == [
            "output_item.added",
            "content_part.added",
            "output_text.done",
            "content_part.done",
        ]
        assert deltas == item["content"][0]["text"]
        assert "" not in [event.get("delta") for event in events]


def test_a_text_is_a_call_only_where_its_tool_is_offered(maker: Maker) -> None:
    _, generated = maker.generate(CALL)
    called: Any = chat_reply(chat(tools=[NESTED]), maker.envelope, PROMPT, [generated])
    assert called["choices"][0]["finish_reason"] == "tool_calls"
    assert called["choices"][0]["message"]["content"] is None
    other = {"type": "function", "function": {"name": "other"}}
    for call in (chat(), chat(tools=[NESTED], tool_choice="none"), chat(tools=[other])):
        told: Any = chat_reply(call, maker.envelope, PROMPT, [generated])
        assert told["choices"][0]["finish_reason"] == "stop"
        assert told["choices"][0]["message"]["content"] == CALL


def test_a_response_has_what_validating_clients_require(maker: Maker) -> None:
    _, generated = maker.generate("ab", cut_short=True)
    asked = responses(tools=[FLAT], temperature=0, max_output_tokens=2, instructions="x", user="u")
    told = responses_reply(asked, maker.envelope, PROMPT, generated)
    assert told["status"] == "incomplete"
    assert told["incomplete_details"] == {"reason": "max_output_tokens"}
    assert told["tools"] == [{"parameters": None, "strict": None, **FLAT}]
    assert told["tool_choice"] == "auto"
    assert told["parallel_tool_calls"] is True
    assert (told["temperature"], told["max_output_tokens"]) == (0, 2)
    assert (told["instructions"], told["user"], told["store"]) == ("x", "u", False)
    assert told["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }


def test_a_stream_that_fails_says_so_and_ends(maker: Maker) -> None:
    refusal = Unavailable("the engine has ended")
    error, done = events_of(ChatStream(chat(), maker.envelope, PROMPT).fail(refusal))
    assert error["error"]["message"] == "the engine has ended"
    assert done == "[DONE]"
    stream = ResponsesStream(responses(), maker.envelope, PROMPT)
    stream.begin()
    events = events_of(stream.fail(refusal))
    for event in events:
        EVENTS.validate_python(event)
    assert [event["type"] for event in events] == ["error", "response.failed"]
    assert events[-1]["response"]["status"] == "failed"
