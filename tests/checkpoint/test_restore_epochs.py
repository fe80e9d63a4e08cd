"""The epoch that each restore issues, from the controller to the gates (HARD-11)."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from gymtrio.checkpoint.coordination import Controller
from gymtrio.errors import CheckpointConflict, InvalidRequest, StaleAttempt
from gymtrio.ids import CheckpointId
from gymtrio.wire.control import RestoreReply, RestoreRequest
from tests.helpers.fleet import SERVERS, Fleet, open_fleet
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.plane import Plane, episode, open_plane

C1 = CheckpointId("c1")
R0, R1 = episode("r"), episode("r", 1)


async def committed() -> MemoryArchive:
    archive = MemoryArchive()
    async with open_fleet(archive=archive) as fleet:
        for participant in fleet.participants.values():
            participant.parked[R0] = "note"
        async with fleet.controller.checkpoint(C1, "d", timeout_s=30) as held:
            await held.commit([R0])
    return archive


async def restore(plane: Plane, epoch: str | None, name: str = "x1") -> RestoreReply:
    return await plane.control.restore(
        RestoreRequest(
            checkpoint_id=CheckpointId(name),
            deadline_ts=plane.clock.now_s() + 10,
            checkpoint_dir="d",
            episode_ids=(R0,),
            execution_epoch=epoch,
        )
    )


def epochs_of(fleet: Fleet) -> list[str | None]:
    """By restore call, in order of arrival."""
    requests = [request for _, _, request in fleet.channel.requests]
    return [r.execution_epoch for r in requests if isinstance(r, RestoreRequest)]


async def test_every_participant_gets_the_epoch_and_each_restore_another(
    autojump_clock: MockClock,
) -> None:
    """HARD-11: also from a controller of some of the members."""
    archive = await committed()
    async with open_fleet(archive=archive) as fleet:
        some: Controller = fleet.controller.restricted_to(fleet.controller.members)
        for controller in (fleet.controller, some, fleet.controller):
            await controller.restore(C1, "d", [R0], timeout_s=30)
        told = epochs_of(fleet)
        by_restore = [{*told[at : at + len(SERVERS)]} for at in range(0, len(told), len(SERVERS))]
        assert [len(epochs) for epochs in by_restore] == [1, 1, 1]
        assert len(set(told)) == 3
        for participant in fleet.participants.values():
            assert participant.admission.fences.epoch_of(R1) == told[-1]
            with pytest.raises(StaleAttempt):
                await participant.admission.enter(R1, epoch=told[0])


async def test_a_restarted_controller_issues_epochs_of_its_own(autojump_clock: MockClock) -> None:
    """HARD-11: the count begins again, the nonce does not."""
    archive = await committed()
    told = []
    for _ in range(2):
        async with open_fleet(archive=archive) as fleet:
            await fleet.controller.restore(C1, "d", [R0], timeout_s=30)
            told.append(epochs_of(fleet)[0])
    assert told[0] != told[1]


async def test_a_repeated_restore_has_the_same_epoch(autojump_clock: MockClock) -> None:
    """HARD-11, CTL-6: a retry joins; one with another epoch is another restore."""
    async with open_plane(archive=await archive_of_a_plane()) as plane:
        reply = await restore(plane, "e1")
        assert await restore(plane, "e1") == reply
        for epoch in ("e2", None):
            with pytest.raises(CheckpointConflict, match="epoch"):
                await restore(plane, epoch)
        assert plane.participant.admission.fences.epoch_of(R1) == "e1"


async def archive_of_a_plane() -> MemoryArchive:
    archive = MemoryArchive()
    async with open_plane(archive=archive) as plane:
        plane.participant.parked[R0] = "note"
        await plane.prepare()
        await plane.commit()
    return archive


async def test_a_failed_restore_records_no_epoch(autojump_clock: MockClock) -> None:
    """HARD-11, CTL-14."""
    async with open_plane(archive=await archive_of_a_plane()) as plane:
        plane.participant.failure = InvalidRequest("bad record")
        plane.participant.fail_at = "install"
        with pytest.raises(InvalidRequest):
            await restore(plane, "e1")
        await plane.participant.admission.enter(R1, epoch="another")


def test_an_epoch_is_a_safe_id() -> None:
    """HARD-11: it becomes a header."""
    with pytest.raises(InvalidRequest, match="execution_epoch"):
        RestoreRequest(
            checkpoint_id=C1,
            deadline_ts=1.0,
            checkpoint_dir="d",
            episode_ids=(),
            execution_epoch="a\r\nb",
        )
