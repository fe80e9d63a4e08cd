"""The embedded engine as a native backend: cuts, continuations, and who may ask for them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio

from gymtrio.capture.cuts import (
    CUT_ROUTE,
    ENGINE_ROUTE,
    NOTHING_GENERATED,
    ActivePrefix,
    CallExtension,
    Continuation,
    CutKind,
    CutReceipt,
    Disposition,
    EngineDescription,
    PrefixAcknowledgement,
    ReplyExtension,
    TerminalReason,
    continuation_of,
    digest_tokens,
    match_receipt,
    take_inventory,
)
from gymtrio.capture.log_store import open_log_store
from gymtrio.capture.prefixes import make_chunk
from gymtrio.capture.replies import CallTokens, Route, read_tokens, take_extension
from gymtrio.capture.rounds import NO_SUCH_CALL
from gymtrio.capture.tokens import TokenRecord
from gymtrio.ids import CaptureKey, CheckpointId
from gymtrio.ports import HostRandomness
from gymtrio.serving.client import Reply, ServerClient
from gymtrio.serving.deployment import Deployment, DeploymentDirectory
from gymtrio.serving.inprocess import open_network
from gymtrio.strict import structure, unstructure
from tests.helpers.served_engine import (
    SETTINGS,
    TOKEN,
    EngineClient,
    ServedEngine,
    open_engine_client,
    open_other_engine,
)

AUTHORIZATION = f"Bearer {TOKEN}"
OUTPUT_TOKENS = 14
STORY = "Write a story about a fox and a cat."
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 11, "temperature": 0.8, "top_p": 0.9},
    "seedless": {"temperature": 0.7},
}


@attrs.frozen
class Told:
    """A reply to a native call, taken apart as a policy server does."""

    tokens: CallTokens
    extension: ReplyExtension


def call_of(call_id: str, continuation: Continuation | None = None) -> CallExtension:
    return CallExtension(
        model_call_id=call_id, rollout_id="r", attempt=0, continuation=continuation
    )


def chat_of(extension: CallExtension, body: Mapping[str, Any], text: str = STORY) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "messages": messages,
        "max_tokens": OUTPUT_TOKENS,
        **body,
        "gymtrio": unstructure(extension),
    }


def told_by(reply: Reply) -> Told:
    body: Any = reply.raise_for_status().json()
    return Told(read_tokens(Route.CHAT, body), take_extension(body))


async def make_call(
    engine: EngineClient, extension: CallExtension, body: Mapping[str, Any]
) -> Told:
    return told_by(await engine.post(Route.CHAT.value, chat_of(extension, body)))


async def long_call(engine: EngineClient, name: str) -> Told:
    """A call that its limit ends, and not the model: which samples are long depends on the CPU. One
    without a seed samples by its id, the same whenever it is made."""
    for number in range(10):
        told = await make_call(engine, call_of(f"{name}-{number}"), BODIES[name])
        if len(told.tokens.token_ids) == OUTPUT_TOKENS:
            return told
    raise AssertionError(f"{name}: no sample is long enough")


def asking(call_ids: Iterable[str]) -> list[ActivePrefix]:
    return [
        ActivePrefix(
            ticket_id=f"{number:03d}",
            rollout_id="r",
            attempt=0,
            model_call_id=call_id,
            admitted_at=float(number),
        )
        for number, call_id in enumerate(call_ids)
    ]


async def cut(engine: EngineClient, *call_ids: str) -> dict[str, PrefixAcknowledgement]:
    """One round, its receipt checked as a policy server does."""
    inventory = take_inventory(CheckpointId("c1"), "policy", asking(call_ids))
    reply = await engine.post(CUT_ROUTE, unstructure(inventory), authorization=AUTHORIZATION)
    receipt = structure(CutReceipt, reply.raise_for_status().json())
    entries = match_receipt(inventory, receipt).values()
    return {entry.model_call_id: entry for entry in entries}


async def cut_in_flight(
    engine: EngineClient, calls: Mapping[str, CallExtension], reached: int
) -> dict[str, PrefixAcknowledgement]:
    """Make calls together with others, cut them again and again until each has gone far enough while
    it decodes, and leave them all: what a crash leaves behind."""
    entries: dict[str, PrefixAcknowledgement] = {}

    async def call(name: str) -> None:
        told = await make_call(engine, calls[name], BODIES[name])
        assert name in entries, f"{name} ended after {len(told.tokens.token_ids)} tokens"

    async with trio.open_nursery() as nursery:
        for name in calls:
            nursery.start_soon(call, name)
        other = {"input": "Count to fifty.", "max_output_tokens": 150}
        nursery.start_soon(engine.post, Route.RESPONSES.value, other)
        while len(entries) < len(calls):
            taken = await cut(engine, *(call.model_call_id for call in calls.values()))
            for name, extension in calls.items():
                entry = taken[extension.model_call_id]
                assert entry.failure in (None, NOTHING_GENERATED, NO_SUCH_CALL)
                if (entry.prefix_token_count or 0) >= reached:
                    entries.setdefault(name, entry)
        nursery.cancel_scope.cancel()
    for entry in entries.values():
        assert entry.cut_kind is CutKind.ACTIVE_PREFIX
    return entries


@pytest.fixture
async def engine(served: ServedEngine) -> AsyncIterator[EngineClient]:
    async with open_engine_client(served.url) as client:
        yield client


async def test_a_generation_cut_in_two_engines_is_the_uncut_one(
    served: ServedEngine, engine: EngineClient
) -> None:
    """CUT-1, CUT-4, I25, I26: ids and log-probs, greedy, seeded and without a seed, also while other
    requests are batched in; the second engine is a new one on the same store."""
    uncut: dict[str, Told] = {}

    async def uncut_call(name: str) -> None:
        uncut[name] = await long_call(engine, name)

    async with trio.open_nursery() as nursery:
        for name in BODIES:
            nursery.start_soon(uncut_call, name)
    again = {name: call_of(told.extension.model_call_id) for name, told in uncut.items()}
    first = await cut_in_flight(engine, again, 3)
    async with open_other_engine(served.state_dir, policy_version=5) as other:
        calls = {
            name: call_of(f"{name}-second", continuation_of(entry)) for name, entry in first.items()
        }
        second = await cut_in_flight(other, calls, 7)
        whole = await make_call(other, calls["seeded"], BODIES["seeded"])
    final: dict[str, Told] = {"whole": whole}

    async def go_on(name: str) -> None:
        extension = call_of(f"{name}-third", continuation_of(second[name]))
        final[name] = await make_call(engine, extension, BODIES[name])

    async with trio.open_nursery() as nursery:
        for name in BODIES:
            nursery.start_soon(go_on, name)
    for name in BODIES:
        assert (
            first[name].staging_keys == second[name].staging_keys[: len(first[name].staging_keys)]
        )
        assert final[name].tokens == uncut[name].tokens, name
        said = final[name].extension
        assert said.model_call_id == f"{name}-third"
        assert said.continued_token_count == second[name].prefix_token_count
        assert said.policy_version == 3
        assert said.effective_output_limit == uncut[name].extension.effective_output_limit
        assert said.finish_reason is uncut[name].extension.finish_reason
        assert uncut[name].extension.continued_token_count == 0
    assert whole.tokens == uncut["seeded"].tokens
    assert whole.extension.policy_version == 3


def test_a_reply_that_is_not_out_yet_is_a_terminal_completion(served: ServedEngine) -> None:
    """Its continuation is answered as it is; once handed over, the call is not known any more."""
    served.run(partial(_hold_a_reply, served))


async def _hold_a_reply(served: ServedEngine) -> None:
    async with open_network() as network:
        with network.serving("engine", served.asgi):
            client = ServerClient(DeploymentDirectory(Deployment()), network)
            engine = EngineClient(client, "http://engine")
            asked = {"input": "Count to ten.", "max_output_tokens": 4, "temperature": 0}
            body = asked | {"gymtrio": unstructure(call_of("held"))}
            async with _holding(served, Route.RESPONSES.value, body) as release:
                entry = (await cut(engine, "held"))["held"]
                release.set()
            assert entry.cut_kind is CutKind.TERMINAL_COMPLETION
            assert entry.terminal_finish_reason is TerminalReason.LENGTH
            assert entry.prefix_token_count == 4
            assert (await cut(engine, "held"))["held"].failure == NO_SUCH_CALL
            again = asked | {"gymtrio": unstructure(call_of("again", continuation_of(entry)))}
            reply: Any = await engine.answer(Route.RESPONSES.value, again)
            assert take_extension(reply).continued_token_count == 4
            tokens = read_tokens(Route.RESPONSES, reply)
            assert digest_tokens(tokens.token_ids) == entry.prefix_digest


@asynccontextmanager
async def _holding(
    served: ServedEngine, path: str, body: dict[str, Any]
) -> AsyncIterator[trio.Event]:
    """Make a call whose caller does not take the reply before it is told to."""
    arrived, release = trio.Event(), trio.Event()
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }

    async def receive() -> Any:
        if not messages:
            await trio.sleep_forever()
        return messages.pop()

    async def send(message: Any) -> None:
        arrived.set()
        await release.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(served.asgi, scope, receive, send)
        await arrived.wait()
        yield release


async def test_calls_that_wait_and_calls_that_are_not_there(engine: EngineClient) -> None:
    """SRV-3: what a caller has left is not known either; ids of living calls are taken."""
    long = chat_of(call_of("long"), {"max_tokens": 60}, "word " * 400)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.post, Route.CHAT.value, long)
        entries = await cut(engine, "long", "never")
        while entries["long"].failure == NO_SUCH_CALL:
            entries = await cut(engine, "long", "never")
        assert entries["long"].failure == NOTHING_GENERATED
        assert entries["never"].failure == NO_SUCH_CALL
        refused: Any = await engine.post(Route.CHAT.value, chat_of(call_of("long"), {}))
        assert refused.status == 409
        assert refused.json()["error"]["code"] == "call_conflict"
        nursery.cancel_scope.cancel()
    while (await cut(engine, "long"))["long"].failure != NO_SUCH_CALL:
        pass


async def test_only_whole_single_replies_can_be_cut(engine: EngineClient) -> None:
    for more in ({"stream": True}, {"n": 2}):
        reply = await engine.post(Route.CHAT.value, chat_of(call_of("x"), more))
        assert reply.status == 422
        assert "gymtrio" in str(reply.json())


@attrs.frozen
class Stored:
    """A finished call with its tokens in the store, as two records and as one."""

    uncut: Told
    head: TokenRecord
    whole: TokenRecord

    def continuation(self, record: TokenRecord, **changes: Any) -> Continuation:
        said = self.uncut.extension
        good = Continuation(
            source_capture_key=CaptureKey("r"),
            source_model_call_id=record.model_call_id,
            staging_keys=(record.staging_key,),
            prefix_token_count=len(record.token_ids),
            prefix_digest=digest_tokens(record.token_ids),
            effective_output_limit=said.effective_output_limit,
            policy_version=said.policy_version,
            engine_digest=said.engine_digest,
        )
        return attrs.evolve(good, **changes)


async def store_call(served: ServedEngine, engine: EngineClient, call_id: str) -> Stored:
    extension = call_of(call_id)
    uncut = await make_call(engine, extension, BODIES["greedy"])

    def record(count: int) -> TokenRecord:
        return make_chunk(
            extension,
            start_token=0,
            prompt_token_ids=uncut.tokens.prompt_token_ids,
            token_ids=uncut.tokens.token_ids[:count],
            log_probs=uncut.tokens.log_probs[:count],
            policy_version=uncut.extension.policy_version,
        )

    stored = Stored(uncut, record(6), record(OUTPUT_TOKENS))
    async with open_log_store(served.state_dir / "tokens", randomness=HostRandomness()) as store:
        await store.put((stored.head, stored.whole))
    return stored


async def test_a_continuation_that_does_not_hold_is_refused_before_anything_is_generated(
    served: ServedEngine, engine: EngineClient
) -> None:
    """CUT-4, CUT-7: 409 `continuation_refused`, with the reason."""
    stored = await store_call(served, engine, "stored")
    head, whole = stored.head, stored.whole
    limit = stored.uncut.extension.effective_output_limit
    cases: list[tuple[Continuation, dict[str, Any], str]] = [
        (stored.continuation(head, engine_digest="0"), {}, "another engine build"),
        (stored.continuation(head, policy_version=9), {}, "newer than 3"),
        (stored.continuation(head, policy_version=2), {}, "another policy version"),
        (stored.continuation(head, staging_keys=("no/such/key",)), {}, "no such record"),
        (stored.continuation(head, staging_keys=("k",) * 513), {}, "beyond any call"),
        (stored.continuation(head, staging_keys=()), {}, "another prompt"),
        (stored.continuation(head, prefix_token_count=7), {}, "6 tokens are staged"),
        (stored.continuation(head, prefix_digest="0"), {}, "not those that were cut"),
        (stored.continuation(head, source_capture_key="other"), {}, "another rollout"),
        (stored.continuation(head, source_capture_key="-"), {}, "rollout id"),
        (stored.continuation(head), {"max_tokens": limit - 1}, "output tokens here"),
        (stored.continuation(whole, effective_output_limit=3), {}, "goes on beyond"),
        (
            stored.continuation(head, terminal_finish_reason=TerminalReason.STOP),
            {},
            "does not end as it was said to",
        ),
        (
            stored.continuation(
                whole,
                terminal_finish_reason=TerminalReason.LENGTH,
                terminal_stop_reason="END",
            ),
            {},
            "does not end as it was said to",
        ),
    ]
    for continuation, more, reason in cases:
        body = BODIES["greedy"] | more
        reply: Any = await engine.post(
            Route.CHAT.value, chat_of(call_of("refused", continuation), body)
        )
        assert reply.status == 409, reason
        assert reply.json()["error"]["code"] == "continuation_refused"
        assert reason in reply.json()["error"]["detail"]
    other = chat_of(call_of("refused", stored.continuation(head)), BODIES["greedy"], "Another.")
    assert "another prompt" in str((await engine.post(Route.CHAT.value, other)).json())
    for record in (head, whole):
        told = await make_call(
            engine, call_of("held", stored.continuation(record)), BODIES["greedy"]
        )
        assert told.tokens == stored.uncut.tokens
        assert told.extension.continued_token_count == len(record.token_ids)


async def test_a_constrained_call_is_refused_whatever_it_continues(
    served: ServedEngine, engine: EngineClient
) -> None:
    """CUT-6, I27"""
    stored = await store_call(served, engine, "constrained")
    body = chat_of(call_of("c", stored.continuation(stored.head)), {"tool_choice": "required"})
    reply = await engine.post(Route.CHAT.value, body)
    assert reply.status == 422


async def test_a_damaged_record_is_refused(served: ServedEngine, engine: EngineClient) -> None:
    stored = await store_call(served, engine, "damaged")
    tokens = served.state_dir / "tokens"
    newest = max(tokens.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(newest.read_bytes())
    key = stored.head.staging_key
    data[data.rindex(key.encode()) + len(key) + 20] ^= 1
    newest.write_bytes(data)
    continuation = stored.continuation(stored.head)
    reply: Any = await engine.post(
        Route.CHAT.value, chat_of(call_of("d", continuation), BODIES["greedy"])
    )
    assert reply.status == 409
    assert reply.json()["error"]["code"] == "continuation_refused"
    assert key in reply.json()["error"]["detail"]


async def test_control_routes_need_the_token_and_reveal_nothing_without(
    engine: EngineClient,
) -> None:
    """CTL-2, I35"""
    inventory = unstructure(take_inventory(CheckpointId("c"), "policy", asking(["a"])))
    wrong = [{}, {"authorization": "Bearer other"}, {"authorization": TOKEN}]
    bodies: set[bytes] = set()
    for headers in wrong:
        for reply in (
            await engine.get(ENGINE_ROUTE, **headers),
            await engine.post(CUT_ROUTE, inventory, **headers),
            await engine.post(CUT_ROUTE, "not an inventory", **headers),
        ):
            assert reply.status == 401
            bodies.add(reply.body)
    twice = await engine.client.request(
        engine.url,
        "GET",
        ENGINE_ROUTE,
        headers=[("authorization", AUTHORIZATION), ("authorization", AUTHORIZATION)],
    )
    # Two of a header that may stand once: not a request, whatever they say.
    assert twice.status == 400
    assert len(bodies) == 1


async def test_malformed_inventories_are_refused(engine: EngineClient) -> None:
    good = unstructure(take_inventory(CheckpointId("c"), "policy", asking(["a"])))
    for body, reason in (
        (good | {"inventory_digest": "0"}, "digest"),
        (good | {"more": 1}, "unknown key"),
        (good | {"active_prefixes": [{}]}, "missing"),
        ([], "expected an object"),
    ):
        reply = await engine.post(CUT_ROUTE, body, authorization=AUTHORIZATION)
        assert reply.status == 422
        assert reason in str(reply.json())


async def test_the_engine_says_what_results_depend_on(engine: EngineClient) -> None:
    reply = await engine.get(ENGINE_ROUTE, authorization=AUTHORIZATION)
    described = structure(EngineDescription, reply.raise_for_status().json())
    assert described.policy_version == SETTINGS["policy_version"]
    assert {"weights_sha256", "sampler", "cpu_sha256", "llama_cpp"} <= described.fingerprint.keys()
    told = await make_call(engine, call_of("e"), BODIES["greedy"] | {"max_tokens": 1})
    assert told.extension.engine_digest == described.digest
    assert told.extension.policy_version == described.policy_version


async def test_an_engine_is_no_participant(engine: EngineClient) -> None:
    """COORD-4: 404 tells a controller so."""
    path = "/ng-control/v1/checkpoint/status"
    assert (await engine.get(path, authorization=AUTHORIZATION)).status == 404


async def test_failed_rounds_are_no_durable_prefixes(engine: EngineClient) -> None:
    entries = await cut(engine, "a", "b")
    assert {entry.disposition for entry in entries.values()} == {Disposition.DURABLE_FAILURE}
