"""Generations over an engine whose tokens are the bytes of a text, so that any character can be cut."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.capture.cuts import ContinuationRefused, TerminalReason
from gymtrio.serving.stock.chats import Chat
from gymtrio.serving.stock.engines import EngineBroke, Facts, Piece, Wanted
from gymtrio.serving.stock.generating import Generated, Generating
from gymtrio.serving.stock.llama_cpp import align

END = 256


class ByteEngine:
    """Says a text, byte by byte, in pieces of a given size; token `END` ends it."""

    def __init__(self, text: str, piece_tokens: int) -> None:
        self.tokens = (*text.encode(), END)
        self.piece_tokens = piece_tokens
        self.generated = 0

    async def describe(self) -> Facts:
        return Facts(model="bytes", context_tokens=1000, fingerprint={})

    async def tokenize(self, chat: Chat) -> tuple[int, ...]:
        return (1,)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        await trio.lowlevel.checkpoint()
        return bytes(t for t in token_ids if t != END).decode("utf-8", "replace")

    @asynccontextmanager
    async def generate(self, wanted: Wanted) -> AsyncIterator[AsyncIterator[Piece]]:
        async with aclosing(self._pieces(wanted)) as pieces:
            yield pieces

    async def _pieces(self, wanted: Wanted) -> AsyncGenerator[Piece]:
        place, limit = len(wanted.prefix_token_ids), wanted.output_tokens_max
        while True:
            end = min(place + self.piece_tokens, limit, len(self.tokens))
            ids = self.tokens[place:end]
            self.generated += len(ids)
            finish = None
            if ids and ids[-1] == END:
                finish = TerminalReason.STOP
            elif end == limit:
                finish = TerminalReason.LENGTH
            yield Piece(
                token_ids=ids,
                log_probs=tuple(-i / 8 for i in range(place, end)),
                text=await self.detokenize(ids),
                finish=finish,
            )
            place = end


def generate(
    engine: ByteEngine,
    *,
    cut: Generated | None = None,
    count: int = 0,
    limit: int = 200,
    stop: tuple[str, ...] = (),
    ended: TerminalReason | None = None,
) -> Generated:
    """Run a generation, perhaps from the first tokens of another one."""
    known = None if cut is None else cut.progress
    generating = Generating(
        engine,
        Wanted(
            prompt_token_ids=(1,),
            prefix_token_ids=() if known is None else known.token_ids[:count],
            output_tokens_max=limit,
            sampling={},
            seed=0,
            seeded=False,
        ),
        prefix_log_probs=() if known is None else known.log_probs[:count],
        stop=stop,
        policy_version=1,
        ended=ended,
        stop_reason=None if known is None or ended is None else known.stop_reason,
    )
    return trio.run(generating.run)


TEXTS = st.text(alphabet="aß😀<>", max_size=12)


@given(
    text=TEXTS,
    stops=st.lists(st.text(alphabet="aß😀<>", min_size=1, max_size=3), max_size=2),
    piece_tokens=st.integers(1, 7),
    limit=st.integers(1, 40),
    place=st.randoms(use_true_random=False),
)
def test_a_cut_is_invisible_wherever_it_is(
    text: str, stops: list[str], piece_tokens: int, limit: int, place: random.Random
) -> None:
    """CUT-4, I25, I26: within a character, within a stop string, at the first token, at the last."""
    engine, stop = ByteEngine(text, piece_tokens), tuple(stops)
    uncut = generate(engine, limit=limit, stop=stop)
    count = place.randint(0, len(uncut.progress.token_ids))
    ended = None
    if count == len(uncut.progress.token_ids):
        ended = uncut.progress.finish_reason
    again = ByteEngine(text, place.randint(1, 7))
    continued = generate(again, cut=uncut, count=count, limit=limit, stop=stop, ended=ended)
    assert continued == uncut
    assert len(uncut.progress.token_ids) <= limit
    assert ended is None or again.generated == 0


@given(
    text=TEXTS,
    stop=st.text(alphabet="aß😀<>", min_size=1, max_size=3),
    pieces=st.integers(1, 7),
)
def test_a_stop_string_ends_where_it_first_stands(text: str, stop: str, pieces: int) -> None:
    generated = generate(ByteEngine(text, pieces), stop=(stop,))
    before, found, _ = text.partition(stop)
    assert generated.text == before
    assert generated.progress.stop_reason == (stop if found else None)
    kept = bytes(t for t in generated.progress.token_ids if t != END).decode()
    assert kept == before + found


def test_nothing_is_shown_behind_a_stop_string_that_was_noticed() -> None:
    """CUT-4: a cut in this instant would be of more tokens than the reply has."""
    engine = ByteEngine("abc STOP def", 16)
    generating = Generating(
        engine,
        Wanted(prompt_token_ids=(1,), output_tokens_max=99, sampling={}, seed=0, seeded=False),
        prefix_log_probs=(),
        stop=("STOP",),
        policy_version=1,
    )
    seen: list[int] = []

    async def look() -> None:
        while True:
            seen.append(len(generating.progress().token_ids))
            await trio.lowlevel.checkpoint()

    async def watch() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await generating.run()
            nursery.cancel_scope.cancel()

    trio.run(watch)
    assert max(seen) <= len("abc STOP")


def test_a_stop_string_across_a_cut_ends_the_generation_when_it_is_there() -> None:
    """CUT-4: not only when the text of the whole is looked at."""
    uncut = generate(ByteEngine("abSTOP" + "c" * 50, 1), stop=("STOP",))
    again = ByteEngine("abSTOP" + "c" * 50, 1)
    assert generate(again, cut=uncut, count=4, stop=("STOP",)) == uncut
    assert again.generated == len("OP")


def test_a_prefix_beyond_a_stop_string_is_refused() -> None:
    engine = ByteEngine("ab", 4)
    uncut = generate(engine)
    with pytest.raises(ContinuationRefused, match="beyond a stop string"):
        generate(engine, cut=uncut, count=2, stop=("a",))


def test_log_probs_are_put_to_their_tokens() -> None:
    """I25: of the tokens of one character only the last has an entry."""

    def entry(token_id: int, log_prob: float) -> dict[str, object]:
        return {"id": token_id, "logprob": log_prob}

    assert align((5, 6, 7), [entry(5, -1), entry(7, -2)]) == [-1, None, -2]
    assert align((6, 6), [entry(6, -3)]) == [None, -3]
    assert align((5, 6), [entry(5, -1)]) == [-1, None]
    assert align((), []) == []
    with pytest.raises(EngineBroke, match="not in the reply"):
        align((5,), [entry(9, -1)])
    with pytest.raises(EngineBroke, match="not a number"):
        align((5,), [{"id": 5, "logprob": None}])
    with pytest.raises(EngineBroke, match="not a finite number"):
        align((5,), [entry(5, float("nan"))])
