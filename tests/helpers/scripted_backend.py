"""A native backend whose pace and failures a test decides. It follows `gymtrio/capture/DESIGN.md`.

Its model is a hash: the token at a position depends on the prompt and the tokens before it, so that a
continuation that lost, doubled or changed a token shows in every token after it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, Final

import attrs
import trio

from gymtrio.capture.cuts import (
    EXTENSION_KEY,
    NOTHING_GENERATED,
    ActivePrefix,
    CallExtension,
    ContinuationRefused,
    CutInventory,
    CutReceipt,
    EngineDescription,
    PrefixAcknowledgement,
    ReplyExtension,
    TerminalReason,
    check_inventory,
)
from gymtrio.capture.prefixes import (
    Prefix,
    acknowledge_failure,
    acknowledge_prefix,
    check_continuation,
    join_prefix,
    make_chunk,
)
from gymtrio.capture.replies import CallTokens, Route, put_extension, write_tokens
from gymtrio.capture.tokens import (
    StagingKey,
    TokensDamaged,
    TokensMissing,
    TokenStore,
    TokenStoreFailed,
)
from gymtrio.episodes.signal import Signal
from gymtrio.errors import PeerRefused, TransportError
from gymtrio.participants.policy.calls import BackendReply
from gymtrio.strict import structure

OUTPUT_TOKENS: Final = 20
VOCABULARY: Final = 1000


def tokens_of_prompt(body: dict[str, Any]) -> tuple[int, ...]:
    text = json.dumps(body.get("messages", body.get("input")), sort_keys=True)
    return tuple(text.encode("utf-8"))


def next_token(context: tuple[int, ...]) -> int:
    digest = hashlib.blake2b(repr(context).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % VOCABULARY


def log_prob_of(token_id: int) -> float:
    return -(token_id + 1) / 7


def uncut_tokens(body: dict[str, Any], count: int = OUTPUT_TOKENS) -> tuple[int, ...]:
    """What a call generates that is left alone."""
    prompt = tokens_of_prompt(body)
    made: tuple[int, ...] = ()
    while len(made) < count:
        made += (next_token(prompt + made),)
    return made


@attrs.define(eq=False)
class LiveCall:
    """A call while the backend has it."""

    route: Route
    body: dict[str, Any]
    """As it was sent, without extension."""
    extension: CallExtension | None
    prompt: tuple[int, ...]
    prefix: Prefix | None = None
    token_ids: tuple[int, ...] = ()
    chunk_keys: tuple[StagingKey, ...] = ()
    staged: int = 0
    """Tokens that lie in chunks."""
    generated: int = 0
    """Tokens that were computed here."""
    finish: trio.Event = attrs.Factory(trio.Event)
    failure: BackendReply | TransportError | None = None

    def emit(self, count: int) -> None:
        """Generate some tokens."""
        for _ in range(count):
            self.token_ids += (next_token(self.prompt + self.token_ids),)
            self.generated += 1

    def fail(self, failure: BackendReply | TransportError) -> None:
        """End it with an error."""
        self.failure = failure
        self.finish.set()


class ScriptedBackend:
    """Implements `gymtrio.participants.policy.calls.Backend`."""

    def __init__(self, store: TokenStore, *, digest: str = "build-1", native: bool = True) -> None:
        self.native = native
        self.store = store
        self.digest = digest
        self.policy_version = 3
        self.at_once = False
        """Calls finish without being told to."""
        self.output_tokens = OUTPUT_TOKENS
        self.gives_tokens = native
        self.live: list[LiveCall] = []
        self.calls: list[LiveCall] = []
        self.cancelled: list[LiveCall] = []
        self.inventories: list[CutInventory] = []
        self.cut_deadlines: list[float] = []
        self.arrived = Signal()
        self.cut_mode = "honest"
        """Or: never, late, unreachable, refused, incomplete, twice, other inventory, other checkpoint,
        other call, no evidence, failure with evidence, each fails, fault."""
        self.fail_cuts_over: int | None = None
        """Refuse inventories of more calls."""
        self.why_each_fails: Callable[[ActivePrefix], str] | None = None
        """Gives the reason for which a call of an inventory is not cut."""
        self.describe_mode = "honest"

    async def wait_live(self, count: int = 1) -> list[LiveCall]:
        """Wait until so many calls are here."""
        while len(self.live) < count:
            await self.arrived.wait()
        return self.live

    async def generate(
        self, route: Route, body: dict[str, object], *, call_id: str | None
    ) -> BackendReply:
        sent = dict(body)
        extension = None
        if EXTENSION_KEY in sent:
            assert self.native, "a foreign backend got an extension"
            extension = structure(CallExtension, sent.pop(EXTENSION_KEY))
            assert call_id == extension.model_call_id
        call = LiveCall(route, sent, extension, tokens_of_prompt(sent))
        self.calls.append(call)
        if extension is not None and extension.continuation is not None:
            try:
                await self._take_prefix(call, extension)
            except ContinuationRefused as refusal:
                return BackendReply(status=refusal.status, body={**refusal.body()})
        self.live.append(call)
        self.arrived.notify()
        if self.goes_on(call):
            call.finish.set()
        try:
            await call.finish.wait()
        except trio.Cancelled:
            self.cancelled.append(call)
            raise
        finally:
            self.live.remove(call)
        if isinstance(call.failure, TransportError):
            raise call.failure
        return call.failure or self._reply(call)

    def goes_on(self, call: LiveCall) -> bool:
        """Whether it finishes without being told to."""
        return self.at_once

    def body_of(self, call: LiveCall) -> dict[str, Any]:
        """What a call is answered, apart from its tokens."""
        return openai_reply(call.route, call.token_ids)

    async def _take_prefix(self, call: LiveCall, extension: CallExtension) -> None:
        continuation = extension.continuation
        assert continuation is not None
        check_continuation(
            continuation, engine_digest=self.digest, policy_version=self.policy_version
        )
        try:
            records = [await self.store.get(key) for key in continuation.staging_keys]
        except (TokensMissing, TokensDamaged, TokenStoreFailed) as error:
            raise ContinuationRefused(str(error)) from error
        call.prefix = join_prefix(continuation, records, call.prompt)
        call.token_ids = call.prefix.token_ids
        call.chunk_keys = call.prefix.staging_keys
        call.staged = len(call.token_ids)

    def _reply(self, call: LiveCall) -> BackendReply:
        call.emit(self.output_tokens - len(call.token_ids))
        body = self.body_of(call)
        if self.gives_tokens and (call.extension is not None or not self.native):
            tokens = CallTokens(
                prompt_token_ids=call.prompt,
                token_ids=call.token_ids,
                log_probs=tuple(map(log_prob_of, call.token_ids)),
            )
            write_tokens(call.route, body, tokens)
        if call.extension is not None:
            put_extension(body, self._said(call, call.extension))
        return BackendReply(status=200, body=body)

    def _said(self, call: LiveCall, extension: CallExtension) -> ReplyExtension:
        return ReplyExtension(
            model_call_id=extension.model_call_id,
            policy_version=self._oldest(call),
            engine_digest=self.digest,
            finish_reason=TerminalReason.LENGTH,
            effective_output_limit=self.output_tokens,
            continued_token_count=0 if call.prefix is None else len(call.prefix.token_ids),
        )

    def _oldest(self, call: LiveCall) -> int:
        return min(
            self.policy_version,
            self.policy_version if not call.prefix else call.prefix.policy_version,
        )

    async def describe(self, *, deadline: float) -> EngineDescription | None:
        if self.describe_mode == "never":
            await trio.sleep_forever()
        if self.describe_mode == "unreachable":
            raise TransportError("engine: connection refused")
        if self.describe_mode == "fault":
            raise ValueError("not what it should be")
        if not self.native:
            return None
        return EngineDescription(
            model="hash", policy_version=self.policy_version, fingerprint={}, digest=self.digest
        )

    async def cut(self, inventory: CutInventory, *, deadline: float) -> CutReceipt:
        self.inventories.append(inventory)
        self.cut_deadlines.append(deadline)
        check_inventory(inventory)
        if self.cut_mode == "never":
            await trio.sleep_forever()
        if self.cut_mode == "late":
            await trio.sleep_until(deadline + 0.1)
        if self.cut_mode == "unreachable":
            raise TransportError("engine: connection refused")
        if self.fail_cuts_over is not None and len(inventory.active_prefixes) > self.fail_cuts_over:
            raise TransportError("engine: connection reset")
        if self.cut_mode == "refused":
            raise PeerRefused("engine", 404, "not_found", "no such route")
        if self.cut_mode == "fault":
            raise ValueError("list.remove(x): x not in list")
        by_id = {call.extension.model_call_id: call for call in self.live if call.extension}
        entries = []
        for asked in inventory.active_prefixes:
            call = by_id.get(asked.model_call_id)
            if call is None:
                entries.append(acknowledge_failure(asked, "no such call"))
            elif self.why_each_fails is not None:
                entries.append(acknowledge_failure(asked, self.why_each_fails(asked)))
            elif self.cut_mode == "each fails":
                entries.append(acknowledge_failure(asked, "the disk is full"))
            elif not call.token_ids:
                entries.append(acknowledge_failure(asked, NOTHING_GENERATED))
            else:
                await self._stage(call)
                entries.append(
                    acknowledge_prefix(
                        asked,
                        token_ids=call.token_ids,
                        staging_keys=call.chunk_keys,
                        effective_output_limit=self.output_tokens,
                        policy_version=self._oldest(call),
                        engine_digest=self.digest,
                    )
                )
        return self._distorted(inventory, entries)

    async def _stage(self, call: LiveCall) -> None:
        assert call.extension is not None
        new = call.token_ids[call.staged :]
        if new:
            chunk = make_chunk(
                call.extension,
                start_token=call.staged,
                prompt_token_ids=call.prompt,
                token_ids=new,
                log_probs=tuple(map(log_prob_of, new)),
                policy_version=self.policy_version,
            )
            call.staged += len(new)
            call.chunk_keys += (chunk.staging_key,)
            await self.store.put((chunk,))

    def _distorted(
        self, inventory: CutInventory, entries: list[PrefixAcknowledgement]
    ) -> CutReceipt:
        mode = self.cut_mode
        if mode == "incomplete":
            entries = entries[1:]
        elif mode == "twice":
            entries = [*entries, entries[0]]
        elif mode == "other call":
            entries = [attrs.evolve(entry, model_call_id="other") for entry in entries]
        elif mode == "no evidence":
            entries = [attrs.evolve(entry, prefix_digest=None) for entry in entries]
        elif mode == "failure with evidence":
            failed = [acknowledge_failure(asked, "no") for asked in inventory.active_prefixes]
            entries = [attrs.evolve(entry, prefix_token_count=1) for entry in failed]
        return CutReceipt(
            checkpoint_id=inventory.checkpoint_id
            if mode != "other checkpoint"
            else type(inventory.checkpoint_id)("other"),
            cut_id="cut",
            inventory_digest="0" * 64 if mode == "other inventory" else inventory.inventory_digest,
            prefixes=tuple(entries),
        )


def openai_reply(route: Route, token_ids: tuple[int, ...]) -> dict[str, Any]:
    """A reply whose text is its tokens."""
    text = " ".join(map(str, token_ids))
    if route is Route.CHAT:
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "hash",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": "length",
                }
            ],
        }
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "hash",
        "output": [message],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
