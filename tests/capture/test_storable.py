"""What of a backend's message a checkpoint can hold."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from gymtrio.capture.cuts import Continuation, EngineDescription, TerminalReason
from gymtrio.capture.storable import (
    DESCRIPTION_BYTES_MAX,
    INTEGER_MAX,
    check_description,
    check_storable,
)
from gymtrio.capture.tokens import StagingKey
from gymtrio.ids import CaptureKey
from gymtrio.strict import MalformedValue
from gymtrio.wire.codec import pack, unpack

CUT = Continuation(
    source_capture_key=CaptureKey("r"),
    source_model_call_id="m",
    staging_keys=(StagingKey("a"), StagingKey("b")),
    prefix_token_count=3,
    prefix_digest="d",
    effective_output_limit=9,
    policy_version=2,
    engine_digest="e",
)
ENGINE = EngineDescription(model="m", policy_version=2, fingerprint={"a": [1.5]}, digest="e")


@pytest.mark.parametrize(
    "change",
    [
        {"policy_version": INTEGER_MAX},
        {"policy_version": 0},
        {"terminal_finish_reason": TerminalReason.STOP, "terminal_stop_reason": "日本語😀\x00"},
    ],
)
def test_what_a_record_can_hold_is_taken(change: dict[str, Any]) -> None:
    message = attrs.evolve(CUT, **change)
    check_storable(message)
    assert unpack(Continuation, pack(message)) == message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy_version", -1),
        ("effective_output_limit", INTEGER_MAX + 1),
        ("prefix_token_count", 2**70),
        ("prefix_digest", "\ud800"),
        ("terminal_stop_reason", "a\udfffb"),
        ("staging_keys", ("a", "\ud800")),
    ],
)
def test_what_it_cannot_is_named(field: str, value: object) -> None:
    """CUT-7"""
    message: Any = attrs.evolve(CUT, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(MalformedValue, match=field):
        check_storable(message)


def nested(levels: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(levels):
        value = {"in": value}
    return value


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": {"build": 2**70}},
        {"fingerprint": {"build": ["\ud800"]}},
        {"fingerprint": nested(100)},
        {"fingerprint": {"build": "x" * DESCRIPTION_BYTES_MAX}},
        {"model": "\ud800"},
        {"policy_version": 2**70},
    ],
)
def test_a_description_is_taken_or_refused_whole(change: dict[str, Any]) -> None:
    check_description(ENGINE)
    check_description(attrs.evolve(ENGINE, fingerprint={"odd": [float("nan"), None, True]}))
    with pytest.raises(MalformedValue):
        check_description(attrs.evolve(ENGINE, **change))
