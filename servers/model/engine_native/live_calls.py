"""The calls of rollouts, by model call id, from their arrival until their reply is handed over.

Invariant: what of a call is staged grows only, by chunks that join without gap or overlap (I25).
"""

from __future__ import annotations

import attrs

from gymtrio.capture.cuts import ActivePrefix, CallExtension
from gymtrio.capture.prefixes import Prefix
from gymtrio.capture.tokens import StagingKey
from servers.model.embedded.generation import Generated
from servers.model.engine_api.errors import CallConflict


@attrs.frozen(kw_only=True)
class Staged:
    """What of a generation lies in the token store."""

    keys: tuple[StagingKey, ...] = ()
    tokens: int = 0


@attrs.define(eq=False, kw_only=True)
class LiveCall:
    extension: CallExtension
    prompt_ids: tuple[int, ...]
    policy_version: int
    """The oldest that contributed."""
    continued_tokens: int = 0
    """How many it began with."""
    staged: Staged = Staged()
    result: Generated | None = None
    """Once it has ended."""

    @property
    def engine_id(self) -> str:
        """What the engine knows it by; ids that clients choose meet no others there."""
        return f"native/{self.extension.model_call_id}"

    def continue_from(self, prefix: Prefix) -> None:
        """Note the prefix with which it begins, before anything is generated."""
        self.policy_version = min(self.policy_version, prefix.policy_version)
        self.continued_tokens = len(prefix.token_ids)
        self.staged = Staged(keys=prefix.staging_keys, tokens=self.continued_tokens)

    def note_staged(self, staged: Staged) -> None:
        """Note that more is durable; of two cuts at once the one that reached further counts."""
        if staged.tokens > self.staged.tokens:
            self.staged = staged


class LiveCalls:
    def __init__(self) -> None:
        self._calls: dict[str, LiveCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def enter(
        self, extension: CallExtension, prompt_ids: tuple[int, ...], policy_version: int
    ) -> LiveCall:
        """
        Raises:
            CallConflict: a call of this id lives.
        """
        call_id = extension.model_call_id
        if call_id in self._calls:
            raise CallConflict(f"call {call_id} is here already")
        call = LiveCall(extension=extension, prompt_ids=prompt_ids, policy_version=policy_version)
        self._calls[call_id] = call
        return call

    def leave(self, call: LiveCall) -> None:
        """Forget a call: its reply is handed over, or its caller has left."""
        del self._calls[call.extension.model_call_id]

    def find(self, asked: ActivePrefix) -> LiveCall | None:
        """The call that an inventory names; None: there is none, or it is another episode's."""
        call = self._calls.get(asked.model_call_id)
        if call is None or call.extension.capture_key != asked.capture_key:
            return None
        return call
