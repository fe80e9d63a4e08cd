"""vLLM, and whatever speaks its completions API: a stream with `return_token_ids` and log-probs.

Routes: `/tokenize`, `/detokenize`, `/v1/completions`, `/v1/models`, `/version`. A generation that is
sampled with the request's seed is resampled from where it is continued: an engine's generator starts
anew with every request, and its state cannot be set.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Final

from gymtrio.capture.cuts import ContinuationRefused, TerminalReason
from gymtrio.serving.stock.calls import EngineCalls, number_of, token_ids_of
from gymtrio.serving.stock.chats import Chat
from gymtrio.serving.stock.engines import EngineBroke, EngineRefused, Facts, Piece, Wanted

COMPLETIONS: Final = "/v1/completions"
_FINISH: Final = {"stop": TerminalReason.STOP, "length": TerminalReason.LENGTH}
_OF_OUTPUT: Final = ("frequency_penalty", "presence_penalty", "bad_words", "logits_processors")
"""Settings that look at the tokens that the request has generated; a prefix is prompt to the engine."""

LOG = logging.getLogger(__name__)


class VllmEngine:
    """See `engines.StockEngine`.

    Args:
        model: what calls name; None: the first that the engine lists.
    """

    def __init__(self, calls: EngineCalls, *, model: str | None) -> None:
        self._calls = calls
        self._wanted = model
        self._model = model

    async def describe(self) -> Facts:
        listed = (await self._calls.get("/v1/models")).get("data")
        models = [m for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
        model = next((m for m in models if self._wanted in (None, m.get("id"))), None)
        if model is None:
            raise EngineBroke(f"/v1/models: no model {self._wanted or ''}".rstrip())
        context_tokens, name = model.get("max_model_len"), model.get("id")
        if type(context_tokens) is not int or not isinstance(name, str):
            raise EngineBroke("/v1/models: a model without id and max_model_len")
        try:
            version = (await self._calls.get("/version")).get("version")
        except EngineRefused:
            version = None
        self._model = name
        return Facts(
            model=name,
            context_tokens=context_tokens,
            fingerprint={"engine": "vllm", "version": version, "model": name},
        )

    async def tokenize(self, chat: Chat) -> tuple[int, ...]:
        body: dict[str, object] = {
            "messages": list(chat.messages),
            "add_generation_prompt": True,
            "chat_template_kwargs": dict(chat.template_kwargs),
        }
        if chat.tools:
            body["tools"] = list(chat.tools)
        reply = await self._calls.post("/tokenize", self._named(body))
        return token_ids_of(reply.get("tokens"), "/tokenize: tokens")

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        reply = await self._calls.post("/detokenize", self._named({"tokens": list(token_ids)}))
        text = reply.get("prompt")
        if not isinstance(text, str):
            raise EngineBroke("/detokenize: no prompt")
        return text

    @asynccontextmanager
    async def generate(self, wanted: Wanted) -> AsyncIterator[AsyncIterator[Piece]]:
        done = len(wanted.prefix_token_ids)
        body: dict[str, object] = {
            **wanted.sampling,
            "prompt": [*wanted.prompt_token_ids, *wanted.prefix_token_ids],
            "max_tokens": wanted.output_tokens_max - done,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
        }
        if done:
            body |= _going_on(wanted)
        if wanted.seeded:
            body["seed"] = wanted.seed if not done else _seed_at(wanted.seed, done)
        if done and wanted.sampling.get("temperature") != 0:
            LOG.info("a sampled generation is resampled from its token %d on", done)
        async with self._calls.events(COMPLETIONS, self._named(body)) as events:
            async with aclosing(_pieces(events)) as pieces:
                yield pieces

    def _named(self, body: dict[str, object]) -> dict[str, object]:
        return body if self._model is None else body | {"model": self._model}


def _going_on(wanted: Wanted) -> dict[str, object]:
    """What a request that goes on from a prefix says otherwise than the first one.

    Raises:
        ContinuationRefused: the generation depends on what the engine does not know as generated.
    """
    forgotten = next((name for name in _OF_OUTPUT if wanted.sampling.get(name)), None)
    if forgotten is not None:
        raise ContinuationRefused(f"{forgotten}: the engine would not count the prefix")
    least = wanted.sampling.get("min_tokens")
    if type(least) is not int:
        return {}
    return {"min_tokens": max(0, least - len(wanted.prefix_token_ids))}


async def _pieces(events: AsyncIterator[dict[str, object]]) -> AsyncGenerator[Piece]:
    async for event in events:
        choices = event.get("choices")
        if choices:
            if not isinstance(choices, list) or not isinstance(choices[0], dict):
                raise EngineBroke(f"{COMPLETIONS}: choices are no objects")
            yield _piece(choices[0])


def _piece(choice: dict[str, object]) -> Piece:
    ids = token_ids_of(choice.get("token_ids") or [], f"{COMPLETIONS}: token_ids")
    told = choice.get("logprobs")
    values = told.get("token_logprobs") if isinstance(told, dict) else None
    log_probs = tuple(
        number_of(value, f"{COMPLETIONS}: token_logprobs")
        for value in (values if isinstance(values, list) else [])
    )
    text, finish = choice.get("text"), choice.get("finish_reason")
    if len(log_probs) != len(ids):
        raise EngineBroke(f"{COMPLETIONS}: {len(ids)} token ids, {len(log_probs)} log-probs")
    if finish is not None and finish not in _FINISH:
        raise EngineBroke(f"{COMPLETIONS}: it ended by {str(finish)[:40]!r}")
    return Piece(
        token_ids=ids,
        log_probs=log_probs,
        text=text if isinstance(text, str) else "",
        finish=None if finish is None else _FINISH[str(finish)],
    )


def _seed_at(seed: int, position: int) -> int:
    digest = hashlib.sha256(f"{seed}:{position}".encode("ascii")).digest()
    return int.from_bytes(digest[:4], "big")
