"""A cut is invisible wherever it is: many places, each continued and compared with the uncut call.

`GYMTRIO_CUTS` says how many cuts; `make cuts` makes 200 of them.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any, Final

import attrs
import trio

from gymtrio.capture.cuts import (
    CallExtension,
    Continuation,
    ReplyExtension,
    TerminalReason,
    digest_tokens,
)
from gymtrio.capture.log_store import open_log_store
from gymtrio.capture.prefixes import make_chunk
from gymtrio.capture.replies import CallTokens, Route, read_tokens, take_extension
from gymtrio.capture.tokens import TokenStore
from gymtrio.ids import CaptureKey
from gymtrio.ports import HostRandomness
from gymtrio.strict import unstructure
from tests.helpers.served_engine import EngineClient, ServedEngine, open_engine_client
from tests.helpers.shown_calls import NESTED, SHOWN

CUTS: Final = int(os.environ.get("GYMTRIO_CUTS", "48"))
AT_ONCE: Final = 4
"""Continued beside each other, so that each is batched with others at other places."""

SEEDED: Final[dict[str, Any]] = {"temperature": 1.0, "seed": 11}
GREEDY: Final[dict[str, Any]] = {"temperature": 0}


def _asking(text: str, **settings: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 20, **settings}


CASES: Final[dict[str, dict[str, Any]]] = {
    "greedy": _asking("Write a story about a fox.", **GREEDY),
    "seeded": _asking("Write a story about a fox.", **SEEDED),
    "characters of several tokens": _asking("Repeat this: 😀🎉日本語 😀🎉日本語", **GREEDY),
    "stop string": _asking("What is the capital of France?", stop=["France is"], **GREEDY),
    "tool call": {"messages": SHOWN, "tools": [NESTED], "max_tokens": 20, **GREEDY},
}


@attrs.frozen
class Uncut:
    body: dict[str, Any]
    first_call_id: str
    choice: Any
    tokens: CallTokens
    said: ReplyExtension

    def places(self) -> Iterator[int]:
        """The first token, all but the last, everything, then any."""
        count = len(self.tokens.token_ids)
        yield from dict.fromkeys((1, max(1, count - 1), count))
        chosen = random.Random(self.first_call_id)
        while True:
            yield chosen.randint(1, count)


async def call(engine: EngineClient, extension: CallExtension, body: dict[str, Any]) -> Uncut:
    asked = body | {"gymtrio": unstructure(extension)}
    reply: Any = await engine.answer(Route.CHAT.value, asked)
    said = take_extension(reply)
    tokens = read_tokens(Route.CHAT, reply)
    choice = reply["choices"][0]
    for made_up in choice["message"].get("tool_calls") or []:
        del made_up["id"]
    return Uncut(body, extension.model_call_id, choice, tokens, said)


async def cut_at(store: TokenStore, uncut: Uncut, count: int) -> Continuation:
    """Make a prefix durable, as a cut in this instant would have."""
    whole = count == len(uncut.tokens.token_ids)
    extension = CallExtension(model_call_id=uncut.first_call_id, rollout_id="r", attempt=0)
    record = make_chunk(
        extension,
        start_token=0,
        prompt_token_ids=uncut.tokens.prompt_token_ids,
        token_ids=uncut.tokens.token_ids[:count],
        log_probs=uncut.tokens.log_probs[:count],
        policy_version=uncut.said.policy_version,
    )
    await store.put((record,))
    return Continuation(
        source_capture_key=CaptureKey("r"),
        source_model_call_id=uncut.first_call_id,
        staging_keys=(record.staging_key,),
        prefix_token_count=count,
        prefix_digest=digest_tokens(record.token_ids),
        effective_output_limit=uncut.said.effective_output_limit,
        policy_version=uncut.said.policy_version,
        engine_digest=uncut.said.engine_digest,
        terminal_finish_reason=uncut.said.finish_reason if whole else None,
        terminal_stop_reason=uncut.said.stop_reason if whole else None,
    )


async def test_every_place_of_a_cut_gives_the_uncut_reply(served: ServedEngine) -> None:
    """CUT-4, I25, I26: text, ids, log-probs, end, budget and stamp; in characters, a stop string,
    the JSON of a tool call."""
    async with (
        open_engine_client(served.url) as engine,
        open_log_store(served.state_dir / "tokens", randomness=HostRandomness()) as store,
    ):
        uncut = {
            name: await call(
                engine,
                CallExtension(model_call_id=f"fidelity-{number}", rollout_id="r", attempt=0),
                body,
            )
            for number, (name, body) in enumerate(CASES.items())
        }
        assert uncut["stop string"].said.stop_reason == "France is"
        assert uncut["tool call"].choice["finish_reason"] == "tool_calls"
        assert uncut["greedy"].said.finish_reason is TerminalReason.LENGTH
        characters = uncut["characters of several tokens"]
        assert len(characters.tokens.token_ids) > len(characters.choice["message"]["content"])
        planned = [(name, one.places()) for name, one in uncut.items()]
        plan = [
            (number, name, next(places))
            for number, (name, places) in zip(range(CUTS), itertools.cycle(planned), strict=False)
        ]
        wrong: list[str] = []

        async def continue_at(number: int, name: str, count: int) -> None:
            async with limiter:
                extension = CallExtension(
                    model_call_id=f"fidelity-again-{number}",
                    rollout_id="r",
                    attempt=1,
                    continuation=await cut_at(store, uncut[name], count),
                )
                told = await call(engine, extension, uncut[name].body)
            expected = attrs.evolve(
                uncut[name].said,
                model_call_id=extension.model_call_id,
                continued_token_count=count,
            )
            if (told.choice, told.tokens, told.said) != (
                uncut[name].choice,
                uncut[name].tokens,
                expected,
            ):
                wrong.append(f"{name}, cut after {count} tokens: {told}")

        limiter = trio.CapacityLimiter(AT_ONCE)
        async with trio.open_nursery() as nursery:
            for number, name, count in plan:
                nursery.start_soon(continue_at, number, name, count)
        assert wrong == []
