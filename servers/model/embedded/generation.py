"""One generation as data: what was asked, what there is so far, and when it ends.

Invariants:
- G1 a generation is its tokens: one made of prefix and tail equals one that was never cut, in text,
  log-probs, end and limits, whatever part came as prefix;
- G2 the emissions of a generation, joined, are its final state;
- G3 text that could be the beginning of a stop string is not emitted before it is known not to be.
"""

from __future__ import annotations

import codecs
import math
from typing import Literal, TypeAlias

import attrs

from gymtrio.errors import InvalidRequest
from servers.model.embedded.sampling import Sampled, Sampling
from servers.model.embedded.settings import STOP_STRING_CHARACTERS_MAX, STOP_STRINGS_MAX
from servers.model.embedded.vocabulary import Vocabulary

FinishReason: TypeAlias = Literal["stop", "length"]


@attrs.frozen
class GenerationRequest:
    """What to generate.

    Raises:
        InvalidRequest: a value has the wrong type or is out of range.
    """

    prompt_ids: tuple[int, ...]
    output_tokens_max: int
    """Counts prefix and tail; also bounded by what the context leaves."""
    sampling: Sampling = attrs.Factory(Sampling)
    stop: tuple[str, ...] = ()
    """Texts that end the generation; they are left out of its text, not of its tokens."""
    prefix_ids: tuple[int, ...] = ()
    """What was generated of this request before; only the rest is generated."""
    prefix_logprobs: tuple[float, ...] = ()

    def __attrs_post_init__(self) -> None:
        if not self.prompt_ids:
            raise InvalidRequest("the prompt is empty")
        if type(self.output_tokens_max) is not int or self.output_tokens_max < 1:
            raise InvalidRequest(f"output limit {self.output_tokens_max!r}, expected 1 or more")
        if len(self.prefix_ids) != len(self.prefix_logprobs):
            raise InvalidRequest(
                f"prefix of {len(self.prefix_ids)} tokens, {len(self.prefix_logprobs)} log-probs"
            )
        if not all(map(math.isfinite, self.prefix_logprobs)):
            raise InvalidRequest("a log-prob of the prefix is not a finite number")
        if len(self.stop) > STOP_STRINGS_MAX:
            raise InvalidRequest(f"{len(self.stop)} stop strings, at most {STOP_STRINGS_MAX}")
        for text in self.stop:
            if not 1 <= len(text) <= STOP_STRING_CHARACTERS_MAX:
                raise InvalidRequest(f"a stop string has 1-{STOP_STRING_CHARACTERS_MAX} characters")


@attrs.frozen
class Generated:
    """A generation at one instant: a snapshot of a live one, or the result."""

    token_ids: tuple[int, ...]
    """With the token that ended it, if one did."""
    logprobs: tuple[float, ...]
    """As many as tokens."""
    text: str
    """Without the stop string and what follows it; a character that is cut in half is U+FFFD."""
    finish_reason: FinishReason | None
    """None while it goes on."""
    stop: str | None
    """The stop string that ended it; None if a token or the limit did."""
    output_limit_tokens: int
    """The limit in force: the one asked for, or what the context left."""
    cached_prompt_tokens: int
    """Tokens of prompt and prefix that the prefix cache spared."""


@attrs.frozen
class Emission:
    """What one step, or the restored prefix, adds."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason | None


class Generation:
    """A generation under way."""

    def __init__(
        self, request: GenerationRequest, vocabulary: Vocabulary, context_tokens: int
    ) -> None:
        """Take up a request, with its prefix if it has one.

        Raises:
            InvalidRequest: the prompt leaves no room, a token id is not of the vocabulary, or the
                prefix goes on beyond its own end.
        """
        room = context_tokens - len(request.prompt_ids)
        if room < 1:
            raise InvalidRequest(
                f"a prompt of {len(request.prompt_ids)} tokens leaves no room in a context of "
                f"{context_tokens}"
            )
        size = len(vocabulary.pieces)
        given = request.prompt_ids + request.prefix_ids
        if not all(type(token_id) is int and 0 <= token_id < size for token_id in given):
            raise InvalidRequest(f"a token id is not in 0..{size - 1}")
        self.sampling = request.sampling
        self.prompt_tokens = len(request.prompt_ids)
        self.context = list(request.prompt_ids)
        """Prompt and output: what the model is given."""
        self.cached_prompt_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop: str | None = None
        self.output_limit_tokens = min(request.output_tokens_max, room)
        self._vocabulary = vocabulary
        self._stops = [(text, text.encode("utf-8", "replace")) for text in request.stop]
        self._stop_bytes_max = max((len(stop) for _, stop in self._stops), default=0)
        self._logprobs: list[float] = []
        self._bytes = bytearray()
        self._emitted_bytes = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id, logprob in zip(request.prefix_ids, request.prefix_logprobs, strict=True):
            if self.finish_reason is not None:
                raise InvalidRequest("the prefix goes on beyond where this request ends")
            self._take(token_id, logprob)
        self.restored = Emission(
            request.prefix_ids, request.prefix_logprobs, self._next_text(), self.finish_reason
        )

    def append(self, sampled: Sampled) -> Emission:
        """Add the next token; only while `finish_reason` is None."""
        assert self.finish_reason is None
        self._take(sampled.token_id, sampled.logprob)
        return Emission(
            (sampled.token_id,), (sampled.logprob,), self._next_text(), self.finish_reason
        )

    def snapshot(self) -> Generated:
        return Generated(
            token_ids=tuple(self.context[self.prompt_tokens :]),
            logprobs=tuple(self._logprobs),
            text=self._bytes.decode("utf-8", "replace"),
            finish_reason=self.finish_reason,
            stop=self.stop,
            output_limit_tokens=self.output_limit_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
        )

    def _take(self, token_id: int, logprob: float) -> None:
        self.context.append(token_id)
        self._logprobs.append(logprob)
        piece = self._vocabulary.pieces[token_id]
        self._bytes += piece
        self._search_stop(len(piece))
        if self.finish_reason is None and token_id in self._vocabulary.end_ids:
            self.finish_reason = "stop"
        if self.finish_reason is None and len(self._logprobs) >= self.output_limit_tokens:
            self.finish_reason = "length"

    def _search_stop(self, new_bytes: int) -> None:
        """End at the stop string that begins first; of several there, at the first given."""
        start = max(0, len(self._bytes) - new_bytes - self._stop_bytes_max + 1)
        found = [
            (place, rank)
            for rank, (_, stop) in enumerate(self._stops)
            if (place := self._bytes.find(stop, start)) >= 0
        ]
        if found:
            place, rank = min(found)
            self.finish_reason = "stop"
            self.stop = self._stops[rank][0]
            del self._bytes[place:]

    def _next_text(self) -> str:
        """Text that became certain since the last emission."""
        final = self.finish_reason is not None
        end = len(self._bytes) - (0 if final else self._held_bytes())
        certain = bytes(self._bytes[self._emitted_bytes : end])
        self._emitted_bytes = max(self._emitted_bytes, end)
        return self._decoder.decode(certain, final)

    def _held_bytes(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = min(self._stop_bytes_max - 1, len(self._bytes))
        return next(
            (
                size
                for size in range(longest, 0, -1)
                if any(stop.startswith(self._bytes[-size:]) for _, stop in self._stops)
            ),
            0,
        )
