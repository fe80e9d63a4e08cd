"""One agent session: which activation comes next, and what a repetition is answered (AGT-6).

Everything here is synchronous: a decision and its effect are one instant.
"""

from __future__ import annotations

import attrs
import trio

from gymtrio.episodes.episode import Episode
from gymtrio.errors import ActivationOutOfOrder, CheckpointConflict, InvalidCheckpointState
from gymtrio.ids import EpisodeId


@attrs.frozen(kw_only=True)
class Completed:
    """The last activation that ended well. One is enough: a caller asks for the next only when it has
    recorded the reply of the last."""

    index: int
    request_digest: str
    reply: dict[str, object]


@attrs.frozen(kw_only=True)
class Interrupted:
    """A restored activation that waits to be asked for again."""

    index: int
    request_digest: str
    boundary: bytes | None
    """Where it continues, as opaque JSON; None: from its input."""


@attrs.define(eq=False, kw_only=True)
class Activation:
    """One that runs."""

    index: int
    request_digest: str
    episode: Episode | None = None
    """None only within the instant of its admission."""


@attrs.define(eq=False, kw_only=True)
class AgentSession:
    """What is known of a session besides the state that its agent keeps."""

    key: str
    episode_id: EpisodeId
    completed: Completed | None = None
    interrupted: Interrupted | None = None
    activation: Activation | None = None
    unclaimed: bool = False
    """Restored, and not touched by its replacement attempt yet."""
    retired: bool = False
    """Refused, and not freed yet."""
    closing: trio.Event | None = None
    freeing: trio.Event | None = None

    @property
    def next_index(self) -> int:
        return 0 if self.completed is None else self.completed.index + 1

    def reply_of(self, index: int | None, request_digest: str) -> dict[str, object] | None:
        """The stored reply of a completed activation, or None: this one has to run.

        Args:
            index: as the caller counts activations, from 0; None: the next.

        Raises:
            ActivationOutOfOrder: it skips ahead, or its reply is not kept any more.
            CheckpointConflict: one is running.
            InvalidCheckpointState: it was completed, or interrupted, with another request.
        """
        expected = self.next_index
        index = expected if index is None else index
        if index > expected:
            raise ActivationOutOfOrder(f"{self.key}: activation {index}, the next is {expected}")
        if index < expected:
            return self._stored(index, request_digest)
        if self.activation is not None:
            raise CheckpointConflict(f"{self.key}: activation {index} runs already")
        waiting = self.interrupted
        if waiting is not None and waiting.request_digest != request_digest:
            raise InvalidCheckpointState(
                f"{self.key}: activation {index} was restored with a different request"
            )
        return None

    def _stored(self, index: int, request_digest: str) -> dict[str, object]:
        done = self.completed
        assert done is not None
        if index != done.index:
            raise ActivationOutOfOrder(
                f"{self.key}: the reply of activation {index} is not kept any more, the last is "
                f"{done.index}"
            )
        if done.request_digest != request_digest:
            raise InvalidCheckpointState(
                f"{self.key}: activation {index} was completed with a different request"
            )
        return done.reply
