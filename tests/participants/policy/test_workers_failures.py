"""Workers that are lost, stand still, join late; a coordinator that goes: nothing gets weaker (WRK)."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
from trio.testing import lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked

from gymtrio.errors import AdmissionClosed, CheckpointError, CoordinatorUnavailable, InvalidPhase
from gymtrio.participants.policy.coordinator import CoordinatedPolicy
from gymtrio.participants.policy.keeper import Entry
from gymtrio.participants.policy.link import LINK_LIMITS, GateState, Nothing, WorkerReport, ask
from gymtrio.participants.policy.worker import PolicyWorker
from gymtrio.storage.writer import WrittenPart
from gymtrio.wire.channel import open_channel
from gymtrio.wire.codec import pack, unpack
from gymtrio.wire.errors import ChannelFull
from gymtrio.wire.messages import Hello, Type, encode
from gymtrio.wire.tables import Role
from tests.helpers.channels import meet
from tests.helpers.memory_archive import Door
from tests.helpers.page_cache import PageCacheFiles
from tests.helpers.plane import GRACE_S, episode
from tests.participants.policy.harness import World, chat, text_of
from tests.participants.policy.workers import OneWorker, Served, open_served

R, S = episode("r"), episode("s")
R1 = R.next_attempt()


async def test_a_worker_lost_while_closed_blocks_until_the_resume(autojump_clock: object) -> None:
    """WRK-3, I18: prepare and commit; the next checkpoint, with the replacement, is like any other."""
    async with open_served(World()) as served:
        _, two = served.workers
        await two.begin_live(R, chat("a"))
        assert (await served.prepare()).phase == "prepared"
        two.die()
        await wait_all_tasks_blocked()
        assert served.blockers == ("policy-workers-unreported:1", "policy-worker-lost", "r")
        with pytest.raises(InvalidPhase, match="policy-worker-lost"):
            await served.commit("c1", (R,))
        await served.join("1")
        assert served.blockers == ("policy-worker-lost", "r")
        with pytest.raises(InvalidPhase, match="policy-worker-lost"):
            await served.commit("c1", (R,))
        await served.resume()
        assert (await served.prepare("c2")).phase == "prepared"
        await served.commit("c2", (R,))


async def test_what_was_at_a_lost_worker_may_be_retired_instead(autojump_clock: object) -> None:
    """WRK-3: the blockers name it; nothing of it is unknown any more then."""
    async with open_served(World()) as served:
        one, two = served.workers
        leaving = await one.begin_leaving(S, chat("b"))
        await two.begin_live(R, chat("a"))
        preparing = await served.prepare(timeout_s=1)
        assert preparing.report.blockers == ("s",)
        two.die()
        await wait_all_tasks_blocked()
        await served.join("1")
        await served.retire(R)
        assert served.blockers == ("s",)
        leaving.done(True)
        assert (await served.prepare()).phase == "prepared"
        reply = await served.commit("c1", (R, S))
        assert reply.episode_ids == ("s",)


async def test_a_worker_that_joins_during_a_checkpoint_completes_it(autojump_clock: object) -> None:
    """WRK-4: it closes at once, and a prepare that waited for it is answered."""
    async with open_served(World(), workers=1) as served:
        served.policy.expected = 2
        preparing = await served.prepare(timeout_s=2)
        assert (preparing.phase, preparing.report.blockers) == (
            "preparing",
            ("policy-workers-unreported:1",),
        )
        late = await served.join()
        assert (await served.prepare()).phase == "prepared"
        caller = late.begin(R, chat("a"))
        await wait_all_tasks_blocked()
        assert not caller.answered
        assert not served.world.backend.calls
        with pytest.raises(AdmissionClosed):
            await late.ask(R, attrs.evolve(chat("a"), refuse_when_closed=True))
        served.world.backend.at_once = True
        await served.resume()
        await caller.ended.wait()
        assert caller.reply is not None


async def test_a_worker_that_stands_still_is_named_by_the_deadline(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """WRK-3, I29: prepare answers in time; the resume does not wait for it either."""
    async with open_served(World()) as served:
        served.workers[1].stream.stall()
        began = trio.current_time()
        preparing = await served.prepare(timeout_s=5)
        assert trio.current_time() == began + 5
        assert preparing.report.blockers == ("policy-workers-unreported:1",)
        await served.resume()
        assert trio.current_time() == began + 5
        served.workers[1].stream.go_on()
        assert (await served.prepare("c2")).phase == "prepared"


async def test_a_worker_that_stands_still_for_long_is_lost(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """WRK-3, HARD-7: its calls block nothing for ever, and its connection is over when it goes on."""
    async with open_served(World()) as served:
        _, two = served.workers
        await two.begin_live(R, chat("a"))
        two.stream.stall()
        await trio.sleep(LINK_LIMITS.silence_timeout_s + 2 * LINK_LIMITS.ping_interval_s)
        assert served.policy.connected == 1
        assert len(served.policy.books) == 0
        two.stream.go_on()
        await wait_all_tasks_blocked()
        assert two.ended is not None


async def test_the_claim_of_a_lost_worker_returns(autojump_clock: object) -> None:
    """HARD-7, I8, I14: to the next call, and to the next export."""
    world, files = World(), PageCacheFiles()
    call = chat("hello")
    async with open_served(world, files=files) as served:
        _, live = await served.workers[0].begin_live(R, call)
        live.emit(4)
        await served.checkpoint(R)
    async with open_served(world, files=files) as served:
        one, two = served.workers
        await served.restore(R)
        await served.resume("x1")
        await two.begin_live(R1, call)
        assert served.control.status().extra["restored_generation_cuts"] == []
        two.die()
        await wait_all_tasks_blocked()
        assert served.control.status().extra["restored_generation_cuts"] == ["r-a1"]
        await served.join("1")
        await served.checkpoint(R1, name="c2", directory="d2")
        cut = (await served.records("d2"))["r-a1"].cut
        assert cut is not None
        assert cut.continuation.prefix_token_count == 4
        await served.resume("c2")
        _, live = await one.begin_live(R1, call)
        assert live.prefix is not None


async def lose_while_leaving(served: Served, worker: OneWorker, *texts: str) -> str:
    """A worker dies while a reply of R is being sent; gives the text."""
    reply = await worker.begin_leaving(R, chat(*texts))
    worker.die()
    await wait_all_tasks_blocked()
    await served.join(worker.name)
    return text_of(reply)


@pytest.mark.parametrize("restored", [False, True])
async def test_a_reply_that_was_leaving_at_a_lost_worker_and_is_asked_again(
    restored: bool, autojump_clock: object
) -> None:
    """I16: it had not arrived; its row is not there twice, also not after a restore."""
    world, files = World(), PageCacheFiles()
    async with open_served(world, files=files) as served:
        await lose_while_leaving(served, served.workers[0], "a")
        await served.checkpoint(R)
        record = (await served.records())["r"]
        assert record.uncertain == (record.rows[0].model_call_id,)
        await served.resume()
        if not restored:
            await served.workers[1].ask_at_once(R, chat("a"))
            (row,) = served.policy.rows(R)
            assert row.model_call_id not in record.uncertain
            return
    async with open_served(world, files=files) as served:
        await served.restore(R)
        await served.resume("x1")
        await served.workers[0].ask_at_once(R1, chat("a"))
        (row,) = served.policy.rows(R1)
        assert row.model_call_id not in record.uncertain


async def test_a_reply_that_was_leaving_at_a_lost_worker_and_had_arrived(
    autojump_clock: object,
) -> None:
    """I16: the conversation goes on from it, so its row stays whatever is asked later."""
    async with open_served(World()) as served:
        text = await lose_while_leaving(served, served.workers[0], "a")
        (lost,) = served.policy.rows(R)
        one = served.workers[1]
        await one.ask_at_once(R, chat("a", text, "b"))
        await one.ask_at_once(R, chat("a"))
        rows = served.policy.rows(R)
        assert rows[0] == lost
        assert rows[1].parent_call_id == lost.model_call_id
        assert len(rows) == 3
        await served.checkpoint(R)
        assert (await served.records())["r"].uncertain == ()


async def test_without_a_coordinator_nothing_is_admitted(autojump_clock: object) -> None:
    """WRK-5: calls are refused with a type, and the worker learns that it is of no use any more."""
    async with open_served(World()) as served:
        one, _ = served.workers
        assert one.policy.not_ready() is None
        worker = served.policy._workers["0"]
        held, live = await one.begin_live(R, chat("a"))
        served.policy._leave(worker)
        await wait_all_tasks_blocked()
        assert one.ended is not None
        assert "lost its coordinator" in (one.policy.not_ready() or "")
        assert not held.answered or held.error is not None
        with pytest.raises(CoordinatorUnavailable, match="lost its coordinator"):
            await one.policy.call(R, chat("b"))
        assert live in served.world.backend.cancelled


async def test_a_worker_that_has_not_reached_its_coordinator_refuses(
    autojump_clock: object,
) -> None:
    """WRK-4: and says why it is not ready."""
    async with open_served(World(), workers=1) as served:
        made: Any = served.workers[0].policy
        alone = PolicyWorker(
            "policy",
            backend=served.world.backend,
            token_store=served.world.store,
            randomness=made.gate._randomness,
            generation_cuts=True,
            part_writer=made._part_writer,
        )
        with pytest.raises(CoordinatorUnavailable, match="not reached its coordinator"):
            await alone.call(R, chat("a"))
        assert "not reached" in (alone.not_ready() or "")


async def test_a_reply_does_not_leave_when_its_row_cannot_be_kept(autojump_clock: object) -> None:
    """I16: the coordinator goes between the end of the generation and the reply."""
    async with open_served(World()) as served:
        one, _ = served.workers
        caller, live = await one.begin_live(R, chat("a"))
        one.stream.stall()
        live.finish.set()
        await wait_all_tasks_blocked()
        assert not caller.answered
        worker = served.policy._workers["0"]
        served.policy._leave(worker)
        one.stream.go_on()
        await caller.ended.wait()
        assert caller.reply is None
        assert served.policy.rows(R) == ()


async def test_old_reports_change_nothing(autojump_clock: object) -> None:
    """WRK-6: neither one of an earlier close, nor one that was overtaken."""
    async with open_served(World()) as served:
        await served.prepare("c1")
        await served.resume("c1")
        await served.prepare("c2")
        worker = served.policy._workers["0"]
        now = worker.report
        assert now is not None
        assert now.generation == 2
        for old in (
            attrs.evolve(now, generation=1, seq=99, blocking=1),
            attrs.evolve(now, seq=now.seq - 1, blocking=1),
            attrs.evolve(now, blocking=1),
        ):
            served.policy._take_report(worker, old)
            assert served.policy.ready()
        new = attrs.evolve(now, seq=now.seq + 1, blocking=1, inflight=1)
        served.policy._take_report(worker, new)
        assert not served.policy.ready()
        await served.resume("c2")
        served.policy._take_report(worker, attrs.evolve(new, seq=new.seq + 1))
        assert (served.counts["held"], served.blockers) == (0, ()), (
            "it was on its way at the opening"
        )


class DoorWriter:
    """A part writer that stands before a door, before or after it has written."""

    def __init__(self, inner: Any, *, after: bool) -> None:
        self.door = Door()
        self._inner = inner
        self._after = after

    async def write_part(self, *arguments: Any) -> WrittenPart | None:
        if not self._after:
            await self.door.pass_through()
        written: WrittenPart | None = await self._inner.write_part(*arguments)
        if self._after:
            await self.door.pass_through()
        return written

    async def remove_parts(self, *arguments: Any) -> None:
        await self._inner.remove_parts(*arguments)


def put_door(worker: OneWorker, *, after: bool) -> Door:
    policy: Any = worker.policy
    policy._part_writer = DoorWriter(policy._part_writer, after=after)
    door: Door = policy._part_writer.door
    door.shut()
    return door


async def two_cuts(served: Served) -> None:
    for worker, name in zip(served.workers, "rs", strict=True):
        _, live = await worker.begin_live(episode(name), chat("a"))
        live.emit(3)
    await served.prepare()


async def test_a_resume_leaves_no_part_behind(autojump_clock: object) -> None:
    """CTL-10, I31: one worker has written its part, the other is at it."""
    async with open_served(World()) as served:
        await two_cuts(served)
        door = put_door(served.workers[1], after=False)

        async def commit() -> None:
            with pytest.raises(CheckpointError, match="stopped by a resume"):
                await served.commit("c1", (R, S))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(commit)
            await door.reached.wait()
            await wait_all_tasks_blocked()
            assert len(served.files.tree()) == 1
            began = trio.current_time()
            await served.resume()
            assert served.files.tree() == {}
            assert trio.current_time() - began < 0.1
        await wait_all_tasks_blocked()
        assert served.files.tree() == {}


async def test_a_worker_lost_while_it_writes_fails_the_commit(autojump_clock: object) -> None:
    """WRK-3, I18, HARD-12: nothing is published, and what the others wrote is gone."""
    async with open_served(World()) as served:
        await two_cuts(served)
        door = put_door(served.workers[1], after=False)

        async def commit() -> None:
            with pytest.raises(CheckpointError, match="worker 1"):
                await served.commit("c1", (R, S))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(commit)
            await door.reached.wait()
            await wait_all_tasks_blocked()
            served.workers[1].die()
        assert served.files.tree() == {}
        assert "policy-worker-lost" in served.blockers


async def test_a_client_that_leaves_during_a_commit_changes_nothing_of_it(
    autojump_clock: object,
) -> None:
    """I18: what was found when the workers were asked is what is written."""
    async with open_served(World()) as served:
        callers = []
        for worker, name in zip(served.workers, "rs", strict=True):
            caller, live = await worker.begin_live(episode(name), chat("a"))
            live.emit(3)
            callers.append(caller)
        await served.prepare()
        door = put_door(served.workers[0], after=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served.commit, "c1", (R, S))
            await door.reached.wait()
            for caller in callers:
                caller.leave()
            await wait_all_tasks_blocked()
            door.let_go()
        records = await served.records()
        assert all(record.cut for record in records.values())
        assert sorted(records) == ["r", "s"]


async def test_a_recovering_server_is_closed_at_every_worker_until_it_is_restored(
    autojump_clock: object,
) -> None:
    """HARD-3: and ready only then."""
    world, files = World(), PageCacheFiles()
    async with open_served(world, files=files) as served:
        await served.workers[0].ask_at_once(R, chat("a"))
        await served.checkpoint(R)
    async with open_served(world, files=files, recover=True) as served:
        caller = served.workers[0].begin(R, chat("b"))
        await wait_all_tasks_blocked()
        assert not caller.answered
        await served.restore(R)
        await wait_all_tasks_blocked()
        assert caller.error is not None, "an old attempt, woken and refused"
        await served.resume("x1")
        assert (await served.workers[1].ask_at_once(R1, chat("b"))).status == 200


async def test_workers_learn_that_a_restore_was_undone(autojump_clock: object) -> None:
    """HARD-3, SRV-6: when the lease ends nobody calls, and the server waits to be restored again."""
    world, files = World(), PageCacheFiles()
    async with open_served(world, files=files) as served:
        await served.workers[0].ask_at_once(R, chat("a"))
        await served.checkpoint(R)
    controls: list[Any] = []

    def make(instance: str, *, expected: int) -> CoordinatedPolicy:
        def not_ready() -> str | None:
            waits = any(control.awaiting_restore for control in controls)
            return "waiting to be restored" if waits else None

        return CoordinatedPolicy(instance, expected=expected, not_ready=not_ready)

    async with open_served(world, files=files, recover=True, make=make) as served:
        controls.append(served.control)
        await served.restore(R)
        served.policy.publish_state()
        await wait_all_tasks_blocked()
        told = [worker.policy.not_ready() for worker in served.workers]
        assert told == [None, None]
        await trio.sleep(GRACE_S + 100)
        assert served.control.awaiting_restore
        told = [worker.policy.not_ready() for worker in served.workers]
        assert told == ["waiting to be restored"] * 2


async def test_a_worker_learns_how_things_stand_before_anything_else(
    autojump_clock: object,
) -> None:
    """WRK-4: the first message is the state, also when the worker asks as soon as it is there."""
    async with open_served(World(), workers=1) as served:
        await served.prepare()
        ours, theirs = memory_stream_pair()
        heard: list[str] = []

        def posted(kind: str, body: bytes) -> None:
            assert unpack(GateState, body).closed
            heard.append(kind)

        served.nursery.start_soon(served._serve, ours)
        me = Hello(role="policy-worker", name="1", instance="w")
        async with open_channel(
            theirs, role="opener", me=me, limits=LINK_LIMITS, posted=posted
        ) as channel:
            report = WorkerReport(
                generation=served.policy.generation,
                seq=1,
                blocking=0,
                inflight=0,
                leaving=0,
            )
            await ask(channel, "report", report, Nothing)
            assert heard[:1] == ["state"]


async def test_a_worker_that_is_taken_for_lost_gets_no_call_in(autojump_clock: object) -> None:
    """HARD-7, I34: it may still ask while its connection ends; nobody would give such a call up."""
    async with open_served(World(), workers=1) as served:
        near, far = lockstep_stream_pair()
        served.nursery.start_soon(served._serve, near)
        await meet(far, Role.OPENER)
        assert await far.receive_some()
        await wait_all_tasks_blocked()
        channel = served.policy._workers["w0"].channel
        with pytest.raises(ChannelFull, match="reads slowly"):
            while True:
                channel.post("noise", bytes(2**19))
        await served.prepare(timeout_s=0.1)
        await served.resume()
        assert served.policy.connected == 1
        entry = Entry(
            call_id="x", episode_id=R, epoch=None, request_digest="d", continues=False, chain=()
        )
        await far.send_all(encode(Type.CALL, (2, "enter", b"", pack(entry), None)))
        await channel.closed.wait()
        assert len(served.policy.books) == 0


async def test_a_worker_that_cannot_tell_that_a_call_has_ended_gives_its_link_up(
    autojump_clock: object,
) -> None:
    """WRK-5, I34: else the call would never end at the coordinator, and no retire of its episode."""
    async with open_served(World()) as served:
        _, two = served.workers
        leaving = await two.begin_leaving(R, chat("a"))
        channel = two.policy.link.channel
        with pytest.raises(ChannelFull, match="slowly"):
            while True:
                channel.post("noise", bytes(2**19))
        leaving.done(True)
        await channel.closed.wait()
        await wait_all_tasks_blocked()
        assert two.ended is not None
        assert len(served.policy.books) == 0
        await served.retire(R)
