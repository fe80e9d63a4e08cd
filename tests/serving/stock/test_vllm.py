"""The backend over an engine that speaks vLLM's API, whose every answer the test decides."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from gymtrio.capture.cuts import (
    EXTENSION_KEY,
    ActivePrefix,
    CallExtension,
    Continuation,
    Disposition,
    continuation_of,
    match_receipt,
    take_inventory,
)
from gymtrio.capture.memory_store import MemoryTokenStore
from gymtrio.capture.replies import Route, read_tokens
from gymtrio.context import Message, Receive, Scope, Send
from gymtrio.errors import TransportError
from gymtrio.ids import CheckpointId
from gymtrio.participants.policy.calls import BackendReply
from gymtrio.ports import HostClock, HostRandomness
from gymtrio.serving.client import Peer, ServerClient, peer_of_url
from gymtrio.serving.inprocess import open_network
from gymtrio.serving.stock.backend import StockBackend
from gymtrio.serving.stock.calls import EngineCalls
from gymtrio.serving.stock.outputs import ToolCallFormat
from gymtrio.serving.stock.vllm import VllmEngine
from gymtrio.strict import unstructure

BODY: dict[str, object] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 8,
    "temperature": 0,
}
TOKENS = tuple(range(100, 108))


@attrs.define
class Engine:
    """Says `TOKENS`, one for each event; each waits for a permit."""

    permits: trio.Semaphore = attrs.Factory(lambda: trio.Semaphore(100))
    asked: list[tuple[str, Any]] = attrs.Factory(list)
    refusal: int | None = None
    events: list[dict[str, Any]] | None = None
    """Sent instead of tokens."""
    model: str = "m"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        body = json.loads(message["body"]) if message["body"] else None
        self.asked.append((scope["path"], body))
        if self.refusal is not None:
            await self._answer(send, {"error": {"message": "no"}}, self.refusal)
        elif scope["path"] == "/v1/completions":
            await self._stream(send, body)
        else:
            await self._answer(send, self._said(scope["path"], body))

    def _said(self, path: str, body: Any) -> dict[str, Any]:
        if path == "/v1/models":
            return {"data": [{"id": self.model, "max_model_len": 32}]}
        if path == "/version":
            return {"version": "1"}
        if path == "/tokenize":
            return {"tokens": [1, 2, 3]}
        assert path == "/detokenize"
        return {"prompt": "".join(chr(token_id) for token_id in body["tokens"])}

    async def _answer(self, send: Send, value: object, status: int = 200) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(value).encode()})

    async def _stream(self, send: Send, body: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        done = len(body["prompt"]) - 3
        tokens = TOKENS[done : done + body["max_tokens"]]
        events = self.events or [
            event(token_id, "length" if token_id == tokens[-1] else None) for token_id in tokens
        ]
        for said in [*events, {"choices": [], "usage": {}}]:
            await self.permits.acquire()
            await send(_chunk(said))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def event(token_id: int, finish: str | None = None, **changed: Any) -> dict[str, Any]:
    choice = {
        "text": chr(token_id),
        "token_ids": [token_id],
        "logprobs": {"token_logprobs": [-token_id / 8]},
        "finish_reason": finish,
    }
    return {"choices": [choice | changed]}


def _chunk(said: dict[str, Any]) -> Message:
    line = f"data: {json.dumps(said)}\n\n".encode()
    return {"type": "http.response.body", "body": line, "more_body": True}


class Plain:
    """Takes what cannot be cut."""

    native = False

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []

    async def generate(
        self, route: Route, body: dict[str, object], *, call_id: str | None
    ) -> BackendReply:
        self.bodies.append(body)
        return BackendReply(status=200, body={"choices": []})


class _Directory:
    def find(self, server: str) -> Peer:
        return peer_of_url(server)


@attrs.frozen
class Bench:
    engine: Engine
    backend: StockBackend
    plain: Plain

    async def call(
        self, call_id: str, continuation: Continuation | None = None, **changed: object
    ) -> BackendReply:
        extension = CallExtension(
            model_call_id=call_id, rollout_id="r", attempt=0, continuation=continuation
        )
        body = BODY | changed | {EXTENSION_KEY: unstructure(extension)}
        return await self.backend.generate(Route.CHAT, body, call_id=call_id)

    def completions(self) -> list[Any]:
        return [body for path, body in self.engine.asked if path == "/v1/completions"]


@asynccontextmanager
async def open_bench(engine: Engine) -> AsyncIterator[Bench]:
    async with open_network() as network:
        with network.serving("engine", engine):
            calls = EngineCalls(ServerClient(_Directory(), network), "http://engine")
            plain: Any = Plain()
            backend = StockBackend(
                VllmEngine(calls, model=None),
                plain,
                MemoryTokenStore(),
                policy_version=4,
                tool_calls=ToolCallFormat.HERMES,
                randomness=HostRandomness(),
                wall_clock=HostClock(),
            )
            yield Bench(engine, backend, plain)


async def cut(bench: Bench, call_id: str) -> Any:
    asked = ActivePrefix(
        ticket_id="1", rollout_id="r", attempt=0, model_call_id=call_id, admitted_at=1.0
    )
    inventory = take_inventory(CheckpointId("c"), "policy", [asked])
    receipt = await bench.backend.cut(inventory, deadline=trio.current_time() + 10)
    (entry,) = match_receipt(inventory, receipt).values()
    return entry


async def test_a_stream_is_gathered_and_read_as_a_native_reply(autojump_clock: object) -> None:
    """CUT-2"""
    async with open_bench(Engine()) as bench:
        reply = await bench.call("a", min_p=0.5, seed=3)
    assert reply.status == 200
    assert reply.evidence
    tokens = read_tokens(Route.CHAT, reply.body)
    assert tokens.token_ids == TOKENS
    assert tokens.log_probs == tuple(-t / 8 for t in TOKENS)
    assert tokens.prompt_token_ids == (1, 2, 3)
    (asked,) = bench.completions()
    assert (asked["min_p"], asked["seed"], asked["model"]) == (0.5, 3, "m")
    assert asked["prompt"] == [1, 2, 3]


async def test_a_call_is_cut_while_it_streams_and_continued(autojump_clock: object) -> None:
    """CUT-2, CUT-4: the call goes on; what continues it asks for the rest only."""
    engine = Engine(permits=trio.Semaphore(0))
    async with open_bench(engine) as bench, trio.open_nursery() as nursery:
        replies: list[BackendReply] = []

        async def call() -> None:
            replies.append(await bench.call("a"))

        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        assert (await cut(bench, "a")).failure == "nothing generated yet"
        for _ in range(3):
            engine.permits.release()
        await trio.testing.wait_all_tasks_blocked()
        entry = await cut(bench, "a")
        assert entry.disposition is Disposition.DURABLE_PREFIX
        assert (entry.prefix_token_count, entry.policy_version) == (3, 4)
        for _ in range(20):
            engine.permits.release()
        await trio.testing.wait_all_tasks_blocked()
        continued = await bench.call("b", continuation_of(entry))
        assert read_tokens(Route.CHAT, continued.body) == read_tokens(Route.CHAT, replies[0].body)
        assert (
            continued.body[EXTENSION_KEY] | {"continued_token_count": 3}
            == (  # type: ignore[operator]
                continued.body[EXTENSION_KEY]
            )
        )
        assert bench.completions()[-1]["max_tokens"] == 5
        assert bench.completions()[-1]["prompt"] == [1, 2, 3, *TOKENS[:3]]


async def test_another_build_of_the_engine_does_not_continue(autojump_clock: object) -> None:
    engine = Engine(permits=trio.Semaphore(3))
    async with open_bench(engine) as bench, trio.open_nursery() as nursery:
        nursery.start_soon(bench.call, "a")
        await trio.testing.wait_all_tasks_blocked()
        entry = await cut(bench, "a")
        engine.model = "other"
        await bench.backend.describe(deadline=trio.current_time() + 10)
        engine.permits = trio.Semaphore(100)
        refused = await bench.call("b", continuation_of(entry))
        assert refused.status == 409
        assert refused.body["error"]["code"] == "continuation_refused"  # type: ignore[index]
        nursery.cancel_scope.cancel()


async def cut_after_three(bench: Bench, **changed: object) -> Any:
    """Cut a call after three tokens, and leave it."""
    bench.engine.permits = trio.Semaphore(3)
    async with trio.open_nursery() as nursery:

        async def call() -> None:
            await bench.call("a", **changed)

        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        entry = await cut(bench, "a")
        nursery.cancel_scope.cancel()
    bench.engine.permits = trio.Semaphore(100)
    assert entry.prefix_token_count == 3
    return entry


async def test_a_sampled_generation_goes_on_with_another_seed(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """CUT-2: the first would repeat its beginning; the same place has the same; it is logged."""
    async with open_bench(Engine()) as bench:
        entry = await cut_after_three(bench, seed=3, temperature=1.0)
        with caplog.at_level(logging.INFO):
            for call_id in ("b", "c"):
                await bench.call(call_id, continuation_of(entry), seed=3, temperature=1.0)
        first, *others = (body["seed"] for body in bench.completions())
        assert first == 3
        assert others[0] == others[1] != 3
        assert "a sampled generation is resampled from its token 3 on" in caplog.text
        await bench.call("d", continuation_of(entry), temperature=1.0)
        assert "seed" not in bench.completions()[-1], "nobody has chosen one"


@pytest.mark.parametrize(("asked", "left"), [(6, 3), (2, 0)])
async def test_what_was_generated_counts_for_the_least_that_is_asked(
    asked: int, left: int, autojump_clock: object
) -> None:
    """CUT-4, I26: the engine counts what it generates itself, and would not end where it would have."""
    async with open_bench(Engine()) as bench:
        entry = await cut_after_three(bench, min_tokens=asked)
        assert (await bench.call("b", continuation_of(entry), min_tokens=asked)).status == 200
        assert [body["min_tokens"] for body in bench.completions()] == [asked, left]


@pytest.mark.parametrize(
    "setting",
    [{"frequency_penalty": 0.5}, {"presence_penalty": -1}, {"bad_words": ["foo bar"]}],
)
async def test_what_the_engine_would_forget_at_a_cut_is_not_continued(
    setting: dict[str, object], autojump_clock: object
) -> None:
    """CUT-4, CUT-7, I26: settings that look at the output so far, which to it is prompt."""
    async with open_bench(Engine()) as bench:
        entry = await cut_after_three(bench, **setting)
        reply = await bench.call("b", continuation_of(entry), **setting)
        assert reply.status == 409
        error: Any = reply.body["error"]
        assert error["code"] == "continuation_refused"
        assert next(iter(setting)) in error["detail"]
        nothing: dict[str, object] = {
            "frequency_penalty": 0,
            "presence_penalty": 0.0,
            "bad_words": [],
        }
        entry = await cut_after_three(bench, **nothing)
        assert (await bench.call("b", continuation_of(entry), **nothing)).status == 200


@pytest.mark.parametrize(
    "constraint",
    [
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"guided_regex": "a"},
    ],
)
async def test_constrained_calls_go_to_the_engine_as_they_are(
    constraint: dict[str, object], autojump_clock: object
) -> None:
    """CUT-6, I27: but for the model, which has the name that the engine gives it, as in other calls."""
    async with open_bench(Engine()) as bench:
        reply = await bench.call("a", model="policy", **constraint)
        assert not reply.evidence
        assert bench.plain.bodies == [BODY | constraint | {"model": "m"}]
        assert (await cut(bench, "a")).disposition is Disposition.DURABLE_FAILURE


async def test_a_call_on_nobodys_behalf_names_the_engines_model(autojump_clock: object) -> None:
    async with open_bench(Engine()) as bench:
        reply = await bench.backend.generate(Route.CHAT, BODY | {"model": "policy"}, call_id=None)
        assert not reply.evidence
        assert bench.plain.bodies == [BODY | {"model": "m"}]


async def test_what_the_engine_refuses_is_told_as_it_said_it(autojump_clock: object) -> None:
    async with open_bench(Engine()) as bench:
        await bench.call("a")
        bench.engine.refusal = 400
        reply = await bench.call("b")
        assert (reply.status, reply.body) == (400, {"error": {"message": "no"}})


async def test_a_prompt_without_room_is_refused(autojump_clock: object) -> None:
    class Long(Engine):
        def _said(self, path: str, body: Any) -> dict[str, Any]:
            said = super()._said(path, body)
            return {"tokens": [1] * 32} if path == "/tokenize" else said

    async with open_bench(Long()) as bench:
        reply = await bench.call("a")
        assert reply.status == 422
        assert "32" in reply.body["error"]["detail"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([event(100, logprobs=None)], "1 token ids, 0 log-probs"),
        ([event(100, token_ids=["a"])], "not a list of token ids"),
        ([event(100, "abort")], "it ended by 'abort'"),
        ([event(100, logprobs={"token_logprobs": [None]})], "not a number"),
        ([event(100, logprobs={"token_logprobs": ["-1.0"]})], "not a number"),
        ([event(100, logprobs={"token_logprobs": [math.nan]})], "not a finite number"),
        ([event(100, logprobs={"token_logprobs": [-math.inf]})], "not a finite number"),
        ([event(100, logprobs={"token_logprobs": [-(10**400)]})], "not a finite number"),
        ([event(100, logprobs={"token_logprobs": [-1.0, -2.0]})], "1 token ids, 2 log-probs"),
        ([event(100, logprobs={"token_logprobs": 7})], "1 token ids, 0 log-probs"),
        ([event(100, token_ids=[-1])], "not all of them are token ids"),
        ([event(100, token_ids=[2**32])], "not all of them are token ids"),
        ([{"choices": [7]}], "no objects"),
        ([{"error": {"message": "out of memory"}}], "out of memory"),
        ([event(100), event(101)], "broke off after 2 tokens"),
    ],
)
async def test_an_engine_that_breaks_its_api_costs_that_call_its_reply(
    events: list[dict[str, Any]], why: str, autojump_clock: object
) -> None:
    """CUT-7, I25: nothing is zipped that does not fit, and nothing is made up."""
    async with open_bench(Engine(events=events)) as bench:
        with pytest.raises(TransportError, match=why):
            await bench.call("a")
        bench.engine.events = None
        assert (await bench.call("a")).status == 200
