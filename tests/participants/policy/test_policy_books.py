"""The books of a policy server: order of admission, claims, rows, and what nobody knows."""

from __future__ import annotations

import attrs
import pytest

from gymtrio.capture.cuts import Continuation, CutRecord
from gymtrio.capture.ledger import EpisodeLedger, LedgerRow
from gymtrio.capture.tokens import StagingKey
from gymtrio.errors import InvalidCheckpointState, InvalidPhase
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.books import Books, merge
from gymtrio.participants.policy.keeper import Entry
from gymtrio.participants.policy.records import PolicyRecord, check_record
from tests.helpers.plane import episode

R = episode("r")
CUT = CutRecord(
    model_call_id="cut",
    request_digest="d",
    continuation=Continuation(
        source_capture_key=R.capture_key,
        source_model_call_id="cut",
        staging_keys=(StagingKey("k"),),
        prefix_token_count=1,
        prefix_digest="p",
        effective_output_limit=9,
        policy_version=1,
        engine_digest="e",
    ),
)


def entry(
    call_id: str, digest: str = "d", *, e: EpisodeId = R, chain: tuple[str, ...] = ()
) -> Entry:
    return Entry(
        call_id=call_id,
        episode_id=e,
        epoch=None,
        request_digest=digest,
        continues=True,
        chain=chain,
    )


def row(call_id: str, digest: str = "d", parent: str | None = None) -> LedgerRow:
    return LedgerRow(
        model_call_id=call_id,
        parent_call_id=parent,
        request_digest=digest,
        conversation_end=f"end of {call_id}",
        staged_under=R.capture_key,
        staging_key=StagingKey(f"{call_id}/whole"),
    )


def ids(books: Books, e: EpisodeId = R) -> list[str]:
    return [row.model_call_id for row in books.ledger.rows(e)]


def test_ordinals_rise_over_all_workers() -> None:
    """CUT-3."""
    books = Books()
    ordinals = [books.enter(entry(str(n)), owner=n % 3).ordinal for n in range(9)]
    assert ordinals == sorted(set(ordinals))
    latest = books.latest_undelivered(R)
    assert latest is not None
    assert latest.call_id == "8"
    books.deliver("8", row("8"))
    assert [books.latest_undelivered(R).call_id] == ["7"]  # type: ignore[union-attr]


def test_a_claim_is_one_calls_until_it_ends() -> None:
    """B2, I14."""
    books = Books()
    books.install(R, PolicyRecord(cut=CUT), EpisodeLedger())
    assert books.enter(entry("other", "another digest")).cut is None
    assert books.enter(attrs.evolve(entry("foreign"), continues=False)).cut is None
    assert books.enter(entry("one")).cut == CUT
    assert books.enter(entry("two")).cut is None
    assert books.restored_cut(R) == CUT, "not delivered, so exported"
    books.end("one", sent=False)
    assert books.enter(entry("three")).cut == CUT
    books.deliver("three", row("three"))
    books.end("three", sent=True)
    assert books.restored_cut(R) is None


def test_a_row_stays_only_if_the_reply_was_sent() -> None:
    """B3, I16."""
    books = Books()
    for call_id, sent in (("gone", False), ("heard", True)):
        books.enter(entry(call_id))
        assert books.deliver(call_id, row(call_id))
        assert call_id in ids(books)
        books.end(call_id, sent=sent)
    assert ids(books) == ["heard"]
    assert not books.deliver("unknown", row("unknown"))
    books.end("unknown", sent=True)
    assert len(books) == 0


def test_only_the_calls_of_a_lost_worker_end() -> None:
    """HARD-7, B4."""
    books = Books()
    books.install(R, PolicyRecord(cut=CUT), EpisodeLedger())
    books.enter(entry("claims"), owner="a")
    books.enter(entry("leaves", "x"), owner="a")
    books.deliver("leaves", row("leaves", "x"))
    books.enter(entry("stays", "y"), owner="b")
    assert books.lose("a") == [R]
    assert books.cuts.peek(R) == CUT
    assert books.record_of(R, None).uncertain == ("leaves",)
    assert [call.call_id for call in books.open_up_to(R)] == ["stays"]
    assert books.lose("a") == []


def test_an_uncertain_row_is_settled_by_what_the_attempt_does_next() -> None:
    """B4: asked again, it was not heard; gone on from, it was."""
    books = Books()
    for call_id in ("lost", "heard"):
        books.enter(entry(call_id, call_id), owner="a")
        books.deliver(call_id, row(call_id, call_id))
    books.lose("a")
    restored = Books()
    record = books.record_of(R, None)
    restored.install(R, record, EpisodeLedger(record.rows))
    for each in (books, restored):
        entered = each.enter(entry("next", "n", chain=("end of heard",)))
        assert entered.parent_call_id == "heard"
        assert each.record_of(R, None).uncertain == ("lost",)
        each.enter(entry("again", "lost"))
        each.enter(entry("once more", "heard"))
        assert ids(each) == ["heard"]
        assert each.record_of(R, None).uncertain == ()


@pytest.mark.parametrize("end", ["lost", "not sent"])
def test_a_reply_that_was_gone_on_from_has_arrived(end: str) -> None:
    """I16, B3: its row is the parent of another one, without which no restore would take them."""
    books = Books()
    books.enter(entry("parent", "p"), owner="a")
    books.deliver("parent", row("parent", "p"))
    entered = books.enter(entry("child", "c", chain=("end of parent",)), owner="b")
    assert entered.parent_call_id == "parent"
    if end == "lost":
        books.lose("a")
    else:
        books.end("parent", sent=False)
    assert books.record_of(R, None).uncertain == ()
    books.enter(entry("the same again", "p"), owner="b")
    books.deliver("child", row("child", "c", parent="parent"))
    books.end("child", sent=True)
    record = books.record_of(R, None)
    assert merge([(R, record)]) == {R: record}
    assert ids(books) == ["parent", "child"]


def test_nothing_is_left_of_what_is_forgotten() -> None:
    """I34."""
    books = Books()
    books.install(R, PolicyRecord(cut=CUT), EpisodeLedger())
    books.enter(entry("a", "x"), owner="w")
    books.deliver("a", row("a", "x"))
    books.lose("w")
    books.forget([R.rollout_id])
    assert books.record_of(R, None) == PolicyRecord()
    assert books.unclaimed_outside(frozenset()) == []


def test_a_server_that_served_is_not_restored() -> None:
    """POL-7."""
    books = Books()
    books.check_installable()
    books.enter(entry("a"))
    with pytest.raises(InvalidPhase):
        books.check_installable()


def test_what_several_processes_wrote_of_an_episode_is_put_together() -> None:
    """I18, I28."""
    rows = PolicyRecord(rows=(row("a"),), uncertain=("a",))
    cut = PolicyRecord(cut=CUT)
    whole = PolicyRecord(rows=rows.rows, cut=CUT, uncertain=("a",))
    assert merge([(R, rows), (R, cut)]) == merge([(R, cut), (R, rows)]) == {R: whole}
    for twice, what in ((rows, "its calls"), (cut, "a cut of it")):
        with pytest.raises(InvalidCheckpointState, match=f"r: two processes wrote {what}"):
            merge([(R, twice), (R, twice)])
    with pytest.raises(InvalidCheckpointState, match="r: an uncertain call that has no row"):
        check_record(R, PolicyRecord(uncertain=("b",)))
