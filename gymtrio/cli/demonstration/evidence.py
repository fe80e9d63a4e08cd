"""What a finished rollout left behind, and whether two of them are the same. Pure.

Two runs are compared by what was observed, not by reward alone: a lost session can end with the right
reward. Ids that servers make differ between runs by design and are left out; everything else that a
rollout said, heard and was given must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from gymtrio.capture.ledger import LedgerRow
from gymtrio.capture.tokens import TokenRecord
from gymtrio.ids import CaptureKey

_MADE_BY_SERVERS: Final = frozenset({"id", "call_id", "status"})
_NOT_STATE: Final = frozenset({"reward", "response", "responses_create_params"})


@attrs.frozen(kw_only=True)
class Evidence:
    """Everything that one rollout left."""

    transcript: tuple[object, ...]
    """The response's output items, without the ids that servers made."""
    tool_outputs: tuple[str, ...]
    final_state: Mapping[str, object]
    """What verify told besides the reward."""
    reward: float
    tokens: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]], ...]
    """Per model call: prompt ids, generated ids, log-probs."""
    calls: tuple[LedgerRow, ...]
    """In order of delivery, those before the crash included."""


@attrs.frozen(kw_only=True)
class Comparison:
    """One rollout undisturbed and killed, side by side."""

    transcript: bool
    tool_outputs: bool
    final_state: bool
    reward: bool
    tokens: bool
    """Prompt ids, generated ids and log-probs of every call, bit for bit."""
    model_calls: bool
    """As many calls, each with the same request."""

    @property
    def equal(self) -> bool:
        return all(attrs.astuple(self))


def read_evidence(
    result: Mapping[str, object], calls: Sequence[LedgerRow], records: Sequence[TokenRecord]
) -> Evidence:
    """Gather what a `/run` result, the ledger and the token store tell of a rollout.

    Args:
        records: of the calls, in their order.
    """
    response = result["response"]
    assert isinstance(response, Mapping)
    items = response["output"]
    assert isinstance(items, list)
    reward = result["reward"]
    assert isinstance(reward, int | float)
    return Evidence(
        transcript=tuple(_without_made_ids(item) for item in items),
        tool_outputs=tuple(
            str(item["output"]) for item in items if item.get("type") == "function_call_output"
        ),
        final_state={
            key: value
            for key, value in result.items()
            if key not in _NOT_STATE and not key.startswith("ng_")
        },
        reward=float(reward),
        tokens=tuple((r.prompt_token_ids, r.token_ids, r.log_probs) for r in records),
        calls=tuple(calls),
    )


def _without_made_ids(item: object) -> object:
    if isinstance(item, Mapping):
        return {k: _without_made_ids(v) for k, v in item.items() if k not in _MADE_BY_SERVERS}
    if isinstance(item, list):
        return [_without_made_ids(member) for member in item]
    return item


def compare(undisturbed: Evidence, killed: Evidence) -> Comparison:
    """Say in what two runs of one rollout are equal."""
    digests = [[row.request_digest for row in run.calls] for run in (undisturbed, killed)]
    return Comparison(
        transcript=undisturbed.transcript == killed.transcript,
        tool_outputs=undisturbed.tool_outputs == killed.tool_outputs,
        final_state=undisturbed.final_state == killed.final_state,
        reward=undisturbed.reward == killed.reward,
        tokens=undisturbed.tokens == killed.tokens,
        model_calls=digests[0] == digests[1],
    )


@attrs.frozen(kw_only=True)
class Saved:
    """What a checkpoint spared a rollout that was killed."""

    calls: int
    """Model calls that were not made again."""
    tokens: int
    """Tokens of those calls."""
    continued_tokens: int
    """Tokens of the generation in flight that were not generated again."""


def count_saved(calls: Sequence[LedgerRow], final_key: CaptureKey) -> Saved:
    """Count what the final attempt did not have to do.

    Args:
        final_key: of the attempt that finished; calls staged under another were made before.
    """
    before = [row for row in calls if row.staged_under != final_key]
    after = [row for row in calls if row.staged_under == final_key]
    return Saved(
        calls=len(before),
        tokens=sum(row.generated_token_count for row in before),
        continued_tokens=sum(row.continued_token_count for row in after),
    )
