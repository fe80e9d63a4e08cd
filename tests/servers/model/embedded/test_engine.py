"""The engine with the real model. Reference results come from each request alone, in a cold engine."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import trio
import trio.testing

from gymtrio.errors import InvalidRequest, Unavailable
from servers.model.embedded.engine import Engine, open_engine
from servers.model.embedded.generation import Emission, Generated, GenerationRequest
from servers.model.embedded.prompt import Turn, encode_turns
from servers.model.embedded.sampling import Sampling
from servers.model.embedded.settings import EngineSettings
from servers.model.embedded.vocabulary import Vocabulary
from tests.helpers.passes import Passes

SIZES = EngineSettings(parallel_calls=5, cached_sequences=2, context_tokens=256, step_tokens=24)
GREEDY = Sampling(temperature=0)
OUTPUT_TOKENS = 14


def chat(vocabulary: Vocabulary, text: str) -> tuple[int, ...]:
    turns = [Turn("system", "You are brief."), Turn("user", text)]
    return encode_turns(turns, vocabulary, SIZES.context_tokens)


def requests(vocabulary: Vocabulary) -> dict[str, GenerationRequest]:
    story = chat(vocabulary, "Write a story about a fox and a cat.")
    return {
        "greedy": GenerationRequest(story, OUTPUT_TOKENS, GREEDY),
        "sampled": GenerationRequest(story, OUTPUT_TOKENS, Sampling(1.0, seed=11)),
        "narrowed": GenerationRequest(story, OUTPUT_TOKENS, Sampling(1.5, 0.9, 40, seed=2**64 - 1)),
        "characters": GenerationRequest(
            tuple(vocabulary.encode("漢字🙂!" * 4, 200)), OUTPUT_TOKENS, GREEDY
        ),
    }


@attrs.frozen
class Uncut:
    request: GenerationRequest
    result: Generated
    vocabulary: Vocabulary

    def cut_at(self, tokens: int) -> GenerationRequest:
        return attrs.evolve(
            self.request,
            prefix_ids=self.result.token_ids[:tokens],
            prefix_logprobs=self.result.logprobs[:tokens],
        )


def same(left: Generated, right: Generated) -> bool:
    return attrs.evolve(left, cached_prompt_tokens=0) == attrs.evolve(right, cached_prompt_tokens=0)


@pytest.fixture(scope="module")
def uncut() -> dict[str, Uncut]:
    """Each request alone in an engine that has computed nothing before."""
    found: dict[str, Uncut] = {}

    async def alone(name: str) -> None:
        sizes = attrs.evolve(SIZES, parallel_calls=1, cached_sequences=0)
        async with open_engine(sizes) as engine:
            request = requests(engine.vocabulary)[name]
            found[name] = Uncut(request, await engine.generate(name, request), engine.vocabulary)

    for name in ("greedy", "sampled", "narrowed", "characters"):
        trio.run(alone, name)
    text = found["greedy"].result.text
    middle = len(text) // 2
    stop = text[middle : middle + 9]
    request = attrs.evolve(found["greedy"].request, stop=("never in it", stop))

    async def stopped() -> None:
        async with open_engine(attrs.evolve(SIZES, parallel_calls=1)) as engine:
            result = await engine.generate("stop", request)
            found["stop"] = Uncut(request, result, engine.vocabulary)

    trio.run(stopped)
    assert found["stop"].result.stop == stop
    assert found["stop"].result.text == text[: text.index(stop)]
    return found


async def all_at_once(engine: Engine, calls: dict[str, GenerationRequest]) -> dict[str, Generated]:
    results: dict[str, Generated] = {}

    async def one(call_id: str, request: GenerationRequest) -> None:
        results[call_id] = await engine.generate(call_id, request)

    async with trio.open_nursery() as nursery:
        for call_id, request in calls.items():
            nursery.start_soon(one, call_id, request)
    return results


def first_of(uncut: Uncut) -> int:
    return 1


def middle_of(uncut: Uncut) -> int:
    return len(uncut.result.token_ids) // 2


def last_of(uncut: Uncut) -> int:
    return len(uncut.result.token_ids) - 1


@pytest.mark.parametrize("cut", [first_of, middle_of, last_of])
async def test_a_cut_is_invisible_in_a_cold_engine_among_others(
    uncut: dict[str, Uncut], cut: Callable[[Uncut], int]
) -> None:
    """CUT-4, invariants I25 and I26: ids and log-probs, greedy and sampled, five in one batch."""
    async with open_engine(SIZES) as engine:
        results = await all_at_once(
            engine, {name: case.cut_at(cut(case)) for name, case in uncut.items()}
        )
    for name, case in uncut.items():
        assert same(results[name], case.result), name


async def test_a_cut_is_invisible_in_a_warm_engine(uncut: dict[str, Uncut]) -> None:
    """CUT-4: at every token of the stopped and of the many-byte reply, whatever is cached."""
    async with open_engine(SIZES) as engine:
        for name in ("stop", "characters"):
            case = uncut[name]
            cuts = {str(cut): case.cut_at(cut) for cut in range(last_of(case) + 1)}
            for call_id, result in (await all_at_once(engine, cuts)).items():
                assert same(result, case.result), f"{name} at {call_id}"
        results = await all_at_once(engine, {name: case.request for name, case in uncut.items()})
        assert all(same(results[name], case.result) for name, case in uncut.items())
        assert results["greedy"].cached_prompt_tokens > 0


def test_the_cases_hold_a_cut_inside_a_character_and_inside_a_stop_string(
    uncut: dict[str, Uncut],
) -> None:
    """What the tests of cuts say they cover."""
    vocabulary = uncut["characters"].vocabulary
    ids = uncut["characters"].result.token_ids
    cuts = [vocabulary.decode(ids[:cut]) for cut in range(len(ids))]
    assert any(part.decode("utf-8", "ignore").encode() != part for part in cuts)
    stopped = uncut["stop"].result
    assert stopped.stop is not None
    before_last = vocabulary.decode(stopped.token_ids[:-1]).decode()
    assert len(before_last) > len(stopped.text)


async def test_a_live_call_is_cut_and_goes_on(uncut: dict[str, Uncut]) -> None:
    """CUT-1 and CUT-4: a snapshot of a continued call is the old prefix and the new tail."""
    case = uncut["sampled"]
    taken: list[Generated] = []
    parts: list[Emission] = []

    async with open_engine(SIZES) as engine:

        def look(emission: Emission) -> None:
            parts.append(emission)
            snapshot = engine.snapshot("live")
            assert snapshot is not None
            taken.append(snapshot)

        result = await engine.generate("live", case.cut_at(4), look)
        assert same(result, case.result)
        assert engine.snapshot("live") is None
        again = attrs.evolve(
            case.request, prefix_ids=taken[5].token_ids, prefix_logprobs=taken[5].logprobs
        )
        assert same(await engine.generate("again", again), case.result)
    assert [len(snapshot.token_ids) for snapshot in taken] == list(range(4, OUTPUT_TOKENS + 1))
    assert taken[5].token_ids == case.result.token_ids[:9]
    assert taken[5].logprobs == case.result.logprobs[:9]
    assert [snapshot.finish_reason for snapshot in taken[:-1]] == [None] * (len(taken) - 1)
    assert taken[-1].finish_reason == "length"
    assert "".join(part.text for part in parts) == case.result.text
    assert sum((part.token_ids for part in parts), ()) == case.result.token_ids


async def test_a_prefix_that_had_ended_is_the_result(uncut: dict[str, Uncut]) -> None:
    case = uncut["stop"]
    parts: list[Emission] = []
    async with open_engine(SIZES) as engine:
        whole = case.cut_at(len(case.result.token_ids))
        assert same(await engine.generate("done", whole, parts.append), case.result)
        assert engine.counters().steps == 0
    assert [(part.token_ids, part.finish_reason) for part in parts] == [
        (case.result.token_ids, "stop")
    ]


async def test_calls_of_one_preamble_compute_it_once_and_get_what_they_would_alone(
    uncut: dict[str, Uncut],
) -> None:
    story = uncut["greedy"].request.prompt_ids
    names = ("greedy", "sampled", "narrowed")
    async with open_engine(SIZES) as engine:
        calls = {name: attrs.evolve(uncut[name].request, output_tokens_max=3) for name in names}
        results = await all_at_once(engine, calls)
        assert engine.counters().computed_tokens < len(story) + 3 * 3 + 2 * 16
    for name in names:
        assert results[name].token_ids == uncut[name].result.token_ids[:3]
        assert results[name].logprobs == uncut[name].result.logprobs[:3]


async def test_a_caller_that_leaves_frees_its_slot(uncut: dict[str, Uncut]) -> None:
    """SRV-3: also while its call decodes; what it has computed stays of use."""
    greedy = uncut["greedy"]
    async with open_engine(attrs.evolve(SIZES, parallel_calls=1)) as engine:
        with trio.CancelScope() as scope:
            long = attrs.evolve(greedy.request, output_tokens_max=200)
            await engine.generate("long", long, lambda _: scope.cancel())
        assert scope.cancelled_caught
        assert engine.snapshot("long") is None
        result = await engine.generate("next", greedy.request)
        assert same(result, greedy.result)
        assert result.cached_prompt_tokens == len(greedy.request.prompt_ids) - 1
        assert engine.counters().active_calls == 0


async def test_a_caller_that_leaves_the_queue_is_forgotten(uncut: dict[str, Uncut]) -> None:
    request = attrs.evolve(uncut["greedy"].request, output_tokens_max=200)
    async with open_engine(attrs.evolve(SIZES, parallel_calls=1)) as engine:
        async with trio.open_nursery() as nursery:
            started = trio.Event()
            nursery.start_soon(engine.generate, "first", request, lambda _: started.set())
            await started.wait()
            scope = trio.CancelScope()

            async def second() -> None:
                with scope:
                    await engine.generate("second", request)

            nursery.start_soon(second)
            await trio.testing.wait_all_tasks_blocked()
            assert engine.counters().waiting_calls == 1
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert engine.counters().waiting_calls == 0
            assert engine.snapshot("second") is None
            assert engine.snapshot("first") is not None
            nursery.cancel_scope.cancel()


async def test_more_calls_than_may_wait_are_refused(uncut: dict[str, Uncut]) -> None:
    request = uncut["greedy"].request
    sizes = attrs.evolve(SIZES, parallel_calls=1, waiting_calls_max=1)
    async with open_engine(sizes) as engine:
        async with trio.open_nursery() as nursery:
            started = trio.Event()
            nursery.start_soon(engine.generate, "0", request, lambda _: started.set())
            await started.wait()
            nursery.start_soon(engine.generate, "1", request)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(Unavailable, match="wait for a slot"):
                await engine.generate("2", request)
            with pytest.raises(InvalidRequest, match="already"):
                await engine.generate("1", request)
            nursery.cancel_scope.cancel()


async def test_requests_that_do_not_fit_the_model_are_refused(uncut: dict[str, Uncut]) -> None:
    request = uncut["greedy"].request
    async with open_engine(SIZES) as engine:
        for prompt in ((5,) * engine.context_tokens, (len(engine.vocabulary.pieces),)):
            with pytest.raises(InvalidRequest):
                await engine.generate("x", attrs.evolve(request, prompt_ids=prompt))
        assert engine.snapshot("x") is None


async def test_calls_that_are_left_when_the_engine_ends_are_refused(
    uncut: dict[str, Uncut],
) -> None:
    request = attrs.evolve(uncut["greedy"].request, output_tokens_max=200)
    refused: list[str] = []
    async with trio.open_nursery() as callers:
        async with open_engine(attrs.evolve(SIZES, parallel_calls=1)) as engine:

            async def call(call_id: str, started: trio.Event) -> None:
                with pytest.raises(Unavailable):
                    await engine.generate(call_id, request, lambda _: started.set())
                refused.append(call_id)

            started = trio.Event()
            callers.start_soon(call, "active", started)
            await started.wait()
            callers.start_soon(call, "waiting", trio.Event())
            await trio.testing.wait_all_tasks_blocked()
        await call("late", trio.Event())
    assert sorted(refused) == ["active", "late", "waiting"]


async def test_the_loop_is_free_while_the_model_computes(uncut: dict[str, Uncut]) -> None:
    passes = Passes()

    async with open_engine(SIZES) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(passes.run)
            await engine.generate("x", attrs.evolve(uncut["greedy"].request, output_tokens_max=2))
            nursery.cancel_scope.cancel()
        assert passes.count > 100 * engine.counters().steps
