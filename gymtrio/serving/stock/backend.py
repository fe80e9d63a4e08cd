"""A backend for engines that cannot cut: it watches the tokens itself and keeps the prefix (CUT-2).

To the policy participant it is a native backend; what an engine that integrates natively does inside,
it does here, with the same library (`gymtrio.capture.worker`, `gymtrio.capture.rounds`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import attrs
import trio

from gymtrio.capture.constrained import constrained_reason
from gymtrio.capture.cuts import (
    EXTENSION_KEY,
    NOTHING_GENERATED,
    ActivePrefix,
    CallExtension,
    ContinuationRefused,
    CutInventory,
    CutReceipt,
    EngineDescription,
)
from gymtrio.capture.replies import CallTokens, Route, put_extension, write_tokens
from gymtrio.capture.rounds import NO_SUCH_CALL, Cutter
from gymtrio.capture.tokens import TokenStore
from gymtrio.capture.worker import CapturedCall, InvalidCapture, Progress, TokenCapture
from gymtrio.errors import InvalidRequest, Refusal, TransportError
from gymtrio.participants.policy.calls import Backend, BackendReply
from gymtrio.ports import Randomness, WallClock
from gymtrio.serving.stock.chats import Chat, read_chat
from gymtrio.serving.stock.engines import EngineBroke, EngineRefused, Facts, StockEngine, Wanted
from gymtrio.serving.stock.generating import Generated, Generating
from gymtrio.serving.stock.outputs import Finished, ToolCallFormat, write_reply
from gymtrio.strict import structure

_REPLY_ID_BYTES: Final = 12

LOG = logging.getLogger(__name__)


@attrs.frozen
class _Known:
    """What hangs together with one build of the engine."""

    facts: Facts
    digest: str
    capture: TokenCapture
    cutter: Cutter


class StockBackend:
    """Implements `gymtrio.participants.policy.calls.Backend`.

    Args:
        plain: where calls go that cannot be cut: constrained ones, and those of nobody.
        store: of the tokens.
        policy_version: of the engine's weights, which it does not tell.
        tool_calls: how the model writes them.
    """

    native: Final = True

    def __init__(
        self,
        engine: StockEngine,
        plain: Backend,
        store: TokenStore,
        *,
        policy_version: int,
        tool_calls: ToolCallFormat,
        randomness: Randomness,
        wall_clock: WallClock,
    ) -> None:
        self._engine = engine
        self._plain = plain
        self._store = store
        self._policy_version = policy_version
        self._tool_calls = tool_calls
        self._randomness = randomness
        self._wall_clock = wall_clock
        self._known: _Known | None = None
        self._generating: dict[CapturedCall, Generating] = {}
        self._tokenizing: set[str] = set()
        """Model call ids of calls whose prompt is not known yet."""

    async def generate(
        self, route: Route, body: dict[str, object], *, call_id: str | None
    ) -> BackendReply:
        asked = {name: value for name, value in body.items() if name != EXTENSION_KEY}
        if EXTENSION_KEY not in body or constrained_reason(asked) is not None:
            # Our callers' name of the model is none of the engine's.
            named = asked | {"model": (await self._describe()).facts.model}
            reply = await self._plain.generate(route, named, call_id=call_id)
            return attrs.evolve(reply, evidence=False)
        extension = structure(CallExtension, body[EXTENSION_KEY])
        try:
            reply_body = await self._generate(route, asked, extension)
        except EngineRefused as refused:
            return BackendReply(status=refused.engine_status, body=refused.reply)
        except Refusal as refusal:
            return BackendReply(status=refusal.status, body=dict(refusal.body()))
        except (EngineBroke, InvalidCapture) as error:
            raise TransportError(str(error)) from error
        return BackendReply(status=200, body=reply_body)

    async def _generate(
        self, route: Route, asked: Mapping[str, object], extension: CallExtension
    ) -> dict[str, object]:
        chat = read_chat(route, asked)
        self._tokenizing.add(extension.model_call_id)
        try:
            known = await self._describe()
            prompt = await self._engine.tokenize(chat)
        finally:
            self._tokenizing.discard(extension.model_call_id)
        room = known.facts.context_tokens - len(prompt)
        if room < 1:
            raise InvalidRequest(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of "
                f"{known.facts.context_tokens}"
            )
        call = await known.capture.begin_call(extension, prompt_token_ids=prompt)
        try:
            generating = self._begin(call, chat, min(chat.output_tokens_max or room, room))
            self._generating[call] = generating
            generated = await generating.run()
            said = known.capture.complete_call(call, generated.progress)
            reply = write_reply(
                route, self._finished(known, call, generated), chat.tools, self._tool_calls
            )
            write_tokens(route, reply, _tokens(call, generated.progress))
            put_extension(reply, said)
        finally:
            self._generating.pop(call, None)
            known.capture.end_call(call)
        return reply

    def _begin(self, call: CapturedCall, chat: Chat, limit: int) -> Generating:
        prefix, cut = call.prefix, call.extension.continuation
        ended = None
        if cut is not None:
            if cut.effective_output_limit > limit:
                raise ContinuationRefused(
                    f"at most {limit} output tokens here, {cut.effective_output_limit} where it was cut"
                )
            limit, ended = cut.effective_output_limit, cut.terminal_finish_reason
        seed = chat.seed
        wanted = Wanted(
            prompt_token_ids=call.prompt_token_ids,
            prefix_token_ids=() if prefix is None else prefix.token_ids,
            output_tokens_max=limit,
            sampling=chat.sampling,
            seed=_seed_of(call.first_call_id) if seed is None else seed,
            seeded=seed is not None,
        )
        return Generating(
            self._engine,
            wanted,
            prefix_log_probs=() if prefix is None else prefix.log_probs,
            stop=chat.stop,
            policy_version=self._policy_version,
            ended=ended,
            stop_reason=None if cut is None else cut.terminal_stop_reason,
        )

    def _finished(self, known: _Known, call: CapturedCall, generated: Generated) -> Finished:
        progress = generated.progress
        assert progress.finish_reason is not None
        return Finished(
            reply_id=self._randomness.hex(_REPLY_ID_BYTES),
            model=known.facts.model,
            created_s=int(self._wall_clock.now_s()),
            text=generated.text,
            prompt_tokens=len(call.prompt_token_ids),
            output_tokens=len(progress.token_ids),
            finish=progress.finish_reason,
        )

    async def cut(self, inventory: CutInventory, *, deadline: float) -> CutReceipt:
        with _until(deadline):
            known = await self._describe()
            return await known.cutter.cut(inventory)

    async def describe(self, *, deadline: float) -> EngineDescription | None:
        with _until(deadline):
            known = await self._describe(anew=True)
        return EngineDescription(
            model=known.facts.model,
            policy_version=self._policy_version,
            fingerprint=known.facts.fingerprint,
            digest=known.digest,
        )

    async def _describe(self, *, anew: bool = False) -> _Known:
        """What is known of the engine; asked once, and at every checkpoint.

        Raises:
            TransportError: it does not say.
        """
        if self._known is not None and not anew:
            return self._known
        try:
            facts = await self._engine.describe()
        except (EngineBroke, EngineRefused) as error:
            raise TransportError(str(error)) from error
        known = self._known
        if known is None or known.facts != facts:
            if known is not None:
                LOG.warning("the engine is another one: %s", facts.fingerprint)
            known = self._known = self._known_by(facts)
        return known

    def _known_by(self, facts: Facts) -> _Known:
        text = json.dumps(facts.fingerprint, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode("ascii")).hexdigest()
        capture = TokenCapture(
            self._store,
            engine_digest=digest,
            policy_version=lambda: self._policy_version,
            records_max=facts.context_tokens,
        )
        cutter = Cutter(
            capture,
            self._store,
            observe=self._observe,
            engine_digest=digest,
            randomness=self._randomness,
            unknown=self._why_unknown,
        )
        return _Known(facts, digest, capture, cutter)

    def _observe(self, call: CapturedCall) -> Progress | None:
        generating = self._generating.get(call)
        return None if generating is None else generating.progress()

    def _why_unknown(self, asked: ActivePrefix) -> str:
        tokenizing = asked.model_call_id in self._tokenizing
        return NOTHING_GENERATED if tokenizing else NO_SUCH_CALL


def _tokens(call: CapturedCall, progress: Progress) -> CallTokens:
    return CallTokens(
        prompt_token_ids=call.prompt_token_ids,
        token_ids=progress.token_ids,
        log_probs=progress.log_probs,
    )


def _seed_of(call_id: str) -> int:
    """A seed for a request without one: that of its first call, so that continuations share it."""
    return int.from_bytes(hashlib.sha256(call_id.encode("utf-8")).digest()[:4], "big")


@contextmanager
def _until(deadline: float) -> Iterator[None]:
    with trio.CancelScope(deadline=deadline) as scope:
        yield
    if scope.cancelled_caught:
        raise TransportError("the engine did not answer in time")
