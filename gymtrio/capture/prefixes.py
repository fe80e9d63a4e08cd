"""The backend's half of a generation cut: what it stages, acknowledges and continues (CUT-1, CUT-4).

Pure: a native backend calls these between reading its live calls and writing to its token store.

- P1 A call's tokens are staged in *chunks*, each a range of the generation; a chunk is named by call
  and range, so that staging one twice writes the same record.
- P2 The staging keys of a prefix, joined in order, cover it without gap or overlap (I25).
- P3 The stamp of a prefix is the oldest policy version that contributed to any of its chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from gymtrio.capture.cuts import (
    ActivePrefix,
    CallExtension,
    Continuation,
    ContinuationRefused,
    CutKind,
    Disposition,
    PrefixAcknowledgement,
    TerminalReason,
    digest_tokens,
)
from gymtrio.capture.tokens import StagingKey, TokenRecord
from gymtrio.ids import CaptureKey, parse_capture_key


@attrs.frozen(kw_only=True)
class Prefix:
    """Tokens of a generation from its beginning, with what is known of each."""

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    mask: tuple[int, ...] = ()
    staging_keys: tuple[StagingKey, ...] = ()
    """Of the chunks it was read from, in order."""
    policy_version: int
    """The oldest that contributed."""


def chunk_key(
    capture_key: CaptureKey, model_call_id: str, start_token: int, end_token: int
) -> StagingKey:
    """Name the tokens `start_token..end_token` of a call's generation (P1)."""
    return StagingKey(f"{capture_key}/{model_call_id}/{start_token}-{end_token}")


def make_chunk(
    call: CallExtension,
    *,
    start_token: int,
    prompt_token_ids: tuple[int, ...],
    token_ids: tuple[int, ...],
    log_probs: tuple[float, ...],
    policy_version: int,
) -> TokenRecord:
    """Make the record of what a call generated since its last chunk.

    Args:
        start_token: how many tokens of the generation lie in earlier chunks, or came as prefix.
        prompt_token_ids: of the call; kept in the first chunk only.
        token_ids: the new ones, at least one.
        log_probs: as many.
        policy_version: the oldest that contributed to the new tokens.
    """
    assert token_ids
    end_token = start_token + len(token_ids)
    return TokenRecord(
        staging_key=chunk_key(call.capture_key, call.model_call_id, start_token, end_token),
        capture_key=call.capture_key,
        model_call_id=call.model_call_id,
        prompt_token_ids=prompt_token_ids if start_token == 0 else (),
        token_ids=token_ids,
        log_probs=log_probs,
        mask=(1,) * len(token_ids),
        policy_version=policy_version,
    )


def acknowledge_prefix(
    asked: ActivePrefix,
    *,
    token_ids: Sequence[int],
    staging_keys: tuple[StagingKey, ...],
    effective_output_limit: int,
    policy_version: int,
    engine_digest: str,
    finish_reason: TerminalReason | None = None,
    stop_reason: str | None = None,
) -> PrefixAcknowledgement:
    """Acknowledge a prefix that is durable under `staging_keys`.

    Args:
        token_ids: the whole prefix, a continued one included.
        finish_reason: how decoding ended; None: it goes on.
    """
    ended = finish_reason is not None
    return PrefixAcknowledgement(
        ticket_id=asked.ticket_id,
        rollout_id=asked.rollout_id,
        attempt=asked.attempt,
        model_call_id=asked.model_call_id,
        admitted_at=asked.admitted_at,
        disposition=Disposition.DURABLE_PREFIX,
        cut_kind=CutKind.TERMINAL_COMPLETION if ended else CutKind.ACTIVE_PREFIX,
        staging_keys=staging_keys,
        prefix_token_count=len(token_ids),
        prefix_digest=digest_tokens(token_ids),
        effective_output_limit=effective_output_limit,
        policy_version=policy_version,
        engine_digest=engine_digest,
        terminal_finish_reason=finish_reason,
        terminal_stop_reason=stop_reason,
    )


def acknowledge_failure(asked: ActivePrefix, why: str) -> PrefixAcknowledgement:
    """Say that a call of the inventory has no durable prefix; it costs its regeneration."""
    return PrefixAcknowledgement(
        ticket_id=asked.ticket_id,
        rollout_id=asked.rollout_id,
        attempt=asked.attempt,
        model_call_id=asked.model_call_id,
        admitted_at=asked.admitted_at,
        disposition=Disposition.DURABLE_FAILURE,
        failure=why,
    )


def check_continuation(
    continuation: Continuation, *, engine_digest: str, policy_version: int
) -> None:
    """Check what can be checked before a record is read.

    Args:
        engine_digest: of the engine that would continue.
        policy_version: of the weights it has now.

    Raises:
        ContinuationRefused: with the reason.
    """
    if continuation.engine_digest != engine_digest:
        raise ContinuationRefused("the prefix was made by another engine build or setting")
    if continuation.policy_version > policy_version:
        raise ContinuationRefused(
            f"the prefix is of policy version {continuation.policy_version}, newer than "
            f"{policy_version}"
        )


def join_prefix(
    continuation: Continuation, records: Sequence[TokenRecord], prompt_token_ids: Sequence[int]
) -> Prefix:
    """Join the records of a continuation and check that they are what it names.

    Args:
        records: what the token store gave for the staging keys, in their order.
        prompt_token_ids: of the call that wants to continue.

    Raises:
        ContinuationRefused: with the reason; nothing of the records may be used.
    """
    if tuple(record.staging_key for record in records) != continuation.staging_keys:
        raise ContinuationRefused("the records are not those of the continuation's staging keys")
    if not records or records[0].prompt_token_ids != tuple(prompt_token_ids):
        raise ContinuationRefused("the prefix belongs to another prompt")
    _check_lineage(continuation, records)
    token_ids = tuple(t for record in records for t in record.token_ids)
    oldest = min(record.policy_version for record in records)
    if len(token_ids) != continuation.prefix_token_count:
        raise ContinuationRefused(
            f"{len(token_ids)} tokens are staged, {continuation.prefix_token_count} were cut"
        )
    if digest_tokens(token_ids) != continuation.prefix_digest:
        raise ContinuationRefused("the staged tokens are not those that were cut")
    if oldest != continuation.policy_version:
        raise ContinuationRefused("the staged tokens are of another policy version than was cut")
    return Prefix(
        token_ids=token_ids,
        log_probs=tuple(p for record in records for p in record.log_probs),
        mask=tuple(m for record in records for m in record.mask),
        staging_keys=continuation.staging_keys,
        policy_version=oldest,
    )


def _check_lineage(continuation: Continuation, records: Sequence[TokenRecord]) -> None:
    """The chunks are of calls that the source call went on from, and the last, if new, is its own."""
    source = parse_capture_key(continuation.source_capture_key)
    made_by = [parse_capture_key(record.capture_key) for record in records]
    if any(each.rollout_id != source.rollout_id for each in made_by):
        raise ContinuationRefused("the prefix belongs to another rollout")
    attempts = [each.attempt for each in made_by]
    if attempts != sorted(attempts) or attempts[-1] > source.attempt:
        raise ContinuationRefused("the prefix has tokens of a later attempt than its source")
    own = continuation.source_model_call_id
    if attempts[-1] == source.attempt and records[-1].model_call_id != own:
        raise ContinuationRefused("the prefix belongs to another call than its source")
