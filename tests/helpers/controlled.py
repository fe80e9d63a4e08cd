"""A real participant under a real `Control`, spoken to as a controller does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from gymtrio.checkpoint.control import open_control
from gymtrio.checkpoint.participant import Participant
from gymtrio.ids import EpisodeId
from tests.helpers.clocks import FollowingClock
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.plane import GRACE_S, Plane


@asynccontextmanager
async def open_controlled(
    participant: Participant, archive: MemoryArchive, *, recover: bool = False
) -> AsyncIterator[Plane]:
    """Run the participant's control plane for as long as the block runs.

    A crash is leaving the block; the next process is the next block, with the same archive.
    """
    clock = FollowingClock()
    async with open_control(
        participant,
        archive=archive,
        wall_clock=clock,
        lease_grace_s=GRACE_S,
        recover=recover,
    ) as control:
        # What a plane does with its participant is for scripted ones only.
        yield Plane(control, cast("Any", participant), archive, clock)


async def checkpoint(
    plane: Plane, name: str, *episodes: EpisodeId, scope_all: bool = True
) -> tuple[str, ...]:
    """Prepare and commit into a directory of that name; it stays open.

    Returns:
        The capture keys of what was exported.
    """
    assert (await plane.prepare(name)).phase == "prepared"
    scope = None if scope_all and not episodes else episodes
    return (await plane.commit(name, scope, directory=name)).episode_ids
