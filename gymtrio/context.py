"""The episode on whose behalf a request is served (ID-4).

It travels as a path prefix, `/ng-rollout/<capture key>/<real path>`, because a prefix passes
through every client and proxy that a base URL passes through, and no harness has to know about it.
The middleware strips it and puts the episode into a context variable; trio copies the context into
every task started inside, so that calls made on behalf of the request carry it on (ID-5).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import attrs

from gymtrio.ids import EpisodeId, parse_capture_key

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

ROLLOUT_PREFIX: Final = "/ng-rollout/"
CAPTURE_SEGMENT: Final = "training-token-capture"


@attrs.frozen
class RolloutContext:
    """Which episode a request belongs to, and what it asks for besides."""

    episode_id: EpisodeId
    capture_tokens: bool = False
    """The caller wants token ids and log-probs kept for training."""
    epoch: str | None = None
    """Which execution of the attempt it belongs to, if the caller knows (HARD-11). It travels as a
    header, beside the prefix."""

    def path(self, real_path: str) -> str:
        """Put the prefix before `real_path`, which starts with a slash."""
        capture = f"/{CAPTURE_SEGMENT}" if self.capture_tokens else ""
        return f"{ROLLOUT_PREFIX}{self.episode_id.capture_key}{capture}{real_path}"


_CONTEXT: ContextVar[RolloutContext | None] = ContextVar("gymtrio_rollout", default=None)


def current_context() -> RolloutContext | None:
    """The rollout context of the running task, if it works for an episode."""
    return _CONTEXT.get()


def current_episode() -> EpisodeId | None:
    context = _CONTEXT.get()
    return None if context is None else context.episode_id


@contextmanager
def rollout_context(context: RolloutContext | None) -> Iterator[None]:
    """Run the body on behalf of `context`; tasks started inside inherit it."""
    token = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(token)


@attrs.frozen
class CheckpointWork:
    """Which checkpoint something is done for."""

    checkpoint_id: str
    phase: Callable[[], str]
    """Where its participant is now."""


_CHECKPOINT: ContextVar[CheckpointWork | None] = ContextVar("gymtrio_checkpoint", default=None)


def current_checkpoint() -> CheckpointWork | None:
    """The checkpoint that the running task works for, if it does."""
    return _CHECKPOINT.get()


@contextmanager
def checkpoint_context(work: CheckpointWork) -> Iterator[None]:
    """Run the body on behalf of a checkpoint; tasks started inside inherit it."""
    token = _CHECKPOINT.set(work)
    try:
        yield
    finally:
        _CHECKPOINT.reset(token)


def split_rollout_path(path: str) -> tuple[RolloutContext | None, str]:
    """Take the rollout prefix off a decoded request path.

    Returns:
        The context and the real path, or `(None, path)` when there is no prefix.

    Raises:
        InvalidRolloutId: the prefix is there but names no episode.
    """
    if not path.startswith(ROLLOUT_PREFIX):
        return None, path
    key, _, rest = path[len(ROLLOUT_PREFIX) :].partition("/")
    episode_id = parse_capture_key(key)
    segment, slash, after = rest.partition("/")
    if segment == CAPTURE_SEGMENT and slash:
        return RolloutContext(episode_id, capture_tokens=True), f"/{after}"
    return RolloutContext(episode_id), f"/{rest}"


def without_prefix(scope: Scope, context: RolloutContext, real_path: str) -> Scope:
    """Copy an ASGI scope as the application behind the prefix is to see it."""
    raw: bytes | None = scope.get("raw_path")
    stripped = dict(scope, path=real_path)
    if raw is not None:
        # Percent-encoding may differ from the decoded path, so the raw path is cut by segments.
        segments = 3 + (1 if context.capture_tokens else 0)
        parts = raw.split(b"/", segments)
        stripped["raw_path"] = b"/" + parts[segments] if len(parts) > segments else b"/"
    return stripped


def rollout_of_scope(scope: Scope) -> tuple[RolloutContext | None, Scope]:
    """Split the prefix off an ASGI scope.

    Raises:
        InvalidRolloutId: see `split_rollout_path`.
    """
    context, real_path = split_rollout_path(scope["path"])
    if context is None:
        return None, scope
    return context, without_prefix(scope, context, real_path)


def decode_path(raw_path: str) -> str:
    """Decode a request target's path as ASGI servers do."""
    return unquote(raw_path) if "%" in raw_path else raw_path
