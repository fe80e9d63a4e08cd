"""Garbage collection that does not stop the loop (SRV-4).

A full collection looks at every object that it tracks: over 16,000 parked requests that is a second
and more in which nothing is served. So what has lived for a moment is set aside (`gc.freeze`), which
costs nothing, and collections look at what is young. Almost everything is freed by reference counting,
set aside or not; what is left to the collector are reference cycles.

Rules:

- G1 Collections look at the young only: what came within `SET_ASIDE_S`.
- G2 Cycles among what was set aside are looked for in a quiet moment, once much has gathered.
- G3 Without any quiet moment they are looked for all the same, before they fill the memory.
- G4 While thousands of requests end at once, what is young is set aside every few hundred ends: the
  interpreter counts what was made less what was freed, and what is freed was set aside long before,
  so that the young would gather unnoticed for one long collection.
- G5 Before a message is written or read that may be thousands of objects in one stretch of the loop,
  what is young is set aside: the first of the collections that they cause would look at it, there.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Final

import trio

GC_THRESHOLDS: Final = (2_000, 1, 65_000)
"""A collection stops the loop for 0.2 to 0.7 us per object that it looks at, and for several where it
finds tasks that have ended: 2 to 6 ms for the young ones, twice that for the middle ones (STO-5). A
full one is made rare, one in two hundred million objects."""

SET_ASIDE_S: Final = 0.05
"""Thousands of episodes that park or go on make 150,000 objects in a fifth of a second: what a
collection finds of them must not stop the loop for longer than 20 ms (STO-5)."""

SET_ASIDE_ENDS: Final = 200
"""Each leaves some twenty young objects when it is by cancellation."""

LOOK_S: Final = 30.0
"""Counting what was set aside takes some 20 ns for each object."""

GATHERED_MIN: Final = 250_000
"""Objects beyond what there was after the last full collection: some 25 MB, if all were garbage, and
less than a tenth of a second to look at."""

GATHERED_MAX: Final = 10_000_000
"""Six times what 16,000 parked requests are: it is garbage, and a pause is better than its growth."""

QUIET_CONNECTIONS_MAX: Final = 500
"""Nobody who notices: with fewer open connections a full collection is as short as at start."""

_log = logging.getLogger(__name__)


class _Ends:
    """Of requests and connections in this process, since the young were set aside."""

    sparing = 0
    """How many loops of this process are spared."""
    count = 0


def note_end() -> None:
    """Note that a request, its connection or what the peer sends has ended (G4).

    To be called for each, whether the process is spared or not.
    """
    _Ends.count += 1
    if _Ends.count >= SET_ASIDE_ENDS:
        _Ends.count = 0
        if _Ends.sparing:
            gc.freeze()


def note_message() -> None:
    """Note that a control message is written or read next (G5), be the process spared or not."""
    if _Ends.sparing:
        gc.freeze()


def is_due(gathered: int, connections: int) -> bool:
    """Whether to look at everything now (G2, G3).

    Args:
        gathered: objects set aside since the last time.
        connections: that are open.
    """
    quiet = connections <= QUIET_CONNECTIONS_MAX
    return gathered > (GATHERED_MIN if quiet else GATHERED_MAX)


def spare_long_lived_objects() -> None:
    """Take what start-up made out of garbage collection, and collect rarely from here on."""
    collect_everything()
    gc.set_threshold(*GC_THRESHOLDS)


def collect_everything() -> int:
    """Look for cycles among all objects; how many objects are alive afterwards."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()


async def spare_the_loop(connections: Callable[[], int]) -> None:
    """Keep collections short in this process, until cancelled.

    Args:
        connections: how many are open.
    """
    spare_long_lived_objects()
    _Ends.sparing += 1
    try:
        await _keep_sparing(connections)
    finally:
        _Ends.sparing -= 1


async def _keep_sparing(connections: Callable[[], int]) -> None:
    alive = gc.get_freeze_count()
    was_due = False
    while True:
        looks_at = trio.current_time() + LOOK_S
        while trio.current_time() < looks_at:
            await trio.sleep(SET_ASIDE_S)
            gc.freeze()
        gathered = gc.get_freeze_count() - alive
        due = is_due(gathered, connections())
        # Twice in a row: thousands that have just left are still being freed.
        if due and was_due:
            began = trio.current_time()
            alive = collect_everything()
            took_s = trio.current_time() - began
            due = False
            _log.info("looked for garbage among %d objects for %.3f s", alive + gathered, took_s)
        was_due = due
