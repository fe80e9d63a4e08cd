"""The control protocol: what a training controller says to a participant, and what it answers.

One definition for HTTP JSON and for frames. Names of fields are fixed: controllers speak them.

Routes, relative to `/ng-control/v1/checkpoint`: GET status; POST prepare, renew, commit, restore,
resume, retire, forget. Every body has `checkpoint_id` and `deadline_ts`; a `controller_nonce` makes
the hold that of one controller and not of every controller that uses the same id (HARD-5).
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, TypeAlias, TypeVar

import attrs

from gymtrio.errors import InvalidRequest
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId, is_safe_id, parse_rollout_id
from gymtrio.limits import ID_CHARACTERS_MAX, PARTICIPANTS_SCOPE_EPISODES_MAX
from gymtrio.strict import structure, unstructure

CONTROL_PREFIX: Final = "/ng-control/v1/checkpoint"
STATUS: Final = "status"
"""The one operation without a request."""


class Kind(Enum):
    """What sort of server a participant belongs to; names a directory of a checkpoint."""

    ENVIRONMENT = "environment"
    MODEL = "model"
    AGENT = "agent"
    RESOURCES = "resources"


class Phase(Enum):
    """Where a participant is in a checkpoint (CTL-3)."""

    IDLE = "idle"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTED = "committed"
    RESTORED = "restored"


def _check_safe_id(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not (isinstance(value, str) and is_safe_id(value)):
        raise InvalidRequest(
            f"{attribute.name}: 1-{ID_CHARACTERS_MAX} characters, first a letter or digit, then "
            "letters, digits, '.', '_', '-'"
        )


def _check_scope(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, tuple):
        return
    if len(value) > PARTICIPANTS_SCOPE_EPISODES_MAX:
        raise InvalidRequest(
            f"{attribute.name}: {len(value)} named, limit {PARTICIPANTS_SCOPE_EPISODES_MAX}"
        )


def _check_restorable(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    _check_scope(instance, attribute, value)
    if not isinstance(value, tuple):
        return
    # Thousands are named, nearly always each rollout once.
    if len({episode_id.rollout_id for episode_id in value}) == len(value):
        return
    named: dict[RolloutId, EpisodeId] = {}
    for episode_id in value:
        other = named.setdefault(episode_id.rollout_id, episode_id)
        if other != episode_id:
            # The fence of the later one would refuse the replacement of the earlier one.
            raise InvalidRequest(
                f"{attribute.name}: {other} and {episode_id} are attempts of one rollout, of which "
                "only one can be continued"
            )


def _check_named(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value == ():
        raise InvalidRequest(f"{attribute.name}: at least one is required")
    _check_scope(instance, attribute, value)


@attrs.frozen(kw_only=True)
class ControlRequest:
    """What every operation's body has."""

    checkpoint_id: CheckpointId = attrs.field(validator=_check_safe_id)
    deadline_ts: float
    """Absolute Unix seconds, finite; when the controller stops waiting."""
    controller_nonce: str | None = attrs.field(default=None, validator=_check_safe_id)
    """Tells controllers apart that use the same checkpoint id; None: not told apart."""


@attrs.frozen(kw_only=True)
class PrepareRequest(ControlRequest):
    """Close admission and wait until every live piece of work is at a safe point."""


@attrs.frozen(kw_only=True)
class RenewRequest(ControlRequest):
    """Extend the lease to `deadline_ts` plus grace."""


@attrs.frozen(kw_only=True)
class CommitRequest(ControlRequest):
    """Write this participant's part of the checkpoint."""

    checkpoint_dir: str
    """Under the configured root; the same directory for every participant."""
    episode_ids: tuple[EpisodeId, ...] | None = attrs.field(default=None, validator=_check_scope)
    """What to export; None: everything exportable (a model needs an explicit scope)."""
    stop: bool = False
    """The deployment ends after this: what exported state holds outside may be freed."""


@attrs.frozen(kw_only=True)
class RestoreRequest(ControlRequest):
    """Install the scope's episodes under their next attempts, all of it or nothing."""

    checkpoint_dir: str
    episode_ids: tuple[EpisodeId, ...] = attrs.field(validator=_check_restorable)
    """The attempts as they were checkpointed, of each rollout one."""
    execution_epoch: str | None = attrs.field(default=None, validator=_check_safe_id)
    """Tells the replacement attempts apart from those of another restore of the same checkpoint; the
    same for every participant, never used twice (HARD-11). None: they are not told apart."""


@attrs.frozen(kw_only=True)
class ResumeRequest(ControlRequest):
    """Let everything go on; from an open phase this is also the abort."""

    start_afresh: bool = False
    """Open a server that waits for a restore without restoring anything (HARD-3)."""
    episode_ids: tuple[EpisodeId, ...] = attrs.field(default=(), validator=_check_scope)
    """With `start_afresh`: what is given up by it. Refused from the instant of opening (I11)."""
    undo_restore: bool = False
    """Drop what this hold restored, as if it never had been: the restore failed elsewhere (COORD-3).
    Nothing of it was admitted yet, so nothing need be refused, and the same checkpoint can be restored
    again; a server that waited to be restored waits again."""

    def __attrs_post_init__(self) -> None:
        if self.episode_ids and not self.start_afresh:
            raise InvalidRequest("episode_ids: named only with start_afresh; else retire them")


@attrs.frozen(kw_only=True)
class RetireRequest(ControlRequest):
    """Give attempts up: refuse them, stop their work, free their state, then answer."""

    episode_ids: tuple[EpisodeId, ...] = attrs.field(validator=_check_named)


@attrs.frozen(kw_only=True)
class ForgetRequest(ControlRequest):
    """Drop the refusals of rollouts that are finished for good."""

    rollout_ids: tuple[str, ...] = attrs.field(validator=_check_named)

    def checked(self) -> tuple[RolloutId, ...]:
        """
        Raises:
            InvalidRolloutId: a name that no rollout can have.
        """
        return tuple(parse_rollout_id(name) for name in self.rollout_ids)


@attrs.frozen(kw_only=True)
class BlockerDetail:
    """One thing that a prepare waits for."""

    blocker: str
    doing: str
    since_s: float
    """For how long, in seconds."""


@attrs.frozen(kw_only=True)
class Report:
    """Whether the participant is at a safe point, and what keeps it from one."""

    ready: bool
    blockers: tuple[str, ...] = ()
    """At most 100 of them; `blocker_count` counts all."""
    blocker_count: int = 0
    counts: dict[str, int] = attrs.field(factory=dict)
    details: tuple[BlockerDetail, ...] = ()
    """What each listed blocker is doing and since when (CTL-15)."""


@attrs.frozen(kw_only=True)
class StatusReply:
    kind: str
    instance: str
    phase: str
    checkpoint_id: str | None
    lease_expires_at: float | None
    """Unix seconds, as the wall clock stands now."""
    retired_rollouts: int
    awaiting_restore: bool
    """The server was started to recover and serves nothing yet (HARD-3)."""
    report: Report
    incarnation: str | None = None
    """Made up when the process opened its control plane: another one has lost whatever that had
    (HARD-13). None: an older server."""
    extra: dict[str, object] = attrs.field(factory=dict)
    """What the kind adds, such as `restored_pending`."""


@attrs.frozen(kw_only=True)
class PrepareReply:
    phase: str
    """`prepared`; `preparing` when the deadline came first; `idle` when a resume did."""
    report: Report
    incarnation: str | None = None
    """Which process answers, see `StatusReply.incarnation`."""


@attrs.frozen(kw_only=True)
class RenewReply:
    lease_expires_at: float
    """On the server's wall clock."""
    lease_s: float | None = None
    """How long the lease lasts from now, whatever the wall clocks say; None: an older server."""
    incarnation: str | None = None
    """Which process answers, see `StatusReply.incarnation`."""


@attrs.frozen(kw_only=True)
class CommitReply:
    phase: str
    manifest: dict[str, object]
    episode_ids: tuple[str, ...]
    """Sorted capture keys of what was really exported."""
    incarnation: str | None = None
    """Which process answers, see `StatusReply.incarnation`."""
    extra: dict[str, object] = attrs.field(factory=dict)
    """What the kind adds: the model's `staging_keys` and `staging_keys_by_episode`."""


@attrs.frozen(kw_only=True)
class RestoreReply:
    phase: str
    source_checkpoint_id: str
    restored: tuple[str, ...]
    """Sorted capture keys of the replacement attempts."""
    incarnation: str | None = None
    """Which process answers, see `StatusReply.incarnation`."""


@attrs.frozen(kw_only=True)
class ResumeReply:
    phase: str
    idempotent: bool
    """Nothing was open for that id; it is fenced all the same."""
    incarnation: str | None = None
    """Which process answers, see `StatusReply.incarnation`."""


@attrs.frozen(kw_only=True)
class RetireReply:
    retired: tuple[str, ...]
    """Capture keys in request order."""


@attrs.frozen(kw_only=True)
class ForgetReply:
    forgotten: tuple[str, ...]


Reply: TypeAlias = (
    StatusReply
    | PrepareReply
    | RenewReply
    | CommitReply
    | RestoreReply
    | ResumeReply
    | RetireReply
    | ForgetReply
)
R = TypeVar("R", bound=Reply)


def reply_to_plain(reply: Reply) -> dict[str, object]:
    """Make plain data of a reply; what a kind adds stands beside the common fields."""
    plain: dict[str, object] = unstructure(reply)
    extra = plain.pop("extra", {})
    assert isinstance(extra, dict)
    assert not extra.keys() & plain.keys()
    return plain | extra


def reply_from_plain(cls: type[R], plain: object) -> R:
    """Read a reply; fields that this side does not know are what the kind added.

    Raises:
        MalformedValue: not a `cls`.
    """
    if isinstance(plain, dict):
        known = {field.name for field in attrs.fields(cls)}
        if "extra" in known:
            extra = {key: value for key, value in plain.items() if key not in known}
            plain = {key: value for key, value in plain.items() if key in known} | {"extra": extra}
    return structure(cls, plain)


REQUESTS: Final[dict[str, type[ControlRequest]]] = {
    "prepare": PrepareRequest,
    "renew": RenewRequest,
    "commit": CommitRequest,
    "restore": RestoreRequest,
    "resume": ResumeRequest,
    "retire": RetireRequest,
    "forget": ForgetRequest,
}
"""Operation to the message it takes; `status` takes none."""

REPLIES: Final[dict[str, type[Reply]]] = {
    "status": StatusReply,
    "prepare": PrepareReply,
    "renew": RenewReply,
    "commit": CommitReply,
    "restore": RestoreReply,
    "resume": ResumeReply,
    "retire": RetireReply,
    "forget": ForgetReply,
}
"""Operation to the message it answers with."""
