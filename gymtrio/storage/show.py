"""Records as JSON that people can read, whatever is in them; for `gymtrio checkpoint show`."""

from __future__ import annotations

from typing import Final

from gymtrio.errors import InvalidCheckpointState
from gymtrio.storage import opaque
from gymtrio.storage.records import Record
from gymtrio.strict import MalformedValue
from gymtrio.wire.codec import unpack_plain

_BYTES_SHOWN_MAX: Final = 64


def record_to_json(record: Record) -> dict[str, object]:
    """Show one record.

    Returns:
        The episode and its payload, unpacked as far as it can be. Opaque state inside it stands under
        the key `json`, bytes that are not JSON under `hex`. To be dumped with ASCII escapes: opaque
        strings may have lone surrogates.
    """
    try:
        payload = _readable(unpack_plain(record.payload))
    except MalformedValue:
        payload = _readable(record.payload)
    return {
        "episode": record.episode_id.capture_key,
        "rollout_id": record.episode_id.rollout_id,
        "attempt": record.episode_id.attempt,
        "payload_bytes": len(record.payload),
        "payload": payload,
    }


def _readable(value: object) -> object:
    # The codec has bounded the depth.
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, bytes):
        try:
            return {"json": opaque.decode(value)}
        except InvalidCheckpointState:
            shown = value[:_BYTES_SHOWN_MAX].hex()
            return {"hex": shown, "bytes": len(value)}
    return value
