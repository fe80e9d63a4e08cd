"""A participant whose process was replaced by one without a past is noticed (HARD-13)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.checkpoint.coordination import Controller, open_coordination
from gymtrio.checkpoint.members import Failed, LeaseNotProven, Replaced
from gymtrio.errors import InvalidCheckpointState
from gymtrio.ids import CheckpointId
from gymtrio.ports import HostRandomness
from gymtrio.wire.control import (
    REPLIES,
    CommitReply,
    PrepareReply,
    RenewReply,
    Report,
    RestoreReply,
    ResumeReply,
    StatusReply,
    reply_from_plain,
    reply_to_plain,
)
from tests.helpers.fleet import SERVERS, Fleet, open_fleet
from tests.helpers.memory_archive import Door, MemoryArchive
from tests.helpers.plane import episode, open_plane

C1 = CheckpointId("c1")
C2 = CheckpointId("c2")
R0 = episode("r0")

REPORT = Report(ready=True)
TELLING: list[Any] = [
    StatusReply(
        kind="agent",
        instance="agent",
        phase="idle",
        checkpoint_id=None,
        lease_expires_at=None,
        retired_rollouts=0,
        awaiting_restore=False,
        report=REPORT,
        incarnation="i",
    ),
    PrepareReply(phase="prepared", report=REPORT, incarnation="i"),
    RenewReply(lease_expires_at=1.0, incarnation="i"),
    CommitReply(phase="committed", manifest={}, episode_ids=(), incarnation="i"),
    RestoreReply(phase="restored", source_checkpoint_id="c", restored=(), incarnation="i"),
    ResumeReply(phase="idle", idempotent=False, incarnation="i"),
]


async def checkpointed(controller: Controller, name: CheckpointId = C1) -> None:
    async with controller.checkpoint(name, name, timeout_s=5) as held:
        await held.commit([R0])
        await held.prove_held()


def replaced_in(failed: BaseException) -> list[tuple[str, str, str]]:
    assert isinstance(failed, Failed)
    return [
        (error.server, error.known, error.found)
        for error in failed.failures.values()
        if isinstance(error, Replaced)
    ]


def incarnation(fleet: Fleet, server: str) -> str:
    return fleet.channel.controls[server].incarnation


# -- what servers say -------------------------------------------------------------------------


async def test_every_process_tells_its_own_name_in_every_reply(autojump_clock: MockClock) -> None:
    """HARD-13."""
    archive, seen = MemoryArchive(), []
    for _ in range(2):
        async with open_plane(archive=archive) as plane:
            told = [
                plane.control.status().incarnation,
                (await plane.prepare()).incarnation,
                (await plane.renew()).incarnation,
                (await plane.commit()).incarnation,
                (await plane.resume()).incarnation,
                (await plane.restore()).incarnation,
            ]
        assert len(set(told)) == 1
        seen += told
    assert None not in seen
    assert len(set(seen)) == 2


@pytest.mark.parametrize("reply", TELLING, ids=lambda reply: type(reply).__name__)
def test_a_reply_of_an_older_server_is_read_as_before(reply: Any) -> None:
    """HARD-13, WIRE-1: the field is optional, and is read back where it is given."""
    assert type(reply) in REPLIES.values()
    plain = json.loads(json.dumps(reply_to_plain(reply)))
    assert reply_from_plain(type(reply), plain) == reply
    del plain["incarnation"]
    assert reply_from_plain(type(reply), plain).incarnation is None


# -- between holds ----------------------------------------------------------------------------


async def test_a_replaced_server_is_refused_until_it_is_accepted(autojump_clock: MockClock) -> None:
    """HARD-13: its part would lack what it held, and look whole; the error names both processes."""
    async with open_fleet() as fleet:
        await checkpointed(fleet.controller)
        before = incarnation(fleet, "policy")
        await fleet.replace("policy")
        now = incarnation(fleet, "policy")
        for name in ("c2", "c3"):
            with pytest.raises(
                Failed,
                match=f"prepare failed at policy: policy was replaced: {now} answers where {before}",
            ) as caught:
                await checkpointed(fleet.controller, CheckpointId(name))
            assert replaced_in(caught.value) == [("policy", before, now)]
            assert fleet.closed() == set()
        await fleet.controller.retire(C2, [R0], timeout_s=5)
        (replaced,) = caught.value.failures.values()
        assert isinstance(replaced, Replaced)
        fleet.controller.accept_replaced(replaced)
        await checkpointed(fleet.controller, CheckpointId("c4"))


async def test_who_was_accepted_is_that_process_and_no_later_one(autojump_clock: MockClock) -> None:
    """HARD-13."""
    async with open_fleet() as fleet:
        first = incarnation(fleet, "tools")
        await fleet.replace("tools")
        accepted = Replaced("tools", first, incarnation(fleet, "tools"))
        await fleet.replace("tools")
        fleet.controller.accept_replaced(accepted)
        with pytest.raises(Failed) as caught:
            await checkpointed(fleet.controller)
        assert replaced_in(caught.value) == [("tools", accepted.found, incarnation(fleet, "tools"))]


async def test_a_replacement_before_the_first_checkpoint_is_noticed(
    autojump_clock: MockClock,
) -> None:
    """HARD-13, HARD-4: discovery is when a controller first sees them."""
    async with open_fleet() as fleet:
        await fleet.replace("agent")
        with pytest.raises(Failed, match="agent was replaced"):
            await checkpointed(fleet.controller)


async def test_a_controller_that_starts_takes_the_servers_as_they_are(
    autojump_clock: MockClock,
) -> None:
    """HARD-13, HARD-4: what lived there before is its program's to know."""
    async with open_fleet() as fleet:
        await fleet.replace("agent")
        async with open_coordination(
            [*SERVERS],
            fleet.channel,
            wall_clock=fleet.clock,
            randomness=HostRandomness(),
        ) as second:
            await checkpointed(second)


async def saved() -> MemoryArchive:
    async with open_fleet() as fleet:
        for participant in fleet.participants.values():
            participant.parked[R0] = "a"
        await checkpointed(fleet.controller)
        return fleet.archive


@pytest.mark.parametrize("recover", [False, True])
async def test_who_was_restored_by_this_controller_has_its_past(
    recover: bool, autojump_clock: MockClock
) -> None:
    """HARD-13."""
    async with open_fleet(archive=await saved()) as fleet:
        for server in SERVERS:
            await fleet.replace(server, recover=recover)
        await fleet.controller.restore(C1, "c1", [R0], timeout_s=5)
        await checkpointed(fleet.controller, C2)


async def test_a_restore_that_failed_gives_nobody_a_past(autojump_clock: MockClock) -> None:
    """HARD-13, COORD-3."""
    async with open_fleet(archive=await saved()) as fleet:
        await fleet.replace("agent")
        fleet.channel.refusals[("restore", "tools")] = InvalidCheckpointState("digest mismatch")
        with pytest.raises(Failed, match="digest mismatch"):
            await fleet.controller.restore(C1, "c1", [R0], timeout_s=5)
        with pytest.raises(Failed, match="agent was replaced"):
            await checkpointed(fleet.controller, C2)


async def test_who_started_afresh_is_counted_on(autojump_clock: MockClock) -> None:
    """HARD-13, HARD-3, I11: what is given up is refused at those that opened and at the others."""
    async with open_fleet() as fleet:
        await fleet.replace("tools", recover=True)
        with pytest.raises(Failed, match="tools.*waits to be restored"):
            await checkpointed(fleet.controller)
        fleet.participants["env"].running.add(R0)
        await fleet.controller.start_afresh([R0], timeout_s=5)
        assert fleet.closed() == set()
        for participant in fleet.participants.values():
            assert participant.admission.fences.is_stale(R0)
            assert not participant.running
        # Once more, as after a lost reply.
        await fleet.controller.start_afresh([R0], timeout_s=5)
        await checkpointed(fleet.controller, C2)


# -- within one hold --------------------------------------------------------------------------


async def test_a_prepare_that_was_begun_with_another_process_does_not_hold(
    autojump_clock: MockClock,
) -> None:
    """HARD-13: the reply of the first was lost, and the second is as ready as an empty server is."""
    async with open_fleet() as fleet, trio.open_nursery() as nursery:
        fleet.participants["agent"].parked[R0] = "a"
        fleet.channel.lost_replies = {("prepare", "agent"): 1}
        failures: list[BaseException] = []

        async def take() -> None:
            try:
                await checkpointed(fleet.controller)
            except Failed as failed:
                failures.append(failed)

        nursery.start_soon(take)
        await wait_all_tasks_blocked()
        assert fleet.channel.order("prepare") == ["env", "policy", "agent"]
        await fleet.replace("agent")
        await trio.sleep(1)
        assert [server for server, _, _ in replaced_in(failures[0])] == ["agent"]
        assert fleet.closed() == set()


@pytest.mark.parametrize("operation", ["commit", "renew"])
async def test_another_process_that_answers_within_a_hold_makes_it_unpublishable(
    operation: str, autojump_clock: MockClock
) -> None:
    """HARD-13: also one that a late duplicate has prepared, and also when it was accepted meanwhile."""
    async with open_fleet() as fleet:
        async with fleet.controller.checkpoint(C1, "c1", timeout_s=5, renew_every_s=1e6) as held:
            (sent,) = [r for o, s, r in fleet.channel.requests if (o, s) == ("prepare", "tools")]
            if operation == "renew":
                await held.commit([R0])
            before = incarnation(fleet, "tools")
            await fleet.replace("tools")
            # The network delivers the prepare once more.
            await fleet.channel.call("tools", "prepare", sent, trio.current_time() + 5)
            fleet.controller.accept_replaced(Replaced("tools", before, incarnation(fleet, "tools")))
            if operation == "commit":
                with pytest.raises(Failed) as caught:
                    await held.commit([R0])
                assert [server for server, _, _ in replaced_in(caught.value)] == ["tools"]
            else:
                with pytest.raises(LeaseNotProven, match="tools was replaced"):
                    await held.prove_held()


async def test_a_stage_that_is_away_is_waited_for_once(autojump_clock: MockClock) -> None:
    """COORD-2, I29: however many servers are away, the last stage is asked soon."""
    async with open_fleet() as fleet:
        await fleet.controller.prepare(C1, timeout_s=5)
        door = Door()
        door.shut()
        for server in ("tools", "agent", "policy"):
            fleet.channel.doors["resume", server] = door
        began = trio.current_time()
        with trio.move_on_after(10):
            await fleet.controller.resume(C1, timeout_s=30)
        asked = [at for at, where in fleet.channel.times if where == ("resume", "env")]
        assert asked[0] - began <= 2
