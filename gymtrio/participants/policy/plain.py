"""A policy server that takes no part in checkpoints: calls go through, nothing is kept (SET-1)."""

from __future__ import annotations

from gymtrio.capture.cuts import CallExtension
from gymtrio.errors import BackendFailed
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.calls import Backend, PolicyCall, PolicyReply, check_call
from gymtrio.participants.policy.exchange import exchange
from gymtrio.ports import Randomness


class PlainPolicy:
    """Implements `calls.Policy`; rollouts get their token ids all the same."""

    def __init__(self, backend: Backend, randomness: Randomness) -> None:
        self._backend = backend
        self._randomness = randomness

    async def call(self, episode_id: EpisodeId | None, call: PolicyCall) -> PolicyReply:
        """See `calls.Policy`.

        Raises:
            BackendFailed: no reply, or one without the tokens that were asked for.
            Refusal: see `check_call`.
        """
        check_call(call, for_rollout=episode_id is not None)
        extension = None
        if episode_id is not None and self._backend.native:
            extension = CallExtension(
                model_call_id=self._randomness.hex(16),
                rollout_id=episode_id.rollout_id,
                attempt=episode_id.attempt,
            )
        exchanged = await exchange(
            self._backend, call, extension=extension, wants_tokens=call.capture_tokens
        )
        if exchanged.succeeded and call.capture_tokens and exchanged.tokens is None:
            raise BackendFailed("token capture was asked for, and the backend gives no token ids")
        return PolicyReply(status=exchanged.status, body=exchanged.body, done=_nothing)


def _nothing(sent: bool) -> None:
    """Nothing waits for the reply to have left."""
