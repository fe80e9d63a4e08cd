"""Who may use a control route (CTL-2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

_BEARER: Final = "Bearer "


def presents_token(authorization: Sequence[str], is_token: Callable[[str], bool]) -> bool:
    """Say whether a request presents the control token.

    Args:
        authorization: every value of the header, since two could be read differently by two parties.
        is_token: compares in constant time.
    """
    if len(authorization) != 1 or not authorization[0].startswith(_BEARER):
        return False
    return is_token(authorization[0].removeprefix(_BEARER))
