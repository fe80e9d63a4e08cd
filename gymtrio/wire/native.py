"""Messages of the native episode protocol, between environment, agent and resources servers.

The shapes follow the public NeMo Gym protocol, so that its clients and rows work unmodified. What a
task, a model or a tool brings along is opaque JSON here (`object`) and is passed on untouched.
"""

from __future__ import annotations

from typing import Final

import attrs

from gymtrio.errors import InvalidRequest
from gymtrio.ids import EpisodeId

VERIFY_HEADER: Final = "x-ng-checkpoint-verify"
"""On every seed reply of a resources server: `replay` or `wait` (RES-4)."""
ADMISSION_HEADER: Final = "x-ng-admission"
"""`refuse`: answer 409 rather than wait at the gate (CTL-18)."""
ACTIVATION_HEADER: Final = "x-ng-activation-index"
"""Which activation of an agent session a call starts, from 0 (AGT-6)."""
EPOCH_HEADER: Final = "x-ng-epoch"
"""Which execution of its attempt a call belongs to: the epoch of the restore that the attempt continues
from. One of an earlier restore is refused as stale (HARD-11). Absent: the caller does not know. On the
reply of a `/run`: which execution it was."""
RESULT_ACK_HEADER: Final = "x-ng-result-ack"
"""`1` on a `/run`: keep its result until `RUN_ACK_ROUTE` says that the caller has it (HARD-9)."""

ONLY_SESSION_HEADER: Final = "x-ng-only-session"
"""`1` on a seed: the attempt has no other session at that server. What an earlier execution of it has
left there, restored and asked for by nobody, is freed (STEP-4)."""

RUN_ACK_ROUTE: Final = "/run/ack"


def _not_empty(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not value:
        raise InvalidRequest(f"{attribute.name} is empty")


@attrs.frozen(kw_only=True)
class TaskId:
    taskset: str = attrs.field(validator=_not_empty)
    task_id: str = attrs.field(validator=_not_empty)


@attrs.frozen(kw_only=True)
class SingleTurnInput:
    """Input of one single-agent turn."""

    responses_create_params: dict[str, object]
    """What the model is asked, as the Responses API takes it."""
    task_data: dict[str, object] = attrs.field(factory=dict)
    """The row's other fields: they go to seed and verify as they are."""


@attrs.frozen(kw_only=True)
class Task:
    task_id: TaskId
    task_input: SingleTurnInput


@attrs.frozen(kw_only=True)
class RunRequest:
    episode_id: EpisodeId
    task: Task


@attrs.frozen(kw_only=True)
class EpisodeFailure:
    """A failed rollout is data: it travels in the reply."""

    failure_reason: str
    terminal: bool
    """True: another attempt of the same task would fail the same way."""
    stage: str | None = None
    failure_kind: str | None = None


@attrs.frozen(kw_only=True)
class RunReply:
    """Exactly one of `result` and `failure` is not None."""

    episode_id: EpisodeId
    task_id: TaskId
    result: dict[str, object] | None = None
    failure: EpisodeFailure | None = None


@attrs.frozen(kw_only=True)
class RunAckRequest:
    """The caller of a `/run` has recorded its result. Idempotent."""

    episode_id: EpisodeId


@attrs.frozen(kw_only=True)
class RunAckReply:
    episode_id: EpisodeId
    known: bool
    """A result was kept, and is dropped now. False: there is none, or it was acknowledged before."""


@attrs.frozen(kw_only=True)
class SeedSessionRequest:
    """Idempotent: the same id and episode give the existing session."""

    resources_session_id: str = attrs.field(validator=_not_empty)
    episode_id: EpisodeId
    task_id: TaskId
    task_data: dict[str, object] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class SeedSessionReply:
    resources_session_id: str
    resources_tools: dict[str, object] | None = None
    sandbox_access: dict[str, object] | None = None


@attrs.frozen(kw_only=True)
class CloseSessionRequest:
    """Succeeds when the session is closed already or was never seeded."""

    resources_session_id: str = attrs.field(validator=_not_empty)
    episode_id: EpisodeId


@attrs.frozen(kw_only=True)
class CloseSessionReply:
    resources_session_id: str


@attrs.frozen(kw_only=True)
class ToolAccess:
    """How an agent reaches tools: here, by HTTP with the session's cookie."""

    kind: str
    name: str
    required: bool = True
    base_url: str = ""
    cookies: dict[str, str] = attrs.field(factory=dict)
    headers: dict[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class AgentSessionRequest:
    agent_session_id: str = attrs.field(validator=_not_empty)
    episode_id: EpisodeId
    task_id: TaskId
    tool_accesses: tuple[ToolAccess, ...] = ()
    sandbox_access: dict[str, object] | None = None


@attrs.frozen(kw_only=True)
class AgentSessionReply:
    agent_session_id: str


@attrs.frozen(kw_only=True)
class AgentCloseRequest:
    agent_session_id: str = attrs.field(validator=_not_empty)
    episode_id: EpisodeId


@attrs.frozen(kw_only=True)
class AgentCloseReply:
    agent_session_id: str
    agent_observations: dict[str, object] | None = None
    """What the agent did: its model calls and tool calls, in order."""
    resources_cookies: dict[str, str] | None = None
    """The resources cookies as the agent's last tool call left them."""
