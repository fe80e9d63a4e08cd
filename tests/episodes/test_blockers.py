"""What a reply says of what it waits for."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from gymtrio.episodes.blockers import Blocker, report_of
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import BLOCKERS_LISTED_MAX


async def test_at_most_a_hundred_are_listed_and_all_are_counted(autojump_clock: MockClock) -> None:
    """CTL-7, CTL-15, STEP-6: those of the smallest ids, each with what it does and since when."""
    blockers = [
        Blocker(EpisodeId(RolloutId(f"r{number:05}")), "running", trio.current_time())
        for number in reversed(range(5000))
    ]
    await trio.sleep(2)
    report = report_of(blockers, {"live": 7})
    assert report.blocker_count == 5000
    assert not report.ready
    assert report.blockers == tuple(f"r{number:05}" for number in range(BLOCKERS_LISTED_MAX))
    assert [d.blocker for d in report.details] == [*report.blockers]
    assert {(d.doing, d.since_s) for d in report.details} == {("running", 2.0)}
    assert report.counts == {"live": 7, "blocking": 5000}


async def test_nothing_that_blocks_is_ready() -> None:
    """STEP-6."""
    report = report_of([], {})
    assert report.ready
    assert report.blockers == ()
