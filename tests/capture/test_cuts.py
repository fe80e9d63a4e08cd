"""Inventories, receipts, prefixes and continuations: the two halves of the contract."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from gymtrio.capture.cuts import (
    ActivePrefix,
    CallExtension,
    Continuation,
    ContinuationRefused,
    CutKind,
    CutReceipt,
    CutRefused,
    Disposition,
    PrefixAcknowledgement,
    TerminalReason,
    check_inventory,
    continuation_of,
    digest_tokens,
    match_receipt,
    take_inventory,
)
from gymtrio.capture.prefixes import (
    acknowledge_failure,
    acknowledge_prefix,
    check_continuation,
    join_prefix,
    make_chunk,
)
from gymtrio.capture.tokens import StagingKey, TokenRecord
from gymtrio.ids import CaptureKey, CheckpointId
from gymtrio.strict import MalformedValue, structure, unstructure
from gymtrio.wire.codec import from_json, to_json

PROMPT = (5, 6, 7)
TOKENS = tuple(range(100, 110))
CALL = CallExtension(model_call_id="m1", rollout_id="r", attempt=0)
C1 = CheckpointId("c1")


def active(number: int = 1) -> ActivePrefix:
    return ActivePrefix(
        ticket_id=f"t{number}",
        rollout_id="r",
        attempt=0,
        model_call_id=f"m{number}",
        admitted_at=float(number),
    )


def chunk(start: int, end: int, *, version: int = 3, call: CallExtension = CALL) -> TokenRecord:
    tokens = TOKENS[start:end]
    return make_chunk(
        call,
        start_token=start,
        prompt_token_ids=PROMPT,
        token_ids=tokens,
        log_probs=tuple(-t / 8 for t in tokens),
        policy_version=version,
    )


def acknowledgement(number: int = 1) -> PrefixAcknowledgement:
    return acknowledge_prefix(
        active(number),
        token_ids=TOKENS[:7],
        staging_keys=(chunk(0, 4).staging_key, chunk(4, 7).staging_key),
        effective_output_limit=20,
        policy_version=3,
        engine_digest="e",
    )


INVENTORY = take_inventory(C1, "policy", [active(2), active(1)])


def receipt(*entries: PrefixAcknowledgement, **changes: Any) -> CutReceipt:
    made = CutReceipt(
        checkpoint_id=C1,
        cut_id="x",
        inventory_digest=INVENTORY.inventory_digest,
        prefixes=entries or (acknowledgement(1), acknowledgement(2)),
    )
    return attrs.evolve(made, **changes)


def test_an_inventory_is_sorted_and_digested() -> None:
    """CUT-1: the digest does not depend on the order of calls, and notices every change."""
    assert [p.ticket_id for p in INVENTORY.active_prefixes] == ["t1", "t2"]
    assert take_inventory(C1, "policy", [active(1), active(2)]) == INVENTORY
    check_inventory(INVENTORY)
    for changed in (
        attrs.evolve(INVENTORY, server_name="other"),
        attrs.evolve(INVENTORY, checkpoint_id=CheckpointId("c2")),
        attrs.evolve(INVENTORY, active_prefixes=INVENTORY.active_prefixes[:1]),
    ):
        with pytest.raises(CutRefused, match="digest"):
            check_inventory(changed)


@pytest.mark.parametrize("message", [INVENTORY, receipt()])
def test_messages_survive_json(message: Any) -> None:
    """CUT-1: exactly, and unknown fields are refused."""
    assert from_json(type(message), to_json(message)) == message
    with pytest.raises(MalformedValue, match="unknown key"):
        structure(type(message), unstructure(message) | {"more": 1})


def test_a_whole_receipt_gives_each_call_its_acknowledgement() -> None:
    """CUT-1."""
    failed = acknowledge_failure(active(2), "the disk is full")
    matched = match_receipt(INVENTORY, receipt(acknowledgement(1), failed))
    assert matched["t2"].failure == "the disk is full"
    assert matched["t1"].cut_kind is CutKind.ACTIVE_PREFIX
    continuation = continuation_of(matched["t1"])
    assert continuation.source_capture_key == "r"
    assert continuation.prefix_digest == digest_tokens(TOKENS[:7])


def whole(**changes: Any) -> CutReceipt:
    return receipt(attrs.evolve(acknowledgement(1), **changes), acknowledgement(2))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (receipt(checkpoint_id=CheckpointId("c2")), "checkpoint c2"),
        (receipt(inventory_digest="0"), "another inventory"),
        (receipt(acknowledgement(1)), "exactly"),
        (receipt(acknowledgement(1), acknowledgement(3)), "exactly"),
        (receipt(acknowledgement(1), acknowledgement(1)), "exactly"),
        (receipt(acknowledgement(1), acknowledgement(2), acknowledgement(2)), "exactly"),
        (whole(model_call_id="m9"), "another call"),
        (whole(attempt=1), "another call"),
        (whole(admitted_at=9.0), "another call"),
        (whole(prefix_token_count=None), "all its evidence"),
        (whole(engine_digest=None), "all its evidence"),
        (whole(policy_version=None), "all its evidence"),
        (whole(staging_keys=()), "all its evidence"),
        (whole(staging_keys=(StagingKey("a"), StagingKey("a"))), "twice"),
        (whole(prefix_token_count=-1), "out of range"),
        (whole(effective_output_limit=0), "out of range"),
        (whole(effective_output_limit=6), "out of range"),
        (whole(prefix_digest="0"), "the digest of the prefix is none"),
        (whole(prefix_digest="A" * 64), "the digest of the prefix is none"),
        (whole(cut_kind=CutKind.TERMINAL_COMPLETION), "finish reason"),
        (whole(terminal_finish_reason=TerminalReason.STOP), "goes on and has ended"),
        (whole(terminal_stop_reason="."), "goes on and has ended"),
        (whole(policy_version=-1), "policy_version: out of range"),
        (whole(policy_version=2**63), "policy_version: out of range"),
        (whole(effective_output_limit=2**70), "effective_output_limit: out of range"),
        (whole(engine_digest="\ud800"), "engine_digest: not a text"),
        (whole(staging_keys=(StagingKey("a"), StagingKey("\ud800"))), "staging_keys: not a text"),
        (whole(disposition=Disposition.DURABLE_FAILURE), "carries evidence"),
        (
            receipt(
                attrs.evolve(
                    acknowledge_failure(active(1), "no"),
                    terminal_finish_reason=TerminalReason.STOP,
                ),
                acknowledgement(2),
            ),
            "carries evidence",
        ),
    ],
)
def test_a_receipt_that_does_not_hold_is_refused_whole(wrong: CutReceipt, why: str) -> None:
    """CUT-7: none of the round's cuts is used then."""
    with pytest.raises(CutRefused, match=why):
        match_receipt(INVENTORY, wrong)


def test_a_chunk_is_named_by_call_and_range() -> None:
    """P1: staging the same range again writes the same record; only the first has the prompt."""
    assert chunk(0, 4) == chunk(0, 4)
    assert chunk(0, 4).staging_key == "r/m1/0-4"
    assert chunk(0, 4).prompt_token_ids == PROMPT
    assert chunk(4, 7).prompt_token_ids == ()
    assert len({chunk(0, 4).staging_key, chunk(4, 7).staging_key, chunk(0, 7).staging_key}) == 3


RECORDS = [chunk(0, 4, version=5), chunk(4, 7, version=3)]
CONTINUATION = continuation_of(acknowledgement())


def test_a_prefix_is_its_chunks_joined_in_order() -> None:
    """CUT-4, I25: none doubled, none missing, aligned; stamped with the oldest version."""
    prefix = join_prefix(CONTINUATION, RECORDS, PROMPT)
    assert prefix.token_ids == TOKENS[:7]
    assert prefix.log_probs == tuple(-t / 8 for t in TOKENS[:7])
    assert prefix.mask == (1,) * 7
    assert prefix.policy_version == 3


def test_chunks_of_several_attempts_join() -> None:
    """CUT-4: a continuing call was cut again, or had nothing new when it was."""
    again = CallExtension(model_call_id="m2", rollout_id="r", attempt=1)
    tail = chunk(7, 9, call=again)
    longer = attrs.evolve(
        CONTINUATION,
        source_capture_key=CaptureKey("r-a1"),
        source_model_call_id="m2",
        staging_keys=(*CONTINUATION.staging_keys, tail.staging_key),
        prefix_token_count=9,
        prefix_digest=digest_tokens(TOKENS[:9]),
    )
    assert join_prefix(longer, [*RECORDS, tail], PROMPT).token_ids == TOKENS[:9]
    nothing_new = attrs.evolve(
        CONTINUATION, source_capture_key=CaptureKey("r-a1"), source_model_call_id="m2"
    )
    assert join_prefix(nothing_new, RECORDS, PROMPT).token_ids == TOKENS[:7]


def continues(**changes: Any) -> Continuation:
    return attrs.evolve(CONTINUATION, **changes)


@pytest.mark.parametrize(
    ("continuation", "records", "prompt", "why"),
    [
        (CONTINUATION, RECORDS[:1], PROMPT, "staging keys"),
        (CONTINUATION, RECORDS[::-1], PROMPT, "staging keys"),
        (CONTINUATION, RECORDS, (5, 6), "another prompt"),
        (continues(source_capture_key=CaptureKey("s")), RECORDS, PROMPT, "another rollout"),
        (continues(source_model_call_id="m9"), RECORDS, PROMPT, "another call than its source"),
        (
            CONTINUATION,
            [RECORDS[0], attrs.evolve(RECORDS[1], capture_key=CaptureKey("r-a1"))],
            PROMPT,
            "a later attempt than its source",
        ),
        (
            continues(source_capture_key=CaptureKey("r-a2")),
            [attrs.evolve(RECORDS[0], capture_key=CaptureKey("r-a2")), RECORDS[1]],
            PROMPT,
            "a later attempt than its source",
        ),
        (continues(prefix_token_count=8), RECORDS, PROMPT, "7 tokens are staged, 8"),
        (continues(prefix_digest="0"), RECORDS, PROMPT, "not those that were cut"),
        (continues(policy_version=4), RECORDS, PROMPT, "another policy version"),
        (continues(staging_keys=()), [], PROMPT, "another prompt"),
    ],
)
def test_records_that_are_not_the_prefix_are_refused(
    continuation: Continuation, records: list[TokenRecord], prompt: Any, why: str
) -> None:
    """CUT-4, I25."""
    with pytest.raises(ContinuationRefused, match=why):
        join_prefix(continuation, records, prompt)


def test_another_build_or_a_newer_policy_is_refused() -> None:
    """CUT-4."""
    check_continuation(CONTINUATION, engine_digest="e", policy_version=3)
    check_continuation(CONTINUATION, engine_digest="e", policy_version=4)
    with pytest.raises(ContinuationRefused, match="build"):
        check_continuation(CONTINUATION, engine_digest="f", policy_version=3)
    with pytest.raises(ContinuationRefused, match="newer than 2"):
        check_continuation(CONTINUATION, engine_digest="e", policy_version=2)


def test_an_ended_call_is_a_terminal_completion() -> None:
    """CUT-1."""
    ended = acknowledge_prefix(
        active(),
        token_ids=TOKENS,
        staging_keys=(StagingKey("k"),),
        effective_output_limit=10,
        policy_version=3,
        engine_digest="e",
        finish_reason=TerminalReason.STOP,
        stop_reason="\n\n",
    )
    assert ended.cut_kind is CutKind.TERMINAL_COMPLETION
    continuation = continuation_of(ended)
    assert continuation.terminal_finish_reason is TerminalReason.STOP
    assert continuation.terminal_stop_reason == "\n\n"
