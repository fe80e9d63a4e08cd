"""The lease of an open checkpoint: how long a participant waits for a silent controller (CTL-11)."""

from __future__ import annotations

from collections.abc import Callable

import trio

from gymtrio.checkpoint.opened import OpenCheckpoint
from gymtrio.episodes.signal import Signal
from gymtrio.limits import CLEANUP_S_MAX


async def watch_lease(
    opened_now: Callable[[], OpenCheckpoint | None],
    changed: Signal,
    expire: Callable[[OpenCheckpoint], None],
) -> None:
    """Let a checkpoint expire when its lease has ended; belongs into the owner's nursery.

    Args:
        opened_now: the checkpoint that is open.
        changed: rung when another one is.
        expire: begins to end it, in one instant; again while it has not ended.
    """
    while True:
        opened = opened_now()
        if opened is None:
            await changed.wait()
            continue
        with trio.move_on_at(opened.lease_expires):
            await opened.ended.wait()
        if opened_now() is not opened or trio.current_time() < opened.lease_expires:
            continue
        if not opened.publication.stop():
            # Until it has ended, the holder may still renew.
            await opened.publication.ended.wait()
            continue
        expire(opened)
        # What it takes back may fail to be freed, and is tried again.
        with trio.move_on_after(CLEANUP_S_MAX):
            await opened.ended.wait()
