"""Environment, agent and counter together, with a scripted policy: episodes over crashes.

Every server takes part; what the policy and the tools saw is compared, not the reward alone.
"""

from __future__ import annotations

import json
from typing import Any, Final

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.participants.base import make_record
from gymtrio.participants.environment import EnvironmentRecord
from gymtrio.wire.codec import unpack
from gymtrio.wire.control import Kind
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.native import Call, Rig, Scripted, open_rig


def episode(name: str = "r", attempt: int = 0) -> EpisodeId:
    return EpisodeId(RolloutId(name), attempt)


R0, R1, R2 = episode(), episode(attempt=1), episode(attempt=2)

MODEL: Final = "/v1/responses"
TOOLS: Final = {"tools": "servers.resources.counter:app"}
AGENT: Final = {"model": "policy"}
MOVES: Final = [
    ("increment_counter", {"count": 4}),
    ("increment_counter", {"count": 5}),
    ("get_counter_value", {}),
]


def task(start: int = 3) -> dict[str, Any]:
    return {
        "responses_create_params": {
            "input": "add 4, then 5, then read",
            "tools": [{"type": "function", "name": name} for name in {name for name, _ in MOVES}],
        },
        "initial_count": start,
        "expected_count": start + 9,
    }


def play(call: Call) -> dict[str, Any]:
    """Makes the moves in order, as far as the conversation shows that they were made."""
    done = sum(item.get("type") == "function_call_output" for item in call.body["input"])
    if done == len(MOVES):
        return {"id": "last", "output": [{"type": "message", "role": "assistant", "content": []}]}
    name, arguments = MOVES[done]
    move = {
        "type": "function_call",
        "name": name,
        "call_id": f"c{done}",
        "arguments": json.dumps(arguments),
    }
    return {"id": f"resp_{done}", "output": [move]}


def policy(hold_at: int | None = None) -> Scripted:
    """A policy that survives crashes; its call number `hold_at` waits to be let go."""
    scripted = Scripted(Kind.MODEL, {})

    def answer(call: Call) -> Any:
        if hold_at is not None and len(scripted.calls) == hold_at:
            scripted.door(MODEL).shut()
        return play(call)

    scripted.answers[MODEL] = answer
    if hold_at == 0:
        scripted.door(MODEL).shut()
    return scripted


def outputs_of(reply: Any) -> list[Any]:
    return [
        json.loads(item["output"])
        for item in reply["result"]["response"]["output"]
        if item["type"] == "function_call_output"
    ]


def asked(scripted: Scripted) -> list[str]:
    return [json.dumps(call.body) for call in scripted.calls]


async def idle(rig: Rig) -> None:
    """Nothing of any episode is left anywhere (I34)."""
    await wait_all_tasks_blocked()
    for server in ("env", "agent", "tools"):
        status = await rig.status(server)
        assert status["phase"] == "idle"
        counts = status["report"]["counts"]
        assert {name: counts[name] for name in counts if counts[name]} == {}, (server, counts)


UNCUT: Final = [{"success": True}, {"success": True}, {"count": 12}]


@pytest.mark.parametrize("held", range(4))
async def test_a_crash_in_any_turn_costs_nothing_but_the_call_in_flight(
    autojump_clock: MockClock, held: int
) -> None:
    """AGT-8, ENV-5, RES-1, I5, I15: the model is asked the same again, no tool is called twice."""
    model, archive = policy(held), MemoryArchive()
    async with open_rig(archive, agent=AGENT, scripted={"policy": model}, apps=TOOLS) as rig:
        rig.start_run(R0, task())
        await wait_all_tasks_blocked()
        assert len(model.calls) == held + 1
        exported = await rig.checkpoint("d", R0)
        assert exported == {"env": ["r"], "agent": ["r"], "tools": ["r"]}
    model.door(MODEL).let_go()
    model.answers[MODEL] = play
    async with open_rig(archive, agent=AGENT, scripted={"policy": model}, apps=TOOLS) as rig:
        await rig.restore("d", R0)
        reply = await rig.run(R1, task())
        await idle(rig)
    assert reply["result"]["reward"] == 1.0
    assert outputs_of(reply) == UNCUT
    assert [call.episode for call in model.calls] == ["r"] * (held + 1) + ["r-a1"] * (4 - held)
    assert asked(model)[held] == asked(model)[held + 1]


async def test_without_the_resources_state_the_result_is_wrong(autojump_clock: MockClock) -> None:
    """E2E-1: the negative control; what the tools then say shows that the state was needed."""
    model, archive = policy(2), MemoryArchive()
    async with open_rig(archive, agent=AGENT, scripted={"policy": model}, apps=TOOLS) as rig:
        rig.start_run(R0, task())
        await wait_all_tasks_blocked()
        await rig.checkpoint("d", R0)
    model.door(MODEL).let_go()
    model.answers[MODEL] = play
    async with open_rig(archive, agent=AGENT, scripted={"policy": model}, apps=TOOLS) as rig:
        await rig.restore("d", R0, skipping="tools")
        reply = await rig.run(R1, task())
    assert reply["failure"]["stage"] == "verify"
    last = model.calls[-1].body["input"][-1]
    assert "not_found" in last["output"] or "session" in last["output"]


def starting_over(archive: MemoryArchive, directory: str) -> None:
    """Make a checkpoint's episodes such that a replay step of theirs has failed under it (STEP-4)."""
    where = (directory, "environment", "env")
    part = archive.parts[where]
    records = []
    for record in part.records:
        content = unpack(EnvironmentRecord, record.payload)
        assert content.boundary is not None
        records.append(make_record(record.episode_id, attrs.evolve(content, boundary=None)))
    archive.parts[where] = attrs.evolve(part, records=tuple(records))


async def test_an_attempt_that_starts_over_leaves_nothing_of_what_it_had(
    autojump_clock: MockClock,
) -> None:
    """STEP-4, I34: its agent and resources sessions were restored, and it asks for others; also when a
    checkpoint comes before it has asked for anything, and a crash after that."""
    model, archive = policy(2), MemoryArchive()
    servers: Any = {"agent": AGENT, "scripted": {"policy": model}, "apps": TOOLS}
    async with open_rig(archive, **servers) as rig:
        rig.start_run(R0, task())
        await wait_all_tasks_blocked()
        await rig.checkpoint("d", R0)
    starting_over(archive, "d")
    model.door(MODEL).let_go()
    model.answers[MODEL] = play
    async with open_rig(archive, **servers) as rig:
        await rig.restore("d", R0)
        # It parks at its first boundary, before its first call.
        await rig.control("env", "prepare", "d2")
        rig.start_run(R1, task())
        await rig.resume("d2")
        exported = await rig.checkpoint("d3", R1)
        assert exported == {"env": ["r-a1"], "agent": ["r-a1"], "tools": ["r-a1"]}
    async with open_rig(archive, **servers) as rig:
        await rig.restore("d3", R1)
        reply = await rig.run(R2, task())
        for server in ("agent", "tools"):
            assert (await rig.status(server))["restored_pending"] == []
        await idle(rig)
    assert outputs_of(reply) == UNCUT


async def test_a_checkpoint_without_a_crash_parks_and_releases(autojump_clock: MockClock) -> None:
    """I2: the model answers while everything is prepared; the episode goes on after resume."""
    model = policy(1)
    async with open_rig(agent=AGENT, scripted={"policy": model}, apps=TOOLS) as rig:
        replies = rig.start_run(R0, task())
        await wait_all_tasks_blocked()
        await rig.checkpoint("d", R0)
        model.door(MODEL).let_go()
        model.answers[MODEL] = play
        await trio.sleep(1)
        assert len(model.calls) == 2
        assert replies == []
        await rig.resume("d")
        await wait_all_tasks_blocked()
        assert [reply["result"]["reward"] for reply in replies] == [1.0]
        await idle(rig)
    assert len(model.calls) == 4


async def test_any_number_of_crashes_in_a_row(autojump_clock: MockClock) -> None:
    """I8, I9: also one before the replacement started, and the same checkpoint twice."""
    model, archive = policy(1), MemoryArchive()
    servers: Any = {"agent": AGENT, "scripted": {"policy": model}, "apps": TOOLS}
    async with open_rig(archive, **servers) as rig:
        rig.start_run(R0, task())
        await wait_all_tasks_blocked()
        await rig.checkpoint("d", R0)
    model.door(MODEL).let_go()
    model.answers[MODEL] = play
    async with open_rig(archive, **servers) as rig:
        await rig.restore("d", R0)
        exported = await rig.checkpoint("d2", R1)
        assert exported == {"env": ["r-a1"], "agent": ["r-a1"], "tools": ["r-a1"]}
    for _ in range(2):
        async with open_rig(archive, **servers) as rig:
            await rig.restore("d2", R1)
            reply = await rig.run(R2, task())
            assert reply["result"]["reward"] == 1.0
            assert outputs_of(reply) == UNCUT
            await idle(rig)


async def test_many_rollouts_each_finished_before_or_exported_and_completed_after(
    autojump_clock: MockClock,
) -> None:
    """I1, I3, I19: the controller's contract, with rollouts in every stage."""
    model, archive = policy(), MemoryArchive()
    names = [f"r{number:02}" for number in range(24)]
    servers: Any = {"agent": AGENT, "scripted": {"policy": model}, "apps": TOOLS}
    async with open_rig(archive, **servers) as rig:
        replies = {name: rig.start_run(episode(name), task()) for name in names[:8]}
        await wait_all_tasks_blocked()
        model.door(MODEL).shut()
        replies |= {name: rig.start_run(episode(name), task()) for name in names[8:]}
        await wait_all_tasks_blocked()
        finished = {name for name, got in replies.items() if got}
        scope = [episode(name) for name in names if name not in finished]
        exported = await rig.checkpoint("d", *scope)
        assert {*exported["env"]} | finished == {*names}
        assert not {*exported["env"]} & finished
        assert len(finished) == 8
    model.door(MODEL).let_go()
    async with open_rig(archive, **servers) as rig:
        await rig.restore("d", *scope)
        after = {e.rollout_id: rig.start_run(e.next_attempt(), task()) for e in scope}
        await wait_all_tasks_blocked()
        assert {name for name, got in after.items() if got} == {*exported["env"]}
        assert {got[0]["result"]["reward"] for got in after.values()} == {1.0}
        await idle(rig)


async def test_retiring_a_rollout_frees_it_everywhere(autojump_clock: MockClock) -> None:
    """CTL-12, I10, I34: callers first; afterwards nothing of it is served until it is forgotten."""
    model = policy(1)
    async with open_rig(agent=AGENT, scripted={"policy": model}, apps=TOOLS) as rig:
        replies = rig.start_run(R0, task())
        await wait_all_tasks_blocked()
        await rig.retire(R0)
        await wait_all_tasks_blocked()
        assert [reply["error"]["code"] for reply in replies] == ["stale_attempt"]
        assert (await rig.run(R0, task()))["error"]["code"] == "stale_attempt"
        await idle(rig)
        for server in ("env", "agent", "tools"):
            await rig.control(server, "forget", rollout_ids=("r",))
        model.door(MODEL).let_go()
        model.answers[MODEL] = play
        assert (await rig.run(R0, task()))["result"]["reward"] == 1.0


@pytest.mark.parametrize("stage", ["env", "agent", "tools"])
async def test_retiring_while_a_prepare_is_under_way_takes_no_clean_up_deadline(
    autojump_clock: MockClock, stage: str
) -> None:
    """CTL-12, STEP-7: the gates of the servers after the environment may be closed already."""
    model = policy(1)
    async with open_rig(agent=AGENT, scripted={"policy": model}, apps=TOOLS) as rig:
        rig.start_run(R0, task())
        await wait_all_tasks_blocked()
        for server in ("env", "agent", "tools"):
            await rig.control(server, "prepare", "d")
            if server == stage:
                break
        before = trio.current_time()
        await rig.retire(R0, name="d")
        assert trio.current_time() == before
        for server in ("tools", "agent", "env"):
            await rig.control(server, "resume", "d")
        await idle(rig)


@settings(max_examples=15)
@given(crashes=st.lists(st.integers(0, 3), max_size=5))
def test_crashes_at_random_turns_lose_and_double_nothing(crashes: list[int]) -> None:
    """I3, I5: each incarnation makes some turns and dies; the last one finishes."""

    async def main() -> None:
        archive = MemoryArchive()
        model = policy()
        servers: Any = {"agent": AGENT, "scripted": {"policy": model}, "apps": TOOLS}
        attempt = 0
        for number, turns in enumerate([*crashes, None]):
            hold_at = None if turns is None else len(model.calls) + turns

            def answer(call: Call, hold_at: int | None = hold_at) -> Any:
                if hold_at is not None and len(model.calls) >= hold_at:
                    model.door(MODEL).shut()
                return play(call)

            model.answers[MODEL] = answer
            if turns == 0:
                model.door(MODEL).shut()
            async with open_rig(archive, **servers) as rig:
                if number:
                    await rig.restore(f"d{number}", episode("r", attempt))
                    attempt += 1
                replies = rig.start_run(episode("r", attempt), task())
                await wait_all_tasks_blocked()
                if replies:
                    assert outputs_of(replies[0]) == UNCUT
                    assert replies[0]["result"]["reward"] == 1.0
                    return
                await rig.checkpoint(f"d{number + 1}", episode("r", attempt))
            model.door(MODEL).let_go()
        raise AssertionError("the last incarnation did not finish")

    trio.run(main, clock=MockClock(autojump_threshold=0))
