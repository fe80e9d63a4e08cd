"""What keeps a participant from a safe point, as replies list it (CTL-7, CTL-15)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

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


def report_of(count: int, blockers: Iterable[Blocker], counts: Mapping[str, int]) -> Report:
    """List the blockers once, at most 100 of them, in order of their ids.

    Args:
        count: how many there are.
        blockers: made while they are taken, and no more of them than are listed: the first ones, since
            of thousands a controller can only be told where to begin (I33).
    """
    listed = sorted(islice(blockers, BLOCKERS_LISTED_MAX), key=lambda b: (b.episode_id, b.since))
    now = trio.current_time()
    return Report(
        ready=not count,
        blockers=tuple(b.episode_id.capture_key for b in listed),
        blocker_count=count,
        counts={**counts, "blocking": count},
        details=tuple(
            BlockerDetail(
                blocker=b.episode_id.capture_key,
                doing=b.doing,
                since_s=round(now - b.since, 3),
            )
            for b in listed
        ),
    )
