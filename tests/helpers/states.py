"""Opaque states of every odd kind, and what it means that one came back."""

from __future__ import annotations

import math
from typing import Any, Final

from hypothesis import strategies as st

ANY_TEXT: Final = st.text(st.characters(codec=None, exclude_categories=()))
"""Lone surrogates and pairs of them included."""

SCALARS: Final = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**63, max_value=10**300)
    | st.floats()
    | ANY_TEXT
)
STATES: Final = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(ANY_TEXT, inner, max_size=5),
    max_leaves=30,
)


def same(one: Any, other: Any) -> bool:
    """Equal in type, order and bits, which `==` does not say."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        if math.isnan(one):
            return math.isnan(other)
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return bool(one == other)
