"""The policy server's gate: what is held, what blocks, what a retire stops."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gymtrio.capture.ledger import LedgerRow
from gymtrio.capture.replies import Route
from gymtrio.capture.tokens import StagingKey
from gymtrio.errors import (
    AdmissionClosed,
    BackendFailed,
    InvalidPhase,
    InvalidRequest,
    RetireIncomplete,
    StaleAttempt,
    TransportError,
    Unavailable,
)
from gymtrio.participants.policy.calls import BackendReply, PolicyCall
from gymtrio.wire.control import Kind
from tests.helpers.plane import episode
from tests.participants.policy.harness import (
    World,
    chat,
    open_policy,
    tokens_of,
    uncut_tokens,
)

R = episode("r")


async def test_a_policy_server_is_a_participant_of_kind_model(autojump_clock: object) -> None:
    """POL-1: it answers status as a model, with every count at zero."""
    async with open_policy(World()) as policy:
        status = policy.control.status()
        assert (status.kind, status.phase) == (Kind.MODEL.value, "idle")
        assert status.report.counts == {
            "inflight": 0,
            "held": 0,
            "cut": 0,
            "cut_failed": 0,
            "cut_skipped": 0,
        }


async def test_a_reply_carries_the_tokens_of_its_generation(autojump_clock: object) -> None:
    """I25: ids and log-probs as the backend gave them; the extension between the servers is gone."""
    async with open_policy(World()) as policy:
        call = chat("hello")
        reply = await policy.ask_at_once(R, call)
        message: Any = reply.body["choices"][0]["message"]  # type: ignore[index]
        assert reply.status == 200
        assert tuple(message["generation_token_ids"]) == uncut_tokens(call.body)
        assert len(message["generation_log_probs"]) == len(message["generation_token_ids"])
        assert message["prompt_token_ids"]
        assert "gymtrio" not in reply.body
        assert "gymtrio" not in call.body, "the caller's own body is not touched"


async def test_a_generation_in_flight_does_not_hold_up_a_checkpoint(
    autojump_clock: object,
) -> None:
    """POL-2, POL-5: prepared at once with one call held; its reply leaves at resume only (I2)."""
    async with open_policy(World()) as policy:
        caller, live = await policy.begin_live(R, chat("hello"))
        assert policy.counts["inflight"] == 1
        assert policy.counts["held"] == 0
        assert (await policy.prepare()).phase == "prepared"
        assert policy.counts["held"] == 1
        live.finish.set()
        await wait_all_tasks_blocked()
        assert not caller.answered
        await policy.commit(episodes=(R,))
        await wait_all_tasks_blocked()
        assert not caller.answered
        await policy.resume()
        await caller.ended.wait()
        assert caller.reply is not None
        assert policy.counts["inflight"] == policy.counts["held"] == 0


async def test_a_reply_that_is_leaving_is_waited_for(autojump_clock: object) -> None:
    """POL-2: only a response whose first byte may be out blocks readiness, and it is named."""
    async with open_policy(World()) as policy:
        policy.backend.at_once = True
        reply = await policy.policy.call(R, chat("hello"))
        preparing = await policy.prepare(timeout_s=2)
        assert preparing.phase == "preparing"
        assert preparing.report.blockers == ("r",)
        (detail,) = preparing.report.details
        assert detail.doing == "sending its reply"
        assert detail.since_s == 2
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(policy.prepare)
            await wait_all_tasks_blocked()
            reply.done(True)
        assert policy.phase == "prepared"
        assert trio.current_time() == began, "told, not polled"


async def test_a_new_call_waits_at_the_gate_without_a_ticket(autojump_clock: object) -> None:
    """POL-2, POL-4: it is not in flight, holds nothing, and goes on at resume."""
    async with open_policy(World()) as policy:
        await policy.prepare()
        caller = policy.begin(R, chat("hello"))
        await wait_all_tasks_blocked()
        assert policy.counts["inflight"] == 0
        assert not policy.backend.calls
        policy.backend.at_once = True
        await policy.resume()
        await caller.ended.wait()
        assert caller.reply is not None


async def test_a_caller_may_ask_to_be_refused_rather_than_wait(autojump_clock: object) -> None:
    """POL-2, CTL-18."""
    async with open_policy(World()) as policy:
        await policy.prepare()
        call = PolicyCall(route=Route.CHAT, body=chat("hello").body, refuse_when_closed=True)
        with pytest.raises(AdmissionClosed):
            await policy.ask(R, call)


async def test_a_waiting_call_of_a_retired_attempt_is_stale(autojump_clock: object) -> None:
    """POL-2, CTL-5: retire wakes it."""
    async with open_policy(World()) as policy:
        await policy.prepare()
        caller = policy.begin(R, chat("hello"))
        await wait_all_tasks_blocked()
        await policy.retire(R)
        await caller.ended.wait()
        assert isinstance(caller.error, StaleAttempt)
        assert not policy.backend.calls


async def test_retire_answers_after_the_generation_has_stopped(autojump_clock: object) -> None:
    """CTL-12, I10: the backend's call is cancelled first; later attempts are served."""
    async with open_policy(World()) as policy:
        caller, live = await policy.begin_live(R, chat("hello"))
        other, _ = await policy.begin_live(episode("r", 1), chat("hello"))
        await policy.retire(R)
        assert policy.backend.cancelled == [live]
        assert isinstance(caller.error, StaleAttempt)
        assert not other.answered
        with pytest.raises(StaleAttempt):
            await policy.ask(R, chat("hello"))


async def test_a_retire_waits_for_a_reply_that_is_leaving(autojump_clock: object) -> None:
    """CTL-12: it cannot be called back; it blocks prepare, and forget, until it has left."""
    async with open_policy(World()) as policy:
        policy.backend.at_once = True
        reply = await policy.policy.call(R, chat("hello"))
        retired = trio.Event()

        async def retire() -> None:
            await policy.retire(R)
            retired.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(retire)
            await wait_all_tasks_blocked()
            assert not retired.is_set()
            with pytest.raises(RetireIncomplete, match="r"):
                await policy.forget("r")
            assert policy.policy.report().details[0].doing == "retired, sending its reply"
            reply.done(True)
        await policy.forget("r")
        assert policy.policy.ready()


async def test_a_held_call_that_is_retired_gets_no_reply(autojump_clock: object) -> None:
    """CTL-12, I2: also when opening and retiring fall into one instant."""
    async with open_policy(World()) as policy:
        caller, live = await policy.begin_live(R, chat("hello"))
        await policy.prepare()
        live.finish.set()
        await wait_all_tasks_blocked()
        policy.policy.open()
        policy.policy.refuse([R])
        await caller.ended.wait()
        assert isinstance(caller.error, StaleAttempt)
        assert policy.policy.ready()


@pytest.mark.parametrize("passes", range(12))
async def test_no_reply_leaves_from_the_instant_of_retiring_on(
    passes: int, autojump_clock: object
) -> None:
    """CTL-5, I10: wherever the call stands then, also where it would not look again."""
    async with open_policy(World()) as policy:
        policy.backend.at_once = True
        caller = policy.begin(R, chat("hello"))
        for _ in range(passes):
            await trio.lowlevel.checkpoint()
        had_left = caller.reply is not None
        policy.policy.refuse([R])
        await caller.ended.wait()
        assert (caller.reply is not None) == had_left


async def test_no_held_reply_leaves_from_the_instant_of_retiring_on(
    autojump_clock: object,
) -> None:
    """CTL-5, I10: woken by the opening, it has not run yet when its attempt is retired."""
    async with open_policy(World()) as policy:
        for number in range(60):
            e = episode(f"e{number}")
            caller, live = await policy.begin_live(e, chat("hello"))
            policy.policy.close()
            live.finish.set()
            await wait_all_tasks_blocked()
            policy.policy.open()
            for _ in range(number % 4):
                await trio.lowlevel.checkpoint()
            had_left = caller.reply is not None
            policy.policy.refuse([e])
            await caller.ended.wait()
            assert (caller.reply is not None) == had_left


async def test_no_reply_leaves_of_a_call_that_is_retired_while_the_books_are_told(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    """CTL-5, I10: a worker hears of both in one turn, and its cancellation comes after the answer."""
    async with open_policy(World()) as policy:
        told, go = trio.Event(), trio.Event()
        keeper = policy.policy.gate._keeper
        deliver = keeper.deliver

        async def from_elsewhere(call_id: str, row: LedgerRow) -> None:
            told.set()
            await go.wait()
            await deliver(call_id, row)

        monkeypatch.setattr(keeper, "deliver", from_elsewhere)
        caller, live = await policy.begin_live(R, chat("hello"))
        live.finish.set()
        await told.wait()
        go.set()
        policy.policy.refuse([R])
        await caller.ended.wait()
        assert caller.reply is None
        assert isinstance(caller.error, StaleAttempt)
        assert policy.policy.ready()


async def test_a_client_that_leaves_while_held_costs_nothing(autojump_clock: object) -> None:
    """POL-3: ticket and row vanish with it."""
    async with open_policy(World()) as policy:
        caller, live = await policy.begin_live(R, chat("hello"))
        await policy.prepare()
        live.finish.set()
        await wait_all_tasks_blocked()
        caller.leave()
        await caller.ended.wait()
        assert policy.counts["inflight"] == policy.counts["held"] == 0
        await policy.commit(episodes=(R,))
        assert policy.records() == {}


async def test_clients_that_leave_while_held_leave_nothing_behind(autojump_clock: object) -> None:
    """POL-2, I33, I34: before and after their reply is here, and with a cut of it; others are held on,
    and the checkpoint is the same without them."""
    async with open_policy(World()) as policy:
        stays, live = await policy.begin_live(episode("stays"), chat("hello"))
        live.emit(3)
        leavers = []
        for number in range(20):
            caller, live = await policy.begin_live(episode(f"e{number}"), chat("hello"))
            live.emit(number % 2)
            leavers.append((caller, live))
        assert (await policy.prepare()).phase == "prepared"
        for number, (_, live) in enumerate(leavers):
            if number % 3:
                live.finish.set()
        await wait_all_tasks_blocked()
        for caller, _ in leavers:
            caller.leave()
            await caller.ended.wait()
        assert policy.policy.ready()
        assert policy.counts | {"inflight": 1, "held": 1} == policy.counts
        assert len(policy.policy.books) == 1
        names = tuple(episode(f"e{number}") for number in range(20))
        reply = await policy.commit(episodes=(episode("stays"), *names))
        assert list(policy.records()) == ["stays"]
        assert list(reply.extra["staging_keys_by_episode"]) == ["stays"]
        await policy.resume()
        policy.backend.live[0].finish.set()
        await stays.ended.wait()
        assert tokens_of(stays.reply) == uncut_tokens(chat("hello").body)
        assert policy.counts["inflight"] == len(policy.policy.books) == 0


async def test_a_client_that_leaves_stops_its_generation(autojump_clock: object) -> None:
    """SRV-3."""
    async with open_policy(World()) as policy:
        caller, live = await policy.begin_live(R, chat("hello"))
        caller.leave()
        await caller.ended.wait()
        assert policy.backend.cancelled == [live]
        assert policy.counts["inflight"] == 0


async def test_calls_on_nobodys_behalf_are_served_and_held_too(autojump_clock: object) -> None:
    """POL-2: they have a ticket, but neither row nor tokens."""
    world = World()
    async with open_policy(world) as policy:
        caller, live = await policy.begin_live(None, chat("hello", n=2))
        assert live.extension is None
        await policy.prepare()
        live.finish.set()
        await wait_all_tasks_blocked()
        assert not caller.answered
        assert policy.counts["held"] == 1
        await policy.resume()
        await caller.ended.wait()
        assert caller.reply is not None
        assert world.store.keys() == []


@pytest.mark.parametrize(
    ("status", "error"),
    [(500, BackendFailed), (409, BackendFailed), (401, BackendFailed), (302, BackendFailed)],
)
async def test_a_failure_between_servers_is_a_bad_gateway(
    status: int, error: type[Exception], autojump_clock: object
) -> None:
    async with open_policy(World()) as policy:
        caller, live = await policy.begin_live(R, chat("hello"))
        live.fail(BackendReply(status=status, body={"error": {"message": "boom"}}))
        await caller.ended.wait()
        assert isinstance(caller.error, error)
        assert "boom" in str(caller.error)


@pytest.mark.parametrize("status", [400, 413, 422, 429, 503])
async def test_what_the_backend_says_about_the_request_is_passed_on(
    status: int, autojump_clock: object
) -> None:
    body = {"error": {"message": "max_tokens is too large", "type": "invalid_request_error"}}
    async with open_policy(World()) as policy:
        caller, live = await policy.begin_live(R, chat("hello"))
        live.fail(BackendReply(status=status, body={**body}))
        await caller.ended.wait()
        assert caller.reply is not None
        assert (caller.reply.status, caller.reply.body) == (status, body)
        await policy.checkpoint(R)
        assert policy.records() == {}, "an error is not a call that was delivered"


async def test_a_refusal_that_comes_while_closed_is_held_as_well(autojump_clock: object) -> None:
    """I2: the agent must not go on because its model call failed during a checkpoint."""
    async with open_policy(World()) as policy:
        caller, live = await policy.begin_live(R, chat("hello"))
        await policy.prepare()
        live.fail(TransportError("engine: connection reset"))
        await wait_all_tasks_blocked()
        assert not caller.answered
        await policy.resume()
        await caller.ended.wait()
        assert isinstance(caller.error, BackendFailed)


async def test_a_reply_without_its_tokens_is_refused(autojump_clock: object) -> None:
    """I25: nothing is staged, no row is made."""
    world = World()
    world.backend.gives_tokens = False
    async with open_policy(world) as policy:
        policy.backend.at_once = True
        with pytest.raises(BackendFailed, match="prompt_token_ids: missing"):
            await policy.ask(R, chat("hello"))
        assert world.store.keys() == []


async def test_a_token_store_that_fails_fails_the_call(autojump_clock: object) -> None:
    """I17: a reply whose tokens are not durable does not leave."""
    world = World()
    async with open_policy(world) as policy:
        await policy.ask_at_once(R, chat("hello"))
        (key,) = world.store.keys()
        caller, live = await policy.begin_live(R, chat("again"))
        taken = StagingKey(f"r/{live.extension.model_call_id}/whole")
        await world.store.put((attrs.evolve(await world.store.get(key), staging_key=taken),))
        live.finish.set()
        await caller.ended.wait()
        assert isinstance(caller.error, Unavailable)
        await policy.checkpoint(R)
        assert len(policy.records()["r"].rows) == 1


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (chat("hello", n=2), InvalidRequest),
    ],
)
async def test_what_is_not_served_is_refused_before_anything_is_done(
    call: PolicyCall, error: type[Exception], autojump_clock: object
) -> None:
    """POL-1: also while closed, where waiting would change nothing."""
    async with open_policy(World()) as policy:
        await policy.prepare()
        with pytest.raises(error):
            await policy.ask(R, call)
        assert policy.counts["inflight"] == 0


async def test_commit_needs_a_scope(autojump_clock: object) -> None:
    """CTL-13: the model holds the ledger of everything it ever served."""
    async with open_policy(World()) as policy:
        await policy.prepare()
        with pytest.raises(InvalidRequest, match="episode_ids"):
            await policy.commit(episodes=None)
        assert policy.archive.parts == {}
        await policy.commit(episodes=(R,))


async def test_restore_is_refused_on_a_server_that_served_a_rollout(
    autojump_clock: object,
) -> None:
    """POL-7, CTL-14: a ledger that this process appended to belongs to a live episode."""
    async with open_policy(World()) as policy:
        await policy.ask_at_once(R, chat("hello"))
        await policy.checkpoint(R)
        await policy.resume()
        before = policy.policy.rows(R)
        with pytest.raises(InvalidPhase, match="served"):
            await policy.restore(R)
        assert policy.policy.rows(R) == before
        assert policy.policy.rows(episode("r", 1)) == ()
        assert policy.restored_cuts == []
        reply = await policy.ask_at_once(R, chat("hello"))
        assert reply.status == 200


async def test_restore_is_refused_while_a_first_call_is_under_way(autojump_clock: object) -> None:
    """POL-7: it has no row yet, and its episode lives; nothing is read, fenced or installed."""
    world = World()
    async with open_policy(world) as policy:
        await policy.ask_at_once(R, chat("hello"))
        await policy.checkpoint(R)
    async with open_policy(world) as policy:
        caller, live = await policy.begin_live(R, chat("hello"))
        with pytest.raises(InvalidPhase, match="served"):
            await policy.restore(R)
        assert policy.policy.rows(episode("r", 1)) == ()
        live.finish.set()
        await caller.ended.wait()
        assert len(policy.policy.rows(R)) == 1


async def test_a_woken_call_looks_again_at_the_gate(autojump_clock: object) -> None:
    """I2: resumed and closed again in one instant, a held reply stays."""
    async with open_policy(World()) as policy:
        caller, live = await policy.begin_live(R, chat("hello"))
        await policy.prepare()
        live.finish.set()
        await wait_all_tasks_blocked()
        policy.policy.open()
        policy.policy.close()
        await wait_all_tasks_blocked()
        assert not caller.answered
        policy.policy.open()
        await caller.ended.wait()
        assert tokens_of(caller.reply) == uncut_tokens(chat("hello").body)


async def test_an_error_that_is_leaving_is_waited_for_like_a_result(
    autojump_clock: object,
) -> None:
    """I2, POL-2: it is a reply, so a checkpoint is not prepared while it is being sent."""
    async with open_policy(World()) as policy:
        caller, live = await policy.begin_live(R, chat("hello"), take=False)
        live.fail(TransportError("the engine is gone"))
        await caller.ended.wait()
        assert isinstance(caller.error, BackendFailed)
        assert caller.reply is not None
        assert caller.reply.status == 502
        preparing = await policy.prepare(timeout_s=2)
        assert (preparing.phase, preparing.report.blockers) == ("preparing", ("r",))
        caller.reply.done(True)
        assert (await policy.prepare()).phase == "prepared"
        assert policy.counts["inflight"] == 0
