"""Any record can be shown as JSON."""

from __future__ import annotations

import json

import attrs
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.storage import opaque
from gymtrio.storage.records import Record
from gymtrio.storage.show import record_to_json
from gymtrio.wire.codec import pack
from tests.helpers.checkpoints import episode


@attrs.frozen
class Inner:
    state: bytes
    note: str


@attrs.frozen
class Outer:
    inner: tuple[Inner, ...]
    digest: bytes


def test_opaque_state_is_shown_as_json_and_other_bytes_as_hex() -> None:
    state = {"b": [1, None, "\ud800"], "a": 10**30}
    inner = Inner(opaque.encode(state, "x"), "n")
    record = Record(episode("r", 2), pack(Outer((inner,), b"\xff\xfe" + bytes(100))))
    shown = record_to_json(record)
    assert shown == {
        "episode": "r-a2",
        "rollout_id": "r",
        "attempt": 2,
        "payload_bytes": len(record.payload),
        "payload": {
            "inner": [{"state": {"json": state}, "note": "n"}],
            "digest": {"hex": "fffe" + "00" * 62, "bytes": 102},
        },
    }
    assert json.loads(json.dumps(shown)) == shown


@given(st.binary(max_size=100))
def test_any_payload_can_be_shown(payload: bytes) -> None:
    shown = record_to_json(Record(episode("r"), payload))
    assert json.dumps(shown)
