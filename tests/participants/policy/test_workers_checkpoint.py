"""Several workers of one policy server: to a controller they are one participant (WRK)."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gymtrio.errors import InvalidPhase, StaleAttempt
from tests.helpers.page_cache import PageCacheFiles
from tests.helpers.plane import episode
from tests.participants.policy.harness import (
    World,
    chat,
    open_policy,
    text_of,
    tokens_of,
    uncut_tokens,
)
from tests.participants.policy.workers import make_archive, open_served

R, S = episode("r"), episode("s")
R1 = R.next_attempt()


async def test_a_checkpoint_closes_every_worker_and_a_resume_opens_them(
    autojump_clock: object,
) -> None:
    """WRK-1, POL-2, I2: the one reply that is leaving is waited for; nothing else."""
    async with open_served(World()) as served:
        one, two = served.workers
        leaving = await one.begin_leaving(R, chat("a"))
        held, live = await two.begin_live(S, chat("b"))
        preparing = await served.prepare(timeout_s=2)
        assert preparing.phase == "preparing"
        assert preparing.report.blockers == ("r",)
        leaving.done(True)
        assert (await served.prepare()).phase == "prepared"
        live.finish.set()
        late = one.begin(episode("t"), chat("c"))
        await wait_all_tasks_blocked()
        assert not held.answered
        assert not late.answered
        assert served.counts["held"] == 1
        served.world.backend.at_once = True
        await served.resume()
        await held.ended.wait()
        await late.ended.wait()
        assert held.reply is not None
        assert late.reply is not None
        await wait_all_tasks_blocked()
        assert served.counts["inflight"] == 0


async def test_what_any_worker_delivered_is_exported_and_what_it_holds_is_not(
    autojump_clock: object,
) -> None:
    """I16, I18, POL-3: rows of both workers in one conversation; of the call in flight its cut."""
    async with open_served(World()) as served:
        one, two = served.workers
        first = await one.ask_at_once(R, chat("a"))
        second = await two.ask_at_once(R, chat("a", text_of(first), "b"))
        _, live = await two.begin_live(R, chat("a", text_of(first), "b", text_of(second), "c"))
        live.emit(3)
        extra = await served.checkpoint(R, S)
        record = (await served.records())["r"]
        assert [row.parent_call_id for row in record.rows] == [None, record.rows[0].model_call_id]
        assert record.cut is not None
        assert record.cut.continuation.prefix_token_count == 3
        assert extra["staging_keys"] == record.staging_keys()
        assert extra["staging_keys_by_episode"] == {"r": record.staging_keys()}
        for key in record.staging_keys():
            assert (await served.world.store.get(key)).staging_key == key


async def test_each_worker_writes_its_own_part(autojump_clock: object) -> None:
    """STO-6, I18: cuts never pass through the coordinator, which writes the ledger and the manifest."""
    async with open_served(World()) as served:
        for worker, name in zip(served.workers, "rs", strict=True):
            await worker.ask_at_once(episode(name), chat("a"))
            _, live = await worker.begin_live(episode(name), chat("b"))
            live.emit(2)
        await served.prepare()
        reply = await served.commit("c1", (R, S))
        sections = sorted(part["section"] for part in reply.manifest["parts"])
        assert sections == ["cuts", "cuts", "ledger"]
        assert reply.manifest["schema_version"] == 2
        records = await served.records()
        assert sorted(records) == ["r", "s"]
        assert all(record.rows and record.cut for record in records.values())


async def test_the_cut_of_an_episode_is_that_of_its_latest_call_whoever_has_it(
    autojump_clock: object,
) -> None:
    """CUT-3, I28: the order of admission is one order over all workers."""
    async with open_served(World()) as served:
        for first, second in (served.workers, served.workers[::-1]):
            name = f"r{first.name}"
            _, earlier = await first.begin_live(episode(name), chat("a"))
            earlier.emit(5)
            _, later = await second.begin_live(episode(name), chat("b"))
            later.emit(2)
        await served.checkpoint(episode("r0"), episode("r1"))
        counts = {
            key: record.cut and record.cut.continuation.prefix_token_count
            for key, record in (await served.records()).items()
        }
        assert counts == {"r0": 2, "r1": 2}


async def test_a_restored_cut_goes_to_one_worker_and_comes_back_from_the_wrong_call(
    autojump_clock: object,
) -> None:
    """WRK-4, CUT-5, POL-5, I14: what the call was not for is counted, for the whole server."""
    world, files = World(), PageCacheFiles()
    call = chat("hello")
    async with open_served(world, files=files) as served:
        _, live = await served.workers[0].begin_live(R, call)
        live.emit(4)
        await served.checkpoint(R)
    async with open_served(world, files=files) as served:
        one, two = served.workers
        await served.restore(R)
        assert served.control.status().extra["restored_generation_cuts"] == ["r-a1"]
        await served.resume("x1")
        await two.ask_at_once(R1, chat("something else"))
        assert served.control.status().extra["restored_generation_cuts"] == ["r-a1"]
        callers = [worker.begin(R1, call) for worker in (one, two)]
        await world.backend.wait_live(2)
        assert served.control.status().extra["restored_generation_cuts"] == []
        continued = [live.prefix is not None for live in world.backend.live]
        assert sorted(continued) == [False, True]
        for live in list(world.backend.live):
            live.finish.set()
        for caller in callers:
            await caller.ended.wait()
            assert caller.reply is not None
            assert tokens_of(caller.reply) == uncut_tokens(call.body)
        counted = served.control.status().extra["generation_cuts_not_continued"]
        assert counted == {"another_request": 1, "cannot": 0, "failed": 0}


async def test_a_cut_that_fails_at_a_worker_is_counted_for_the_server(
    autojump_clock: object,
) -> None:
    """CUT-7, POL-5, WRK-1."""
    world, files = World(), PageCacheFiles()
    call = chat("hello")
    async with open_served(world, files=files) as served:
        _, live = await served.workers[0].begin_live(R, call)
        live.emit(4)
        await served.checkpoint(R)
    world.backend.digest = "build-2"
    async with open_served(world, files=files) as served:
        await served.restore(R)
        await served.resume("x1")
        assert tokens_of(await served.workers[1].ask_at_once(R1, call)) == uncut_tokens(call.body)
        await wait_all_tasks_blocked()
        counted = served.control.status().extra["generation_cuts_not_continued"]
        assert counted == {"another_request": 0, "cannot": 0, "failed": 1}


async def test_a_claim_that_is_not_delivered_is_exported_again(autojump_clock: object) -> None:
    """CUT-5, I8: by the coordinator, unless the call got further."""
    world, files = World(), PageCacheFiles()
    call = chat("hello")
    async with open_served(world, files=files) as served:
        _, live = await served.workers[0].begin_live(R, call)
        live.emit(4)
        await served.checkpoint(R)
    async with open_served(world, files=files) as served:
        await served.restore(R)
        await served.resume("x1")
        world.backend.cut_mode = "unreachable"
        await served.workers[1].begin_live(R1, call)
        await served.checkpoint(R1, name="c2", directory="d2")
        record = (await served.records("d2"))["r-a1"]
        assert record.cut is not None
        assert record.cut.continuation.prefix_token_count == 4


async def test_a_restore_is_refused_once_a_worker_served_a_rollout(autojump_clock: object) -> None:
    """POL-7."""
    world, files = World(), PageCacheFiles()
    async with open_served(world, files=files) as served:
        await served.workers[0].ask_at_once(R, chat("a"))
        await served.checkpoint(R)
    async with open_served(world, files=files) as served:
        await served.workers[1].ask_at_once(S, chat("a"))
        with pytest.raises(InvalidPhase, match="has served calls"):
            await served.restore(R)


async def test_a_restore_is_refused_once_a_worker_has_left(autojump_clock: object) -> None:
    """POL-7: what it may have served, nobody can say for sure."""
    world, files = World(), PageCacheFiles()
    async with open_served(world, files=files) as served:
        await served.workers[0].ask_at_once(R, chat("a"))
        await served.checkpoint(R)
    async with open_served(world, files=files) as served:
        served.workers[0].die()
        await wait_all_tasks_blocked()
        await served.join("0")
        with pytest.raises(InvalidPhase, match="has left since"):
            await served.restore(R)


async def test_a_restored_attempt_that_called_is_not_pending_any_more(
    autojump_clock: object,
) -> None:
    """Scenario: on any worker, and no reopening makes it pending again."""
    world, files = World(), PageCacheFiles()
    async with open_served(world, files=files) as served:
        for name in "rs":
            await served.workers[0].ask_at_once(episode(name), chat("a"))
        await served.checkpoint(R, S)
    async with open_served(world, files=files) as served:
        await served.restore(R, S)
        await served.resume("x1")
        await served.workers[1].ask_at_once(R1, chat("z"))
        for number in range(2):
            await served.prepare(f"c{number}")
            await served.resume(f"c{number}")
        assert served.policy.unclaimed_outside(frozenset()) == [S.next_attempt()]


async def test_a_retired_attempt_is_refused_everywhere_until_it_is_forgotten(
    autojump_clock: object,
) -> None:
    """WRK-4, CTL-5, I10, I11: also by a worker that joins later."""
    async with open_served(World()) as served:
        one, two = served.workers
        caller, live = await one.begin_live(R, chat("a"))
        await served.prepare()
        waiting = two.begin(R, chat("b"))
        await wait_all_tasks_blocked()
        await served.retire(R)
        assert served.world.backend.cancelled == [live]
        await wait_all_tasks_blocked()
        assert isinstance(caller.error, StaleAttempt)
        assert isinstance(waiting.error, StaleAttempt), "woken at the gate"
        two.die()
        await wait_all_tasks_blocked()
        late = await served.join("1")
        at_late = late.begin(R, chat("c"))
        await wait_all_tasks_blocked()
        assert isinstance(at_late.error, StaleAttempt), "refused at once, closed or not"
        await served.resume()
        for worker in (one, late):
            with pytest.raises(StaleAttempt):
                await worker.ask(R, chat("d"))
        await served.forget("r")
        for worker in (one, late):
            assert (await worker.ask_at_once(R, chat("d"))).status == 200


async def test_a_retire_waits_until_the_worker_has_stopped(autojump_clock: object) -> None:
    """CTL-12, I10: a reply that is leaving at a worker is waited for."""
    async with open_served(World()) as served:
        leaving = await served.workers[1].begin_leaving(R, chat("a"))
        async with trio.open_nursery() as nursery:
            done = trio.Event()

            async def retire() -> None:
                await served.retire(R)
                done.set()

            nursery.start_soon(retire)
            await wait_all_tasks_blocked()
            assert not done.is_set()
            leaving.done(True)
            await done.wait()
        assert served.policy.books.ledger.rows(R) == ()


async def test_one_process_restores_what_two_workers_wrote(autojump_clock: object) -> None:
    """WRK-6, STO-4: the number of workers is not a property of a checkpoint."""
    world, files = World(), PageCacheFiles()
    async with open_served(world, files=files) as served:
        first = await served.workers[0].ask_at_once(R, chat("a"))
        again = chat("a", text_of(first), "b")
        _, live = await served.workers[1].begin_live(R, again)
        live.emit(5)
        await served.checkpoint(R)
    async with open_policy(world) as policy:
        policy.control._archive = make_archive(files)
        await policy.restore(R)
        await policy.resume("x1")
        reply = await policy.ask_at_once(R1, again)
        assert tokens_of(reply) == uncut_tokens(again.body)
        old, new = policy.policy.rows(R1)
        assert new.parent_call_id == old.model_call_id
        assert new.continued_token_count == 5
