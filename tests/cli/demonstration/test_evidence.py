from __future__ import annotations

from typing import Any

import attrs
import pytest

from gymtrio.capture.ledger import LedgerRow
from gymtrio.capture.tokens import StagingKey, TokenRecord
from gymtrio.cli.demonstration.evidence import (
    Evidence,
    Saved,
    compare,
    count_saved,
    read_evidence,
)
from gymtrio.ids import CaptureKey


def row(number: int, *, under: str = "r", continued: int = 0) -> LedgerRow:
    return LedgerRow(
        model_call_id=f"c{number}",
        parent_call_id=None,
        request_digest=f"d{number}",
        conversation_end=f"e{number}",
        staged_under=CaptureKey(under),
        staging_key=StagingKey(f"{under}/c{number}"),
        generated_token_count=10,
        continued_token_count=continued,
    )


def record(number: int, logs: tuple[float, ...] = (-0.5, -1.0)) -> TokenRecord:
    return TokenRecord(
        staging_key=StagingKey(f"r/c{number}"),
        capture_key=CaptureKey("r"),
        model_call_id=f"c{number}",
        prompt_token_ids=(1, 2),
        token_ids=(3, 4),
        log_probs=logs,
        mask=(1, 1),
        policy_version=0,
    )


def result(suffix: str = "a", **changes: Any) -> dict[str, object]:
    items = [
        {"type": "function_call", "id": f"fc_{suffix}", "call_id": suffix, "name": "hit"},
        {"type": "function_call_output", "call_id": suffix, "output": '{"your_sum":14}'},
        {"type": "message", "id": f"m_{suffix}", "content": [{"text": "done", "id": suffix}]},
    ]
    told = {"response": {"output": items, "id": suffix}, "reward": 1.0, "rounds_played": 1}
    return told | {"ng_agent_observations": suffix, "responses_create_params": suffix} | changes


def evidence(suffix: str = "a", **changes: Any) -> Evidence:
    return read_evidence(result(suffix, **changes), [row(0), row(1)], [record(0), record(1)])


def test_runs_that_differ_only_in_ids_that_servers_made_are_equal() -> None:
    assert compare(evidence("a"), evidence("b")).equal


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("transcript", ("other",), "transcript"),
        ("tool_outputs", ('{"your_sum":15}',), "tool_outputs"),
        ("final_state", {"rounds_played": 2}, "final_state"),
        ("reward", 0.0, "reward"),
        ("tokens", (((1, 2), (3, 4), (-0.5, -1.0000001)),), "tokens"),
        ("calls", (row(0),), "model_calls"),
    ],
)
def test_each_kind_of_difference_is_told_by_itself(field: str, value: object, named: str) -> None:
    """A lost session may end with the right reward: every kind is compared."""
    first = evidence()
    found = compare(first, attrs.evolve(first, **{field: value}))
    assert not found.equal
    assert [name for name, equal in attrs.asdict(found).items() if not equal] == [named]


def test_what_a_checkpoint_saved_is_counted_by_who_staged_the_call() -> None:
    calls = [row(0), row(1), row(2, under="r-a1", continued=4), row(3, under="r-a1")]
    assert count_saved(calls, CaptureKey("r-a1")) == Saved(calls=2, tokens=20, continued_tokens=4)
