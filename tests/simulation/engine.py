"""The inference backend: a server that no crash touches, with an exactly known model.

The token at position i of an answer is a function of the conversation and i, its log-prob a function
of the token: one that was lost, doubled or changed shows wherever the answer goes. What the model says
is a function of the conversation as well: it plays a task "add a b c" by a call of the counter for each
number, reads the counter, and ends.

It follows `gymtrio/capture/DESIGN.md` with `gymtrio.capture.prefixes`, as any native backend does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import attrs
import trio

from gymtrio.capture.cuts import (
    CUT_ROUTE,
    ENGINE_ROUTE,
    EXTENSION_KEY,
    NOTHING_GENERATED,
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
    acknowledge_failure,
    acknowledge_prefix,
    check_continuation,
    join_prefix,
    make_chunk,
)
from gymtrio.capture.replies import CallTokens, Route, put_extension, write_tokens
from gymtrio.capture.tokens import StagingKey, TokensMissing, TokenStore
from gymtrio.serving.app import ServerApp
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.http import Request, Response, json_response
from gymtrio.serving.resources_server import NoSettings
from gymtrio.strict import structure, unstructure
from gymtrio.wire.control import Kind

TOKEN_S: Final = 0.05
"""Virtual time per token."""
TWO_CALLS_AT: Final = 2
"""A task of as many amounts begins with two function calls in one answer."""
DIGEST: Final = "simulated-1"


def conversation(items: object) -> str:
    return hashlib.sha256(json.dumps(items, sort_keys=True).encode("ascii")).hexdigest()


def prompt_of(said: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(said[:16]))


def answer_tokens(said: str) -> tuple[int, ...]:
    """The whole answer to a conversation."""
    count = 4 + int(said[:2], 16) % 9
    return tuple(
        int.from_bytes(hashlib.sha256(f"{said} {i}".encode()).digest()[:2], "big") % 1000
        for i in range(count)
    )


def log_prob_of(token_id: int) -> float:
    return -(token_id + 1) / 7


def log_probs_of(token_ids: Sequence[int]) -> tuple[float, ...]:
    return tuple(map(log_prob_of, token_ids))


def answer_items(items: Sequence[dict[str, Any]], said: str) -> list[dict[str, Any]]:
    """What the model says: the next move of the task, or the next two."""
    asked = next(item["content"] for item in items if item.get("role") == "user")
    amounts = [int(word) for word in str(asked).split() if word.isdecimal()]
    done = sum(item.get("type") == "function_call_output" for item in items)
    if done > len(amounts):
        return [{"type": "message", "role": "assistant", "content": [], "id": f"m-{said[:8]}"}]
    moves: list[tuple[str, dict[str, int]]] = [
        ("increment_counter", {"count": amount}) for amount in amounts
    ]
    moves.append(("get_counter_value", {}))
    # Two steps that a checkpoint waits for, with nothing but a boundary between them.
    at_once = 2 if done == 0 and len(amounts) == TWO_CALLS_AT else 1
    return [
        {
            "type": "function_call",
            "name": name,
            "call_id": f"call-{said[:8]}-{number}",
            "arguments": json.dumps(arguments),
        }
        for number, (name, arguments) in enumerate(moves[done : done + at_once])
    ]


@attrs.define(eq=False, kw_only=True)
class LiveCall:
    extension: CallExtension
    said: str
    policy_version: int
    """The oldest that contributed, as the call is stamped."""
    oldest: int
    """The same, as a fact."""
    token_ids: tuple[int, ...] = ()
    staged_keys: tuple[StagingKey, ...] = ()
    staged: int = 0


@attrs.frozen
class Answered:
    """One generation that ran to its end."""

    extension: CallExtension
    said: str
    oldest: int
    """Policy version that contributed."""


class Engine:
    """The model and its live calls."""

    def __init__(self) -> None:
        self.policy_version = 1
        self.live: dict[str, LiveCall] = {}
        self.begun: list[tuple[CallExtension, str]] = []
        self.answered: list[Answered] = []
        self.cut_count = 0
        self.problems: list[str] = []
        """What no honest policy server would ask."""

    async def generate(self, store: TokenStore, request: Request) -> Response:
        body: Any = request.json()
        said = conversation(body["input"])
        extension = structure(CallExtension, body[EXTENSION_KEY])
        call = LiveCall(
            extension=extension,
            said=said,
            policy_version=self.policy_version,
            oldest=self.policy_version,
        )
        self.begun.append((extension, said))
        if extension.continuation is not None:
            try:
                await self._continue(store, call)
            except ContinuationRefused as refusal:
                self.problems.append(f"{extension.capture_key}: {refusal.detail}")
                raise
        continued = len(call.token_ids)
        self.live[extension.model_call_id] = call
        try:
            whole = answer_tokens(said)
            while len(call.token_ids) < len(whole):
                await trio.sleep(TOKEN_S)
                call.token_ids += (whole[len(call.token_ids)],)
        finally:
            del self.live[extension.model_call_id]
        self.answered.append(Answered(extension, said, call.oldest))
        return json_response(self._reply(body, call, continued))

    async def _continue(self, store: TokenStore, call: LiveCall) -> None:
        continuation = call.extension.continuation
        assert continuation is not None
        check_continuation(continuation, engine_digest=DIGEST, policy_version=self.policy_version)
        try:
            records = [await store.get(key) for key in continuation.staging_keys]
        except TokensMissing as error:
            raise ContinuationRefused(str(error)) from error
        prefix = join_prefix(continuation, records, prompt_of(call.said))
        call.token_ids = prefix.token_ids
        call.staged_keys = prefix.staging_keys
        call.staged = len(prefix.token_ids)
        call.oldest = min(call.oldest, prefix.policy_version)
        call.policy_version = self.stamp(call.policy_version, prefix.policy_version)

    @staticmethod
    def stamp(own: int, of_prefix: int) -> int:
        """The version that a continued generation is stamped with."""
        return min(own, of_prefix)

    def _reply(self, body: Any, call: LiveCall, continued: int) -> dict[str, Any]:
        reply: dict[str, Any] = {
            "id": f"resp-{call.said[:8]}",
            "object": "response",
            "output": answer_items(body["input"], call.said),
        }
        tokens = CallTokens(
            prompt_token_ids=prompt_of(call.said),
            token_ids=call.token_ids,
            log_probs=log_probs_of(call.token_ids),
        )
        write_tokens(Route.RESPONSES, reply, tokens)
        put_extension(
            reply,
            ReplyExtension(
                model_call_id=call.extension.model_call_id,
                policy_version=call.policy_version,
                engine_digest=DIGEST,
                finish_reason=TerminalReason.STOP,
                effective_output_limit=100,
                continued_token_count=continued,
            ),
        )
        return reply

    async def cut(self, store: TokenStore, request: Request) -> Response:
        inventory = structure(CutInventory, request.json())
        check_inventory(inventory)
        entries: list[PrefixAcknowledgement] = []
        for asked in inventory.active_prefixes:
            call = self.live.get(asked.model_call_id)
            if call is None or not call.token_ids:
                why = "no such call" if call is None else NOTHING_GENERATED
                entries.append(acknowledge_failure(asked, why))
                continue
            # One instant: what is staged below is what is acknowledged, however far decoding gets.
            token_ids, keys = call.token_ids, call.staged_keys
            new = token_ids[call.staged :]
            if new:
                chunk = make_chunk(
                    call.extension,
                    start_token=call.staged,
                    prompt_token_ids=prompt_of(call.said),
                    token_ids=new,
                    log_probs=log_probs_of(new),
                    policy_version=call.policy_version,
                )
                keys = (*keys, chunk.staging_key)
                await store.put((chunk,))
                if len(token_ids) > call.staged:
                    call.staged, call.staged_keys = len(token_ids), keys
            self.cut_count += 1
            entries.append(
                acknowledge_prefix(
                    asked,
                    token_ids=token_ids,
                    staging_keys=keys,
                    effective_output_limit=100,
                    policy_version=call.policy_version,
                    engine_digest=DIGEST,
                )
            )
        receipt = CutReceipt(
            checkpoint_id=inventory.checkpoint_id,
            cut_id=f"cut-{self.cut_count}",
            inventory_digest=inventory.inventory_digest,
            prefixes=tuple(entries),
        )
        return json_response(unstructure(receipt))

    async def describe(self, request: Request) -> Response:
        description = EngineDescription(
            model="hash", policy_version=self.policy_version, fingerprint={}, digest=DIGEST
        )
        return json_response(unstructure(description))


def engine_app(engine: Engine, store: TokenStore) -> ServerApp[NoSettings]:
    """Serve an engine; its state is the caller's."""

    @asynccontextmanager
    async def open_service(host: ServiceHost[NoSettings]) -> AsyncIterator[Service]:
        yield Service(
            routes={
                ("POST", Route.RESPONSES.value): partial(engine.generate, store),
                ("POST", CUT_ROUTE): partial(engine.cut, store),
                ("GET", ENGINE_ROUTE): engine.describe,
            }
        )

    return ServerApp(
        kind=Kind.MODEL,
        default_instance="engine",
        settings_class=NoSettings,
        open_service=open_service,
    )
