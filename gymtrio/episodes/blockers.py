"""What keeps a participant from a safe point, as replies list it (CTL-7, CTL-15)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

import attrs
import trio

from gymtrio.ids import EpisodeId
from gymtrio.limits import BLOCKERS_LISTED_MAX
from gymtrio.wire.control import BlockerDetail, Report


@attrs.frozen
class Blocker:
    """One piece of work that a prepare waits for."""

    episode_id: EpisodeId
    """Which attempt a controller would have to retire."""
    doing: str
    since: float
    """On trio's clock."""


def report_of(blockers: Iterable[Blocker], counts: Mapping[str, int]) -> Report:
    """List the blockers once, at most 100 of them, those of the smallest ids first."""
    found = list(blockers)
    listed = heapq.nsmallest(BLOCKERS_LISTED_MAX, found, key=lambda b: (b.episode_id, b.since))
    now = trio.current_time()
    return Report(
        ready=not found,
        blockers=tuple(b.episode_id.capture_key for b in listed),
        blocker_count=len(found),
        counts={**counts, "blocking": len(found)},
        details=tuple(
            BlockerDetail(
                blocker=b.episode_id.capture_key,
                doing=b.doing,
                since_s=round(now - b.since, 3),
            )
            for b in listed
        ),
    )
