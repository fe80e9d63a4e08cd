"""Token capture in an inference worker: its live calls, what of them is durable, how they end (CUT-8).

An engine that integrates natively owns one `TokenCapture`. It begins a call before it generates, shows
its progress when asked, completes it when decoding ended, and ends it when its reply is out of its
hands. `rounds.py` cuts what is live; the embedded engine is the worked example.

- W1 A call is live from `begin_call` to `end_call`, and found by its id and episode only.
- W2 What of a call is staged grows only, by chunks that join without gap or overlap (I25).
- W3 A continued call begins with the very tokens that were cut; its stamp is the oldest version that
  contributed, prefix included (CUT-4).
- W4 A call is complete only once its record is valid: ids, log-probs and mask of one length, beginning
  with what was staged, within its limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs

from gymtrio.capture.cuts import (
    ActivePrefix,
    CallExtension,
    Continuation,
    ContinuationRefused,
    ReplyExtension,
    TerminalReason,
)
from gymtrio.capture.prefixes import (
    Prefix,
    check_continuation,
    chunk_key,
    join_prefix,
    make_chunk,
)
from gymtrio.capture.tokens import (
    StagingKey,
    TokenRecord,
    TokensDamaged,
    TokensMissing,
    TokenStore,
    TokenStoreFailed,
)
from gymtrio.errors import GymtrioError, InvalidRolloutId, Refusal


class CallConflict(Refusal):
    """A call of this id lives."""

    status, code = 409, "call_conflict"


class InvalidCapture(GymtrioError):
    """What an engine says of a call does not hold together; a fault of the engine."""


@attrs.frozen(kw_only=True)
class Progress:
    """What there is of a generation at one instant.

    Raises:
        InvalidCapture: not one log-prob per token, or one that is not finite.
    """

    token_ids: tuple[int, ...]
    """The whole generation, a continued prefix included."""
    log_probs: tuple[float, ...] = attrs.field()
    """Natural logarithms, one per token."""
    effective_output_limit: int
    """Output tokens it may have in all."""
    policy_version: int
    """The oldest that contributed to what was generated here; weights may change under a call."""
    finish_reason: TerminalReason | None = None
    """How decoding ended; None: it goes on."""
    stop_reason: str | None = None
    """The stop string that ended it, if one did."""

    @log_probs.validator
    def _one_finite_number_per_token(self, attribute: object, value: tuple[float, ...]) -> None:
        if len(value) != len(self.token_ids):
            raise InvalidCapture(f"{len(self.token_ids)} token ids, {len(value)} log-probs")
        if not all(map(math.isfinite, value)):
            raise InvalidCapture("a log-prob is not a finite number")


@attrs.frozen(kw_only=True)
class Staged:
    """What of a generation lies in the token store."""

    keys: tuple[StagingKey, ...] = ()
    tokens: int = 0


@attrs.define(eq=False, kw_only=True)
class CapturedCall:
    """One call of a rollout while it is live; made by `TokenCapture.begin_call`."""

    extension: CallExtension
    prompt_token_ids: tuple[int, ...]
    prefix: Prefix | None = None
    """What it goes on from."""
    first_call_id: str
    """Of the call that began the generation, however often it was cut since."""
    staged: Staged = Staged()
    completed: Progress | None = None
    """Once decoding has ended and its record was found valid (W4)."""

    @property
    def continued_tokens(self) -> int:
        return 0 if self.prefix is None else len(self.prefix.token_ids)

    def policy_version(self, progress: Progress) -> int:
        """The oldest that contributed to any token (W3)."""
        if self.prefix is None:
            return progress.policy_version
        if len(progress.token_ids) == self.continued_tokens:
            return self.prefix.policy_version
        return min(progress.policy_version, self.prefix.policy_version)

    def note_staged(self, staged: Staged) -> None:
        """Note that more is durable; of two cuts at once the one that reached further counts."""
        if staged.tokens > self.staged.tokens:
            self.staged = staged

    def check(self, progress: Progress) -> None:
        """
        Raises:
            InvalidCapture: it does not begin with the prefix, is shorter than what was staged, or is
                over its limit.
        """
        called = f"call {self.extension.model_call_id}"
        count = len(progress.token_ids)
        if self.prefix is not None:
            begin = progress.token_ids[: self.continued_tokens]
            if begin != self.prefix.token_ids:
                raise InvalidCapture(f"{called} does not begin with the prefix it continues")
        if count < self.staged.tokens:
            raise InvalidCapture(f"{called} has {count} tokens, {self.staged.tokens} are staged")
        if count > progress.effective_output_limit:
            raise InvalidCapture(
                f"{called} has {count} tokens, its limit is {progress.effective_output_limit}"
            )


class TokenCapture:
    """The calls of rollouts that an inference worker generates for.

    Args:
        store: where tokens are staged, shared with the policy servers; None: nothing can be cut or
            continued here.
        engine_digest: `EngineDescription.digest` of this engine.
        policy_version: gives that of the weights it has now.
        records_max: of one prefix: more than any call has tokens are refused unread.
    """

    def __init__(
        self,
        store: TokenStore | None,
        *,
        engine_digest: str,
        policy_version: Callable[[], int],
        records_max: int,
    ) -> None:
        self._store = store
        self._engine_digest = engine_digest
        self._policy_version = policy_version
        self._records_max = records_max
        self._calls: dict[str, CapturedCall] = {}

    def __len__(self) -> int:
        """How many calls are live."""
        return len(self._calls)

    async def begin_call(
        self,
        extension: CallExtension,
        *,
        prompt_token_ids: tuple[int, ...],
        generation_cut: Continuation | None = None,
        generation_cut_staging_keys: Sequence[StagingKey] | None = None,
    ) -> CapturedCall:
        """Begin a call; from now on it can be cut, until `end_call`.

        Args:
            prompt_token_ids: of this very request.
            generation_cut: the prefix it goes on from; None: that of the extension, if it has one.
            generation_cut_staging_keys: where the prefix lies; None: where the cut says. They must be
                the same.

        Raises:
            CallConflict: a call of this id is live.
            ContinuationRefused: the prefix is missing, damaged, of another prompt, rollout, build or a
                newer policy; nothing was generated, and the call is not live.

        Cancelled: the call is not live.
        """
        call_id = extension.model_call_id
        if call_id in self._calls:
            raise CallConflict(f"call {call_id} is here already")
        call = CapturedCall(
            extension=extension, prompt_token_ids=prompt_token_ids, first_call_id=call_id
        )
        self._calls[call_id] = call
        cut = extension.continuation if generation_cut is None else generation_cut
        begun = False
        try:
            if cut is not None:
                keys = cut.staging_keys
                if generation_cut_staging_keys is not None:
                    keys = tuple(generation_cut_staging_keys)
                await self._continue(call, cut, keys)
            begun = True
        finally:
            if not begun:
                self.end_call(call)
        return call

    async def _continue(
        self, call: CapturedCall, cut: Continuation, keys: tuple[StagingKey, ...]
    ) -> None:
        if self._store is None:
            raise ContinuationRefused("this engine has no token store, so it keeps no tokens")
        if len(keys) > self._records_max:
            raise ContinuationRefused(f"{len(keys)} records are beyond any call")
        if keys != cut.staging_keys or len(set(keys)) != len(keys):
            raise ContinuationRefused("the staging keys are not those of the cut, each once")
        check_continuation(
            cut, engine_digest=self._engine_digest, policy_version=self._policy_version()
        )
        try:
            records = [await self._store.get(key) for key in keys]
            prefix = join_prefix(cut, records, call.prompt_token_ids)
        except (TokensMissing, TokensDamaged, TokenStoreFailed) as error:
            raise ContinuationRefused(str(error)) from error
        except InvalidRolloutId as error:
            raise ContinuationRefused(error.detail) from None
        call.prefix = prefix
        call.first_call_id = records[0].model_call_id
        call.staged = Staged(keys=keys, tokens=len(prefix.token_ids))

    def find(self, asked: ActivePrefix) -> CapturedCall | None:
        """The call that an inventory names; None: there is none, or it is another episode's."""
        call = self._calls.get(asked.model_call_id)
        if call is None or call.extension.capture_key != asked.capture_key:
            return None
        return call

    def build_prefix_record(self, call: CapturedCall, progress: Progress) -> TokenRecord:
        """Snapshot a call: prefix and tail in one record, stamped with the oldest version.

        Raises:
            InvalidCapture: see `CapturedCall.check`.
        """
        call.check(progress)
        extension = call.extension
        return TokenRecord(
            staging_key=chunk_key(
                extension.capture_key, extension.model_call_id, 0, len(progress.token_ids)
            ),
            capture_key=extension.capture_key,
            model_call_id=extension.model_call_id,
            prompt_token_ids=call.prompt_token_ids,
            token_ids=progress.token_ids,
            log_probs=progress.log_probs,
            mask=_mask(call, len(progress.token_ids)),
            policy_version=call.policy_version(progress),
        )

    def build_generation_chunk_record(
        self, call: CapturedCall, progress: Progress
    ) -> TokenRecord | None:
        """The record of what is new since the last chunk; None: everything is staged.

        Once it is durable, say so by `note_staged`.

        Raises:
            InvalidCapture: see `CapturedCall.check`.
        """
        call.check(progress)
        start = call.staged.tokens
        if len(progress.token_ids) == start:
            return None
        return make_chunk(
            call.extension,
            start_token=start,
            prompt_token_ids=call.prompt_token_ids,
            token_ids=progress.token_ids[start:],
            log_probs=progress.log_probs[start:],
            policy_version=progress.policy_version,
        )

    def complete_call(self, call: CapturedCall, progress: Progress) -> ReplyExtension:
        """Note that decoding has ended; gives what the reply says about it (W4).

        Raises:
            InvalidCapture: its record is not valid; the call is not complete.
        """
        if progress.finish_reason is None:
            raise InvalidCapture(f"call {call.extension.model_call_id} has not ended")
        record = self.build_prefix_record(call, progress)
        call.completed = progress
        return ReplyExtension(
            model_call_id=record.model_call_id,
            policy_version=record.policy_version,
            engine_digest=self._engine_digest,
            finish_reason=progress.finish_reason,
            stop_reason=progress.stop_reason,
            effective_output_limit=progress.effective_output_limit,
            continued_token_count=call.continued_tokens,
        )

    def end_call(self, call: CapturedCall) -> None:
        """Forget a call: its reply is handed over, or its caller has left."""
        del self._calls[call.extension.model_call_id]


def _mask(call: CapturedCall, count: int) -> tuple[int, ...]:
    """That of the prefix, and ones: what is generated here is trained on."""
    begin = () if call.prefix is None else call.prefix.mask
    return (*begin, *(1,) * (count - len(begin)))
