from __future__ import annotations

from servers.model.engine_native.continuations import seed_of


def test_a_derived_seed_is_lasting() -> None:
    assert seed_of("a") == 0xCA978112CA1BBDCA
    assert 0 <= seed_of("\udc80") < 2**64
