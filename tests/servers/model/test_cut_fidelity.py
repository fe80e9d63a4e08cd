"""A cut is invisible wherever it is: many places, each continued and compared with the uncut call.

`GYMTRIO_CUTS` says how many cuts; `make cuts` makes 200 of them.
"""

from __future__ import annotations

import itertools
import json
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
ODD_PLACES: Final = 2
"""Of each case at the least, if it has them."""

SEEDED: Final[dict[str, Any]] = {"temperature": 0.6, "seed": 1}
GREEDY: Final[dict[str, Any]] = {"temperature": 0}
MAX_TOKENS: Final = 20
STOP: Final = "France is"


def _asking(text: str, **settings: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **settings}


KINDS: Final[dict[str, dict[str, Any]]] = {
    "text": _asking("Write a story about a fox."),
    "characters": _asking("Repeat this: 😀🎉日本語 😀🎉日本語"),
    "stop string": _asking("What is the capital of France?", stop=[STOP]),
    "tool call": {"messages": SHOWN, "tools": [NESTED]},
}
CASES: Final[dict[str, dict[str, Any]]] = {
    f"{kind}, {how}": body | settings | {"max_tokens": MAX_TOKENS, "logprobs": True}
    for kind, body in KINDS.items()
    for how, settings in (("greedy", GREEDY), ("seeded", SEEDED))
}


@attrs.frozen
class Uncut:
    body: dict[str, Any]
    first_call_id: str
    choice: Any
    tokens: CallTokens
    said: ReplyExtension

    def begins(self) -> list[bytes]:
        """What there is of the text at each place of a cut."""
        pieces = [bytes(entry["bytes"] or ()) for entry in self.choice["logprobs"]["content"]]
        return [b"".join(pieces[:count]) for count in range(len(pieces) + 1)]

    def odd_places(self) -> list[int]:
        """The places within a character, a stop string, the JSON of a tool call."""
        begins = self.begins()
        stop = begins[-1].find(STOP.encode()) if "stop" in self.body else -1
        return [
            count
            for count, begin in enumerate(begins[:-1])
            if _ends_within_character(begin)
            or 0 <= stop < len(begin)
            or ("tools" in self.body and not _is_json(begin))
        ]

    def places(self) -> Iterator[int]:
        """Before the first token, after it, before the last and after it, odd ones, then any."""
        chosen = random.Random(self.first_call_id)
        count = len(self.tokens.token_ids)
        odd = [place for place in self.odd_places() if 1 < place < count - 1]
        yield from dict.fromkeys((0, 1, count - 1, count))
        yield from chosen.sample(odd, min(ODD_PLACES, len(odd)))
        while True:
            yield chosen.randint(0, count)


def _ends_within_character(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


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
        _check_worth_cutting(uncut)
        planned = [(name, one.places()) for name, one in uncut.items()]
        plan = [
            (number, name, next(places))
            for number, (name, places) in zip(range(CUTS), itertools.cycle(planned), strict=False)
        ]
        for name, one in uncut.items():
            places = {count for _, of, count in plan if of == name}
            assert {0, 1, len(one.tokens.token_ids) - 1, len(one.tokens.token_ids)} <= places
            assert "text" in name or places.intersection(one.odd_places())
        wrong: list[str] = []

        async def continue_at(number: int, name: str, count: int) -> None:
            async with limiter:
                # Of what has generated nothing there is no cut: it is made again as it was.
                extension = CallExtension(
                    model_call_id=f"fidelity-again-{number}",
                    rollout_id="r",
                    attempt=1,
                    continuation=await cut_at(store, uncut[name], count) if count else None,
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


def _check_worth_cutting(uncut: dict[str, Uncut]) -> None:
    """The cases are what their names say, and end in every way within their limit."""
    for name, one in uncut.items():
        assert len(one.tokens.token_ids) <= one.said.effective_output_limit == MAX_TOKENS
        if "text" in name:
            assert one.said.finish_reason is TerminalReason.LENGTH
            assert one.choice["finish_reason"] == "length"
        elif "characters" in name:
            assert any(map(_ends_within_character, one.begins()))
        elif "stop" in name:
            assert (one.said.finish_reason, one.said.stop_reason) == (TerminalReason.STOP, STOP)
            assert one.choice["finish_reason"] == "stop"
        else:
            assert one.said.finish_reason is TerminalReason.STOP
            assert one.choice["finish_reason"] == "tool_calls"
    assert uncut["text, greedy"].tokens != uncut["text, seeded"].tokens
