"""What environment servers share: `POST /run` around an episode protocol.

A protocol is an async function from an `EpisodeRun` to the result; everything around it is here:
admission, the restored boundary, the deadline, the last boundary, clean-ups, and the reply. Beside
it, `POST /run/ack` lets go of a result that its caller asked to have kept (HARD-9). A rollout that
failed is data: it travels as `failure` in a 200 reply. What is refused (a stale attempt, another task)
is an HTTP error.

With checkpointing off the same protocol runs with steps that record nothing.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeAlias

import attrs
import trio

from gymtrio.context import RolloutContext, rollout_context
from gymtrio.episodes.cleanups import Cleanups
from gymtrio.episodes.episode import Episode, EpisodeTimedOut
from gymtrio.episodes.steps import Steps, Unrecorded
from gymtrio.errors import (
    GymtrioError,
    InvalidRequest,
    PeerRefused,
    SettingsError,
    TransportError,
)
from gymtrio.participants.digest import json_digest
from gymtrio.participants.environment import EnvironmentParticipant
from gymtrio.serving.http import Handler, Request, Response, json_response
from gymtrio.serving.relayed import checkpoint_refusal, delivering, is_retryable
from gymtrio.serving.workers import only_one_worker
from gymtrio.strict import MalformedValue, structure, unstructure
from gymtrio.wire.native import (
    ADMISSION_HEADER,
    EPOCH_HEADER,
    RESULT_ACK_HEADER,
    RUN_ACK_ROUTE,
    EpisodeFailure,
    RunAckReply,
    RunAckRequest,
    RunRequest,
)

FAILURE_CHARACTERS_MAX: Final = 2000
"""A reason is read by people; what a peer said may be megabytes."""


def _positive(instance: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"{attribute.name} must be more than 0 seconds, got {value}")


FIRST_EPOCH_BYTES: Final = 8
"""Of randomness in `EnvironmentServer.first_epoch`."""


@attrs.frozen(kw_only=True)
class EnvironmentSettings:
    """What every environment server can be told."""

    num_workers: int = attrs.field(default=1, validator=only_one_worker)
    """More than one is refused (ENV-7)."""
    episode_timeout_s: float | None = attrs.field(default=None, validator=_positive)
    """Time an episode may run, parked time not counted; None: no limit."""
    capture_tokens: bool = False
    """Ask for token capture for every episode, also when its `/run` did not."""


class EpisodeFailed(GymtrioError):
    """The rollout failed; becomes the `failure` of its reply."""

    def __init__(self, stage: str, reason: str, *, terminal: bool) -> None:
        super().__init__(f"{stage}: {reason}")
        self.failure = EpisodeFailure(
            failure_reason=reason[:FAILURE_CHARACTERS_MAX], terminal=terminal, stage=stage
        )


@contextmanager
def failing_as(stage: str) -> Iterator[None]:
    """Turn what a call to another server raises into what it means for the episode.

    A refusal that the checkpoint protocol knows (a stale attempt) goes through to the caller, which
    knows what to do about it; everything else fails the episode at `stage`.

    Raises:
        EpisodeFailed, Refusal: in place of what the block raised.
    """
    try:
        yield
    except PeerRefused as error:
        known = checkpoint_refusal(error.code, error.detail)
        if known is not None:
            raise known from error
        terminal = not is_retryable(error.status)
        raise EpisodeFailed(stage, str(error), terminal=terminal) from error
    except TransportError as error:
        raise EpisodeFailed(stage, str(error), terminal=False) from error
    except (SettingsError, MalformedValue) as error:
        raise EpisodeFailed(stage, str(error), terminal=True) from error


@attrs.frozen
class EpisodeRun:
    """One episode, as its protocol sees it."""

    request: RunRequest
    steps: Steps
    cleanups: Cleanups
    """Run when the protocol has returned or raised."""
    context: RolloutContext
    """The current one of the protocol's task; clean-ups may run in another."""


EpisodeProtocol: TypeAlias = Callable[[EpisodeRun], Awaitable[dict[str, object]]]
"""Runs an episode from `steps.continuation`; its result, or failure, is recorded for it.

Boundaries are its own, but for the one of `gymtrio.participants.results.last_boundary`.

Raises:
    EpisodeFailed: the rollout failed.
    Refusal: the caller is told so by an HTTP error.
"""


def parse_run(body: object) -> RunRequest:
    """Read the body of a `/run`.

    A task's own fields may stand beside `responses_create_params`, as in rows; they are task data.

    Raises:
        InvalidRequest, InvalidRolloutId
    """
    try:
        return structure(RunRequest, _with_task_data(body))
    except MalformedValue as error:
        raise InvalidRequest(str(error)) from None


def _with_task_data(body: object) -> object:
    if not isinstance(body, Mapping) or not isinstance(body.get("task"), Mapping):
        return body
    task = body["task"]
    task_input = task.get("task_input")
    if not isinstance(task_input, Mapping):
        return body
    named = {"responses_create_params", "task_data"}
    flat = {key: value for key, value in task_input.items() if key not in named}
    task_data = task_input.get("task_data", {})
    if not flat or not isinstance(task_data, Mapping):
        return body
    merged = {key: value for key, value in task_input.items() if key in named}
    merged["task_data"] = {**flat, **task_data}
    return {**body, "task": {**task, "task_input": merged}}


class EnvironmentServer:
    """The routes of an environment server.

    Args:
        participant: None: checkpointing is off.
        first_epoch: names the executions of attempts that no restore made; each process has another. A
            restore may make an attempt of the same number again, and is told apart by it (HARD-11).
    """

    def __init__(
        self,
        protocol: EpisodeProtocol,
        settings: EnvironmentSettings,
        participant: EnvironmentParticipant | None,
        *,
        first_epoch: str,
    ) -> None:
        self.participant = participant
        self._first_epoch = first_epoch
        self._protocol = protocol
        self._settings = settings

    @property
    def routes(self) -> dict[tuple[str, str], Handler]:
        return {("POST", "/run"): self.run, ("POST", RUN_ACK_ROUTE): self.acknowledge}

    async def run(self, request: Request) -> Response:
        """Serve one `/run`."""
        run = parse_run(request.json())
        asked = request.context is not None and request.context.capture_tokens
        context = RolloutContext(
            run.episode_id, asked or self._settings.capture_tokens, epoch=request.epoch
        )
        participant = self.participant
        with rollout_context(context):
            if participant is None:
                return json_response(_reply(run, await self._run_unrecorded(run, context)))
            return await delivering(
                partial(self._answer, participant, run, context, request),
                partial(participant.deliver, run.episode_id),
            )

    async def acknowledge(self, request: Request) -> Response:
        """Let go of a result that its caller has; served in every phase, twice is as good as once."""
        try:
            message = structure(RunAckRequest, request.json())
        except MalformedValue as error:
            raise InvalidRequest(str(error)) from None
        episode_id = message.episode_id
        known = self.participant is not None and self.participant.acknowledge(
            episode_id, request.epoch
        )
        return json_response(unstructure(RunAckReply(episode_id=episode_id, known=known)))

    async def _answer(
        self,
        participant: EnvironmentParticipant,
        run: RunRequest,
        context: RolloutContext,
        request: Request,
    ) -> Response:
        async def body(episode: Episode) -> dict[str, object]:
            # Asked in the instant of admission; a caller need not know it.
            first = context.epoch or self._first_epoch
            epoch = participant.epoch_of(run.episode_id, first)
            acting = attrs.evolve(context, epoch=epoch)
            with rollout_context(acting):
                return await self._episode(
                    run,
                    acting,
                    episode,
                    conclude=partial(participant.conclude, episode),
                    clean_up=partial(participant.clean_up, episode),
                )

        outcome = await participant.run_episode(
            run.episode_id,
            json_digest(unstructure(run.task)),
            body,
            self._settings.episode_timeout_s,
            timed_out=_timed_out,
            epoch=context.epoch,
            refuse=request.header(ADMISSION_HEADER) == "refuse",
            wants_ack=request.header(RESULT_ACK_HEADER) == "1",
        )
        epoch = participant.epoch_of(run.episode_id)
        try:
            return json_response(
                _reply(run, outcome), headers=() if epoch is None else [(EPOCH_HEADER, epoch)]
            )
        except (TypeError, ValueError):
            # A fault of the protocol's: not JSON, so that it could be neither heard nor recorded.
            participant.disown(run.episode_id)
            raise

    async def _run_unrecorded(self, run: RunRequest, context: RolloutContext) -> dict[str, object]:
        timeout_s = self._settings.episode_timeout_s
        with trio.move_on_after(math.inf if timeout_s is None else timeout_s):
            return await self._episode(
                run, context, Unrecorded(), conclude=_unrecorded, clean_up=Cleanups.run
            )
        return _timed_out(EpisodeTimedOut(f"{run.episode_id} timed out after {timeout_s:g} s"))

    async def _episode(
        self,
        run: RunRequest,
        context: RolloutContext,
        steps: Steps,
        *,
        conclude: Callable[[dict[str, object]], Awaitable[None]],
        clean_up: Callable[[Cleanups], Awaitable[None]],
    ) -> dict[str, object]:
        cleanups = Cleanups(run.episode_id.capture_key)
        try:
            outcome = await self._outcome(EpisodeRun(run, steps, cleanups, context))
            await conclude(outcome)
            return outcome
        finally:
            await clean_up(cleanups)

    async def _outcome(self, run: EpisodeRun) -> dict[str, object]:
        try:
            return {"result": await self._protocol(run)}
        except EpisodeFailed as failed:
            return _failed(failed.failure)


async def _unrecorded(outcome: dict[str, object]) -> None:
    await trio.lowlevel.checkpoint_if_cancelled()


def _timed_out(error: EpisodeTimedOut) -> dict[str, object]:
    return _failed(EpisodeFailure(failure_reason=str(error), terminal=False, stage="timeout"))


def _failed(failure: EpisodeFailure) -> dict[str, object]:
    return {"failure": unstructure(failure)}


def _reply(run: RunRequest, outcome: Mapping[str, object]) -> dict[str, object]:
    return {
        "episode_id": unstructure(run.episode_id),
        "task_id": unstructure(run.task.task_id),
        **outcome,
    }
