"""The backend over an engine that speaks llama.cpp's API, whose every answer the test decides."""

from __future__ import annotations

import hashlib
import json
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
    TerminalReason,
    continuation_of,
    digest_tokens,
    match_receipt,
    take_inventory,
)
from gymtrio.capture.memory_store import MemoryTokenStore
from gymtrio.capture.prefixes import make_chunk
from gymtrio.capture.replies import CallTokens, Route, read_tokens, take_extension
from gymtrio.context import Receive, Scope, Send
from gymtrio.errors import TransportError
from gymtrio.ids import CaptureKey, CheckpointId
from gymtrio.participants.policy.calls import BackendReply
from gymtrio.ports import HostClock, HostRandomness
from gymtrio.serving.client import Peer, ServerClient, peer_of_url
from gymtrio.serving.inprocess import open_network
from gymtrio.serving.stock.backend import StockBackend
from gymtrio.serving.stock.calls import EngineCalls
from gymtrio.serving.stock.llama_cpp import CHUNK_TOKENS, LlamaCppEngine, chunk_seed
from gymtrio.serving.stock.outputs import ToolCallFormat
from gymtrio.strict import unstructure

PROMPT = [1, 2, 3]
LIMIT = 2 * CHUNK_TOKENS + 8
BODY: dict[str, object] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": LIMIT,
    "temperature": 1.0,
}


def token_at(context: list[int], seed: int, place: int) -> int:
    """As a generator that starts anew with each request: by seed and place in this request."""
    digest = hashlib.blake2b(f"{context}:{seed}:{place}".encode(), digest_size=4).digest()
    return 100 + int.from_bytes(digest, "big") % 900


def is_part_of_character(token_id: int) -> bool:
    """Of such a token llama.cpp tells no log-prob by itself."""
    return token_id % 5 == 0


def log_prob_of(context: list[int], token_id: int) -> float:
    return -(token_id + len(context)) / 7


@attrs.define
class Llama:
    permits: trio.Semaphore = attrs.Factory(lambda: trio.Semaphore(1000))
    """One for each chunk."""
    asked: list[Any] = attrs.Factory(list)
    """Bodies of chunks."""
    searched: list[Any] = attrs.Factory(list)
    """Bodies of requests for a log-prob that was left out."""
    build: str = "b1"
    other_seeds: bool = False
    """Its generator is another one."""
    changed: dict[str, object] = attrs.Factory(dict)
    """Said in the replies of chunks, in place of what is true."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        body = json.loads(message["body"]) if message["body"] else None
        if scope["path"] == "/completion" and "logit_bias" not in body:
            await self.permits.acquire()
        said = json.dumps(self._said(scope["path"], body)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": said})

    def _said(self, path: str, body: Any) -> dict[str, Any]:
        if path == "/props":
            return {
                "default_generation_settings": {"n_ctx": 100},
                "model_path": "/models/m.gguf",
                "build_info": self.build,
            }
        if path == "/apply-template":
            return {"prompt": "hi"}
        if path == "/tokenize":
            return {"tokens": PROMPT}
        if path == "/detokenize":
            return {"content": "".join(map(chr, body["tokens"]))}
        assert path == "/completion"
        assert body["stream"] is False
        return self._search(body) if "logit_bias" in body else self._chunk(body)

    def _chunk(self, body: Any) -> dict[str, Any]:
        self.asked.append(body)
        seed = body["seed"] + self.other_seeds
        context, ids, entries = list(body["prompt"]), [], []
        for place in range(body["n_predict"]):
            token_id = token_at(body["prompt"], seed, place)
            ids.append(token_id)
            if not is_part_of_character(token_id):
                entries.append({"id": token_id, "logprob": log_prob_of(context, token_id)})
            context.append(token_id)
        text = "".join(map(chr, ids))
        told = {"tokens": ids, "completion_probabilities": entries, "content": text}
        return told | {"stop_type": "limit"} | self.changed

    def _search(self, body: Any) -> dict[str, Any]:
        self.searched.append(body)
        forbidden = {token_id for token_id, _ in body["logit_bias"]}
        other = next(n for n in range(100, 999) if n not in forbidden)
        likeliest = [
            {"id": token_id, "logprob": log_prob_of(body["prompt"], token_id)}
            for token_id in sorted({*forbidden, other})
        ]
        entry = {"id": other, "logprob": -1.0, "top_logprobs": likeliest}
        return {"tokens": [other], "completion_probabilities": [entry]}


class _Directory:
    def find(self, server: str) -> Peer:
        return peer_of_url(server)


@attrs.frozen
class Bench:
    engine: Llama
    backend: StockBackend
    store: MemoryTokenStore

    async def call(
        self, call_id: str, continuation: Continuation | None = None, **changed: object
    ) -> BackendReply:
        extension = CallExtension(
            model_call_id=call_id, rollout_id="r", attempt=0, continuation=continuation
        )
        body = BODY | changed | {EXTENSION_KEY: unstructure(extension)}
        return await self.backend.generate(Route.CHAT, body, call_id=call_id)

    async def tokens(
        self, call_id: str, continuation: Continuation | None = None, **changed: object
    ) -> CallTokens:
        reply = await self.call(call_id, continuation, **changed)
        assert reply.status == 200, reply.body
        return read_tokens(Route.CHAT, reply.body)

    async def cut_after_chunks(
        self,
        call_id: str,
        count: int,
        continuation: Continuation | None = None,
        **changed: object,
    ) -> Continuation:
        """Cut a call after so many chunks more, and leave it."""
        self.engine.permits = trio.Semaphore(count)
        asked = ActivePrefix(
            ticket_id="1", rollout_id="r", attempt=0, model_call_id=call_id, admitted_at=1.0
        )
        inventory = take_inventory(CheckpointId("c"), "policy", [asked])
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                await self.call(call_id, continuation, **changed)

            nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
            receipt = await self.backend.cut(inventory, deadline=trio.current_time() + 10)
            nursery.cancel_scope.cancel()
        self.engine.permits = trio.Semaphore(1000)
        (entry,) = match_receipt(inventory, receipt).values()
        before = 0 if continuation is None else continuation.prefix_token_count
        assert entry.prefix_token_count == before + count * CHUNK_TOKENS
        return continuation_of(entry)

    async def cut_after_tokens(self, call_id: str, count: int, uncut: CallTokens) -> Continuation:
        """A prefix that ends anywhere, as another policy server's chunks might have it."""
        described = await self.backend.describe(deadline=trio.current_time() + 10)
        assert described is not None
        extension = CallExtension(model_call_id=call_id, rollout_id="r", attempt=0)
        record = make_chunk(
            extension,
            start_token=0,
            prompt_token_ids=uncut.prompt_token_ids,
            token_ids=uncut.token_ids[:count],
            log_probs=uncut.log_probs[:count],
            policy_version=4,
        )
        await self.store.put((record,))
        return Continuation(
            source_capture_key=CaptureKey("r"),
            source_model_call_id=call_id,
            staging_keys=(record.staging_key,),
            prefix_token_count=count,
            prefix_digest=digest_tokens(record.token_ids),
            effective_output_limit=LIMIT,
            policy_version=4,
            engine_digest=described.digest,
        )


@asynccontextmanager
async def open_bench(engine: Llama | None = None) -> AsyncIterator[Bench]:
    engine = engine or Llama()
    store = MemoryTokenStore()
    async with open_network() as network:
        with network.serving("engine", engine):
            calls = EngineCalls(ServerClient(_Directory(), network), "http://engine")
            plain: Any = None
            backend = StockBackend(
                LlamaCppEngine(calls),
                plain,
                store,
                policy_version=4,
                tool_calls=ToolCallFormat.HERMES,
                randomness=HostRandomness(),
                wall_clock=HostClock(),
            )
            yield Bench(engine, backend, store)


async def test_a_generation_is_asked_for_in_chunks_with_seeds_of_their_own(
    autojump_clock: object,
) -> None:
    """CUT-2: each goes on behind all that is known."""
    async with open_bench() as bench:
        tokens = await bench.tokens("a", seed=7)
    assert len(tokens.token_ids) == LIMIT
    asked = bench.engine.asked
    assert [body["n_predict"] for body in asked] == [CHUNK_TOKENS, CHUNK_TOKENS, 8]
    assert [body["seed"] for body in asked] == [chunk_seed(7, chunk) for chunk in range(3)]
    assert len({body["seed"] for body in asked}) == 3
    for number, body in enumerate(asked):
        assert body["prompt"] == [*PROMPT, *tokens.token_ids[: number * CHUNK_TOKENS]]


async def test_log_probs_that_the_engine_leaves_out_are_asked_for(autojump_clock: object) -> None:
    """I25: every token has its own, of the context in which it was drawn."""
    async with open_bench() as bench:
        tokens = await bench.tokens("a", seed=7)
    parts = [token_id for token_id in tokens.token_ids if is_part_of_character(token_id)]
    assert parts
    assert len(bench.engine.searched) == len(parts)
    for place, (token_id, log_prob) in enumerate(
        zip(tokens.token_ids, tokens.log_probs, strict=True)
    ):
        assert log_prob == log_prob_of([*PROMPT, *tokens.token_ids[:place]], token_id)


@pytest.mark.parametrize("seed", [{"seed": 7}, {}], ids=["seeded", "without a seed"])
async def test_what_was_cut_is_continued_token_for_token(
    seed: dict[str, object], autojump_clock: object
) -> None:
    """CUT-2, CUT-4, I26: sampled, also without a seed: its own is made of the call that was first."""
    async with open_bench() as bench:
        uncut = await bench.tokens("a", **seed)
        first = await bench.cut_after_chunks("a", 1, **seed)
        asked = len(bench.engine.asked)
        assert await bench.tokens("b", first, **seed) == uncut
        rest = bench.engine.asked[asked:]
        assert [body["n_predict"] for body in rest] == [CHUNK_TOKENS, 8], "only the rest"
        # Its continuation is cut as well: the seed is still that of the first call.
        second = await bench.cut_after_chunks("c", 1, first, **seed)
        assert await bench.tokens("d", second, **seed) == uncut


@pytest.mark.parametrize("count", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS + 3, LIMIT - 1])
async def test_a_cut_within_a_chunk_runs_it_again(count: int, autojump_clock: object) -> None:
    """CUT-4, I25, I26: from its start, so that its seed gives the same; nothing of it is doubled."""
    async with open_bench() as bench:
        uncut = await bench.tokens("a", seed=7)
        asked = len(bench.engine.asked)
        cut = await bench.cut_after_tokens("a", count, uncut)
        assert await bench.tokens("b", cut, seed=7) == uncut
        assert bench.engine.asked[asked]["prompt"] == [
            *PROMPT,
            *uncut.token_ids[: count - count % CHUNK_TOKENS],
        ]


async def test_an_engine_that_does_not_repeat_a_chunk_does_not_continue_it(
    autojump_clock: object,
) -> None:
    """CUT-4, CUT-7: 409 with the reason, and nothing was made up."""
    async with open_bench() as bench:
        uncut = await bench.tokens("a", seed=7)
        cut = await bench.cut_after_tokens("a", CHUNK_TOKENS + 3, uncut)
        bench.engine.other_seeds = True
        reply = await bench.call("b", cut, seed=7)
        error: Any = reply.body["error"]
        assert (reply.status, error["code"]) == (409, "continuation_refused")
        assert "does not repeat the chunk" in error["detail"]


async def test_the_budget_is_that_of_the_call_that_was_cut(autojump_clock: object) -> None:
    """CUT-4: where there is less room now it is refused, where there is more no more is taken."""
    async with open_bench() as bench:
        uncut = await bench.tokens("a", seed=7)
        cut = await bench.cut_after_tokens("a", CHUNK_TOKENS, uncut)
        reply = await bench.call("b", attrs.evolve(cut, effective_output_limit=LIMIT + 1), seed=7)
        assert reply.status == 409
        assert f"at most {LIMIT} output tokens" in str(reply.body)
        shorter = attrs.evolve(cut, effective_output_limit=CHUNK_TOKENS + 3)
        reply = await bench.call("c", shorter, seed=7)
        tokens = read_tokens(Route.CHAT, reply.body)
        assert tokens.token_ids == uncut.token_ids[: CHUNK_TOKENS + 3]
        assert take_extension(reply.body).effective_output_limit == CHUNK_TOKENS + 3


async def test_a_whole_generation_is_answered_without_the_engine(autojump_clock: object) -> None:
    """CUT-4: a held reply, ended by its limit, or by a stop string of several tokens."""
    async with open_bench() as bench:
        for number, stop in enumerate((None, 20)):
            settings: dict[str, object] = {"seed": 7}
            if stop is not None:
                ids = (await bench.tokens("x", seed=7)).token_ids
                settings["stop"] = "".join(map(chr, ids[stop : stop + 2]))
            reply = await bench.call(f"a{number}", **settings)
            uncut, said = read_tokens(Route.CHAT, reply.body), take_extension(reply.body)
            assert len(uncut.token_ids) == (LIMIT if stop is None else stop + 2)
            whole = attrs.evolve(
                await bench.cut_after_tokens(f"a{number}", len(uncut.token_ids), uncut),
                terminal_finish_reason=said.finish_reason,
                terminal_stop_reason=said.stop_reason,
            )
            assert said.finish_reason is (
                TerminalReason.LENGTH if stop is None else TerminalReason.STOP
            )
            asked = len(bench.engine.asked)
            again = await bench.call(f"b{number}", whole, **settings)
            assert len(bench.engine.asked) == asked
            assert read_tokens(Route.CHAT, again.body) == uncut
            assert take_extension(again.body).stop_reason == said.stop_reason
            assert again.body["choices"] == reply.body["choices"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tokens": None}, "not a list of token ids"),
        ({"tokens": [-1] * CHUNK_TOKENS}, "not all of them are token ids"),
        ({"completion_probabilities": 7}, "no list of objects"),
        ({"completion_probabilities": [{"id": 5, "logprob": -1}]}, "not in the reply"),
        ({"stop_type": "word"}, "it ended by 'word'"),
        ({"stop_type": None}, "it ended by 'None'"),
    ],
)
async def test_an_engine_that_breaks_its_api_costs_that_call_its_reply(
    changed: dict[str, object], why: str, autojump_clock: object
) -> None:
    """CUT-7, I25: nothing is zipped that does not fit, and nothing is made up."""
    async with open_bench() as bench:
        bench.engine.changed = changed
        with pytest.raises(TransportError, match=why):
            await bench.call("a")
        bench.engine.changed = {}
        assert (await bench.call("a")).status == 200
