from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.errors import Unavailable
from servers.model.embedded.generation import Generated, Generation, GenerationRequest
from servers.model.embedded.prefix_cache import WORTH_TOKENS, common_tokens
from servers.model.embedded.sampling import Sampled
from servers.model.embedded.scheduler import Call, Scheduler
from servers.model.embedded.settings import EngineSettings
from servers.model.embedded.steps import Copy, Step
from servers.model.embedded.vocabulary import Vocabulary

CONTEXT_TOKENS = 256


class ListMemory:
    """The model as lists: sequences hold tokens; the next token is a function of those before."""

    def __init__(self, sequences: int) -> None:
        self.held: list[list[int]] = [[] for _ in range(sequences)]
        self.computed_tokens = 0

    def run(self, step: Step) -> tuple[Sampled, ...]:
        for move in step.moves:
            if isinstance(move, Copy):
                self.held[move.target] = list(self.held[move.source])
            else:
                assert move.keep_tokens < len(self.held[move.sequence])
                del self.held[move.sequence][move.keep_tokens :]
        order = [chunk.sequence for chunk in step.chunks]
        assert order == sorted(set(order))
        return tuple(self._chunks(step))

    def _chunks(self, step: Step) -> Iterator[Sampled]:
        for chunk in step.chunks:
            held = self.held[chunk.sequence]
            assert chunk.token_ids
            assert chunk.first_position == len(held)
            held += chunk.token_ids
            assert len(held) <= CONTEXT_TOKENS
            self.computed_tokens += len(chunk.token_ids)
            if chunk.sampling is not None:
                yield next_token(held)


def next_token(held: list[int]) -> Sampled:
    return Sampled(2 + sum(place * token for place, token in enumerate(held)) % 10, -len(held))


def alone(request: GenerationRequest, vocabulary: Vocabulary) -> Generated:
    generation = Generation(request, vocabulary, CONTEXT_TOKENS)
    while generation.finish_reason is None:
        generation.append(next_token(generation.context))
    return attrs.evolve(generation.snapshot(), cached_prompt_tokens=0)


def sizes(**changes: int) -> EngineSettings:
    return attrs.evolve(
        EngineSettings(
            parallel_calls=3, cached_sequences=2, context_tokens=CONTEXT_TOKENS, step_tokens=12
        ),
        **changes,
    )


class Plant:
    """A scheduler with its memory."""

    def __init__(self, vocabulary: Vocabulary, settings: EngineSettings) -> None:
        self.vocabulary = vocabulary
        self.settings = settings
        self.scheduler = Scheduler(settings)
        self.memory = ListMemory(settings.sequences)

    def call(self, prompt: list[int], limit: int = 4) -> Call:
        request = GenerationRequest(tuple(prompt), limit)
        call = Call(Generation(request, self.vocabulary, CONTEXT_TOKENS))
        self.scheduler.submit(call)
        return call

    def step(self) -> Step | None:
        step = self.scheduler.plan()
        if step is not None:
            assert step.tokens <= self.settings.batch_tokens_max
            self.scheduler.apply(step, self.memory.run(step))
        return step

    def drain(self) -> None:
        while self.step() is not None:
            pass


PREAMBLES = st.sampled_from([[], [2] * 30, [2] * 40 + [3] * 20, [4, 5] * 40])
ARRIVALS = st.lists(
    st.tuples(
        PREAMBLES,
        st.lists(st.integers(2, 11), min_size=1, max_size=30),
        st.integers(1, 12),
        st.integers(0, 6),
        st.one_of(st.none(), st.integers(0, 8)),
    ),
    max_size=12,
)


@given(ARRIVALS, st.integers(0, 3), st.integers(1, 4), st.integers(1, 40))
def test_what_a_call_gets_does_not_depend_on_the_others(
    small_vocabulary: Vocabulary,
    arrivals: list[tuple[list[int], list[int], int, int, int | None]],
    shelves: int,
    slots: int,
    step_tokens: int,
) -> None:
    """Invariant I26: whatever is batched, cached, copied or withdrawn."""
    plant = Plant(
        small_vocabulary,
        sizes(parallel_calls=slots, cached_sequences=shelves, step_tokens=step_tokens),
    )
    live: list[tuple[Call, int | None]] = []
    calls: list[Call] = []
    for preamble, own, limit, steps, patience in arrivals:
        call = plant.call(preamble + own, limit)
        calls.append(call)
        live.append((call, patience))
        for _ in range(steps):
            plant.step()
            for waiting, left in [pair for pair in live if pair[1] == 0]:
                plant.scheduler.withdraw(waiting)
                live.remove((waiting, left))
            live = [(c, left if left is None else left - 1) for c, left in live]
    plant.drain()
    assert (plant.scheduler.active_calls, plant.scheduler.waiting_calls) == (0, 0)
    for call, (preamble, own, limit, _, _) in zip(calls, arrivals, strict=True):
        uncut = alone(GenerationRequest(tuple(preamble + own), limit), small_vocabulary)
        result = attrs.evolve(call.generation.snapshot(), cached_prompt_tokens=0)
        if call.withdrawn and result != uncut:
            assert result.token_ids == uncut.token_ids[: len(result.token_ids)]
        else:
            assert result == uncut


def test_calls_that_share_a_preamble_compute_it_once(small_vocabulary: Vocabulary) -> None:
    """Invariant S4."""
    plant = Plant(small_vocabulary, sizes())
    preamble = [2] * 100
    calls = [plant.call([*preamble, 3, 4 + index], limit=1) for index in range(6)]
    plant.drain()
    started_a_little_early = (plant.settings.parallel_calls - 1) * WORTH_TOKENS
    assert plant.memory.computed_tokens <= 102 + 5 + started_a_little_early
    cached = sorted(call.generation.cached_prompt_tokens for call in calls)
    assert cached[0] == 0
    assert cached[1] >= 101 - WORTH_TOKENS


def test_the_next_turn_of_a_conversation_computes_only_what_is_new(
    small_vocabulary: Vocabulary,
) -> None:
    plant = Plant(small_vocabulary, sizes(parallel_calls=2, cached_sequences=4))
    firsts = [plant.call([4 + index] * 50, limit=8) for index in range(5)]
    plant.drain()
    before = plant.memory.computed_tokens
    seconds = [plant.call([*first.generation.context, 10, 10, 10], limit=1) for first in firsts]
    plant.drain()
    # The last token of each reply was never given to the model, hence 4 and not 3.
    assert plant.memory.computed_tokens - before == 4 * len(seconds)


def test_a_long_prompt_does_not_stop_those_who_decode(small_vocabulary: Vocabulary) -> None:
    """Invariant S2."""
    plant = Plant(small_vocabulary, sizes())
    decoding = plant.call([2], limit=20)
    plant.step()
    plant.call([3] * 200, limit=1)
    for produced in range(2, 12):
        plant.step()
        assert len(decoding.generation.snapshot().token_ids) == produced


def test_a_withdrawn_call_leaves_its_slot_to_the_next_step(small_vocabulary: Vocabulary) -> None:
    """Invariant S3."""
    plant = Plant(small_vocabulary, sizes(parallel_calls=1))
    first = plant.call([2], limit=200)
    second = plant.call([3], limit=2)
    plant.step()
    plant.scheduler.withdraw(first)
    step = plant.step()
    assert step is not None
    assert [chunk.token_ids for chunk in step.chunks] == [(3,)]
    plant.drain()
    assert second.generation.finish_reason == "length"
    assert first.generation.finish_reason is None


def test_a_call_withdrawn_while_its_step_is_computed_gets_nothing(
    small_vocabulary: Vocabulary,
) -> None:
    plant = Plant(small_vocabulary, sizes())
    call = plant.call([2], limit=20)
    step = plant.scheduler.plan()
    assert step is not None
    samples = plant.memory.run(step)
    plant.scheduler.withdraw(call)
    assert plant.scheduler.apply(step, samples) == []
    assert plant.scheduler.plan() is None
    assert plant.scheduler.active_calls == 0


def test_more_calls_than_may_wait_are_refused(small_vocabulary: Vocabulary) -> None:
    """Invariant S1."""
    plant = Plant(small_vocabulary, sizes(waiting_calls_max=2))
    plant.call([2])
    kept = plant.call([3])
    with pytest.raises(Unavailable, match="2 model calls wait"):
        plant.call([4])
    plant.scheduler.withdraw(kept)
    plant.call([5])


def test_calls_start_in_order_of_arrival(small_vocabulary: Vocabulary) -> None:
    """Invariant S1."""
    plant = Plant(small_vocabulary, sizes(parallel_calls=1))
    calls = [plant.call([2 + index, 3], limit=2) for index in range(5)]
    ended: list[Call] = []
    while plant.step() is not None:
        done = [c for c in calls if c.generation.finish_reason is not None and c not in ended]
        ended += done
    assert ended == calls


@given(st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20))
def test_common_tokens_are_those_before_the_first_difference(
    left: list[int], right: list[int]
) -> None:
    size = common_tokens(left, right)
    assert left[:size] == right[:size]
    assert left[size : size + 1] != right[size : size + 1] or size == min(len(left), len(right))
