"""The ledger: rows, parents, attempts."""

from __future__ import annotations

import attrs

from gymtrio.capture.ledger import EpisodeLedger, Ledger, LedgerRow, staging_keys_of
from gymtrio.capture.tokens import StagingKey
from tests.helpers.plane import episode

R = episode("r")
R1 = episode("r", 1)


def row(name: str, end: str, parent: str | None = None) -> LedgerRow:
    return LedgerRow(
        model_call_id=name,
        parent_call_id=parent,
        request_digest="d",
        conversation_end=end,
        staged_under=R.capture_key,
        staging_key=StagingKey(f"k-{name}"),
    )


def test_the_longest_prefix_is_the_parent() -> None:
    """POL-7: the latest of two calls that ended alike."""
    ledger = Ledger()
    for name, end in [("a", "1"), ("b", "2"), ("c", "2"), ("d", "9")]:
        ledger.add(R, row(name, end))
    assert ledger.find_parent(R, ["0", "1", "x"]) == "a"
    assert ledger.find_parent(R, ["0", "1", "2", "x"]) == "c"
    assert ledger.find_parent(R, ["0", "x"]) is None
    assert ledger.find_parent(R1, ["1"]) is None


def test_a_row_that_is_taken_back_is_nobodys_parent() -> None:
    """I16: and the one that ended alike before it is found again."""
    ledger = Ledger()
    for name in "ab":
        ledger.add(R, row(name, "1"))
    ledger.take_back(R, "b")
    assert ledger.find_parent(R, ["1"]) == "a"
    ledger.take_back(R, "a")
    assert ledger.find_parent(R, ["1"]) is None
    assert ledger.rows(R) == ()
    ledger.take_back(R1, "a")


def test_rows_are_installed_under_another_attempt() -> None:
    """POL-7: they keep where they were staged, and replace what was there."""
    ledger = Ledger()
    ledger.add(R1, row("dead", "1"))
    ledger.install(R1, EpisodeLedger([row("a", "1"), row("b", "2", "a")]))
    assert [r.model_call_id for r in ledger.rows(R1)] == ["a", "b"]
    assert {r.staged_under for r in ledger.rows(R1)} == {"r"}
    assert ledger.find_parent(R1, ["1", "2"]) == "b"


def test_attempts_are_discarded_up_to_one() -> None:
    """CTL-12, I34: look-alike names are other rollouts."""
    ledger = Ledger()
    for e in [R, R1, episode("r", 2), episode("r.a"), episode("r-b")]:
        ledger.add(e, row("a", "1"))
    ledger.discard_up_to(R1)
    assert ledger.rows(R) == ledger.rows(R1) == ()
    assert len(ledger) == 3
    ledger.discard(episode("r", 2))
    ledger.discard(episode("r", 2))
    assert len(ledger) == 2


def test_rows_without_tokens_have_no_key() -> None:
    assert staging_keys_of([row("a", "1"), attrs.evolve(row("b", "2"), staging_key=None)]) == [
        "k-a"
    ]
