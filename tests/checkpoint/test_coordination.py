"""The controller library against real control planes, with calls lost, refused and held."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.checkpoint.coordination import _restore_hold, open_coordination
from gymtrio.checkpoint.members import Failed, LeaseNotProven, NoPolicyModel, NotPrepared
from gymtrio.errors import InvalidCheckpointState, PeerRefused
from gymtrio.ids import CheckpointId, RolloutId
from gymtrio.ports import HostRandomness
from tests.helpers.clocks import FollowingClock
from tests.helpers.fleet import SERVERS, FleetChannel, open_fleet
from tests.helpers.memory_archive import Door, MemoryArchive
from tests.helpers.plane import GRACE_S, episode

C1 = CheckpointId("c1")
R0 = episode("r0")


async def test_prepare_goes_stage_by_stage_and_resume_the_other_way(
    autojump_clock: MockClock,
) -> None:
    """COORD-2."""
    async with open_fleet() as fleet:
        async with fleet.controller.checkpoint(C1, "d", timeout_s=30) as held:
            assert set(fleet.phases().values()) == {"prepared"}
            await held.commit([R0])
        assert fleet.channel.order("prepare") == ["env", "policy", "agent", "tools"]
        assert fleet.channel.order("resume") == ["tools", "agent", "policy", "env"]
        assert set(fleet.phases().values()) == {"idle"}


async def test_a_stage_that_is_not_ready_stops_the_prepare_and_says_why(
    autojump_clock: MockClock,
) -> None:
    """COORD-1, COORD-2: later stages are untouched, everything resumes, blockers are explained."""
    async with open_fleet() as fleet:
        fleet.participants["agent"].running.add(R0)
        with pytest.raises(NotPrepared) as caught:
            async with fleet.controller.checkpoint(C1, "d", timeout_s=5):
                raise AssertionError("not prepared")
        assert "agent: r0" in str(caught.value)
        assert "tools" not in fleet.channel.order("prepare")
        assert fleet.closed() == set()
        # The participants that prepare never reached are fenced too.
        with pytest.raises(Failed, match="stale_checkpoint"):
            await fleet.controller.prepare(C1, timeout_s=5)


async def test_who_has_prepared_and_is_no_longer_ready_is_no_longer_counted_on(
    autojump_clock: MockClock,
) -> None:
    """COORD-2, WRK-3: a prepare that is repeated tells it before a commit is refused for it."""
    async with open_fleet() as fleet:
        assert (await fleet.controller.prepare(C1, timeout_s=5)).ready
        fleet.participants["policy"].running.add(R0)
        again = await fleet.controller.prepare(C1, timeout_s=5)
        assert not again.ready
        assert again.blocking["policy"].blockers == ("r0",)
        with pytest.raises(Failed, match="policy: .*no longer ready: r0"):
            await fleet.controller.commit(C1, "d", [R0], timeout_s=5)


async def test_an_answer_given_at_the_deadline_is_heard(autojump_clock: MockClock) -> None:
    """CTL-7, COORD-6: what blocks is told; a server that ran out of time is not taken for silent."""
    async with open_fleet() as fleet:
        fleet.participants["agent"].running.add(R0)
        fleet.channel.slow_replies_s["prepare", "agent"] = 0.3
        with pytest.raises(NotPrepared, match="agent: r0"):
            async with fleet.controller.checkpoint(C1, "d", timeout_s=5):
                raise AssertionError("not prepared")
        assert fleet.closed() == set()


async def test_the_body_failing_or_being_cancelled_resumes(autojump_clock: MockClock) -> None:
    """COORD-1: on every exit."""
    async with open_fleet() as fleet:
        with pytest.raises(ZeroDivisionError):
            async with fleet.controller.checkpoint(C1, "d", timeout_s=30):
                raise ZeroDivisionError
        assert fleet.closed() == set()
        with trio.move_on_after(1):
            async with fleet.controller.checkpoint(CheckpointId("c2"), "d", timeout_s=30):
                await trio.sleep_forever()
        assert fleet.closed() == set()
        assert len(fleet.channel.order("resume")) == 8


@pytest.mark.parametrize("at", SERVERS)
async def test_a_cancellation_during_the_last_resume_does_not_cut_it_short(
    at: str, autojump_clock: MockClock
) -> None:
    """COORD-1: on every exit, also one that was good until then; nobody is left closed."""
    async with open_fleet() as fleet, trio.open_nursery() as nursery:
        door = fleet.channel.doors["resume", at] = Door()
        door.shut()
        leaving = trio.CancelScope()

        async def cancel_at_the_door() -> None:
            await door.reached.wait()
            leaving.cancel()
            await wait_all_tasks_blocked()
            door.let_go()

        nursery.start_soon(cancel_at_the_door)
        with leaving:
            async with fleet.controller.checkpoint(C1, "d", timeout_s=30) as held:
                await held.commit([R0])
        assert leaving.cancel_called
        assert fleet.channel.order("resume") == ["tools", "agent", "policy", "env"]
        assert fleet.closed() == set()


async def test_leases_are_renewed_in_the_background(autojump_clock: MockClock) -> None:
    """COORD-1, CTL-11: publishing may take longer than any lease."""
    async with open_fleet() as fleet:
        async with fleet.controller.checkpoint(C1, "d", timeout_s=30):
            await trio.sleep(3 * 3600)
            assert set(fleet.phases().values()) == {"prepared"}


async def test_calls_whose_request_or_reply_is_lost_are_sent_again(
    autojump_clock: MockClock,
) -> None:
    """COORD-6: the same id makes it safe; nothing is done twice."""
    async with open_fleet() as fleet:
        fleet.channel.lost_replies = {("prepare", "env"): 2, ("commit", "agent"): 1}
        fleet.channel.lost_requests = {("commit", "tools"): 2, ("resume", "tools"): 1}
        async with fleet.controller.checkpoint(C1, "d", timeout_s=30) as held:
            await held.commit([R0])
        assert fleet.archive.writes == 4
        assert fleet.closed() == set()


async def test_a_participant_that_cannot_be_reached_fails_by_its_deadline(
    autojump_clock: MockClock,
) -> None:
    """COORD-6: every call is bounded, and the others are resumed."""
    async with open_fleet() as fleet:
        fleet.channel.lost_requests = {("prepare", "tools"): 10**6}
        before = trio.current_time()
        with pytest.raises(Failed, match="tools: connection refused"):
            async with fleet.controller.checkpoint(C1, "d", timeout_s=5):
                pass
        assert trio.current_time() - before <= 5
        assert fleet.closed() == set()


async def test_resume_goes_on_through_failures(autojump_clock: MockClock) -> None:
    """COORD-2: and names them at the end."""
    async with open_fleet() as fleet:
        await fleet.controller.prepare(C1, timeout_s=5)
        fleet.channel.refusals[("resume", "agent")] = InvalidCheckpointState("broken")
        with pytest.raises(Failed, match="resume failed at agent"):
            await fleet.controller.resume(C1, timeout_s=5)
        assert fleet.closed() == {"agent"}


async def test_the_scope_reaches_everyone(autojump_clock: MockClock) -> None:
    """COORD-2: commit goes everywhere at once, with one scope and one directory."""
    async with open_fleet() as fleet:
        for participant in fleet.participants.values():
            participant.parked |= {R0: "a", episode("r1"): "b"}
        async with fleet.controller.checkpoint(C1, "d", timeout_s=30) as held:
            replies = await held.commit([episode("r1")])
        assert {name: reply.episode_ids for name, reply in replies.items()} == dict.fromkeys(
            SERVERS, ("r1",)
        )


# -- restore ----------------------------------------------------------------------------------


async def committed() -> MemoryArchive:
    async with open_fleet() as fleet:
        for participant in fleet.participants.values():
            participant.parked[R0] = "a"
        async with fleet.controller.checkpoint(C1, "d", timeout_s=30) as held:
            await held.commit([R0])
        return fleet.archive


@pytest.mark.parametrize("recover", [False, True])
async def test_restore_continues_everything_as_the_next_attempt(
    recover: bool, autojump_clock: MockClock
) -> None:
    """COORD-3, HARD-3: any number of times, also of servers that start closed."""
    archive = await committed()
    for _ in range(2):
        async with open_fleet(archive=archive, recover=recover) as fleet:
            replies = await fleet.controller.restore(C1, "d", [R0], timeout_s=30)
            # Once more in the same life: nothing was claimed, so nothing is lost by it.
            replies = await fleet.controller.restore(C1, "d", [R0], timeout_s=30)
            assert {reply.restored for reply in replies.values()} == {("r0-a1",)}
            assert {reply.source_checkpoint_id for reply in replies.values()} == {"c1"}
            assert fleet.closed() == set()
            for participant in fleet.participants.values():
                assert episode("r0", 1) in participant.restored


@pytest.mark.parametrize("recover", [False, True])
async def test_a_restore_that_fails_anywhere_is_undone_and_can_be_done_again(
    recover: bool, autojump_clock: MockClock
) -> None:
    """COORD-3, I9: nothing is restored anywhere, the first error is raised, and a retry succeeds."""
    async with open_fleet(archive=await committed(), recover=recover) as fleet:
        fleet.channel.refusals[("restore", "tools")] = InvalidCheckpointState("digest mismatch")
        with pytest.raises(Failed, match="tools.*digest mismatch") as caught:
            await fleet.controller.restore(C1, "d", [R0], timeout_s=30)
        assert list(caught.value.failures) == ["tools"]
        for participant in fleet.participants.values():
            assert len(participant.restored) == 0
        assert fleet.closed() == (set(SERVERS) if recover else set())
        fleet.channel.refusals.clear()
        await fleet.controller.restore(C1, "d", [R0], timeout_s=30)
        assert fleet.closed() == set()
        for participant in fleet.participants.values():
            await participant.admission.enter(episode("r0", 1))


async def test_a_restore_is_undone_also_when_it_is_cancelled(autojump_clock: MockClock) -> None:
    """COORD-3."""
    async with open_fleet(archive=await committed()) as fleet:
        door = Door()
        door.shut()
        fleet.channel.doors[("restore", "tools")] = door
        with trio.move_on_after(1):
            await fleet.controller.restore(C1, "d", [R0], timeout_s=30)
        assert all(len(p.restored) == 0 for p in fleet.participants.values())
        assert fleet.closed() == set()


@pytest.mark.parametrize("recover", [False, True])
async def test_a_controller_that_stood_still_is_told_that_its_restore_is_gone(
    recover: bool, autojump_clock: MockClock
) -> None:
    """COORD-3, CTL-11, HARD-3: the leases have ended before it resumes; it can restore again."""
    async with open_fleet(archive=await committed(), recover=recover) as fleet:
        fleet.channel.slow_replies_s["restore", "tools"] = 2 * GRACE_S
        fleet.channel.stands_still = True
        with pytest.raises(Failed, match="resume failed at") as caught:
            await fleet.controller.restore(C1, "d", [R0], timeout_s=30)
        assert caught.value.failures.keys() == set(SERVERS)
        assert all("stale_checkpoint" in str(e) for e in caught.value.failures.values())
        assert all(len(p.restored) == 0 for p in fleet.participants.values())
        assert fleet.closed() == (set(SERVERS) if recover else set())
        fleet.channel.slow_replies_s.clear()
        await fleet.controller.restore(C1, "d", [R0], timeout_s=30)
        assert fleet.closed() == set()
        assert all(len(p.restored) == 1 for p in fleet.participants.values())


@pytest.mark.parametrize("operation", ["restore", "resume"])
async def test_a_server_that_is_away_does_not_keep_the_others_closed(
    operation: str, autojump_clock: MockClock
) -> None:
    """COORD-1, COORD-2, COORD-3, I29: each is asked without waiting for who does not answer."""
    async with open_fleet(archive=await committed()) as fleet:
        fleet.channel.lost_requests = {
            ("resume", "tools"): 10**6,
            (operation, "tools"): 10**6,
        }
        if operation == "restore":
            with pytest.raises(Failed, match="restore failed at tools"):
                await fleet.controller.restore(C1, "d", [R0], timeout_s=30)
            assert fleet.closed() == set()
            return
        with pytest.raises(Failed, match="resume failed at tools"):
            async with fleet.controller.checkpoint(CheckpointId("c2"), "e", timeout_s=60) as held:
                await held.commit([R0])
                closed_at = trio.current_time()
        assert fleet.closed() == {"tools"}
        opened_by = [at for at, name in fleet.channel.times if name == ("resume", "env")]
        assert opened_by[0] - closed_at <= 10


async def test_the_error_of_the_body_is_the_one_that_is_raised(autojump_clock: MockClock) -> None:
    """COORD-1: also when resuming fails."""
    async with open_fleet() as fleet:
        fleet.channel.refusals[("resume", "agent")] = InvalidCheckpointState("broken")
        with pytest.raises(ZeroDivisionError):
            async with fleet.controller.checkpoint(C1, "d", timeout_s=30):
                raise ZeroDivisionError


# -- retire, forget, publish ------------------------------------------------------------------


async def test_retire_and_forget_go_callers_first(autojump_clock: MockClock) -> None:
    """COORD-2."""
    async with open_fleet() as fleet:
        await fleet.controller.retire(C1, [R0], timeout_s=5)
        assert fleet.channel.order("retire")[:2] == ["env", "agent"]
        assert set(fleet.channel.order("retire")[2:]) == {"policy", "tools"}
        await fleet.controller.forget(C1, [RolloutId("r0")], timeout_s=5)
        assert fleet.channel.order("forget")[:2] == ["env", "agent"]
        status = await fleet.controller.status()
        assert {s.retired_rollouts for s in status.values()} == {0}


async def test_a_hold_is_proven_by_a_renewal_sent_after_the_last_commit(
    autojump_clock: MockClock,
) -> None:
    """HARD-2: it counts from when it was sent, and one that is refused or late proves nothing."""
    async with open_fleet() as fleet:
        async with fleet.controller.checkpoint(C1, "d", timeout_s=30, renew_every_s=10**6) as held:
            await held.commit([R0])
            sent_at = trio.current_time()
            assert await held.prove_held(margin_s=2) == sent_at + 28
            door = Door()
            door.shut()
            fleet.channel.doors[("renew", "env")] = door
            async with trio.open_nursery() as nursery:
                late = []

                async def prove() -> None:
                    try:
                        await held.prove_held()
                    except LeaseNotProven as error:
                        late.append(error)

                nursery.start_soon(prove)
                await wait_all_tasks_blocked()
                await trio.sleep(31)
                door.let_go()
            assert late
            del fleet.channel.doors[("renew", "env")]
            await trio.sleep(4000)
            with pytest.raises(LeaseNotProven, match="stale_checkpoint"):
                await held.prove_held()


@pytest.mark.parametrize(("answered_after_s", "margin_s"), [(29.5, 1), (30.5, 0)])
async def test_a_renewal_that_is_answered_too_late_proves_nothing(
    answered_after_s: float, margin_s: float, autojump_clock: MockClock
) -> None:
    """HARD-2: everybody holds and says so, but until when was said is over, or too near."""
    async with open_fleet() as fleet:
        async with fleet.controller.checkpoint(C1, "d", timeout_s=30, renew_every_s=10**6) as held:
            await held.commit([R0])
            fleet.channel.slow_replies_s["renew", "env"] = answered_after_s
            with pytest.raises(LeaseNotProven):
                await held.prove_held(margin_s=margin_s)
            fleet.channel.slow_replies_s["renew", "env"] = 28.5
            assert await held.prove_held() > trio.current_time()


async def test_a_hold_is_proven_for_no_longer_than_the_shortest_lease(
    autojump_clock: MockClock,
) -> None:
    """HARD-2: a host whose clock is ahead takes every deadline for nearer than it is."""
    async with open_fleet(ahead_s={"agent": 2_500}) as fleet:
        async with fleet.controller.checkpoint(
            C1, "d", timeout_s=3_000, renew_every_s=10**6
        ) as held:
            await held.commit([R0])
            until = await held.prove_held()
            assert until - trio.current_time() == pytest.approx(500 + GRACE_S - 1)
            await trio.sleep_until(until)
            assert fleet.phases()["agent"] == "committed"
            await trio.sleep(1.1)
            assert fleet.phases()["agent"] == "idle"


async def test_a_hold_is_proven_at_servers_that_do_not_tell_their_lease(
    autojump_clock: MockClock,
) -> None:
    """HARD-2: older ones; then what was asked for has to do."""
    async with open_fleet() as fleet:
        async with fleet.controller.checkpoint(C1, "d", timeout_s=30) as held:
            fleet.channel.left_out["renew"] = "lease_s"
            assert await held.prove_held(margin_s=2) == trio.current_time() + 28


# -- discovery --------------------------------------------------------------------------------


async def discover(channel: FleetChannel, servers: list[str]) -> list[str]:
    async with open_coordination(
        servers, channel, wall_clock=FollowingClock(), randomness=HostRandomness()
    ) as controller:
        return [member.server for member in controller.members]


async def test_discovery_asks_everyone_and_orders_by_kind(autojump_clock: MockClock) -> None:
    """COORD-4: 404 is not a participant."""
    async with open_fleet() as fleet:
        fleet.channel.absent = {"judge"}
        found = await discover(fleet.channel, ["tools", "judge", "agent", "policy", "env"])
        assert found == ["env", "policy", "agent", "tools"]


@pytest.mark.parametrize("status", [401, 403, 405, 422, 500])
async def test_a_server_that_refuses_to_say_is_an_error_not_an_absence(
    status: int, autojump_clock: MockClock
) -> None:
    """COORD-4: of a wrong token, say; a checkpoint without that server would look whole."""
    async with open_fleet() as fleet:
        fleet.channel.refusals["status", "agent"] = PeerRefused("agent", status, None, "no")
        with pytest.raises(Failed, match=f"discovery failed at agent: agent answered {status}"):
            await discover(fleet.channel, [*SERVERS])


async def test_an_unreachable_server_is_an_error_not_an_absence(
    autojump_clock: MockClock,
) -> None:
    """COORD-4: after three tries."""
    async with open_fleet() as fleet:
        fleet.channel.lost_requests = {("status", "agent"): 2}
        await discover(fleet.channel, [*SERVERS])
        fleet.channel.lost_requests = {("status", "agent"): 3}
        with pytest.raises(Failed, match="discovery failed at agent"):
            await discover(fleet.channel, [*SERVERS])


async def test_a_participant_of_an_unknown_kind_is_an_error_that_names_it(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COORD-4: of a later release, perhaps; it must not pass for absence either."""
    async with open_fleet() as fleet:
        real = fleet.channel.call

        async def call(server: str, *arguments: Any) -> object:
            reply = await real(server, *arguments)
            assert isinstance(reply, dict)
            return {**reply, "kind": "judge"} if server == "agent" else reply

        monkeypatch.setattr(fleet.channel, "call", call)
        with pytest.raises(Failed, match="discovery failed at agent: kind: .*, got 'judge'"):
            await discover(fleet.channel, [*SERVERS])


async def test_a_deployment_without_a_policy_model_is_an_error(autojump_clock: MockClock) -> None:
    """COORD-4."""
    async with open_fleet() as fleet:
        with pytest.raises(NoPolicyModel):
            await discover(fleet.channel, ["env", "agent", "tools"])


def test_restoring_never_reuses_the_id_of_the_checkpoint() -> None:
    """COORD-6, HARD-8: a hold of its own, also for the longest id."""
    hold = _restore_hold(CheckpointId("c" * 128), "0123456789ab-1")
    assert len(hold) == 128
    assert hold.endswith(".restore-0123456789ab-1")
