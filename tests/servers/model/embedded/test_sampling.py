from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gymtrio.errors import InvalidRequest
from servers.model.embedded.sampling import (
    SEED_MAX,
    SEED_MIN,
    TEMPERATURE_MAX,
    Logits,
    Sampling,
    sample,
    uniform,
)

SEEDS = st.integers(SEED_MIN, SEED_MAX)
POSITIONS = st.integers(0, 8191)
LOGITS = st.lists(
    st.one_of(st.floats(-60, 60, width=32), st.just(-math.inf)), min_size=1, max_size=40
).filter(lambda row: max(row) > -math.inf)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.one_of(st.just(0.0), st.floats(0, TEMPERATURE_MAX)),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 50),
    seed=SEEDS,
)


def row(values: list[float]) -> Logits:
    return np.array(values, dtype=np.float32)


@given(SEEDS, POSITIONS)
def test_the_number_of_a_position_is_in_range_and_does_not_change(seed: int, place: int) -> None:
    assert 0 <= uniform(seed, place) < 1
    assert uniform(seed, place) == uniform(seed, place)


def test_the_number_of_a_position_is_the_same_in_every_version() -> None:
    """Cuts that lie in checkpoints are continued by later versions."""
    assert uniform(0, 0) == 0.8336885269740499
    assert uniform(-1, 17) == 0.0465360164974673


def test_numbers_of_positions_and_seeds_are_spread() -> None:
    by_position = [uniform(7, position) for position in range(4000)]
    by_seed = [uniform(seed, 7) for seed in range(4000)]
    for numbers in (by_position, by_seed):
        counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
        assert min(counts) > 330
        assert max(counts) < 470


@given(LOGITS, SAMPLINGS, POSITIONS)
def test_a_token_that_cannot_be_is_never_chosen(
    values: list[float], sampling: Sampling, position: int
) -> None:
    chosen = sample(row(values), sampling, position)
    assert 0 <= chosen.token_id < len(values)
    assert math.isfinite(chosen.logprob)
    assert chosen.logprob <= 1e-9
    assert values[chosen.token_id] > -math.inf


@given(LOGITS, SAMPLINGS, POSITIONS)
def test_the_choice_is_a_function_of_its_arguments(
    values: list[float], sampling: Sampling, position: int
) -> None:
    logits = row(values)
    before = logits.copy()
    assert sample(logits, sampling, position) == sample(row(values), sampling, position)
    assert np.array_equal(logits, before)


@given(LOGITS, SEEDS, POSITIONS)
def test_temperature_zero_takes_the_likeliest_and_of_equals_the_lowest(
    values: list[float], seed: int, position: int
) -> None:
    chosen = sample(row(values), Sampling(temperature=0, seed=seed), position)
    assert chosen.token_id == values.index(max(values))


def weights_of(values: list[float], temperature: float) -> Any:
    logits = row(values).astype(np.float64)
    return np.exp((logits - logits.max()) / temperature)


@given(LOGITS, st.floats(0.1, 3), st.integers(1, 50), SEEDS, POSITIONS)
@example([0.0, 1.0e-28], 1.0, 1, 1, 0)
def test_top_k_takes_one_of_the_k_likeliest(
    values: list[float], temperature: float, top_k: int, seed: int, position: int
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, seed=seed)
    chosen = sample(row(values), sampling, position)
    weights = weights_of(values, temperature)
    # Logits that differ less than weights can tell are equally likely, and all of them stay.
    assert (weights > weights[chosen.token_id] * (1 + 1e-9)).sum() < top_k


@given(LOGITS, st.floats(0.01, 0.99), SEEDS, POSITIONS)
@example([0.0, -1.2e-38], 0.25, 0, 0)
def test_top_p_takes_no_token_beyond_the_covered_share(
    values: list[float], top_p: float, seed: int, position: int
) -> None:
    chosen = sample(row(values), Sampling(top_p=top_p, seed=seed), position)
    weights = weights_of(values, 1.0)
    likelier = weights[weights > weights[chosen.token_id] * (1 + 1e-9)].sum() / weights.sum()
    assert likelier < top_p + 1e-6


@given(LOGITS, SAMPLINGS, POSITIONS)
def test_the_log_prob_is_of_the_whole_distribution_at_the_temperature(
    values: list[float], sampling: Sampling, position: int
) -> None:
    temperature = sampling.temperature or 1.0
    if temperature < 0.01:
        return
    chosen = sample(row(values), sampling, position)
    scaled = np.array(values) / temperature
    total = scaled.max() + math.log(np.exp(scaled - scaled.max()).sum())
    assert chosen.logprob == pytest.approx(scaled[chosen.token_id] - total, abs=1e-9)


def test_tokens_come_as_often_as_they_are_likely() -> None:
    shares = [0.5, 0.3, 0.15, 0.05]
    logits = row([math.log(share) for share in shares])
    drawn = [sample(logits, Sampling(seed=seed), 3).token_id for seed in range(4000)]
    for token_id, share in enumerate(shares):
        assert drawn.count(token_id) / 4000 == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": True},
        {"temperature": "1"},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"top_k": 1.0},
        {"seed": 2**64},
        {"seed": None},
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]
