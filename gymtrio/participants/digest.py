"""How requests are told apart: by a digest that the order of keys does not change."""

from __future__ import annotations

import hashlib
import json


def json_digest(value: object) -> str:
    """Identify a JSON value: equal ones have equal digests (ENV-1).

    Returns:
        SHA-256 of the compact JSON with sorted keys, in hexadecimal.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
