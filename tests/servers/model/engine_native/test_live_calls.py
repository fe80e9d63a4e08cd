from __future__ import annotations

import pytest

from gymtrio.capture.cuts import ActivePrefix, CallExtension
from gymtrio.capture.prefixes import Prefix
from gymtrio.capture.tokens import StagingKey
from servers.model.engine_api.errors import CallConflict
from servers.model.engine_native.continuations import seed_of
from servers.model.engine_native.live_calls import LiveCalls, Staged


def extension(call_id: str = "a", attempt: int = 0) -> CallExtension:
    return CallExtension(model_call_id=call_id, rollout_id="r", attempt=attempt)


def asked(call_id: str = "a", rollout_id: str = "r", attempt: int = 0) -> ActivePrefix:
    return ActivePrefix(
        ticket_id="1",
        rollout_id=rollout_id,
        attempt=attempt,
        model_call_id=call_id,
        admitted_at=1.0,
    )


def test_a_call_is_found_by_its_id_and_episode_while_it_is_there() -> None:
    calls = LiveCalls()
    call = calls.enter(extension(), (1,), 0)
    assert calls.find(asked()) is call
    assert calls.find(asked("b")) is None
    assert calls.find(asked(rollout_id="other")) is None
    assert calls.find(asked(attempt=1)) is None
    with pytest.raises(CallConflict, match="here already"):
        calls.enter(extension(attempt=1), (1,), 0)
    calls.leave(call)
    assert calls.find(asked()) is None
    assert len(calls) == 0
    calls.enter(extension(), (1,), 0)


def test_what_is_staged_only_grows() -> None:
    call = LiveCalls().enter(extension(), (1,), 4)
    longer, shorter = Staged(tokens=5), Staged(tokens=3)
    call.note_staged(longer)
    call.note_staged(shorter)
    assert call.staged is longer


def test_a_prefix_brings_its_records_and_can_only_lower_the_version() -> None:
    for prefix_version, expected in ((2, 2), (9, 4)):
        call = LiveCalls().enter(extension(), (1,), 4)
        call.continue_from(
            Prefix(
                token_ids=(5, 6),
                log_probs=(0.0, 0.0),
                mask=(1, 1),
                staging_keys=(StagingKey("k"),),
                policy_version=prefix_version,
            )
        )
        assert call.policy_version == expected
        assert call.staged == Staged(keys=(StagingKey("k"),), tokens=2)
        assert call.continued_tokens == 2


def test_a_derived_seed_is_lasting() -> None:
    assert seed_of("a") == 0xCA978112CA1BBDCA
    assert 0 <= seed_of("\udc80") < 2**64
