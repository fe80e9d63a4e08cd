from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.errors import InvalidRequest
from servers.model.embedded.generation import Emission, Generation, GenerationRequest
from servers.model.embedded.sampling import Sampled
from servers.model.embedded.vocabulary import Vocabulary

TOKENS = st.lists(st.integers(1, 11), max_size=12)
STOPS = st.lists(st.text("abSTOPé漢 ", min_size=1, max_size=4), max_size=3).map(tuple)


def request(limit: int = 100, **fields: object) -> GenerationRequest:
    return GenerationRequest((1, 2), limit, **fields)  # type: ignore[arg-type]


def run(generation: Generation, token_ids: list[int]) -> list[Emission]:
    """Feed tokens, each with a log-prob of its own, until the generation ends."""
    emitted = [generation.restored]
    for token_id in token_ids[len(generation.snapshot().token_ids) :]:
        if generation.finish_reason is None:
            logprob = -float(len(generation.snapshot().token_ids))
            emitted.append(generation.append(Sampled(token_id, logprob)))
    return emitted


@given(TOKENS.map(lambda tokens: [*tokens, 0]), STOPS, st.integers(1, 14))
def test_a_cut_anywhere_changes_nothing(
    small_vocabulary: Vocabulary, tokens: list[int], stop: tuple[str, ...], limit: int
) -> None:
    """CUT-4, invariants G1 and G2: limit, stop strings, text and log-probs count the prefix."""
    whole = Generation(request(limit, stop=stop), small_vocabulary, 64)
    run(whole, tokens)
    uncut = whole.snapshot()
    assert uncut.finish_reason is not None
    for cut in range(len(uncut.token_ids) + 1):
        again = attrs.evolve(
            request(limit, stop=stop),
            prefix_ids=uncut.token_ids[:cut],
            prefix_logprobs=uncut.logprobs[:cut],
        )
        continued = Generation(again, small_vocabulary, 64)
        assert (continued.finish_reason is None) == (cut < len(uncut.token_ids))
        emitted = run(continued, tokens)
        assert continued.snapshot() == uncut
        assert "".join(part.text for part in emitted) == uncut.text
        assert sum((part.token_ids for part in emitted), ()) == uncut.token_ids
        assert sum((part.logprobs for part in emitted), ()) == uncut.logprobs


@given(TOKENS, STOPS)
def test_text_holds_no_stop_string_and_what_was_emitted_stands(
    small_vocabulary: Vocabulary, tokens: list[int], stop: tuple[str, ...]
) -> None:
    """Invariant G3."""
    generation = Generation(request(stop=stop), small_vocabulary, 64)
    said = ""
    for emission in run(generation, tokens):
        said += emission.text
        assert not any(text in said for text in stop)
    assert generation.snapshot().text.startswith(said)
    assert (generation.stop is not None) == (generation.finish_reason == "stop")


def test_a_stop_string_across_tokens_ends_and_stays_out_of_the_text(
    small_vocabulary: Vocabulary,
) -> None:
    generation = Generation(request(stop=("TO",)), small_vocabulary, 64)
    texts = [emission.text for emission in run(generation, [2, 7, 8, 2])]
    assert texts == ["", "a", "S", ""]
    result = generation.snapshot()
    assert (result.text, result.finish_reason, result.stop) == ("aS", "stop", "TO")
    assert result.token_ids == (2, 7, 8)


def test_of_several_stop_strings_the_first_in_the_text_counts(
    small_vocabulary: Vocabulary,
) -> None:
    generation = Generation(request(stop=("OP", "T", "TO")), small_vocabulary, 64)
    run(generation, [9])
    assert (generation.snapshot().text, generation.stop) == ("S", "T")


def test_half_a_character_waits_for_the_other_half(small_vocabulary: Vocabulary) -> None:
    generation = Generation(request(), small_vocabulary, 64)
    assert [emission.text for emission in run(generation, [5, 6, 0])] == ["", "", "é", ""]


def test_half_a_character_at_the_limit_is_a_replacement_character(
    small_vocabulary: Vocabulary,
) -> None:
    generation = Generation(request(2), small_vocabulary, 64)
    assert [emission.text for emission in run(generation, [2, 5])] == ["", "a", "\ufffd"]
    assert generation.finish_reason == "length"


def test_the_token_that_ends_the_turn_is_kept_and_says_stop_even_at_the_limit(
    small_vocabulary: Vocabulary,
) -> None:
    generation = Generation(request(2), small_vocabulary, 64)
    run(generation, [2, 0])
    result = generation.snapshot()
    assert (result.token_ids, result.text) == ((2, 0), "a")
    assert (result.finish_reason, result.stop) == ("stop", None)


def test_the_context_bounds_the_output(small_vocabulary: Vocabulary) -> None:
    generation = Generation(request(100), small_vocabulary, 5)
    run(generation, [2, 2, 2, 2])
    assert generation.snapshot().output_limit_tokens == 3
    assert (len(generation.snapshot().token_ids), generation.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt_ids": ()}, "empty"),
        ({"prompt_ids": (2, 12)}, "token id"),
        ({"prompt_ids": (2, -1)}, "token id"),
        ({"prompt_ids": (2, True)}, "token id"),
        ({"prompt_ids": (2,) * 64}, "no room"),
        ({"output_tokens_max": 0}, "output limit"),
        ({"output_tokens_max": True}, "output limit"),
        ({"prefix_ids": (2,)}, "log-probs"),
        ({"prefix_ids": (12,), "prefix_logprobs": (0.0,)}, "token id"),
        ({"prefix_ids": (2,), "prefix_logprobs": (math.nan,)}, "finite"),
        ({"prefix_ids": (0, 2), "prefix_logprobs": (0.0, 0.0)}, "beyond"),
        ({"output_tokens_max": 1, "prefix_ids": (2, 2), "prefix_logprobs": (0.0, 0.0)}, "beyond"),
        ({"stop": ("",)}, "stop string"),
        ({"stop": ("x" * 257,)}, "stop string"),
        ({"stop": ("x",) * 17}, "stop strings"),
    ],
)
def test_requests_that_do_not_fit_are_refused(
    small_vocabulary: Vocabulary, fields: dict[str, object], why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        Generation(attrs.evolve(request(), **fields), small_vocabulary, 64)  # type: ignore[arg-type]
