"""Generates for calls of rollouts, which can be cut and may continue a cut."""

from __future__ import annotations

import attrs

from gymtrio.capture.cuts import (
    CallExtension,
    ContinuationRefused,
    EngineDescription,
    ReplyExtension,
    TerminalReason,
)
from gymtrio.capture.replies import CallTokens, Route, put_extension, write_tokens
from gymtrio.capture.tokens import TokenStore
from servers.model.embedded.engine import Engine
from servers.model.embedded.generation import Generated, GenerationRequest
from servers.model.engine_native.continuations import continued, read_prefix, seed_of
from servers.model.engine_native.live_calls import LiveCall, LiveCalls


class NativeBackend:
    """
    Args:
        store: None: there is no control token, hence no cuts and nothing to continue.
    """

    def __init__(
        self, engine: Engine, *, description: EngineDescription, store: TokenStore | None
    ) -> None:
        self.live_calls = LiveCalls()
        self._engine = engine
        self._description = description
        self._store = store

    def enter(self, extension: CallExtension, wanted: GenerationRequest) -> LiveCall:
        """Begin a call; from now on it can be cut, until `leave`.

        Raises:
            CallConflict: a call of this id lives.
        """
        return self.live_calls.enter(extension, wanted.prompt_ids, self._description.policy_version)

    def leave(self, call: LiveCall) -> None:
        """Forget a call: its reply is handed over, or its caller has left."""
        self.live_calls.leave(call)

    async def generate(
        self, call: LiveCall, wanted: GenerationRequest, *, seeded: bool
    ) -> Generated:
        """Generate the whole, or what its continuation has left.

        Args:
            seeded: the request brings its seed; else one is derived that its continuations share.

        Raises:
            ContinuationRefused: nothing was generated.
            Unavailable: see `Engine.generate`.

        Cancelled: its slot is free from the next step on.
        """
        first_call_id = call.extension.model_call_id
        if call.extension.continuation is not None:
            wanted, first_call_id = await self._continue(call, wanted)
        if not seeded:
            seed = seed_of(first_call_id)
            wanted = attrs.evolve(wanted, sampling=attrs.evolve(wanted.sampling, seed=seed))
        call.result = await self._engine.generate(call.engine_id, wanted)
        return call.result

    async def _continue(
        self, call: LiveCall, wanted: GenerationRequest
    ) -> tuple[GenerationRequest, str]:
        """What is left to generate, and the id of the call that began it."""
        continuation = call.extension.continuation
        assert continuation is not None
        if self._store is None:
            raise ContinuationRefused("this engine has no control token, so it keeps no tokens")
        restored = await read_prefix(
            continuation,
            store=self._store,
            prompt_ids=call.prompt_ids,
            description=self._description,
            context_tokens=self._engine.context_tokens,
        )
        wanted = continued(
            wanted,
            restored.prefix,
            continuation,
            vocabulary=self._engine.vocabulary,
            context_tokens=self._engine.context_tokens,
        )
        call.continue_from(restored.prefix)
        return wanted, restored.first_call_id

    def add_evidence(self, reply: dict[str, object], route: Route, call: LiveCall) -> None:
        """Put the tokens and the extension of a call that has ended into its reply."""
        result = call.result
        assert result is not None
        assert result.finish_reason is not None
        tokens = CallTokens(
            prompt_token_ids=call.prompt_ids,
            token_ids=result.token_ids,
            log_probs=result.logprobs,
        )
        write_tokens(route, reply, tokens)
        extension = ReplyExtension(
            model_call_id=call.extension.model_call_id,
            policy_version=call.policy_version,
            engine_digest=self._description.digest,
            finish_reason=TerminalReason(result.finish_reason),
            stop_reason=result.stop,
            effective_output_limit=result.output_limit_tokens,
            continued_token_count=call.continued_tokens,
        )
        put_extension(reply, extension)
