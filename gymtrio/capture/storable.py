"""What of a backend's message a checkpoint can hold. Pure.

JSON has larger integers and stranger texts than a record has. What came further unnoticed would fail
the commit, which is everybody's, for the fault of one backend (CUT-7).
"""

from __future__ import annotations

from typing import Final

import attrs

from gymtrio.strict import MalformedValue
from gymtrio.wire.codec import pack, unpack

INTEGER_MAX: Final = 2**63 - 1
"""Counts and versions beyond it are none."""

DESCRIPTION_BYTES_MAX: Final = 64 * 1024
"""What an engine says of itself goes into the manifest, which is small."""


def check_storable(message: attrs.AttrsInstance) -> None:
    """Check the integers and texts of a message that was read already.

    Raises:
        MalformedValue: naming the field.
    """
    for field in attrs.fields(type(message)):
        value = getattr(message, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, int) and not 0 <= part <= INTEGER_MAX:
                raise MalformedValue(field.name, "out of range")
            if isinstance(part, str) and not _is_text(part):
                raise MalformedValue(field.name, "not a text: a lone surrogate")


def check_description(description: attrs.AttrsInstance) -> None:
    """Check what an engine says of itself, free JSON included.

    Raises:
        MalformedValue: it is too large, nests too deeply, or has what a message cannot.
    """
    packed = pack(description)
    if len(packed) > DESCRIPTION_BYTES_MAX:
        raise MalformedValue("", f"{len(packed)} bytes, limit {DESCRIPTION_BYTES_MAX}")
    unpack(type(description), packed)


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
