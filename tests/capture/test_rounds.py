"""Rounds of cuts over calls whose progress a test decides."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.capture.cuts import (
    NOTHING_GENERATED,
    ActivePrefix,
    CallExtension,
    Continuation,
    CutInventory,
    CutKind,
    Disposition,
    PrefixAcknowledgement,
    TerminalReason,
    continuation_of,
    match_receipt,
    take_inventory,
)
from gymtrio.capture.memory_store import MemoryTokenStore
from gymtrio.capture.prefixes import Prefix, join_prefix
from gymtrio.capture.rounds import NO_SUCH_CALL, Cutter
from gymtrio.capture.tokens import TokenRecord, TokenStore, TokenStoreFailed
from gymtrio.capture.worker import CapturedCall, Progress, TokenCapture
from gymtrio.errors import InvalidRequest
from gymtrio.ids import CheckpointId
from gymtrio.ports import HostRandomness

PROMPT = (7, 8, 9)


def generated(count: int, **ended: Any) -> Progress:
    return Progress(
        token_ids=tuple(range(100, 100 + count)),
        log_probs=tuple(-i / 8 for i in range(count)),
        effective_output_limit=50,
        policy_version=4,
        **ended,
    )


class FailingStore(MemoryTokenStore):
    """Fails while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = False

    async def put(self, records: tuple[TokenRecord, ...]) -> None:
        if self.failing:
            raise TokenStoreFailed("the disk is full")
        await super().put(records)


class Bench:
    """A cutter, its live calls, and how far each of them is."""

    def __init__(self, store: TokenStore) -> None:
        self.store = store
        self.capture = TokenCapture(
            store, engine_digest="build", policy_version=lambda: 4, records_max=100
        )
        self.progress: dict[str, Progress] = {}
        self.cutter = Cutter(
            self.capture,
            store,
            observe=lambda call: self.progress.get(call.extension.model_call_id),
            engine_digest="build",
            randomness=HostRandomness(),
        )

    async def begin(
        self, call_id: str, rollout_id: str = "r", continuation: Continuation | None = None
    ) -> CapturedCall:
        extension = CallExtension(
            model_call_id=call_id, rollout_id=rollout_id, attempt=0, continuation=continuation
        )
        return await self.capture.begin_call(extension, prompt_token_ids=PROMPT)

    def reach(self, call: CapturedCall, count: int) -> None:
        self.progress[call.extension.model_call_id] = generated(count)

    async def cut(self, *asked: ActivePrefix) -> list[PrefixAcknowledgement]:
        inventory = take_inventory(CheckpointId("c"), "policy", asked)
        acknowledged = match_receipt(inventory, await self.cutter.cut(inventory))
        return [acknowledged[entry.ticket_id] for entry in inventory.active_prefixes]

    async def read(self, entry: PrefixAcknowledgement) -> Prefix:
        """What a later continuation would get."""
        records = [await self.store.get(key) for key in entry.staging_keys]
        return join_prefix(continuation_of(entry), records, PROMPT)


def asking(call_id: str, *, ticket: int = 1, rollout_id: str = "r") -> ActivePrefix:
    return ActivePrefix(
        ticket_id=f"{ticket:03d}",
        rollout_id=rollout_id,
        attempt=0,
        model_call_id=call_id,
        admitted_at=float(ticket),
    )


async def test_a_prefix_is_durable_with_all_its_evidence() -> None:
    """CUT-1"""
    bench = Bench(MemoryTokenStore())
    bench.reach(await bench.begin("a"), 5)
    (entry,) = await bench.cut(asking("a"))
    assert entry.disposition is Disposition.DURABLE_PREFIX
    assert entry.cut_kind is CutKind.ACTIVE_PREFIX
    assert entry.policy_version == 4
    assert entry.engine_digest == "build"
    assert entry.effective_output_limit == 50
    prefix = await bench.read(entry)
    assert prefix.token_ids == generated(5).token_ids
    assert prefix.log_probs == generated(5).log_probs


async def test_what_has_no_prefix_is_a_failure_with_its_reason() -> None:
    bench = Bench(MemoryTokenStore())
    await bench.begin("silent")
    bench.reach(await bench.begin("foreign", "other"), 5)
    entries = await bench.cut(
        asking("silent"), asking("foreign", ticket=2), asking("unknown", ticket=3)
    )
    assert [entry.disposition for entry in entries] == [Disposition.DURABLE_FAILURE] * 3
    assert [entry.failure for entry in entries] == [NOTHING_GENERATED, NO_SUCH_CALL, NO_SUCH_CALL]
    assert isinstance(bench.store, MemoryTokenStore)
    assert bench.store.keys() == []


async def test_a_call_that_has_ended_is_whole_until_its_reply_is_handed_over() -> None:
    bench = Bench(MemoryTokenStore())
    call = await bench.begin("a")
    ended = generated(6, finish_reason=TerminalReason.STOP, stop_reason="END")
    bench.capture.complete_call(call, ended)
    (entry,) = await bench.cut(asking("a"))
    assert entry.cut_kind is CutKind.TERMINAL_COMPLETION
    assert entry.terminal_finish_reason is TerminalReason.STOP
    assert entry.terminal_stop_reason == "END"
    assert (await bench.read(entry)).token_ids == generated(6).token_ids
    bench.capture.end_call(call)
    (gone,) = await bench.cut(asking("a"))
    assert gone.failure == NO_SUCH_CALL


async def test_the_same_inventory_again_writes_nothing_anew() -> None:
    store = MemoryTokenStore()
    bench = Bench(store)
    bench.reach(await bench.begin("a"), 5)
    twice = [await bench.cut(asking("a")) for _ in range(2)]
    assert twice[0] == twice[1]
    assert len(store.keys()) == 1


async def test_one_call_under_two_tickets_is_staged_once() -> None:
    store = MemoryTokenStore()
    bench = Bench(store)
    bench.reach(await bench.begin("a"), 5)
    entries = await bench.cut(asking("a"), asking("a", ticket=2))
    assert entries[0].staging_keys == entries[1].staging_keys
    assert len(store.keys()) == 1


async def test_a_continued_call_brings_its_chunks_and_the_oldest_version() -> None:
    """CUT-4, I25"""
    bench = Bench(MemoryTokenStore())
    bench.progress["a"] = attrs.evolve(generated(5), policy_version=2)
    await bench.begin("a")
    (first,) = await bench.cut(asking("a"))
    again = await bench.begin("b", continuation=continuation_of(first))
    bench.reach(again, 5)
    (waiting,) = await bench.cut(asking("b"))
    assert waiting.staging_keys == first.staging_keys
    assert waiting.policy_version == 2
    bench.reach(again, 9)
    (entry,) = await bench.cut(asking("b"))
    assert entry.staging_keys[:-1] == first.staging_keys
    assert entry.prefix_token_count == 9
    assert entry.policy_version == 2
    assert (await bench.read(entry)).token_ids == generated(9).token_ids


async def test_what_an_engine_says_wrongly_costs_that_call_its_cut() -> None:
    """CUT-7, I25: a generation that lost tokens is not acknowledged; the others are."""
    bench = Bench(MemoryTokenStore())
    lying, honest = await bench.begin("lying"), await bench.begin("honest")
    both = (asking("lying"), asking("honest", ticket=2))
    bench.reach(lying, 6)
    bench.reach(honest, 6)
    await bench.cut(*both)
    bench.reach(lying, 4)
    refused, durable = await bench.cut(*both)
    assert refused.failure == "call lying has 4 tokens, 6 are staged"
    assert durable.prefix_token_count == 6


async def test_a_store_that_fails_costs_one_round_and_only_what_was_new() -> None:
    """CUT-7"""
    store = FailingStore()
    bench = Bench(store)
    growing, resting = await bench.begin("growing"), await bench.begin("resting")
    both = (asking("growing"), asking("resting", ticket=2))
    bench.reach(growing, 3)
    bench.reach(resting, 3)
    await bench.cut(*both)
    store.failing = True
    bench.reach(growing, 6)
    failed, durable = await bench.cut(*both)
    assert failed.failure == "the disk is full"
    assert failed.staging_keys == ()
    assert durable.prefix_token_count == 3
    store.failing = False
    bench.reach(growing, 8)
    entry, _ = await bench.cut(*both)
    assert (await bench.read(entry)).token_ids == generated(8).token_ids


async def test_two_rounds_at_once_both_hold() -> None:
    release = trio.Event()

    class SlowStore(MemoryTokenStore):
        async def put(self, records: tuple[TokenRecord, ...]) -> None:
            if len(records[0].token_ids) == 4:
                await release.wait()
            await super().put(records)

    bench = Bench(SlowStore())
    call = await bench.begin("a")
    entries: dict[str, PrefixAcknowledgement] = {}

    async def round_of(name: str) -> None:
        (entries[name],) = await bench.cut(asking("a"))

    async with trio.open_nursery() as nursery:
        bench.reach(call, 4)
        nursery.start_soon(round_of, "slow")
        await trio.testing.wait_all_tasks_blocked()
        bench.reach(call, 7)
        await round_of("quick")
        release.set()
    bench.reach(call, 9)
    await round_of("later")
    for name, count in (("slow", 4), ("quick", 7), ("later", 9)):
        prefix = await bench.read(entries[name])
        assert prefix.token_ids == generated(count).token_ids, name


async def test_an_inventory_that_was_changed_on_its_way_is_refused() -> None:
    bench = Bench(MemoryTokenStore())
    inventory = take_inventory(CheckpointId("c"), "policy", [asking("a")])
    wrong: CutInventory = attrs.evolve(inventory, server_name="other")
    with pytest.raises(InvalidRequest, match="digest"):
        await bench.cutter.cut(wrong)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12))
def test_every_receipt_is_the_generation_so_far(steps: list[tuple[int, bool]]) -> None:
    """I25: however often it was cut, and whichever rounds the store failed."""

    async def run() -> None:
        store = FailingStore()
        bench = Bench(store)
        call = await bench.begin("a")
        count = 0
        for more, failing in steps:
            count += more
            bench.reach(call, count)
            store.failing = failing
            (entry,) = await bench.cut(asking("a"))
            if entry.disposition is Disposition.DURABLE_PREFIX:
                prefix = await bench.read(entry)
                assert prefix.token_ids == generated(count).token_ids
                assert prefix.log_probs == generated(count).log_probs
            else:
                assert failing or not count

    trio.run(run)
