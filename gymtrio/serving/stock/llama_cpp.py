"""llama.cpp's server: chunks of a few tokens, each a request of its own.

Its stream leaves out the ids and log-probs of tokens that end within a character; a reply that is not
streamed has every id. So a generation is asked for in chunks at fixed places, which costs little with
its prompt cache, and gives more: each chunk has a seed of its own, so that also a sampled generation is
continued exactly. A log-prob that is missing is asked for again, with its token forbidden: llama.cpp
tells log-probs of the distribution before it forbids.

Routes: `/apply-template`, `/tokenize`, `/detokenize`, `/completion`, `/props`.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Final

from gymtrio.capture.cuts import ContinuationRefused, TerminalReason
from gymtrio.serving.stock.calls import EngineCalls, number_of, token_ids_of
from gymtrio.serving.stock.chats import Chat
from gymtrio.serving.stock.engines import EngineBroke, Facts, Piece, Wanted

CHUNK_TOKENS: Final = 16
"""Of one request: what a crash may cost at most, against a round trip each."""

COMPLETION: Final = "/completion"
_SEARCHED: Final = (32, 2048, 1_000_000)
"""How many of the likeliest tokens are asked for until one is among them."""
_FORBIDDEN_MAX: Final = 8
"""Forbidden at one place before it is given up: each was again a part of a character."""


class LlamaCppEngine:
    """See `engines.StockEngine`."""

    def __init__(self, calls: EngineCalls) -> None:
        self._calls = calls

    async def describe(self) -> Facts:
        props = await self._calls.get("/props")
        defaults = props.get("default_generation_settings")
        context_tokens = defaults.get("n_ctx") if isinstance(defaults, dict) else None
        path = props.get("model_path")
        if type(context_tokens) is not int or not isinstance(path, str):
            raise EngineBroke("/props: no n_ctx or model_path")
        name = path.rpartition("/")[2]
        return Facts(
            model=name,
            context_tokens=context_tokens,
            fingerprint={"engine": "llama.cpp", "version": props.get("build_info"), "model": name},
        )

    async def tokenize(self, chat: Chat) -> tuple[int, ...]:
        body: dict[str, object] = {
            "messages": list(chat.messages),
            "chat_template_kwargs": dict(chat.template_kwargs),
        }
        if chat.tools:
            body["tools"] = list(chat.tools)
        prompt = (await self._calls.post("/apply-template", body)).get("prompt")
        reply = await self._calls.post(
            "/tokenize", {"content": prompt, "add_special": True, "parse_special": True}
        )
        return token_ids_of(reply.get("tokens"), "/tokenize: tokens")

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        reply = await self._calls.post("/detokenize", {"tokens": list(token_ids)})
        text = reply.get("content")
        if not isinstance(text, str):
            raise EngineBroke("/detokenize: no content")
        return text

    @asynccontextmanager
    async def generate(self, wanted: Wanted) -> AsyncIterator[AsyncIterator[Piece]]:
        async with aclosing(self._pieces(wanted)) as pieces:
            yield pieces

    async def _pieces(self, wanted: Wanted) -> AsyncGenerator[Piece]:
        known = list(wanted.prefix_token_ids)
        finish = None
        while finish is None:
            start = len(known) - len(known) % CHUNK_TOKENS
            count = min(CHUNK_TOKENS, wanted.output_tokens_max - start)
            context = [*wanted.prompt_token_ids, *known[:start]]
            asked = {**wanted.sampling, "seed": chunk_seed(wanted.seed, start // CHUNK_TOKENS)}
            reply = await self._complete(context, asked, count)
            ids = token_ids_of(reply.get("tokens"), f"{COMPLETION}: tokens")
            head = known[start:]
            if list(ids[: len(head)]) != head:
                # Only a cut within a chunk gets here, and only before its first piece.
                raise ContinuationRefused("the engine does not repeat the chunk that was cut")
            log_probs = await self._log_probs(context, asked, ids, reply)
            new = ids[len(head) :]
            known.extend(new)
            finish = _finish(reply)
            if finish is TerminalReason.LENGTH and new and len(known) < wanted.output_tokens_max:
                finish = None
            content = reply.get("content")
            yield Piece(
                token_ids=new,
                log_probs=log_probs[len(head) :],
                text=content if isinstance(content, str) and not head else "",
                finish=finish,
            )

    async def _complete(
        self, context: list[int], asked: dict[str, object], count: int, n_probs: int = 1
    ) -> dict[str, object]:
        body = {
            **asked,
            "prompt": context,
            "n_predict": count,
            "n_probs": n_probs,
            "return_tokens": True,
            "cache_prompt": True,
            "stream": False,
        }
        return await self._calls.post(COMPLETION, body)

    async def _log_probs(
        self,
        context: list[int],
        asked: dict[str, object],
        ids: tuple[int, ...],
        reply: dict[str, object],
    ) -> tuple[float, ...]:
        told = align(ids, _entries(reply))
        return tuple(
            [
                await self._log_prob([*context, *ids[:place]], asked, ids[place])
                if log_prob is None
                else log_prob
                for place, log_prob in enumerate(told)
            ]
        )

    async def _log_prob(self, context: list[int], asked: dict[str, object], token_id: int) -> float:
        """Ask for the log-prob of a token that a reply has left out."""
        for n_probs in _SEARCHED:
            forbidden = [token_id]
            while len(forbidden) <= _FORBIDDEN_MAX:
                bias = [[banned, False] for banned in forbidden]
                reply = await self._complete(context, asked | {"logit_bias": bias}, 1, n_probs)
                entries = _entries(reply)
                if entries:
                    found = _among_likeliest(entries[0], token_id)
                    if found is not None:
                        return found
                    break
                forbidden.extend(token_ids_of(reply.get("tokens"), f"{COMPLETION}: tokens")[:1])
        raise EngineBroke(f"{COMPLETION}: no log-prob of token {token_id}")


def chunk_seed(seed: int, chunk: int) -> int:
    """The seed of a chunk: the same for the same generation, however often it is continued."""
    return int.from_bytes(
        hashlib.blake2b(f"{seed}:{chunk}".encode(), digest_size=4).digest(), "big"
    )


def align(ids: tuple[int, ...], entries: list[dict[str, object]]) -> list[float | None]:
    """Put the entries that a reply has to the tokens that it has; None: its entry was left out.

    From the end: of the tokens of one character the last has the entry.

    Raises:
        EngineBroke: an entry belongs to no token.
    """
    aligned: list[float | None] = [None] * len(ids)
    left = list(entries)
    for place in range(len(ids) - 1, -1, -1):
        if left and left[-1].get("id") == ids[place]:
            where = f"{COMPLETION}: logprob"
            aligned[place] = number_of(left.pop().get("logprob"), where)
    if left:
        raise EngineBroke(f"{COMPLETION}: a log-prob of a token that is not in the reply")
    return aligned


def _entries(reply: dict[str, object]) -> list[dict[str, object]]:
    entries = reply.get("completion_probabilities") or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise EngineBroke(f"{COMPLETION}: completion_probabilities is no list of objects")
    return entries


def _among_likeliest(entry: dict[str, object], token_id: int) -> float | None:
    likeliest = entry.get("top_logprobs")
    for candidate in likeliest if isinstance(likeliest, list) else []:
        if isinstance(candidate, dict) and candidate.get("id") == token_id:
            return number_of(candidate.get("logprob"), f"{COMPLETION}: top_logprobs")
    return None


def _finish(reply: dict[str, object]) -> TerminalReason | None:
    how = reply.get("stop_type")
    if how == "limit":
        return TerminalReason.LENGTH
    if how == "eos":
        return TerminalReason.STOP
    raise EngineBroke(f"{COMPLETION}: it ended by {str(how)[:40]!r}")
