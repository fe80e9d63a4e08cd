"""Generation cuts: the messages between a policy server and a backend that cuts natively (CUT-1).

At a close the policy server names every call in flight in an *inventory*. The backend makes the token
prefix of each durable, while the call goes on decoding, and answers with a *receipt* that covers the
inventory exactly: one acknowledgement per entry, `durable_prefix` with all its evidence or
`durable_failure` with none.

    POST <backend>/ng-control/v1/generation-cut   CutInventory -> CutReceipt
    GET  <backend>/ng-control/v1/engine           -> EngineDescription

A call carries a `CallExtension` in its body, its reply a `ReplyExtension`, both under the key
`gymtrio`. After a restore the re-issued call's extension holds a `Continuation`; the backend reads the
prefix by its staging keys, checks it, and generates only the rest (CUT-4), or refuses with
`ContinuationRefused`, and the policy server asks again without it. `DESIGN.md` beside this file is the
contract; `prefixes.py` has the backend's half of the checks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from enum import Enum
from typing import Final

import attrs

from gymtrio.capture.storable import check_storable
from gymtrio.capture.tokens import StagingKey
from gymtrio.errors import GymtrioError, Refusal
from gymtrio.ids import CaptureKey, CheckpointId, EpisodeId
from gymtrio.strict import MalformedValue, unstructure

CUT_ROUTE: Final = "/ng-control/v1/generation-cut"
ENGINE_ROUTE: Final = "/ng-control/v1/engine"
EXTENSION_KEY: Final = "gymtrio"
"""Where a `CallExtension` stands in the body of a model call to a native backend, and a
`ReplyExtension` in the body of its reply."""
NOTHING_GENERATED: Final = "nothing generated yet"
"""The `failure` of a call that waits or reads its prompt: nothing is lost, so it is not counted as a
cut that failed."""
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class CutRefused(GymtrioError):
    """A receipt or a continuation that does not hold together; costs a regeneration only (CUT-7)."""


class ContinuationRefused(Refusal):
    """A backend does not continue this prefix: missing, damaged, of another prompt, build or a newer
    policy. Nothing was generated; the caller asks again without the continuation."""

    status, code = 409, "continuation_refused"


class Disposition(Enum):
    DURABLE_PREFIX = "durable_prefix"
    DURABLE_FAILURE = "durable_failure"


class CutKind(Enum):
    ACTIVE_PREFIX = "active_prefix"
    """The call was still decoding."""
    TERMINAL_COMPLETION = "terminal_completion"
    """It had ended; the prefix is everything."""


class TerminalReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@attrs.frozen(kw_only=True)
class ActivePrefix:
    """One call in flight, as the inventory names it."""

    ticket_id: str
    rollout_id: str
    attempt: int
    model_call_id: str
    admitted_at: float
    """Order of admission; only compared."""

    @property
    def capture_key(self) -> CaptureKey:
        return EpisodeId(self.rollout_id, self.attempt).capture_key


@attrs.frozen(kw_only=True)
class CutInventory:
    checkpoint_id: CheckpointId
    server_name: str
    active_prefixes: tuple[ActivePrefix, ...]
    """Sorted by ticket id."""
    inventory_digest: str
    """SHA-256 in hex over the sorted compact JSON of everything else."""


@attrs.frozen(kw_only=True)
class PrefixAcknowledgement:
    ticket_id: str
    rollout_id: str
    attempt: int
    model_call_id: str
    admitted_at: float
    disposition: Disposition
    cut_kind: CutKind | None = None
    staging_keys: tuple[StagingKey, ...] = ()
    """Records whose tokens, joined in this order, are the prefix."""
    prefix_token_count: int | None = None
    prefix_digest: str | None = None
    """`digest_tokens` over the prefix."""
    effective_output_limit: int | None = None
    """Output tokens the call may have in all, prefix included."""
    policy_version: int | None = None
    """The oldest that contributed to the prefix."""
    engine_digest: str | None = None
    """`EngineDescription.digest` of the backend that made the prefix."""
    terminal_finish_reason: TerminalReason | None = None
    terminal_stop_reason: str | None = None
    """The stop string that ended it, if one did."""
    failure: str | None = None
    """Why, for a `durable_failure`."""


@attrs.frozen(kw_only=True)
class CutReceipt:
    checkpoint_id: CheckpointId
    cut_id: str
    inventory_digest: str
    prefixes: tuple[PrefixAcknowledgement, ...]


@attrs.frozen(kw_only=True)
class Continuation:
    """A durable prefix that a re-issued call goes on from."""

    source_capture_key: CaptureKey
    source_model_call_id: str
    staging_keys: tuple[StagingKey, ...]
    prefix_token_count: int
    prefix_digest: str
    effective_output_limit: int
    policy_version: int
    engine_digest: str
    terminal_finish_reason: TerminalReason | None = None
    terminal_stop_reason: str | None = None


@attrs.frozen(kw_only=True)
class CallExtension:
    """What a policy server adds to a call so that the backend can cut and continue it."""

    model_call_id: str
    """New for each call, also for one that continues a cut."""
    rollout_id: str
    attempt: int
    continuation: Continuation | None = None

    @property
    def capture_key(self) -> CaptureKey:
        return EpisodeId(self.rollout_id, self.attempt).capture_key


@attrs.frozen(kw_only=True)
class ReplyExtension:
    """What a native backend adds to the reply of a call that came with a `CallExtension`.

    Prompt ids, token ids and log-probs are not here but where OpenAI-shaped clients of rollouts look
    for them, see `replies.py`.
    """

    model_call_id: str
    policy_version: int
    """The oldest that contributed to any token of the reply."""
    engine_digest: str
    finish_reason: TerminalReason
    """How decoding ended, whatever the reply's own field says about tool calls."""
    stop_reason: str | None = None
    """The stop string that ended it, if one did."""
    effective_output_limit: int
    continued_token_count: int = 0
    """How many of the reply's tokens came from a continuation; 0: everything was generated now."""


@attrs.frozen(kw_only=True)
class EngineDescription:
    """What the results of a backend depend on besides the request and the weights' version."""

    model: str
    policy_version: int
    fingerprint: dict[str, object]
    """JSON for people and for the manifest of a checkpoint: build, CPU, settings."""
    digest: str
    """Equal exactly when a prefix of one engine is continued exactly by the other."""


@attrs.frozen(kw_only=True)
class CutRecord:
    """A cut as a checkpoint holds it: which request it belongs to, and how to go on."""

    model_call_id: str
    request_digest: str
    continuation: Continuation


def digest_tokens(token_ids: Iterable[int]) -> str:
    """SHA-256 in hex over the ids as decimal text joined by commas."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode("ascii")).hexdigest()


def take_inventory(
    checkpoint_id: CheckpointId, server_name: str, active_prefixes: Iterable[ActivePrefix]
) -> CutInventory:
    """Name the calls in flight, sorted and digested."""
    ordered = tuple(sorted(active_prefixes, key=lambda prefix: prefix.ticket_id))
    return CutInventory(
        checkpoint_id=checkpoint_id,
        server_name=server_name,
        active_prefixes=ordered,
        inventory_digest=_digest_inventory(checkpoint_id, server_name, ordered),
    )


def _digest_inventory(
    checkpoint_id: str, server_name: str, active_prefixes: tuple[ActivePrefix, ...]
) -> str:
    plain = {
        "checkpoint_id": checkpoint_id,
        "server_name": server_name,
        "active_prefixes": [unstructure(prefix) for prefix in active_prefixes],
    }
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def check_inventory(inventory: CutInventory) -> None:
    """
    Raises:
        CutRefused: the digest is not that of the inventory.
    """
    expected = _digest_inventory(
        inventory.checkpoint_id, inventory.server_name, inventory.active_prefixes
    )
    if inventory.inventory_digest != expected:
        raise CutRefused("inventory digest mismatch")


def match_receipt(inventory: CutInventory, receipt: CutReceipt) -> dict[str, PrefixAcknowledgement]:
    """Check that a receipt covers an inventory exactly and that each entry is whole.

    Returns:
        Ticket id to its acknowledgement, of every call in the inventory.

    Raises:
        CutRefused: with the reason; none of the round's cuts is used then.
    """
    if receipt.checkpoint_id != inventory.checkpoint_id:
        raise CutRefused(f"receipt is for checkpoint {receipt.checkpoint_id}")
    if receipt.inventory_digest != inventory.inventory_digest:
        raise CutRefused("receipt is for another inventory")
    acknowledged = {entry.ticket_id: entry for entry in receipt.prefixes}
    asked = {entry.ticket_id: entry for entry in inventory.active_prefixes}
    if len(acknowledged) != len(receipt.prefixes) or acknowledged.keys() != asked.keys():
        raise CutRefused("receipt does not cover the inventory exactly")
    for ticket_id, entry in acknowledged.items():
        _check_same_call(asked[ticket_id], entry)
        _check_evidence(entry)
    return acknowledged


def _check_same_call(asked: ActivePrefix, entry: PrefixAcknowledgement) -> None:
    named = (entry.rollout_id, entry.attempt, entry.model_call_id, entry.admitted_at)
    if named != (asked.rollout_id, asked.attempt, asked.model_call_id, asked.admitted_at):
        raise CutRefused(f"receipt names another call for ticket {asked.ticket_id}")


def _check_evidence(entry: PrefixAcknowledgement) -> None:
    evidence = (
        entry.cut_kind,
        entry.prefix_token_count,
        entry.prefix_digest,
        entry.effective_output_limit,
        entry.policy_version,
        entry.engine_digest,
    )
    ended = (entry.terminal_finish_reason, entry.terminal_stop_reason)
    where = f"ticket {entry.ticket_id}"
    if entry.disposition is Disposition.DURABLE_FAILURE:
        if any(part is not None for part in (*evidence, *ended)) or entry.staging_keys:
            raise CutRefused(f"{where}: a failure that carries evidence")
        return
    if any(part is None for part in evidence) or not entry.staging_keys:
        raise CutRefused(f"{where}: a durable prefix without all its evidence")
    assert entry.prefix_token_count is not None
    assert entry.prefix_digest is not None
    assert entry.effective_output_limit is not None
    if len(set(entry.staging_keys)) != len(entry.staging_keys):
        raise CutRefused(f"{where}: a staging key twice")
    limit = entry.effective_output_limit
    if limit < 1 or not 0 <= entry.prefix_token_count <= limit:
        raise CutRefused(f"{where}: counts out of range")
    if not _SHA256.fullmatch(entry.prefix_digest):
        raise CutRefused(f"{where}: the digest of the prefix is none")
    if entry.cut_kind is CutKind.TERMINAL_COMPLETION:
        if entry.terminal_finish_reason is None:
            raise CutRefused(f"{where}: a completion without its finish reason")
    elif any(part is not None for part in ended):
        # It would be answered as a whole generation.
        raise CutRefused(f"{where}: a call that goes on and has ended")
    try:
        check_storable(entry)
    except MalformedValue as error:
        raise CutRefused(f"{where}: {error}") from None


def continuation_of(entry: PrefixAcknowledgement) -> Continuation:
    """Turn a `durable_prefix` acknowledgement into what a re-issued call goes on from."""
    assert entry.disposition is Disposition.DURABLE_PREFIX
    assert entry.prefix_token_count is not None
    assert entry.prefix_digest is not None
    assert entry.effective_output_limit is not None
    assert entry.policy_version is not None
    assert entry.engine_digest is not None
    return Continuation(
        source_capture_key=EpisodeId(entry.rollout_id, entry.attempt).capture_key,
        source_model_call_id=entry.model_call_id,
        staging_keys=entry.staging_keys,
        prefix_token_count=entry.prefix_token_count,
        prefix_digest=entry.prefix_digest,
        effective_output_limit=entry.effective_output_limit,
        policy_version=entry.policy_version,
        engine_digest=entry.engine_digest,
        terminal_finish_reason=entry.terminal_finish_reason,
        terminal_stop_reason=entry.terminal_stop_reason,
    )
