"""What every native engine must do, as checks that whoever integrates one can run (CUT-1, CUT-8).

    @pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
    async def test_my_engine(check: EngineCheck) -> None:
        await check(EngineUnderTest(client, "http://localhost:8000", token, store, calls))

The contract is `gymtrio/capture/DESIGN.md`; a check names the point that it is about. It raises
`NotConforming`, or what the client raised when there was no answer at all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final, TypeAlias

import attrs
import trio

from gymtrio.capture.conformance import NotConforming
from gymtrio.capture.cuts import (
    CUT_ROUTE,
    ENGINE_ROUTE,
    EXTENSION_KEY,
    ActivePrefix,
    CallExtension,
    Continuation,
    ContinuationRefused,
    CutReceipt,
    CutRefused,
    Disposition,
    EngineDescription,
    PrefixAcknowledgement,
    ReplyExtension,
    continuation_of,
    match_receipt,
    take_inventory,
)
from gymtrio.capture.prefixes import join_prefix
from gymtrio.capture.replies import (
    CallTokens,
    MalformedReply,
    Route,
    read_tokens,
    take_extension,
)
from gymtrio.capture.tokens import StagingKey, TokenStore
from gymtrio.ids import CheckpointId
from gymtrio.serving.client import Reply, ServerClient
from gymtrio.strict import structure, unstructure

ROLLOUT_ID: Final = "conformance"
CHECKPOINT_ID: Final = CheckpointId("conformance")
CUT_AFTER_TOKENS: Final = 3
"""A call counts as under way from here on."""


@attrs.frozen
class EngineUnderTest:
    """An engine, and what is needed to talk to it.

    Args:
        call: a chat completions request without extension, decoded greedily, whose generation has a
            dozen tokens at least and takes long enough to be cut meanwhile.
        ids: makes model call ids; those of two runs against one engine must differ.
    """

    client: ServerClient
    server: str
    control_token: str
    store: TokenStore
    call: dict[str, Any]
    ids: Callable[[], str] = attrs.field(
        factory=lambda: map("conformance-{}".format, count()).__next__
    )

    def extension(self, continuation: Continuation | None = None) -> CallExtension:
        return CallExtension(
            model_call_id=self.ids(), rollout_id=ROLLOUT_ID, attempt=0, continuation=continuation
        )

    async def send(self, extension: object, **changed: object) -> Reply:
        body = self.call | changed | {EXTENSION_KEY: extension}
        return await self.client.request(
            self.server, "POST", Route.CHAT.value, json=body, context=None
        )

    async def make(self, extension: CallExtension) -> Made:
        reply: Any = (await self.send(unstructure(extension))).raise_for_status().json()
        try:
            return Made(read_tokens(Route.CHAT, reply), take_extension(reply))
        except MalformedReply as error:
            raise NotConforming(f"3, 4: {error}") from error

    async def control(self, method: str, path: str, *, token: str | None, json: object) -> Reply:
        headers = [] if token is None else [("authorization", f"Bearer {token}")]
        return await self.client.request(
            self.server, method, path, json=json, headers=headers, context=None, control=True
        )

    async def cut(self, *calls: CallExtension) -> list[PrefixAcknowledgement]:
        """One round; its receipt covers the inventory exactly, each entry whole."""
        inventory = take_inventory(CHECKPOINT_ID, "policy", list(_named(calls)))
        reply = await self.control(
            "POST", CUT_ROUTE, token=self.control_token, json=unstructure(inventory)
        )
        receipt = structure(CutReceipt, reply.raise_for_status().json())
        try:
            return list(match_receipt(inventory, receipt).values())
        except CutRefused as error:
            raise NotConforming(f"8: {error}") from error

    async def cut_under_way(self, call: CallExtension) -> PrefixAcknowledgement:
        """Cut a call until it has a few tokens."""
        while True:
            (entry,) = await self.cut(call)
            if (entry.prefix_token_count or 0) >= CUT_AFTER_TOKENS:
                return entry

    @asynccontextmanager
    async def under_way(self) -> AsyncIterator[tuple[CallExtension, PrefixAcknowledgement]]:
        """A call that is being generated, with a cut of it; leaving the block leaves the call."""
        call = self.extension()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.send, unstructure(call))
            yield call, await self.cut_under_way(call)
            nursery.cancel_scope.cancel()


@attrs.frozen
class Made:
    tokens: CallTokens
    said: ReplyExtension


EngineCheck: TypeAlias = Callable[[EngineUnderTest], Awaitable[None]]


def _named(calls: tuple[CallExtension, ...]) -> Iterator[ActivePrefix]:
    for number, call in enumerate(calls):
        yield ActivePrefix(
            ticket_id=f"{number:06d}",
            rollout_id=call.rollout_id,
            attempt=call.attempt,
            model_call_id=call.model_call_id,
            admitted_at=float(number),
        )


def _expect(holds: bool, point: str) -> None:
    if not holds:
        raise NotConforming(point)


async def it_says_what_it_is(engine: EngineUnderTest) -> None:
    reply = await engine.control("GET", ENGINE_ROUTE, token=engine.control_token, json=None)
    structure(EngineDescription, reply.raise_for_status().json())


async def control_needs_the_token(engine: EngineUnderTest) -> None:
    inventory = unstructure(take_inventory(CHECKPOINT_ID, "policy", []))
    for token in (None, engine.control_token + "x"):
        for method, path in (("GET", ENGINE_ROUTE), ("POST", CUT_ROUTE)):
            reply = await engine.control(method, path, token=token, json=inventory)
            _expect(reply.status == 401, f"6, 10: {path} answers {reply.status} without the token")


async def a_reply_has_its_tokens_and_its_extension(engine: EngineUnderTest) -> None:
    call = engine.extension()
    made = await engine.make(call)
    _expect(made.said.model_call_id == call.model_call_id, "4: it names another call")
    _expect(made.said.continued_token_count == 0, "4: nothing was continued")
    generated = len(made.tokens.token_ids)
    _expect(generated <= made.said.effective_output_limit, "4: more tokens than its limit")
    _expect(bool(made.tokens.prompt_token_ids), "3: no prompt token ids")


async def an_ordinary_call_has_neither(engine: EngineUnderTest) -> None:
    reply = await engine.client.request(
        engine.server, "POST", Route.CHAT.value, json=engine.call, context=None
    )
    body: Any = reply.raise_for_status().json()
    _expect(EXTENSION_KEY not in body, "1: an extension nobody asked for")
    message = body["choices"][0]["message"]
    _expect("generation_token_ids" not in message, "1: token fields nobody asked for")


async def an_unknown_field_is_refused(engine: EngineUnderTest) -> None:
    plain: Any = unstructure(engine.extension())
    reply = await engine.send(plain | {"unheard_of": 1})
    _expect(reply.status == 422, f"an unknown field of the extension: {reply.status}, not 422")


async def an_id_that_lives_is_taken(engine: EngineUnderTest) -> None:
    async with engine.under_way() as (call, _):
        reply = await engine.send(unstructure(call))
        _expect(reply.status == 409, f"2: the id of a living call: {reply.status}, not 409")


async def a_call_is_cut_and_goes_on(engine: EngineUnderTest) -> None:
    """7, 8: what is acknowledged can be read, and is the beginning of the reply."""
    call = engine.extension()
    made: list[Made] = []

    async def make() -> None:
        made.append(await engine.make(call))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(make)
        entry = await engine.cut_under_way(call)
    await _expect_prefix(engine, entry, made[0])


async def the_same_inventory_may_come_again(engine: EngineUnderTest) -> None:
    async with engine.under_way() as (call, first):
        (again,) = await engine.cut(call)
        kept = again.staging_keys[: len(first.staging_keys)]
        _expect(kept == first.staging_keys, "9: chunks of an earlier cut are gone")


async def what_is_not_there_is_a_failure(engine: EngineUnderTest) -> None:
    (entry,) = await engine.cut(engine.extension())
    _expect(entry.disposition is Disposition.DURABLE_FAILURE, "8: a call that never came was cut")


async def a_caller_that_leaves_ends_its_call(engine: EngineUnderTest) -> None:
    async with engine.under_way() as (call, _):
        pass
    for _ in range(1000):
        (entry,) = await engine.cut(call)
        if entry.disposition is Disposition.DURABLE_FAILURE:
            return
    raise NotConforming("2: the call lives on though its caller has left")


async def an_inventory_that_was_changed_is_refused(engine: EngineUnderTest) -> None:
    inventory = take_inventory(CHECKPOINT_ID, "policy", list(_named((engine.extension(),))))
    changed = attrs.evolve(inventory, server_name="other")
    reply = await engine.control(
        "POST", CUT_ROUTE, token=engine.control_token, json=unstructure(changed)
    )
    _expect(reply.status == 422, f"6: a wrong digest: {reply.status}, not 422")


async def a_continued_call_is_the_uncut_one(engine: EngineUnderTest) -> None:
    """11, 12: greedy decoding goes on as if never cut; a second cut of it covers both parts."""
    uncut = await engine.make(engine.extension())
    async with engine.under_way() as (_, entry):
        pass
    continued = await engine.make(engine.extension(continuation_of(entry)))
    _expect(continued.tokens == uncut.tokens, "12: it differs from a call that was not cut")
    said = continued.said
    _expect(said.continued_token_count == entry.prefix_token_count, "4: a wrong count of continued")
    _expect(said.policy_version == entry.policy_version, "4: not the oldest policy version")


async def a_prefix_that_does_not_hold_is_refused(engine: EngineUnderTest) -> None:
    """11: before anything was generated, with a code that the policy server knows."""
    async with engine.under_way() as (_, entry):
        pass
    good = continuation_of(entry)
    for wrong in (
        attrs.evolve(good, engine_digest="0" * 64),
        attrs.evolve(good, policy_version=good.policy_version + 1_000_000),
        attrs.evolve(good, prefix_digest="0" * 64),
        attrs.evolve(good, prefix_token_count=good.prefix_token_count + 1),
        attrs.evolve(good, staging_keys=(StagingKey("nobody"),)),
    ):
        reply = await engine.send(unstructure(engine.extension(wrong)))
        _expect_refused(reply)
    elsewhere: dict[str, object] = {"messages": [{"role": "user", "content": "Another prompt."}]}
    _expect_refused(await engine.send(unstructure(engine.extension(good)), **elsewhere))


def _expect_refused(reply: Reply) -> None:
    error: Any = reply.json()
    code = error.get("error", {}).get("code") if isinstance(error, dict) else None
    _expect(
        (reply.status, code) == (409, ContinuationRefused.code),
        f"11: a prefix that does not hold: {reply.status} {code}",
    )


async def _expect_prefix(engine: EngineUnderTest, entry: PrefixAcknowledgement, made: Made) -> None:
    records = [await engine.store.get(key) for key in entry.staging_keys]
    try:
        prefix = join_prefix(continuation_of(entry), records, made.tokens.prompt_token_ids)
    except ContinuationRefused as error:
        raise NotConforming(f"7, 8: {error.detail}") from error
    cut = len(prefix.token_ids)
    _expect(made.tokens.token_ids[:cut] == prefix.token_ids, "7: other tokens than the reply's")
    _expect(made.tokens.log_probs[:cut] == prefix.log_probs, "7: other log-probs than the reply's")


ENGINE_CHECKS: Final[tuple[EngineCheck, ...]] = (
    it_says_what_it_is,
    control_needs_the_token,
    a_reply_has_its_tokens_and_its_extension,
    an_ordinary_call_has_neither,
    an_unknown_field_is_refused,
    an_id_that_lives_is_taken,
    a_call_is_cut_and_goes_on,
    the_same_inventory_may_come_again,
    what_is_not_there_is_a_failure,
    a_caller_that_leaves_ends_its_call,
    an_inventory_that_was_changed_is_refused,
    a_continued_call_is_the_uncut_one,
    a_prefix_that_does_not_hold_is_refused,
)
