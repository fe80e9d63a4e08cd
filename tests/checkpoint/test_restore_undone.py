"""What a controller's restore leaves behind when it failed, and what repeating one means."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from gymtrio.checkpoint.members import Failed
from gymtrio.errors import CheckpointConflict, InvalidCheckpointState
from gymtrio.ids import CheckpointId
from tests.helpers.fleet import SERVERS, open_fleet
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.plane import GRACE_S, episode, open_plane

C1 = CheckpointId("c1")
R0, R1 = episode("r0"), episode("r1")
TIMEOUT_S = 30.0


async def committed_everywhere() -> MemoryArchive:
    async with open_fleet() as fleet:
        for participant in fleet.participants.values():
            participant.parked |= {R0: "a", R1: "b"}
        async with fleet.controller.checkpoint(C1, "d", timeout_s=TIMEOUT_S) as held:
            await held.commit([R0, R1])
        return fleet.archive


@pytest.mark.parametrize("recover", [False, True])
async def test_undoing_goes_on_through_failures_and_the_restores_error_is_raised(
    recover: bool, autojump_clock: MockClock
) -> None:
    """COORD-3, CTL-11, HARD-3: who cannot be told is undone by its lease."""
    archive = await committed_everywhere()
    async with open_fleet(archive=archive, recover=recover) as fleet:
        fleet.channel.refusals["restore", "tools"] = InvalidCheckpointState("digest mismatch")
        fleet.channel.refusals["resume", "agent"] = InvalidCheckpointState("out of reach")
        with pytest.raises(Failed, match="restore failed at tools.*digest mismatch") as caught:
            await fleet.controller.restore(C1, "d", [R0, R1], timeout_s=TIMEOUT_S)
        assert list(caught.value.failures) == ["tools"]
        restored = {name for name, p in fleet.participants.items() if len(p.restored)}
        assert restored == {"agent"}
        assert fleet.closed() == (set(SERVERS) if recover else {"agent"})
        await trio.sleep(TIMEOUT_S + GRACE_S + 1)
        assert len(fleet.participants["agent"].restored) == 0
        assert fleet.closed() == (set(SERVERS) if recover else set())
        fleet.channel.refusals.clear()
        await fleet.controller.restore(C1, "d", [R0, R1], timeout_s=TIMEOUT_S)
        assert fleet.closed() == set()


async def test_a_restore_repeated_answers_what_was_answered_or_conflicts(
    autojump_clock: MockClock,
) -> None:
    """CTL-6: the order of the scope does not matter; everything else does."""
    archive = MemoryArchive()
    async with open_plane(archive=archive) as plane:
        plane.participant.parked |= {R0: "a", R1: "b"}
        await plane.prepare()
        await plane.commit()
    async with open_plane(archive=archive) as plane:
        reply = await plane.restore(R0, R1)
        assert await plane.restore(R1, R0) == reply
        with pytest.raises(CheckpointConflict):
            await plane.restore(R0)
        with pytest.raises(CheckpointConflict):
            await plane.restore(R0, R1, directory="e")
        assert plane.phase == "restored"
