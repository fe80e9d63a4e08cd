"""What is around an episode protocol, whatever the protocol."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.context import current_context
from gymtrio.errors import InvalidRequest, PeerRefused, SettingsError, TransportError
from gymtrio.participants.environment import EnvironmentParticipant
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
from gymtrio.serving.http import Request, Response
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
    return EnvironmentServer(protocol, settings, participant), participant


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
    """STEP-7: its failure is heard at once, so that the checkpoint is ready."""
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
        assert len(replies) == 1
        assert participant.ready()
        assert cleaned == []
        participant.open()
        await wait_all_tasks_blocked()
        assert cleaned == [True]
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
