"""The single-agent protocol against scripted servers: what is asked, in which order, after a crash."""

from __future__ import annotations

from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.context import RolloutContext
from gymtrio.episodes.episode import Episode, StepMode
from gymtrio.errors import SettingsError
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import CLEANUP_S_MAX
from gymtrio.participants.digest import json_digest
from gymtrio.participants.environment import EnvironmentParticipant
from gymtrio.serving.http import Response, json_response
from gymtrio.wire.control import Kind
from servers.environment.single_agent_turn import STAGES, Stage, verify_mode
from tests.helpers.controlled import checkpoint, open_controlled
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.native import Call, Scripted, open_rig


def episode(name: str = "r", attempt: int = 0) -> EpisodeId:
    return EpisodeId(RolloutId(name), attempt)


R0, R1, R2 = episode(), episode(attempt=1), episode(attempt=2)

TASK: Final = {
    "responses_create_params": {"input": "add 3"},
    "task_data": {"expected": 3},
}

SEED, OPEN, INVOKE, CLOSE_AGENT, VERIFY, CLOSE = (
    "/seed_session",
    "/v1/agent_sessions",
    "/v1/responses",
    "/v1/agent_sessions/close",
    "/verify",
    "/close_session",
)


def tools(verify: str | None = "replay") -> Scripted:
    headers = [] if verify is None else [("x-ng-checkpoint-verify", verify)]

    def seed(call: Call) -> Response:
        session_id = call.body["resources_session_id"]
        return json_response(
            {"resources_session_id": session_id}, headers=headers, cookies={"tools": "seeded"}
        )

    return Scripted(
        Kind.RESOURCES,
        {
            SEED: seed,
            VERIFY: lambda call: {**call.body, "reward": 1.0},
            CLOSE: lambda call: {"resources_session_id": call.body["resources_session_id"]},
        },
    )


def agent() -> Scripted:
    def opened(call: Call) -> Response:
        session_id = call.body["agent_session_id"]
        return json_response({"agent_session_id": session_id}, cookies={"agent": "opened"})

    return Scripted(
        Kind.AGENT,
        {
            OPEN: opened,
            INVOKE: {"id": "resp_1", "output": [{"type": "message"}]},
            CLOSE_AGENT: lambda call: {
                "agent_session_id": call.body["agent_session_id"],
                "agent_observations": {"records": ["saw"]},
                "resources_cookies": {"tools": "used"},
            },
        },
    )


class Outside:
    """The servers that survive a crash of the environment server."""

    def __init__(self, verify: str | None = "replay") -> None:
        self.tools = tools(verify)
        self.agent = agent()

    @property
    def scripted(self) -> dict[str, Scripted]:
        return {"tools": self.tools, "agent": self.agent}

    def of(self, path: str) -> Scripted:
        return self.tools if path in (SEED, VERIFY, CLOSE) else self.agent

    def calls(self, path: str) -> list[Call]:
        return [call for call in self.of(path).calls if call.path == path]

    def calls_of(self, attempt: int) -> set[str]:
        """What was called on behalf of an attempt, each at most once."""
        found = []
        for call in [*self.tools.calls, *self.agent.calls]:
            named = call.body.get("episode_id", {}).get("attempt", call.episode == "r-a1")
            if named == attempt:
                found.append(call.path)
        assert len(found) == len(set(found))
        return set(found)


# -- the protocol -----------------------------------------------------------------------------


async def test_the_stages_in_order_with_ids_cookies_and_prefix(autojump_clock: MockClock) -> None:
    """ENV-5, ID-5: seed, open, invoke, close, verify, return; then the resources session is closed."""
    outside = Outside()
    async with open_rig(scripted=outside.scripted) as rig:
        reply = await rig.run(R0, TASK)
    assert outside.tools.paths() == [SEED, VERIFY, CLOSE]
    assert outside.agent.paths() == [OPEN, INVOKE, CLOSE_AGENT]
    seed, verify, close = outside.tools.calls
    opened, invoke, _ = outside.agent.calls
    session_id = seed.body["resources_session_id"]
    assert session_id.startswith("resources-session-")
    assert seed.body["task_data"] == {"expected": 3}
    assert {call.episode for call in outside.tools.calls} == {"r"}
    assert opened.body["agent_session_id"].startswith("agent-session-")
    assert opened.body["tool_accesses"] == [
        {
            "kind": "direct_http",
            "name": "tools",
            "required": True,
            "base_url": "http://tools",
            "cookies": {"tools": "seeded"},
            "headers": {},
        }
    ]
    assert invoke.body == {"input": "add 3"}
    assert (invoke.episode, invoke.cookies) == ("r", {"agent": "opened"})
    assert invoke.headers["x-ng-activation-index"] == "0"
    assert verify.cookies == {"tools": "used"}
    assert verify.body == {
        "expected": 3,
        "responses_create_params": {"input": "add 3"},
        "response": {"id": "resp_1", "output": [{"type": "message"}]},
    }
    assert close.body["resources_session_id"] == session_id
    assert reply == {
        "episode_id": {"rollout_id": "r", "attempt": 0},
        "task_id": {"taskset": "tasks", "task_id": "1"},
        "result": {
            **verify.body,
            "reward": 1.0,
            "ng_agent_observations": {"records": ["saw"]},
        },
    }


async def test_a_tasks_own_fields_may_stand_beside_the_input(autojump_clock: MockClock) -> None:
    """ENV-5: as in rows; they are task data."""
    outside = Outside()
    async with open_rig(scripted=outside.scripted) as rig:
        await rig.run(
            R0,
            {"responses_create_params": {"input": "x"}, "expected": 3, "task_data": {"level": 2}},
        )
    assert outside.calls(SEED)[0].body["task_data"] == {"expected": 3, "level": 2}


@pytest.mark.parametrize(
    ("setting", "asked", "captured"),
    [(False, False, False), (True, False, True), (False, True, True)],
)
async def test_token_capture_is_asked_for_where_it_is_wanted(
    autojump_clock: MockClock, setting: bool, asked: bool, captured: bool
) -> None:
    """ID-4."""
    outside = Outside()
    context = RolloutContext(R0, capture_tokens=True) if asked else None
    async with open_rig(scripted=outside.scripted, env={"capture_tokens": setting}) as rig:
        await rig.run(R0, TASK, context=context)
    assert outside.calls(INVOKE)[0].captures_tokens is captured


async def test_tasksets_have_servers_of_their_own(autojump_clock: MockClock) -> None:
    """ENV-5."""
    outside, special = Outside(), Outside()
    settings = {
        "default": None,
        "tasksets": {
            "plain": {"resources": "tools", "agent": "agent"},
            "special": {"resources": "tools2", "agent": "agent"},
        },
    }
    scripted = outside.scripted | {"tools2": special.tools}
    async with open_rig(scripted=scripted, env=settings) as rig:
        await rig.run(episode("a"), TASK, taskset="special")
        await rig.run(episode("b"), TASK, taskset="plain")
        refused = await rig.run(episode("c"), TASK, taskset="plane")
    assert special.tools.paths() == outside.tools.paths() == [SEED, VERIFY, CLOSE]
    assert refused["error"]["code"] == "invalid_request"
    assert "did you mean 'plain'" in refused["error"]["detail"]


@pytest.mark.parametrize(
    ("header", "mode"),
    [("replay", "replay"), ("wait", "wait"), (None, "wait"), ("sometimes", "wait")],
)
def test_an_unknown_verify_mode_means_wait(header: str | None, mode: str) -> None:
    """RES-4, ENV-5."""
    assert verify_mode(header).value == mode


def test_every_stage_but_the_last_has_work() -> None:
    """ENV-5: the table is whole."""
    assert {*STAGES} == {*Stage} - {Stage.RETURN}


# -- checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [SEED, OPEN, INVOKE, VERIFY])
async def test_a_crash_repeats_the_stage_in_flight_and_nothing_before_it(
    autojump_clock: MockClock, held: str
) -> None:
    """ENV-5, I5, I6: under the next attempt, with the same sessions and cookies."""
    outside, archive = Outside("replay"), MemoryArchive()
    outside.of(held).door(held).shut()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        replies = rig.start_run(R0, TASK)
        await outside.of(held).door(held).reached.wait()
        assert (await rig.checkpoint("d", R0))["env"] == ["r"]
        assert replies == []
    outside.of(held).door(held).let_go()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        stale = await rig.run(R0, TASK)
        assert stale["error"]["code"] == "stale_attempt"
        reply = await rig.run(R1, TASK)
    assert reply["episode_id"] == {"rollout_id": "r", "attempt": 1}
    assert reply["result"]["reward"] == 1.0
    stages = [SEED, OPEN, INVOKE, CLOSE_AGENT, VERIFY]
    assert outside.calls_of(1) == {*stages[stages.index(held) :], CLOSE}
    sessions = {call.body["resources_session_id"] for call in outside.calls(SEED)}
    assert len(sessions) == 1
    assert len({call.body["agent_session_id"] for call in outside.calls(OPEN)}) == 1
    assert outside.calls(INVOKE)[-1].cookies == {"agent": "opened"}


async def test_closing_the_agent_is_waited_for_and_not_repeated(autojump_clock: MockClock) -> None:
    """ENV-5, STEP-3: the boundary after it has the receipt."""
    outside, archive = Outside(), MemoryArchive()
    door = outside.agent.door(CLOSE_AGENT)
    door.shut()
    outside.tools.door(VERIFY).shut()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        rig.start_run(R0, TASK)
        await door.reached.wait()
        missed = await rig.control("env", "prepare", "d", timeout_s=1)
        assert (missed["phase"], missed["report"]["blockers"]) == ("preparing", ["r"])
        assert missed["report"]["details"][0]["doing"] == "in a wait step: close_agent"
        door.let_go()
        await rig.checkpoint("d", R0)
        assert outside.calls(VERIFY) == []
    outside.tools.door(VERIFY).let_go()
    closes = len(outside.calls(CLOSE_AGENT))
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        reply = await rig.run(R1, TASK)
    assert reply["result"]["ng_agent_observations"] == {"records": ["saw"]}
    assert len(outside.calls(CLOSE_AGENT)) == closes
    assert outside.calls(VERIFY)[-1].cookies == {"tools": "used"}


async def test_a_verify_that_may_not_run_twice_is_waited_for(autojump_clock: MockClock) -> None:
    """ENV-5, RES-4: boundary return; after the crash only the result is answered."""
    outside, archive = Outside("wait"), MemoryArchive()
    door = outside.tools.door(VERIFY)
    door.shut()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        replies = rig.start_run(R0, TASK)
        await door.reached.wait()
        missed = await rig.control("env", "prepare", "d", timeout_s=1)
        assert missed["report"]["details"][0]["doing"] == "in a wait step: verify"
        door.let_go()
        await rig.checkpoint("d", R0)
        await wait_all_tasks_blocked()
        assert replies == []
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        reply = await rig.run(R1, TASK)
    assert reply["result"]["reward"] == 1.0
    assert len(outside.calls(VERIFY)) == 1
    assert {call.body["episode_id"]["attempt"] for call in outside.calls(SEED)} == {0}


@pytest.mark.parametrize("verify", ["replay", "wait"])
async def test_a_restored_episode_still_knows_how_to_verify(
    autojump_clock: MockClock, verify: str
) -> None:
    """ENV-5: the mode stands in the handles, though the seed is not repeated."""
    outside, archive = Outside(verify), MemoryArchive()
    outside.agent.door(INVOKE).shut()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        rig.start_run(R0, TASK)
        await outside.agent.door(INVOKE).reached.wait()
        await rig.checkpoint("d", R0)
    outside.agent.door(INVOKE).let_go()
    outside.tools.door(VERIFY).shut()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        rig.start_run(R1, TASK)
        await outside.tools.door(VERIFY).reached.wait()
        reply = await rig.control("env", "prepare", "d2", timeout_s=1)
        assert reply["phase"] == ("prepared" if verify == "replay" else "preparing")


async def test_an_episode_that_finishes_during_prepare_leaves_after_resume(
    autojump_clock: MockClock,
) -> None:
    """I4, I2, ENV-5: its result was recorded in a boundary; nothing is called again."""
    outside = Outside("wait")
    door = outside.tools.door(VERIFY)
    door.shut()
    async with open_rig(scripted=outside.scripted) as rig:
        replies = rig.start_run(R0, TASK)
        await door.reached.wait()
        prepared: list[Any] = []

        async def prepare() -> None:
            prepared.append(await rig.control("env", "prepare", "d"))

        rig.nursery.start_soon(prepare)
        await wait_all_tasks_blocked()
        door.let_go()
        await wait_all_tasks_blocked()
        assert [reply["phase"] for reply in prepared] == ["prepared"]
        assert replies == []
        await rig.control("env", "resume", "d")
        await wait_all_tasks_blocked()
        assert [reply["result"]["reward"] for reply in replies] == [1.0]
    assert outside.tools.paths() == [SEED, VERIFY, CLOSE]


async def test_a_checkpoint_without_a_crash_parks_and_releases(autojump_clock: MockClock) -> None:
    """I2, STEP-3: the reply of the agent comes under the checkpoint, and is heard after it."""
    outside = Outside()
    door = outside.agent.door(INVOKE)
    door.shut()
    async with open_rig(scripted=outside.scripted) as rig:
        replies = rig.start_run(R0, TASK)
        await door.reached.wait()
        await rig.checkpoint("d", R0)
        door.let_go()
        await trio.sleep(1)
        assert outside.agent.paths() == [OPEN, INVOKE]
        await rig.resume("d")
        await wait_all_tasks_blocked()
        assert [reply["result"]["reward"] for reply in replies] == [1.0]


async def test_a_second_crash_before_the_replacement_starts(autojump_clock: MockClock) -> None:
    """ENV-4, I8."""
    outside, archive = Outside(), MemoryArchive()
    outside.agent.door(INVOKE).shut()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        rig.start_run(R0, TASK)
        await outside.agent.door(INVOKE).reached.wait()
        await rig.checkpoint("d", R0)
    outside.agent.door(INVOKE).let_go()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        assert (await rig.checkpoint("d2", R1))["env"] == ["r-a1"]
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d2", R1)
        assert (await rig.run(R2, TASK))["result"]["reward"] == 1.0
    assert len(outside.calls(SEED)) == 1


async def test_the_same_checkpoint_is_restored_again_after_its_replacement_ran(
    autojump_clock: MockClock,
) -> None:
    """I9: what the dead execution did changes nothing."""
    outside, archive = Outside(), MemoryArchive()
    outside.agent.door(INVOKE).shut()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        rig.start_run(R0, TASK)
        await outside.agent.door(INVOKE).reached.wait()
        await rig.checkpoint("d", R0)
    outside.agent.door(INVOKE).let_go()
    for _ in range(2):
        async with open_rig(archive, scripted=outside.scripted) as rig:
            await rig.restore("d", R0)
            assert (await rig.run(R1, TASK))["result"]["reward"] == 1.0
    assert len(outside.calls(SEED)) == 1


async def test_an_agent_that_fails_under_a_checkpoint_makes_the_episode_start_over(
    autojump_clock: MockClock,
) -> None:
    """STEP-4: from its input, with new sessions, as nobody can vouch for the old ones."""
    outside, archive = Outside(), MemoryArchive()
    door = outside.agent.door(INVOKE)
    door.shut()
    answer = outside.agent.answers[INVOKE]
    outside.agent.answers[INVOKE] = json_response({"error": {"code": "x", "detail": "y"}}, 500)
    async with open_rig(archive, scripted=outside.scripted) as rig:
        rig.start_run(R0, TASK)
        await door.reached.wait()
        assert (await rig.control("env", "prepare", "d"))["phase"] == "prepared"
        door.let_go()
        await wait_all_tasks_blocked()
        await rig.control("env", "commit", "d", checkpoint_dir="d", episode_ids=(R0,))
    outside.agent.answers[INVOKE] = answer
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        assert (await rig.run(R1, TASK))["result"]["reward"] == 1.0
    assert len({call.body["resources_session_id"] for call in outside.calls(SEED)}) == 2


async def test_another_task_cannot_continue_an_episode(autojump_clock: MockClock) -> None:
    """ENV-3."""
    outside, archive = Outside(), MemoryArchive()
    outside.agent.door(INVOKE).shut()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        rig.start_run(R0, TASK)
        await outside.agent.door(INVOKE).reached.wait()
        await rig.checkpoint("d", R0)
    outside.agent.door(INVOKE).let_go()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        refused = await rig.run(R1, TASK | {"task_data": {"expected": 4}})
        assert refused["error"]["code"] == "invalid_checkpoint_state"
        assert "different task" in refused["error"]["detail"]
        assert (await rig.run(R1, TASK))["result"]["reward"] == 1.0


async def test_a_boundary_of_something_else_is_refused(autojump_clock: MockClock) -> None:
    """ENV-3: 422 to the caller of the replacement, and nothing is called."""
    outside, archive = Outside(), MemoryArchive()
    participant = EnvironmentParticipant("env")
    digest = json_digest(
        {"task_id": {"taskset": "tasks", "task_id": "1"}, "task_input": TASK},
    )

    async def another_protocol(live: Episode) -> None:
        await live.boundary({"next": "dance", "handles": {}})
        await live.step(trio.sleep_forever, mode=StepMode.REPLAY, doing="x")

    async with open_controlled(participant, archive) as plane, trio.open_nursery() as nursery:
        nursery.start_soon(participant.run_episode, R0, digest, another_protocol)
        await wait_all_tasks_blocked()
        await checkpoint(plane, "d")
        nursery.cancel_scope.cancel()
    async with open_rig(archive, scripted=outside.scripted) as rig:
        await rig.restore("d", R0)
        refused = await rig.run(R1, TASK)
    assert refused["error"]["code"] == "invalid_checkpoint_state"
    assert "boundary of r-a1: next: expected one of 'seed'" in refused["error"]["detail"]
    assert outside.tools.calls == []


# -- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "stage"),
    [
        (SEED, "seed"),
        (OPEN, "open_agent"),
        (INVOKE, "invoke_agent"),
        (CLOSE_AGENT, "close_agent"),
        (VERIFY, "verify"),
    ],
)
@pytest.mark.parametrize(("status", "terminal"), [(500, False), (429, False), (422, True)])
async def test_a_failed_rollout_is_data(
    autojump_clock: MockClock, path: str, stage: str, status: int, terminal: bool
) -> None:
    """ENV-5: 200, with the stage and whether another attempt could do better."""
    outside = Outside()
    body = {"error": {"code": "broken", "detail": "the reason"}}
    outside.of(path).answers[path] = json_response(body, status)
    async with open_rig(scripted=outside.scripted) as rig:
        reply = await rig.run(R0, TASK)
    failure = reply["failure"]
    assert (failure["stage"], failure["terminal"]) == (stage, terminal)
    assert "the reason" in failure["failure_reason"]
    assert "result" not in reply


@pytest.mark.parametrize("path", [SEED, OPEN, CLOSE_AGENT])
async def test_an_answer_for_another_session_fails_the_episode(
    autojump_clock: MockClock, path: str
) -> None:
    """ENV-5: sessions are the ones we chose."""
    outside = Outside()
    key = "resources_session_id" if path == SEED else "agent_session_id"
    outside.of(path).answers[path] = {key: "another"}
    async with open_rig(scripted=outside.scripted) as rig:
        failure = (await rig.run(R0, TASK))["failure"]
    assert "answered for session 'another'" in failure["failure_reason"]
    assert failure["terminal"]


async def test_a_stale_attempt_elsewhere_is_told_to_the_caller(autojump_clock: MockClock) -> None:
    """CTL-5: it is no result of the rollout; the caller knows what to do about it."""
    outside = Outside()
    refusal = {"error": {"code": "stale_attempt", "detail": "r was retired"}}
    outside.agent.answers[INVOKE] = json_response(refusal, 409)
    async with open_rig(scripted=outside.scripted) as rig:
        reply = await rig.run(R0, TASK)
    assert reply["error"]["code"] == "stale_attempt"


async def test_what_was_opened_is_closed_last_first(autojump_clock: MockClock) -> None:
    """STEP-7: the agent before the resources that it uses."""
    outside = Outside()
    order: list[str] = []
    for path in (CLOSE_AGENT, CLOSE):
        answer = outside.of(path).answers[path]

        def noting(call: Call, answer: Any = answer, path: str = path) -> Any:
            order.append(path)
            return answer(call)

        outside.of(path).answers[path] = noting
    outside.agent.answers[INVOKE] = json_response({}, 500)
    async with open_rig(scripted=outside.scripted) as rig:
        assert "failure" in await rig.run(R0, TASK)
    assert order == [CLOSE_AGENT, CLOSE]


async def test_a_session_whose_seed_was_never_answered_is_closed_all_the_same(
    autojump_clock: MockClock,
) -> None:
    """STEP-7: its id was chosen here, and its clean-up registered before the seed was sent."""
    outside = Outside()
    outside.tools.door(SEED).shut()
    async with open_rig(scripted=outside.scripted, env={"episode_timeout_s": 5}) as rig:
        reply = await rig.run(R0, TASK)
    assert reply["failure"]["stage"] == "timeout"
    assert not reply["failure"]["terminal"]
    assert "5 s in seed" in reply["failure"]["failure_reason"]
    (seed,), (close,) = outside.calls(SEED), outside.calls(CLOSE)
    assert seed.body["resources_session_id"] == close.body["resources_session_id"]
    assert outside.tools.left == [SEED]


async def test_a_clean_up_that_hangs_gives_up(autojump_clock: MockClock) -> None:
    """STEP-7: the reply leaves after CLEANUP_S_MAX at the latest."""
    outside = Outside()
    outside.tools.door(CLOSE).shut()
    async with open_rig(scripted=outside.scripted) as rig:
        before = trio.current_time()
        assert (await rig.run(R0, TASK))["result"]["reward"] == 1.0
        assert trio.current_time() - before == pytest.approx(CLEANUP_S_MAX)


async def test_a_caller_that_leaves_ends_its_episode_and_its_sessions(
    autojump_clock: MockClock,
) -> None:
    """STEP-1, STEP-7: an abandoned rollout leaves nothing elsewhere."""
    outside = Outside()
    outside.agent.door(INVOKE).shut()
    async with open_rig(scripted=outside.scripted) as rig:
        with trio.move_on_after(3):
            await rig.run(R0, TASK)
        await wait_all_tasks_blocked()
        assert outside.agent.left == [INVOKE]
        assert outside.agent.paths()[-1] == CLOSE_AGENT
        assert outside.tools.paths()[-1] == CLOSE
        counts = (await rig.status("env"))["report"]["counts"]
        assert counts["live"] == counts["blocking"] == 0


async def test_a_retired_episode_is_stopped_and_its_sessions_closed_before_the_answer(
    autojump_clock: MockClock,
) -> None:
    """CTL-12, I10."""
    outside = Outside()
    outside.agent.door(INVOKE).shut()
    async with open_rig(scripted=outside.scripted) as rig:
        replies = rig.start_run(R0, TASK)
        await outside.agent.door(INVOKE).reached.wait()
        await rig.control("env", "retire", episode_ids=(R0,))
        assert outside.agent.paths()[-1] == CLOSE_AGENT
        assert outside.tools.paths()[-1] == CLOSE
        await wait_all_tasks_blocked()
        assert [reply["error"]["code"] for reply in replies] == ["stale_attempt"]


# -- requests and settings --------------------------------------------------------------------


async def test_a_duplicate_of_a_running_attempt_is_refused(autojump_clock: MockClock) -> None:
    """HARD-1: the first goes on."""
    outside = Outside()
    outside.agent.door(INVOKE).shut()
    async with open_rig(scripted=outside.scripted) as rig:
        replies = rig.start_run(R0, TASK)
        await outside.agent.door(INVOKE).reached.wait()
        assert (await rig.run(R0, TASK))["error"]["code"] == "checkpoint_conflict"
        outside.agent.door(INVOKE).let_go()
        await wait_all_tasks_blocked()
        assert [reply["result"]["reward"] for reply in replies] == [1.0]


async def test_a_run_under_a_checkpoint_waits_unless_it_asks_not_to(
    autojump_clock: MockClock,
) -> None:
    """CTL-18, ENV-2."""
    outside = Outside()
    async with open_rig(scripted=outside.scripted) as rig:
        await rig.control("env", "prepare")
        replies = rig.start_run(R0, TASK)
        refused = await rig.run(R1, TASK, headers=[("x-ng-admission", "refuse")])
        assert refused["error"]["code"] == "admission_closed"
        assert replies == []
        await rig.control("env", "resume")
        await wait_all_tasks_blocked()
        assert [reply["result"]["reward"] for reply in replies] == [1.0]


@pytest.mark.parametrize(
    ("body", "code", "detail"),
    [
        ({}, "invalid_request", "episode_id: missing"),
        (
            {"episode_id": {"rollout_id": "r-a2"}, "task": {}},
            "invalid_rollout_id",
            "names an attempt",
        ),
        (
            {
                "episode_id": {"rollout_id": "r"},
                "task": {"task_id": {"taskset": "t", "task_id": "1"}, "task_input": {}},
            },
            "invalid_request",
            "task.task_input.responses_create_params: missing",
        ),
        (
            {
                "episode_id": {"rollout_id": "r"},
                "task": {"task_id": {"taskset": "", "task_id": "1"}, "task_input": {}},
            },
            "invalid_request",
            "taskset is empty",
        ),
    ],
)
async def test_a_malformed_run_is_refused_with_the_path(
    autojump_clock: MockClock, body: Any, code: str, detail: str
) -> None:
    """ID-1, CTL-17."""
    async with open_rig(scripted=Outside().scripted) as rig:
        reply: Any = (await rig.client.request("env", "POST", "/run", json=body)).json()
    assert reply["error"]["code"] == code
    assert detail in reply["error"]["detail"]


async def test_without_checkpointing_the_same_episodes_run_and_nobody_takes_part(
    autojump_clock: MockClock,
) -> None:
    """SET-1: no participant, no bookkeeping; deadlines and clean-ups all the same."""
    outside = Outside()
    async with open_rig(
        scripted=outside.scripted, checkpointing=False, env={"episode_timeout_s": 5}
    ) as rig:
        assert (await rig.run(R0, TASK))["result"]["reward"] == 1.0
        assert outside.tools.paths() == [SEED, VERIFY, CLOSE]
        assert await rig.participants() == []
        outside.agent.door(INVOKE).shut()
        timed_out = await rig.run(R1, TASK)
        assert timed_out["failure"]["stage"] == "timeout"
        assert outside.tools.paths()[-2:] == [SEED, CLOSE]


async def test_several_workers_are_refused_with_the_reason() -> None:
    """ENV-7."""
    with pytest.raises(SettingsError, match=r"servers\.env\.settings: num_workers .* one process"):
        async with open_rig(scripted=Outside().scripted, env={"num_workers": 2}):
            pytest.fail("it opened")
