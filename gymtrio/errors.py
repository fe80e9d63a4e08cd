"""One tree of errors, each leaf with its wire code and HTTP status (CTL-17).

Vocabulary: a *refusal* is an answer to a peer that asked for something we will not do; it crosses
the wire as `{"error": {"code", "detail"}}`. What we find wrong in our own configuration or
surroundings is a `SettingsError` or a `HostError`. A fault of our own is an assertion and is never
caught.

The detail names the episode, file or field. It never holds a secret.
"""

from __future__ import annotations

from typing import ClassVar, Final


class GymtrioError(Exception):
    """Base of everything that gymtrio raises on purpose."""


class SettingsError(GymtrioError):
    """A setting is missing, unknown or out of range; the message names file and key."""


class HostError(GymtrioError):
    """This machine lacks something a server needs; the message says what to do about it."""


class Refusal(GymtrioError):
    """Base of the typed answers; never raised itself."""

    status: ClassVar[int]
    code: ClassVar[str]

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail

    def body(self) -> dict[str, dict[str, str]]:
        return {"error": {"code": self.code, "detail": self.detail}}


class RolloutIdRequired(Refusal):
    """Agent work without a rollout id while checkpointing is on (ID-7)."""

    status, code = 400, "rollout_id_required"


class InvalidRolloutId(Refusal):
    """A rollout id, attempt or capture key outside the grammar (ID-1, ID-2)."""

    status, code = 400, "invalid_rollout_id"


class InvalidRequest(Refusal):
    """A body that is not what the route takes: unknown field, wrong type, not JSON."""

    status, code = 422, "invalid_request"


class Unauthorized(Refusal):
    """No control call without the token (CTL-2). The detail is constant: it reveals nothing."""

    status, code = 401, "unauthorized"

    def __init__(self) -> None:
        super().__init__("a valid bearer token is required")


class CheckpointError(Refusal):
    """Something of a checkpoint failed that has no code of its own."""

    status, code = 409, "checkpoint_error"


class StaleCheckpoint(CheckpointError):
    """The checkpoint id was already resumed here, or its lease ran out (CTL-4)."""

    code = "stale_checkpoint"


class CheckpointConflict(CheckpointError):
    """Another checkpoint is open, or the same one with other arguments (CTL-4, CTL-6)."""

    code = "checkpoint_conflict"


class InvalidPhase(CheckpointError):
    """The phase table has no such transition from where the participant is (CTL-3)."""

    code = "invalid_phase"


class DeadlineExceeded(CheckpointError):
    """The deadline had passed, or passed before the work ended (CTL-8)."""

    code = "deadline_exceeded"


class StaleAttempt(CheckpointError):
    """The attempt was retired or superseded by a restore (CTL-5)."""

    code = "stale_attempt"


class AdmissionClosed(CheckpointError):
    """The caller asked to be refused rather than to wait (CTL-18), or the server awaits a
    restore."""

    code = "admission_closed"


class RetireIncomplete(CheckpointError):
    """Something of the attempt still runs (CTL-12)."""

    code = "retire_incomplete"


class ActivationOutOfOrder(CheckpointError):
    """An activation index that skips ahead (AGT-6)."""

    code = "activation_out_of_order"


class InvalidCheckpointState(CheckpointError):
    """Stored data is wrong, or cannot be written (STO-3, STO-4, STO-8)."""

    status, code = 422, "invalid_checkpoint_state"


class DirectoryRefused(InvalidCheckpointState):
    """A `checkpoint_dir` that is not one below the root: nothing was begun (STO-7)."""


class CoordinatorUnavailable(CheckpointError):
    """A worker has lost, or not yet reached, its coordinator (WRK-1)."""

    status, code = 503, "checkpoint_coordinator_unavailable"


class NotFound(Refusal):
    """No such route, session or record."""

    status, code = 404, "not_found"


class SessionConflict(Refusal):
    """A session id that is taken by another episode, or was closed before its seed came."""

    status, code = 409, "session_conflict"


class TooLarge(Refusal):
    """A body over the limit that the detail names (SRV-5)."""

    status, code = 413, "too_large"


class Unavailable(Refusal):
    """The server cannot take this now: it drains, or its backend is away."""

    status, code = 503, "unavailable"


class BackendFailed(Refusal):
    """A server that we call on behalf of the caller answered wrongly or not at all."""

    status, code = 502, "backend_failed"


class TransportError(GymtrioError):
    """A peer could not be reached, or the connection ended before its reply was whole."""


class PeerRefused(GymtrioError):
    """A peer answered with an error status; carries what it said."""

    def __init__(self, where: str, status: int, code: str | None, detail: str) -> None:
        super().__init__(f"{where} answered {status} {code or ''}: {detail}")
        self.where = where
        self.status = status
        self.code = code
        self.detail = detail


def _leaves(base: type[Refusal]) -> list[type[Refusal]]:
    found = [base] if hasattr(base, "code") else []
    for child in base.__subclasses__():
        found += _leaves(child)
    return found


REFUSALS: Final[dict[str, type[Refusal]]] = {leaf.code: leaf for leaf in reversed(_leaves(Refusal))}
"""Wire code to class: a client turns an error body back into the type the server raised."""
