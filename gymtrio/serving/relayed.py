"""What a server makes of the answers of the servers that it calls, and how its own reply leaves.

A refusal that the checkpoint protocol knows, such as a stale attempt, is passed on as it is: the caller
at the far end knows what to do about it, and it must never look like a result.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import attrs

from gymtrio.errors import (
    REFUSALS,
    BackendFailed,
    CheckpointError,
    InvalidRequest,
    PeerRefused,
    Refusal,
    RolloutIdRequired,
    SettingsError,
    TransportError,
)
from gymtrio.serving.http import Response, refusal_response

_RETRYABLE_STATUS: Final = frozenset({408, 425, 429})


def checkpoint_refusal(code: str | None, detail: str) -> Refusal | None:
    """The refusal of the checkpoint protocol that a peer's error code stands for, if it is one."""
    refusal = REFUSALS.get(code or "")
    if refusal is None or not issubclass(refusal, CheckpointError | RolloutIdRequired):
        return None
    return refusal(detail)


def is_retryable(status: int) -> bool:
    """Whether the same call may succeed later: the peer did not say that it is wrong."""
    return status in _RETRYABLE_STATUS or status >= 500


@contextmanager
def relaying(what: str) -> Iterator[None]:
    """Answer our caller for a server that we called on its behalf.

    Args:
        what: for the detail, such as "the model".

    Raises:
        Refusal: in place of the `PeerRefused`, `TransportError` or `SettingsError` of the block.
    """
    try:
        yield
    except PeerRefused as error:
        known = checkpoint_refusal(error.code, error.detail)
        if known is not None:
            raise known from error
        kind = BackendFailed if is_retryable(error.status) else InvalidRequest
        raise kind(f"{what}: {error}") from error
    except (TransportError, SettingsError) as error:
        raise BackendFailed(f"{what}: {error}") from error


async def delivering(
    work: Callable[[], Awaitable[Response]], deliver: Callable[[], Callable[[bool], None]]
) -> Response:
    """Answer with what comes of work that counts as in flight until its reply is out.

    Args:
        deliver: called in the instant in which `work` has ended, unless it was cancelled.
    """
    try:
        response = await work()
    except Refusal as refusal:
        response = refusal_response(refusal)
    except Exception:
        # A fault of ours: the application answers, and nothing of it is a result.
        deliver()(False)
        raise
    return attrs.evolve(response, on_done=deliver())
