"""Decides what each step computes: who has a slot, whose prompt advances, who waits.

Pure and synchronous: `plan` says what to compute, someone computes it, `apply` takes the outcome.
Calls join and leave between steps only.

Invariants:
- S1 at most `parallel_calls` calls have a slot, at most `waiting_calls_max` wait, and they start in
  order of arrival, but for S4;
- S2 every decoding call gets a token in every step; prompts share what is left of `step_tokens`, at
  least `PREFILL_TOKENS_MIN`, in order of start;
- S3 a withdrawn call is in no step planned after its withdrawal;
- S4 a call that could share a longer prefix with one whose prompt is being computed starts after
  it, so that many rollouts with one few-shot preamble compute it once. It waits only while that
  one advances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs

from gymtrio.errors import Unavailable
from servers.model.embedded.generation import Emission, Generation
from servers.model.embedded.prefix_cache import WORTH_TOKENS, PrefixCache, common_tokens
from servers.model.embedded.sampling import Sampled
from servers.model.embedded.settings import PREFILL_TOKENS_MIN, EngineSettings
from servers.model.embedded.steps import Chunk, Move, Step


@attrs.define(eq=False)
class Call:
    """A generation with its place in the engine."""

    generation: Generation
    computed_tokens: int = 0
    """How much of the generation's context its slot holds."""
    withdrawn: bool = False

    @property
    def pending_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.generation.context) - self.computed_tokens


class Scheduler:
    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._cache = PrefixCache(settings.parallel_calls, settings.cached_sequences)
        self._waiting: deque[Call] = deque()
        self._active: dict[int, Call] = {}
        """By slot, in order of start."""

    @property
    def waiting_calls(self) -> int:
        return len(self._waiting)

    @property
    def active_calls(self) -> int:
        return len(self._active)

    def submit(self, call: Call) -> None:
        """Queue a call.

        Raises:
            Unavailable: as many calls wait as may.
        """
        if len(self._waiting) >= self._settings.waiting_calls_max:
            raise Unavailable(f"{len(self._waiting)} model calls wait for a slot, no more may")
        self._waiting.append(call)

    def withdraw(self, call: Call) -> None:
        """Forget a call. Its slot is free from the next plan on; harmless after its end."""
        call.withdrawn = True
        if call in self._waiting:
            self._waiting.remove(call)

    def plan(self) -> Step | None:
        """Plan the next step; every step must be applied before the next plan.

        Returns:
            None if there is nothing to do.
        """
        for slot in [slot for slot, call in self._active.items() if call.withdrawn]:
            self._free(slot)
        decoding = sum(call.pending_tokens == 1 for call in self._active.values())
        budget = max(self._settings.step_tokens - decoding, PREFILL_TOKENS_MIN)
        chunks: list[Chunk] = []
        for slot, call in self._active.items():
            size = 1 if call.pending_tokens == 1 else min(call.pending_tokens, budget)
            budget -= size if call.pending_tokens > 1 else 0
            if size:
                chunks.append(self._chunk(slot, call, size))
        moves = self._start(budget, chunks)
        if not chunks:
            return None
        return Step(tuple(moves), tuple(sorted(chunks, key=lambda chunk: chunk.sequence)))

    def apply(self, step: Step, samples: Sequence[Sampled]) -> list[tuple[Call, Emission]]:
        """Take the outcome of a step.

        Args:
            step: what `plan` returned last.
            samples: one for each chunk with a sampling, in order.

        Returns:
            The calls that got a token, with what it added; those that ended have left their slots.
        """
        emitted: list[tuple[Call, Emission]] = []
        left = iter(samples)
        for chunk in step.chunks:
            call = self._active[chunk.sequence]
            call.computed_tokens = chunk.end_position
            self._cache.extend(chunk.sequence, chunk.token_ids)
            sampled = next(left) if chunk.sampling is not None else None
            if sampled is None or call.withdrawn:
                continue
            emitted.append((call, call.generation.append(sampled)))
            if call.generation.finish_reason is not None:
                self._free(chunk.sequence)
        return emitted

    def _start(self, budget: int, chunks: list[Chunk]) -> list[Move]:
        """Give free slots, lowest first, to waiting calls while prompt tokens may be computed."""
        moves: list[Move] = []
        free = [s for s in range(self._settings.parallel_calls) if s not in self._active]
        for call in [*self._waiting][: 2 * len(free)]:
            if budget < 1 or not free:
                break
            if self._shares_more_soon(call):
                continue
            slot = free.pop(0)
            self._waiting.remove(call)
            self._active[slot] = call
            call.computed_tokens, needed = self._cache.begin(slot, call.generation.context)
            call.generation.cached_prompt_tokens = call.computed_tokens
            moves += needed
            size = min(call.pending_tokens, budget)
            budget -= size
            chunks.append(self._chunk(slot, call, size))
        return moves

    def _shares_more_soon(self, call: Call) -> bool:
        context = call.generation.context
        prompts = [c.generation.context for c in self._active.values() if c.pending_tokens > 1]
        soon = max((common_tokens(prompt, context) for prompt in prompts), default=0)
        return soon >= WORTH_TOKENS and soon - self._cache.match_tokens(context) >= WORTH_TOKENS

    def _chunk(self, slot: int, call: Call, size: int) -> Chunk:
        generation, start = call.generation, call.computed_tokens
        token_ids = tuple(generation.context[start : start + size])
        sampling = generation.sampling if size == call.pending_tokens else None
        return Chunk(slot, start, token_ids, sampling)

    def _free(self, slot: int) -> None:
        del self._active[slot]
        self._cache.release(slot)
