"""What is around an episode protocol, whatever the protocol."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.context import current_context
from gymtrio.errors import (
    InvalidRequest,
    PeerRefused,
    SettingsError,
    StaleAttempt,
    TransportError,
)
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.limits import RESULTS_UNACKNOWLEDGED_MAX
from gymtrio.participants.environment import EnvironmentParticipant
from gymtrio.participants.results import Result
from gymtrio.serving.environment_server import (
    FAILURE_CHARACTERS_MAX,
    EnvironmentServer,
    EnvironmentSettings,
    EpisodeFailed,
    EpisodeProtocol,
    EpisodeRun,
    failing_as,
    parse_run,
)
from gymtrio.serving.http import Headers, Request, Response, first_header
from gymtrio.settings import load_settings

BODY: dict[str, Any] = {
    "episode_id": {"rollout_id": "r", "attempt": 0},
    "task": {
        "task_id": {"taskset": "t", "task_id": "1"},
        "task_input": {"responses_create_params": {"input": "x"}},
    },
}


def run_request(body: object = BODY) -> Request:
    return Request("POST", "/run", body=json.dumps(body).encode())


def server_of(
    protocol: EpisodeProtocol, *, timeout_s: float | None = None
) -> tuple[EnvironmentServer, EnvironmentParticipant]:
    participant = EnvironmentParticipant("env")
    settings = EnvironmentSettings(episode_timeout_s=timeout_s)
    return EnvironmentServer(protocol, settings, participant, first_epoch="first"), participant


async def answered(server: EnvironmentServer, request: Request | None = None) -> Any:
    """The reply, handed over."""
    response = await server.run(request or run_request())
    assert isinstance(response, Response)
    if response.on_done is not None:
        response.on_done(True)
    return json.loads(response.body)


async def test_a_result_is_answered_with_what_was_asked(autojump_clock: MockClock) -> None:
    """ENV-1: on behalf of the episode."""

    async def protocol(run: EpisodeRun) -> dict[str, object]:
        assert current_context() == run.context
        return {"input": run.request.task.task_input.responses_create_params}

    server, participant = server_of(protocol)
    assert await answered(server) == {
        "episode_id": {"rollout_id": "r", "attempt": 0},
        "task_id": {"taskset": "t", "task_id": "1"},
        "result": {"input": {"input": "x"}},
    }
    assert participant.ready()


async def test_a_reply_counts_as_in_flight_until_it_is_out(autojump_clock: MockClock) -> None:
    """I2: also a failure and a refusal."""

    async def failing(run: EpisodeRun) -> dict[str, object]:
        raise EpisodeFailed("verify", "no", terminal=True)

    async def refusing(run: EpisodeRun) -> dict[str, object]:
        raise InvalidRequest("no")

    for protocol, status in ((failing, 200), (refusing, 422)):
        server, participant = server_of(protocol)
        response = await server.run(run_request())
        assert response.status == status
        assert not participant.ready()
        assert response.on_done is not None
        response.on_done(False)
        assert participant.ready()


async def test_a_fault_in_a_protocol_blocks_nothing(autojump_clock: MockClock) -> None:
    """ENV-2, I34: the application answers 500; no ticket is left."""

    async def broken(run: EpisodeRun) -> dict[str, object]:
        raise ZeroDivisionError

    server, participant = server_of(broken)
    with pytest.raises(ZeroDivisionError):
        await server.run(run_request())
    assert participant.ready()
    assert not participant.episodes.live


async def test_a_result_that_is_not_json_is_a_fault_that_blocks_nothing(
    autojump_clock: MockClock,
) -> None:
    """ENV-2, I34."""

    async def odd(run: EpisodeRun) -> dict[str, object]:
        return {"when": {1, 2}}

    server, participant = server_of(odd)
    with pytest.raises(TypeError):
        await server.run(run_request())
    assert participant.ready()
    assert len(participant.results) == 0


async def test_a_long_reason_is_cut(autojump_clock: MockClock) -> None:
    """ENV-5: what a peer said may be megabytes."""

    async def failing(run: EpisodeRun) -> dict[str, object]:
        raise EpisodeFailed("seed", "x" * 100_000, terminal=False)

    server, _ = server_of(failing)
    assert len((await answered(server))["failure"]["failure_reason"]) == FAILURE_CHARACTERS_MAX


async def test_time_is_up(autojump_clock: MockClock) -> None:
    """STEP-5, STEP-7: data, not terminal; clean-ups run with time of their own."""
    cleaned: list[float] = []

    async def slow() -> None:
        await trio.sleep(2)
        cleaned.append(trio.current_time())

    async def protocol(run: EpisodeRun) -> dict[str, object]:
        run.cleanups.register("slow", slow)
        await trio.sleep_forever()
        raise AssertionError

    server, _ = server_of(protocol, timeout_s=3)
    failure = (await answered(server))["failure"]
    assert (failure["stage"], failure["terminal"]) == ("timeout", False)
    assert failure["failure_reason"] == "r timed out after 3 s before its first step"
    assert cleaned == [pytest.approx(5)]


async def test_clean_ups_of_an_episode_that_failed_under_a_checkpoint_come_after_it(
    autojump_clock: MockClock,
) -> None:
    """STEP-7, HARD-9: its failure is recorded, so that the checkpoint is ready, and heard after it."""
    cleaned: list[bool] = []
    fail = trio.Event()

    async def note() -> None:
        cleaned.append(True)

    async def protocol(run: EpisodeRun) -> dict[str, object]:
        run.cleanups.register("note", note)
        await fail.wait()
        raise EpisodeFailed("x", "y", terminal=True)

    server, participant = server_of(protocol)
    replies: list[Any] = []

    async def call() -> None:
        replies.append(await answered(server))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(participant.run)
        nursery.start_soon(call)
        await wait_all_tasks_blocked()
        participant.close()
        fail.set()
        await wait_all_tasks_blocked()
        assert participant.ready()
        assert replies == cleaned == []
        participant.open()
        await wait_all_tasks_blocked()
        assert cleaned == [True]
        assert [reply["failure"]["failure_reason"] for reply in replies] == ["y"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("error", "terminal"),
    [
        (TransportError("gone"), False),
        (SettingsError("no such server"), True),
        (PeerRefused("x", 503, None, "away"), False),
        (PeerRefused("x", 404, None, "no"), True),
    ],
)
def test_what_a_peer_does_fails_a_stage(error: Exception, terminal: bool) -> None:
    """ENV-5."""
    with pytest.raises(EpisodeFailed) as failed, failing_as("seed"):
        raise error
    assert failed.value.failure.terminal is terminal
    assert failed.value.failure.stage == "seed"


def test_task_data_that_is_named_twice_is_the_explicit_one() -> None:
    """ENV-5."""
    body = {
        **BODY,
        "task": {
            **BODY["task"],
            "task_input": {"responses_create_params": {}, "task_data": {"a": 1}, "a": 2, "b": 3},
        },
    }
    assert parse_run(body).task.task_input.task_data == {"a": 1, "b": 3}


@pytest.mark.parametrize("body", [None, [], {"task": 1}, {"task": {"task_input": 1}}])
def test_what_is_no_run_is_refused(body: object) -> None:
    """CTL-17."""
    with pytest.raises(InvalidRequest):
        parse_run(body)


@pytest.mark.parametrize(
    "settings", [{"num_workers": 2}, {"num_workers": 0}, {"episode_timeout_s": 0.0}]
)
def test_settings_out_of_range_are_refused(settings: dict[str, object]) -> None:
    """ENV-7, SET-1."""
    with pytest.raises(SettingsError):
        load_settings(EnvironmentSettings, settings, "env")


# -- results that stay ------------------------------------------------------------------------


def asking(value: str = "1") -> Request:
    return attrs.evolve(run_request(), headers=((b"x-ng-result-ack", value.encode()),))


def ack_request(body: object = None, headers: Headers = ()) -> Request:
    body = {"episode_id": {"rollout_id": "r"}} if body is None else body
    return Request("POST", "/run/ack", body=json.dumps(body).encode(), headers=headers)


def counting() -> tuple[EpisodeProtocol, list[str]]:
    runs: list[str] = []

    async def protocol(run: EpisodeRun) -> dict[str, object]:
        runs.append(str(run.request.episode_id))
        return {"run": len(runs)}

    return protocol, runs


async def test_a_reply_whose_caller_had_left_is_given_to_a_repeated_run(
    autojump_clock: MockClock,
) -> None:
    """HARD-9, I1: also when its caller did not ask to acknowledge; once heard, it is gone."""
    protocol, runs = counting()
    server, participant = server_of(protocol)
    lost = await server.run(run_request())
    assert lost.on_done is not None
    lost.on_done(False)
    assert participant.ready()
    assert participant.report().counts["results_kept"] == 1
    assert (await answered(server))["result"] == {"run": 1}
    assert participant.report().counts["results_kept"] == 0
    assert runs == ["r"]


async def test_a_repeated_run_beside_a_reply_that_is_on_its_way(autojump_clock: MockClock) -> None:
    """HARD-9, I2: both block until they are out; neither runs anything."""
    protocol, runs = counting()
    server, participant = server_of(protocol)
    first, second = await server.run(run_request()), await server.run(run_request())
    assert first.body == second.body
    assert first.on_done is not None
    assert second.on_done is not None
    second.on_done(True)
    assert not participant.ready()
    first.on_done(False)
    assert participant.ready()
    assert len(participant.results) == 0
    assert runs == ["r"]


async def test_a_result_stays_until_its_caller_acknowledges_it(autojump_clock: MockClock) -> None:
    """HARD-9: and answers the same task only; acknowledging twice is 200 twice."""
    protocol, runs = counting()
    server, participant = server_of(protocol)
    for _ in range(2):
        assert (await answered(server, asking()))["result"] == {"run": 1}
        assert (await answered(server))["result"] == {"run": 1}
    other = {**BODY, "task": {**BODY["task"], "task_id": {"taskset": "t", "task_id": "2"}}}
    refused = await server.run(run_request(other))
    assert refused.status == 422
    assert refused.on_done is not None
    refused.on_done(True)
    replies = [json.loads((await server.acknowledge(ack_request())).body) for _ in range(2)]
    episode_id = {"rollout_id": "r", "attempt": 0}
    assert replies == [{"episode_id": episode_id, "known": known} for known in (True, False)]
    assert len(participant.results) == 0
    assert runs == ["r"]


async def test_only_1_asks_for_acknowledgement(autojump_clock: MockClock) -> None:
    """HARD-9."""
    protocol, _ = counting()
    server, participant = server_of(protocol)
    await answered(server, asking("0"))
    assert len(participant.results) == 0


async def test_failures_are_results_too(autojump_clock: MockClock) -> None:
    """HARD-9: a failed rollout is data, and so is one whose time was up."""
    runs: list[str] = []

    async def failing(run: EpisodeRun) -> dict[str, object]:
        runs.append("failing")
        raise EpisodeFailed("verify", "no", terminal=True)

    async def slow(run: EpisodeRun) -> dict[str, object]:
        runs.append("slow")
        await trio.sleep_forever()
        raise AssertionError

    for protocol, stage in ((failing, "verify"), (slow, "timeout")):
        server, participant = server_of(protocol, timeout_s=3)
        first = await answered(server, asking())
        assert first["failure"]["stage"] == stage
        assert await answered(server) == first
        assert participant.ready()
    assert runs == ["failing", "slow"]


async def test_a_refusal_is_no_result(autojump_clock: MockClock) -> None:
    """HARD-9: it is an answer to this call, not what became of the rollout."""

    async def refusing(run: EpisodeRun) -> dict[str, object]:
        raise InvalidRequest("no")

    server, participant = server_of(refusing)
    response = await server.run(asking())
    assert response.on_done is not None
    response.on_done(False)
    assert len(participant.results) == 0


@pytest.mark.parametrize("body", [[], {"episode": 1}, {"episode_id": {}, "more": 1}])
async def test_what_is_no_acknowledgement_is_refused(
    autojump_clock: MockClock, body: object
) -> None:
    """CTL-17."""
    server, _ = server_of(counting()[0])
    with pytest.raises(InvalidRequest):
        await server.acknowledge(ack_request(body))


async def test_an_acknowledgement_of_a_superseded_execution_drops_nothing(
    autojump_clock: MockClock,
) -> None:
    """HARD-9, HARD-11: the result of the newer execution has not been heard."""
    server, participant = server_of(counting()[0])
    r0, r1 = EpisodeId(RolloutId("r")), EpisodeId(RolloutId("r"), 1)
    participant.admission.supersede([r0], "e2")
    run = {**BODY, "episode_id": {"rollout_id": "r", "attempt": 1}}
    asked = attrs.evolve(run_request(run), headers=((b"x-ng-result-ack", b"1"),))
    response = await server.run(asked)
    assert first_header(response.headers, "x-ng-epoch") == "e2"
    ack = {"episode_id": {"rollout_id": "r", "attempt": 1}}
    with pytest.raises(StaleAttempt):
        await server.acknowledge(ack_request(ack, ((b"x-ng-epoch", b"e1"),)))
    assert [result.episode_id for result in participant.results] == [r1]


async def test_with_checkpointing_off_nothing_is_kept(autojump_clock: MockClock) -> None:
    """SET-1, HARD-9: who asks and acknowledges all the same is answered."""
    protocol, runs = counting()
    server = EnvironmentServer(protocol, EnvironmentSettings(), None, first_epoch="first")
    for number in (1, 2):
        assert (await answered(server, asking()))["result"] == {"run": number}
    assert json.loads((await server.acknowledge(ack_request())).body)["known"] is False
    assert len(runs) == 2


async def test_over_the_limit_a_new_episode_that_asks_is_refused_before_it_runs(
    autojump_clock: MockClock,
) -> None:
    """HARD-9, U2: 503; one that does not ask is served, and so is what is kept."""
    protocol, runs = counting()
    server, participant = server_of(protocol)
    await answered(server, asking())
    for number in range(RESULTS_UNACKNOWLEDGED_MAX - 1):
        episode_id = EpisodeId(RolloutId(f"s{number}"))
        participant.results.keep(Result(episode_id=episode_id, task_digest="t", wants_ack=True))
    new = {**BODY, "episode_id": {"rollout_id": "new"}}
    refused = await server.run(attrs.evolve(asking(), body=json.dumps(new).encode()))
    assert refused.status == 503
    assert (await answered(server, asking()))["result"] == {"run": 1}
    assert (await answered(server, run_request(new)))["result"] == {"run": 2}
    assert runs == ["r", "new"]
