"""Generation cuts of a policy server: rounds, continuations, and everything that may go wrong."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gymtrio.capture.fingerprint import request_digest
from gymtrio.errors import TransportError
from gymtrio.participants.base import make_record
from gymtrio.participants.policy.calls import BackendReply
from gymtrio.participants.policy.cut_round import INVENTORY_CALLS_MAX, REASONS_LOGGED_MAX
from gymtrio.participants.policy.records import PolicyRecord
from gymtrio.wire.codec import unpack
from tests.helpers.plane import episode
from tests.participants.policy.harness import (
    World,
    chat,
    is_readable,
    open_policy,
    text_of,
    tokens_of,
    uncut_tokens,
)

R = episode("r")
R1 = episode("r", 1)
R2 = episode("r", 2)
HELLO = chat("hello")
UNCUT = uncut_tokens(HELLO.body)


async def cut_one(world: World, tokens: int = 7, call: Any = HELLO) -> dict[str, Any]:
    """Cut one call after so many tokens, and crash. Gives the commit's own fields."""
    async with open_policy(world) as policy:
        _, live = await policy.begin_live(R, call)
        live.emit(tokens)
        return await policy.checkpoint(R)


async def test_an_undelivered_call_is_cut_and_its_row_left_out(autojump_clock: object) -> None:
    """CUT-1, POL-3, I17: the record is the prefix, its keys are in the reply and readable."""
    world = World()
    async with open_policy(world) as policy:
        await policy.ask_at_once(R, chat("a"))
        _, live = await policy.begin_live(R, HELLO)
        live.emit(7)
        await policy.prepare()
        assert policy.counts | {"cut": 1, "held": 1, "cut_failed": 0} == policy.counts
        extra = (await policy.commit(episodes=(R,))).extra
        record = policy.records()["r"]
        assert len(record.rows) == 1
        assert record.cut is not None
        continuation = record.cut.continuation
        assert continuation.prefix_token_count == 7
        (chunk,) = [await world.store.get(key) for key in continuation.staging_keys]
        assert chunk.token_ids == UNCUT[:7]
        assert extra["staging_keys_by_episode"]["r"] == record.staging_keys()
        assert set(continuation.staging_keys) < set(extra["staging_keys"])
        assert await is_readable(world, extra["staging_keys"])


async def test_the_call_goes_on_decoding_while_it_is_cut(autojump_clock: object) -> None:
    """CUT-1, I26: without a crash a cut changes nothing."""
    async with open_policy(World()) as policy:
        caller, live = await policy.begin_live(R, HELLO)
        live.emit(7)
        await policy.checkpoint(R)
        await policy.resume()
        live.finish.set()
        await caller.ended.wait()
        assert tokens_of(caller.reply) == UNCUT
        assert policy.counts["cut"] == 0, "the round is over"


async def test_the_same_call_continues_the_prefix(autojump_clock: object) -> None:
    """CUT-4, I25, I26: only the rest is generated, the reply equals the uncut one."""
    world = World()
    await cut_one(world)
    async with open_policy(world) as policy:
        await policy.restore(R)
        assert policy.restored_cuts == ["r-a1"]
        await policy.resume("x1")
        reply = await policy.ask_at_once(R1, HELLO)
        assert tokens_of(reply) == UNCUT
        assert policy.backend.calls[-1].generated == 13
        assert policy.restored_cuts == []
        await policy.checkpoint(R1, directory="d1")
        record = policy.records("d1")["r-a1"]
        assert record.cut is None, "freed after delivery"
        (row,) = record.rows
        assert row.continued_token_count == 7
        whole = await world.store.get(row.staging_key)
        assert whole.token_ids == UNCUT


async def test_another_call_gives_the_cut_back(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """CUT-5, POL-5, I14: it regenerates, counted and logged; the cut waits for the right call, and is
    in the next export."""
    world = World()
    await cut_one(world)
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        other = chat("hello", temperature=0.5)
        with caplog.at_level(logging.INFO):
            assert tokens_of(await policy.ask_at_once(R1, other)) == UNCUT
        assert "a restored cut is not for it: it is of another request" in caplog.text
        assert policy.not_continued == {"another_request": 1}
        assert policy.backend.calls[-1].generated == 20
        await policy.checkpoint(R1, directory="d1")
        assert policy.records("d1")["r-a1"].cut == policy.records()["r"].cut
        await policy.resume()
        await policy.ask_at_once(R1, HELLO)
        assert policy.backend.calls[-1].generated == 13


async def test_the_same_request_sent_anew_need_not_be_the_same_bytes(
    autojump_clock: object,
) -> None:
    """CUT-4: what a server or client makes up for each sending does not count."""
    world = World()
    await cut_one(world)
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        again = chat("hello", user="u2", metadata={"try": 2}, stop=None)
        await policy.ask_at_once(R1, again)
        assert policy.backend.calls[-1].generated == 13


async def test_a_cut_is_claimed_once(autojump_clock: object) -> None:
    """I14: of two equal calls one continues, the other regenerates."""
    world = World()
    await cut_one(world)
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        first, _ = await policy.begin_live(R1, HELLO)
        second, _ = await policy.begin_live(R1, HELLO)
        for live in list(policy.backend.live):
            live.finish.set()
        await first.ended.wait()
        await second.ended.wait()
        assert sorted(call.generated for call in policy.backend.calls[-2:]) == [13, 20]
        assert tokens_of(first.reply) == tokens_of(second.reply) == UNCUT


async def test_a_client_that_left_gives_the_cut_back(autojump_clock: object) -> None:
    """CUT-5: kept until the continued reply is delivered, whether it left before or while sending."""
    world = World()
    await cut_one(world)
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        caller, _ = await policy.begin_live(R1, HELLO)
        caller.leave()
        await caller.ended.wait()
        policy.backend.at_once = True
        reply = await policy.policy.call(R1, HELLO)
        reply.done(False)
        assert policy.restored_cuts == ["r-a1"]
        await policy.ask(R1, HELLO)
        assert [call.generated for call in policy.backend.calls[-2:]] == [13, 13]
        assert policy.restored_cuts == []


async def test_a_second_crash_before_the_replacement_called_keeps_the_cut(
    autojump_clock: object,
) -> None:
    """CUT-5, I8: for any number of crashes."""
    world = World()
    await cut_one(world)
    directory = "d"
    for attempt in range(1, 4):
        async with open_policy(world) as policy:
            await policy.restore(episode("r", attempt - 1), directory=directory)
            await policy.resume("x1")
            directory = f"d{attempt}"
            await policy.checkpoint(episode("r", attempt), directory=directory)
    async with open_policy(world) as policy:
        await policy.restore(episode("r", 3), directory=directory)
        await policy.resume("x1")
        assert tokens_of(await policy.ask_at_once(episode("r", 4), HELLO)) == UNCUT
        assert policy.backend.calls[-1].generated == 13


async def test_a_claimed_cut_is_exported_while_its_call_is_undelivered(
    autojump_clock: object,
) -> None:
    """CUT-5: the round failed for the continuing call, so the old cut is what there is."""
    world = World()
    await cut_one(world)
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        await policy.begin_live(R1, HELLO)
        policy.backend.cut_mode = "unreachable"
        await policy.checkpoint(R1, directory="d1")
        assert policy.records("d1")["r-a1"].cut == policy.records()["r"].cut


async def test_a_continuing_call_is_cut_again(autojump_clock: object) -> None:
    """CUT-4: the prefix grows by chunks, no token is staged twice, the stamp is the oldest."""
    world = World()
    await cut_one(world)
    world.backend.policy_version = 5
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        _, live = await policy.begin_live(R1, HELLO)
        live.emit(4)
        await policy.checkpoint(R1, directory="d1")
        cut = policy.records("d1")["r-a1"].cut
        assert cut is not None
        chunks = [await world.store.get(key) for key in cut.continuation.staging_keys]
        assert [len(chunk.token_ids) for chunk in chunks] == [7, 4]
        assert cut.continuation.prefix_token_count == 11
        assert cut.continuation.policy_version == 3
    async with open_policy(world) as policy:
        await policy.restore(R1, directory="d1")
        await policy.resume("x1")
        assert tokens_of(await policy.ask_at_once(R2, HELLO)) == UNCUT
        assert policy.backend.calls[-1].generated == 9
        await policy.checkpoint(R2, directory="d2")
        assert policy.records("d2")["r-a2"].rows[0].policy_version == 3


async def test_only_the_latest_admitted_call_of_an_episode_is_exported(
    autojump_clock: object,
) -> None:
    """CUT-3, I28: a client retry leaves two calls; both are asked for, one is written."""
    world = World()
    async with open_policy(world) as policy:
        _, first = await policy.begin_live(R, HELLO)
        _, second = await policy.begin_live(R, HELLO)
        first.emit(9)
        second.emit(5)
        await policy.checkpoint(R)
        assert len(policy.backend.inventories[0].active_prefixes) == 2
        cut = policy.records()["r"].cut
        assert cut is not None
        assert cut.model_call_id == second.extension.model_call_id
        assert cut.continuation.prefix_token_count == 5


async def test_a_held_reply_is_a_cut_of_everything(autojump_clock: object) -> None:
    """CUT-1, CUT-4: what was generated and staged before the commit is not generated again."""
    world = World()
    async with open_policy(world) as policy:
        _, live = await policy.begin_live(R, HELLO)
        live.emit(7)
        await policy.prepare()
        live.finish.set()
        await wait_all_tasks_blocked()
        await policy.commit(episodes=(R,))
        cut = policy.records()["r"].cut
        assert cut is not None
        assert cut.continuation.prefix_token_count == 20
        assert cut.continuation.terminal_finish_reason.value == "length"
        assert policy.records()["r"].rows == ()
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        assert tokens_of(await policy.ask_at_once(R1, HELLO)) == UNCUT
        assert policy.backend.calls[-1].generated == 0


async def test_a_constrained_call_is_neither_cut_nor_continued(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """CUT-6, I27, POL-5: it is counted with its reason; a restored cut stays for the right call."""
    world = World()
    constrained = chat("hello", tool_choice="required")
    async with open_policy(world) as policy:
        _, live = await policy.begin_live(R, constrained)
        live.emit(7)
        await policy.prepare()
        assert policy.counts["cut_skipped"] == 1
        live.finish.set()
        await wait_all_tasks_blocked()
        await policy.commit(episodes=(R,))
        assert policy.records() == {}
        assert policy.backend.inventories == []
    await_cut = World()
    await cut_one(await_cut)
    async with open_policy(await_cut) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        with caplog.at_level(logging.INFO):
            await policy.ask_at_once(R1, constrained)
        assert "a restored cut is not for it: tool_choice:required" in caplog.text
        assert policy.not_continued == {"cannot": 1}
        assert policy.backend.calls[-1].generated == 20
        assert policy.restored_cuts == ["r-a1"]


async def test_a_cut_that_claims_to_be_of_a_constrained_call_is_not_continued(
    autojump_clock: object,
) -> None:
    """I27: whoever wrote it."""
    world = World()
    await cut_one(world)
    constrained = chat("hello", tool_choice="required")
    where, part = next(iter(world.archive.parts.items()))
    record = unpack(PolicyRecord, part.records[0].payload)
    digest = request_digest(constrained.route, constrained.body)
    forged = attrs.evolve(record, cut=attrs.evolve(record.cut, request_digest=digest))
    world.archive.parts[where] = attrs.evolve(part, records=(make_record(R, forged),))
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        await policy.ask_at_once(R1, constrained)
        assert policy.backend.calls[-1].generated == 20


FAILURES = {
    "never": "no receipt",
    "late": "no receipt",
    "unreachable": "connection refused",
    "refused": "no such route",
    "incomplete": "does not cover",
    "twice": "does not cover",
    "other inventory": "another inventory",
    "other checkpoint": "checkpoint other",
    "other call": "another call",
    "no evidence": "without all its evidence",
    "failure with evidence": "carries evidence",
    "each fails": "disk is full",
    "fault": "a fault: ValueError",
}


@pytest.mark.parametrize("mode", FAILURES)
async def test_a_round_that_fails_costs_regeneration_only(
    mode: str, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """CUT-7, POL-5: prepared all the same, counted and logged with the reason; the call regenerates."""
    world = World()
    world.backend.cut_mode = world.backend.describe_mode = mode
    async with open_policy(world) as policy:
        await policy.ask_at_once(R, chat("a"))
        for name in ("r", "s"):
            _, live = await policy.begin_live(episode(name), HELLO)
            live.emit(7)
        with caplog.at_level(logging.WARNING):
            extra = await policy.checkpoint(R, episode("s"))
        assert policy.counts | {"cut": 0, "cut_failed": 2, "held": 2} == policy.counts
        assert FAILURES[mode] in caplog.text
        assert "2 generations not cut" in caplog.text
        assert policy.records()["r"].cut is None
        assert list(extra["staging_keys_by_episode"]) == ["r"]
    world.backend.cut_mode = "honest"
    async with open_policy(world) as policy:
        await policy.restore(R, episode("s"))
        await policy.resume("x1")
        assert tokens_of(await policy.ask_at_once(R1, HELLO)) == UNCUT
        assert policy.backend.calls[-1].generated == 20


async def test_reasons_of_a_backend_are_told_in_few_short_lines(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """CUT-7, POL-5: each call may have one of its own; all are counted."""
    count = 50
    world = World()
    async with open_policy(world) as policy:
        for number in range(count):
            _, live = await policy.begin_live(episode(f"e{number}"), HELLO)
            live.emit(2)
        world.backend.why_each_fails = lambda asked: f"{asked.rollout_id}: " + "x" * 10_000
        with caplog.at_level(logging.WARNING):
            await policy.prepare()
        assert policy.counts["cut_failed"] == count
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == REASONS_LOGGED_MAX + 1
        assert max(map(len, lines)) < 300
        rest = count - REASONS_LOGGED_MAX
        assert lines[-1].endswith(f"{rest} generations not cut: for other reasons")


async def test_a_hung_backend_costs_half_of_the_time_that_is_left(autojump_clock: object) -> None:
    """CUT-1, CUT-7: of 3 s to the deadline at most 1.5 s."""
    world = World()
    world.backend.cut_mode = "never"
    world.backend.describe_mode = "never"
    async with open_policy(world) as policy:
        _, live = await policy.begin_live(R, HELLO)
        live.emit(7)
        began = trio.current_time()
        assert (await policy.prepare(timeout_s=3)).phase == "prepared"
        assert trio.current_time() - began == pytest.approx(1.5)
        assert policy.backend.cut_deadlines == [pytest.approx(began + 1.5)]


async def test_a_resume_ends_a_round_at_once(autojump_clock: object) -> None:
    """CTL-10, I31: nothing of it is left, and the next checkpoint has a round of its own."""
    world = World()
    world.backend.cut_mode = "never"
    async with open_policy(world) as policy:
        caller, live = await policy.begin_live(R, HELLO)
        live.emit(7)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(policy.prepare)
            await wait_all_tasks_blocked()
            await policy.resume()
        assert policy.counts["cut_failed"] == 0
        world.backend.cut_mode = "honest"
        await policy.prepare("c2")
        assert policy.counts["cut"] == 1
        await policy.resume("c2")
        live.finish.set()
        await caller.ended.wait()


async def test_a_call_without_a_token_yet_is_skipped_not_failed(autojump_clock: object) -> None:
    """POL-5: nothing is lost by generating it again."""
    async with open_policy(World()) as policy:
        await policy.begin_live(R, HELLO)
        await policy.prepare()
        assert policy.counts | {"cut": 0, "cut_failed": 0, "cut_skipped": 1} == policy.counts


async def test_without_calls_the_backend_is_not_asked_to_cut(autojump_clock: object) -> None:
    """CUT-1: and with cuts off it never is."""
    world = World()
    async with open_policy(world) as policy:
        await policy.checkpoint(R)
    async with open_policy(world, cuts=False) as policy:
        _, live = await policy.begin_live(R, HELLO)
        live.emit(7)
        await policy.prepare()
        assert policy.counts["cut"] == policy.counts["cut_skipped"] == 0
    assert world.backend.inventories == []


async def test_a_foreign_backend_is_counted_as_skipped(autojump_clock: object) -> None:
    """POL-5, CUT-7: never silent."""
    world = World()
    world.backend.native = False
    async with open_policy(world) as policy:
        await policy.begin_live(R, HELLO)
        await policy.prepare()
        assert policy.counts["cut_skipped"] == 1
        assert world.backend.inventories == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"digest": "build-2"}, "another engine build"),
        ({"policy_version": 2}, "newer than 2"),
    ],
)
async def test_a_prefix_that_the_engine_refuses_is_generated_anew(
    change: dict[str, Any], why: str, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """CUT-4, CUT-7: another build or a newer policy; logged, and the caller notices nothing."""
    world = World()
    await cut_one(world)
    for name, value in change.items():
        setattr(world.backend, name, value)
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        reply = await policy.ask_at_once(R1, HELLO)
        assert tokens_of(reply) == UNCUT
        assert policy.backend.calls[-1].generated == 20
        assert policy.backend.calls[-1].extension.continuation is None
        assert why in caplog.text
        assert policy.restored_cuts == []
        assert policy.not_continued == {"failed": 1}


async def test_a_prefix_whose_tokens_are_gone_is_generated_anew(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """CUT-7, POL-5: the store lost them."""
    world = World()
    await cut_one(world)
    lost = World()
    lost.archive = world.archive
    async with open_policy(lost) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        assert tokens_of(await policy.ask_at_once(R1, HELLO)) == UNCUT
        assert policy.backend.calls[-1].generated == 20
        assert "generated anew: " in caplog.text
        assert "no such record" in caplog.text
        assert policy.not_continued == {"failed": 1}


async def test_a_backend_that_continues_other_tokens_is_not_believed(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """I25, CUT-7: a reply that does not begin with the prefix is thrown away, the call made anew."""
    world = World()
    await cut_one(world)
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        caller, live = await policy.begin_live(R1, HELLO)
        live.token_ids = (999, *live.token_ids[1:])
        policy.backend.at_once = True
        live.finish.set()
        await caller.ended.wait()
        assert tokens_of(caller.reply) == UNCUT
        assert "does not begin with the tokens" in caplog.text
        assert policy.not_continued == {"failed": 1}
        assert policy.restored_cuts == []
        await policy.checkpoint(R1, directory="d1")
        (row,) = policy.records("d1")["r-a1"].rows
        assert (await world.store.get(row.staging_key)).token_ids == UNCUT


def _error(status: int, message: str) -> BackendReply:
    return BackendReply(status=status, body={"error": {"message": message}})


@pytest.mark.parametrize(
    "failure",
    [
        TransportError("engine: it died of the prefix"),
        _error(500, "it died of the prefix"),
        _error(400, "it died of the prefix"),
        _error(422, "it died of the prefix"),
        BackendReply(status=200, body={"error": "it died of the prefix"}),
    ],
    ids=str,
)
async def test_a_cut_that_always_fails_does_not_fail_its_episode(
    failure: Any, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """CUT-7, POL-5: whatever the engine says of it; the same call without it is answered."""
    world = World()
    await cut_one(world)
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        caller, live = await policy.begin_live(R1, HELLO)
        policy.backend.at_once = True
        live.fail(failure)
        await caller.ended.wait()
        assert tokens_of(caller.reply) == UNCUT
        assert policy.backend.calls[-1].extension.continuation is None
        assert "r-a1, call " in caplog.text
        assert "the cut is not continued, the call is generated anew: " in caplog.text
        assert policy.not_continued == {"failed": 1}
        assert policy.restored_cuts == []


async def test_a_backend_that_is_down_does_not_use_a_cut_up(autojump_clock: object) -> None:
    """CUT-5, CUT-7: the caller is told why; when the backend is back, its call goes on from the cut."""
    world = World()
    await cut_one(world)
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        caller, live = await policy.begin_live(R1, HELLO)
        live.fail(TransportError("engine: connection refused"))
        await wait_all_tasks_blocked()
        (again,) = policy.backend.live
        again.fail(TransportError("engine: connection refused"))
        await caller.ended.wait()
        assert caller.error.code == "backend_failed"
        assert caller.error.detail == "engine: connection refused"
        assert policy.restored_cuts == ["r-a1"]
        assert policy.not_continued == {}
        assert tokens_of(await policy.ask_at_once(R1, HELLO)) == UNCUT
        assert policy.backend.calls[-1].generated == 13


async def test_a_call_that_failed_at_the_backend_gives_the_cut_back(
    autojump_clock: object,
) -> None:
    """CUT-5."""
    world = World()
    await cut_one(world)
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        caller, live = await policy.begin_live(R1, HELLO)
        live.fail(BackendReply(status=503, body={"error": {"message": "busy"}}))
        await caller.ended.wait()
        assert caller.reply.status == 503
        assert policy.restored_cuts == ["r-a1"]


async def test_a_commit_that_leaves_a_restored_cut_out_frees_it(autojump_clock: object) -> None:
    """CTL-13, I19: without a refusal; a call of that attempt is generated anew."""
    world = World()
    await cut_one(world)
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        await policy.checkpoint(directory="d1")
        await policy.resume()
        assert policy.restored_cuts == []
        await policy.ask_at_once(R1, HELLO)
        assert policy.backend.calls[-1].generated == 20


async def test_a_foreign_backend_leaves_a_restored_cut_alone(autojump_clock: object) -> None:
    """CUT-5: it cannot continue it; a restart with the right engine can."""
    world = World()
    await cut_one(world)
    world.backend.native = world.backend.gives_tokens = False
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        await policy.ask_at_once(R1, HELLO)
        assert policy.restored_cuts == ["r-a1"]
        assert policy.not_continued == {"cannot": 1}


@pytest.mark.parametrize("claimed", [False, True])
async def test_retire_frees_a_restored_cut(claimed: bool, autojump_clock: object) -> None:
    """CTL-12, I34: claimed or not."""
    world = World()
    await cut_one(world)
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        if claimed:
            await policy.begin_live(R1, HELLO)
        await policy.retire(R1)
        assert policy.restored_cuts == []
        assert policy.counts["inflight"] == 0


async def test_two_participants_in_one_process_continue_their_own_cuts(
    autojump_clock: object,
) -> None:
    """POL-4: each its own, in one process, over one backend and store."""
    world = World()
    async with open_policy(world, instance="one") as one, open_policy(world, instance="two") as two:
        _, live_one = await one.begin_live(R, HELLO)
        _, live_two = await two.begin_live(R, HELLO)
        live_one.emit(3)
        live_two.emit(6)
        await one.checkpoint(R)
        await two.checkpoint(R)
        assert one.counts["held"] == two.counts["held"] == 1
    async with open_policy(world, instance="one") as one, open_policy(world, instance="two") as two:
        for policy, rest in ((one, 17), (two, 14)):
            await policy.restore(R)
            await policy.resume("x1")
            assert tokens_of(await policy.ask_at_once(R1, HELLO)) == UNCUT
            assert world.backend.calls[-1].generated == rest


async def test_the_manifest_says_what_the_engine_was(autojump_clock: object) -> None:
    """CUT-4: for people; the engine itself compares the digest in each cut."""
    world = World()
    async with open_policy(world) as policy:
        await policy.checkpoint(R)
        part = world.archive.parts[("d", "model", "policy")]
        assert part.fields["engine"]["digest"] == "build-1"
        await policy.resume()
        world.backend.describe_mode = "unreachable"
        await policy.checkpoint(R, name="c2", directory="d2")
        assert world.archive.parts[("d2", "model", "policy")].fields == {"engine": None}


async def test_many_calls_are_cut_in_one_round(autojump_clock: object) -> None:
    """POL-6, CUT-1: each call is in one inventory; a part that fails costs its own calls only."""
    count = INVENTORY_CALLS_MAX + 40
    async with open_policy(World()) as policy:
        episodes = [episode(f"e{number}") for number in range(count)]
        for e in episodes:
            _, live = await policy.begin_live(e, HELLO)
            live.emit(2)
        await policy.checkpoint(*episodes)
        assert policy.counts | {"inflight": count, "held": count, "cut": count} == policy.counts
        named = [p.ticket_id for i in policy.backend.inventories for p in i.active_prefixes]
        assert len(policy.backend.inventories) == 2
        assert len(set(named)) == len(named) == count
        await policy.resume()
        policy.backend.fail_cuts_over = 40
        await policy.prepare("c2")
        assert policy.counts | {"cut": 40, "cut_failed": INVENTORY_CALLS_MAX} == policy.counts
        await policy.resume("c2")
        assert text_of(await policy.ask_at_once(R, chat("a")))
