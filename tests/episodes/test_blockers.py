"""What a reply says of what it waits for."""

from __future__ import annotations

from collections.abc import Iterator

import trio
from trio.testing import MockClock

from gymtrio.episodes.blockers import Blocker, report_of
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import BLOCKERS_LISTED_MAX


async def test_at_most_a_hundred_are_listed_and_all_are_counted(autojump_clock: MockClock) -> None:
    """CTL-7, CTL-15, STEP-6: in order of id, each with what it does and since when."""
    made = 0

    def blockers() -> Iterator[Blocker]:
        nonlocal made
        for number in reversed(range(BLOCKERS_LISTED_MAX * 3)):
            made += 1
            yield Blocker(EpisodeId(RolloutId(f"r{number:05}")), "running", began)

    began = trio.current_time()
    await trio.sleep(2)
    report = report_of(5000, blockers(), {"live": 7})
    assert report.blocker_count == 5000
    assert not report.ready
    listed = range(BLOCKERS_LISTED_MAX * 2, BLOCKERS_LISTED_MAX * 3)
    assert report.blockers == tuple(f"r{number:05}" for number in listed)
    assert made == BLOCKERS_LISTED_MAX, "I33: those that are not listed are not looked at"
    assert [d.blocker for d in report.details] == [*report.blockers]
    assert {(d.doing, d.since_s) for d in report.details} == {("running", 2.0)}
    assert report.counts == {"live": 7, "blocking": 5000}


async def test_nothing_that_blocks_is_ready() -> None:
    """STEP-6."""
    report = report_of(0, [], {})
    assert report.ready
    assert report.blockers == ()
