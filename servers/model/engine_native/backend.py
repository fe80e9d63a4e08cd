"""Generates for calls of rollouts, which can be cut and may continue a cut."""

from __future__ import annotations

import attrs

from gymtrio.capture.cuts import CallExtension, EngineDescription, TerminalReason
from gymtrio.capture.replies import CallTokens, Route, put_extension, write_tokens
from gymtrio.capture.tokens import TokenStore
from gymtrio.capture.worker import CapturedCall, Progress, TokenCapture
from servers.model.embedded.engine import Engine
from servers.model.embedded.generation import Generated, GenerationRequest
from servers.model.engine_native.continuations import continued, seed_of


class NativeBackend:
    """
    Args:
        store: None: there is no control token, hence no cuts and nothing to continue.
    """

    def __init__(
        self, engine: Engine, *, description: EngineDescription, store: TokenStore | None
    ) -> None:
        self.capture = TokenCapture(
            store,
            engine_digest=description.digest,
            policy_version=lambda: description.policy_version,
            records_max=engine.context_tokens,
        )
        self._engine = engine
        self._description = description

    async def begin(self, extension: CallExtension, wanted: GenerationRequest) -> CapturedCall:
        """Begin a call; from now on it can be cut, until `end`.

        Raises:
            CallConflict: a call of this id lives.
            ContinuationRefused: see `TokenCapture.begin_call`.
        """
        return await self.capture.begin_call(extension, prompt_token_ids=wanted.prompt_ids)

    def end(self, call: CapturedCall) -> None:
        """Forget a call: its reply is handed over, or its caller has left."""
        self.capture.end_call(call)

    def observe(self, call: CapturedCall) -> Progress | None:
        """See `gymtrio.capture.rounds.Cutter`."""
        generated = self._engine.snapshot(_engine_id(call))
        return None if generated is None else self._progress(generated)

    async def generate(
        self, call: CapturedCall, wanted: GenerationRequest, *, seeded: bool
    ) -> Generated:
        """Generate the whole, or what its continuation has left.

        Args:
            seeded: the request brings its seed; else one is derived that its continuations share.

        Raises:
            ContinuationRefused: nothing was generated.
            Unavailable: see `Engine.generate`.

        Cancelled: its slot is free from the next step on.
        """
        continuation = call.extension.continuation
        if call.prefix is not None:
            assert continuation is not None
            wanted = continued(
                wanted,
                call.prefix,
                continuation,
                vocabulary=self._engine.vocabulary,
                context_tokens=self._engine.context_tokens,
            )
        if not seeded:
            seed = seed_of(call.first_call_id)
            wanted = attrs.evolve(wanted, sampling=attrs.evolve(wanted.sampling, seed=seed))
        return await self._engine.generate(_engine_id(call), wanted)

    def add_evidence(
        self, reply: dict[str, object], route: Route, call: CapturedCall, result: Generated
    ) -> None:
        """Put the tokens and the extension of a call that has ended into its reply."""
        extension = self.capture.complete_call(call, self._progress(result))
        tokens = CallTokens(
            prompt_token_ids=call.prompt_token_ids,
            token_ids=result.token_ids,
            log_probs=result.logprobs,
        )
        write_tokens(route, reply, tokens)
        put_extension(reply, extension)

    def _progress(self, generated: Generated) -> Progress:
        reason = generated.finish_reason
        return Progress(
            token_ids=generated.token_ids,
            log_probs=generated.logprobs,
            effective_output_limit=generated.output_limit_tokens,
            policy_version=self._description.policy_version,
            finish_reason=None if reason is None else TerminalReason(reason),
            stop_reason=generated.stop,
        )


def _engine_id(call: CapturedCall) -> str:
    """What the engine knows a call by; ids that clients choose meet no others there."""
    return f"native/{call.extension.model_call_id}"
