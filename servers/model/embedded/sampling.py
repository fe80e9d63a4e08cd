"""Chooses tokens: a function of logits, request and absolute position, without any state.

Invariant: the uniform number of a position is `blake2b("<seed>:<position>")`, whatever ran before.
A generation that is cut and continued elsewhere therefore draws the same numbers, which a seeded
generator that restarts at the cut would not. Counter-based generators: Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import hashlib
import math
from typing import Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from gymtrio.errors import InvalidRequest

Logits: TypeAlias = npt.NDArray[np.float32]
_Values: TypeAlias = npt.NDArray[np.float64]

SAMPLER: Final = "blake2b-53 v1"
"""Goes into the engine's fingerprint: another version draws other tokens from the same seed."""

TEMPERATURE_MAX: Final = 100.0
SEED_MIN: Final = -(2**63)
SEED_MAX: Final = 2**64 - 1
"""Both the signed and the unsigned 64-bit seeds that clients send."""


@attrs.frozen
class Sampling:
    """How tokens of one call are chosen.

    Raises:
        InvalidRequest: a value has the wrong type or is out of range.
    """

    temperature: float = 1.0
    """0 is greedy: the most likely token, the one of the lowest id among equals."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together have at least this probability; 1 keeps all."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 keeps all. Applied before `top_p`."""
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, TEMPERATURE_MAX, integer=False)
        _check("top_p", self.top_p, 0.0, 1.0, integer=False)
        _check("top_k", self.top_k, 0, 2**31 - 1, integer=True)
        _check("seed", self.seed, SEED_MIN, SEED_MAX, integer=True)
        if self.top_p == 0:
            raise InvalidRequest("top_p is 0, expected more: for greedy decoding set temperature 0")


@attrs.frozen
class Sampled:
    """A chosen token.

    The log-prob is of the distribution at the request's temperature (at 1 if that is 0), before
    `top_k` and `top_p` cut its tail. At temperatures 0 and 1 it equals what OpenAI and vLLM report;
    at another it is what a trainer computes that divides its logits by the rollout temperature.
    """

    token_id: int
    logprob: float


def uniform(seed: int, position: int) -> float:
    """Draw the number in [0, 1) that belongs to an absolute token position of a seeded call."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    # 53 bits are what a float holds; all 64 could round up to 1.
    return float(int.from_bytes(digest, "big") >> 11) / 2**53


def sample(logits: Logits, sampling: Sampling, position: int) -> Sampled:
    """Choose the token at `position`.

    Args:
        logits: of the whole vocabulary, finite or -inf, at least one finite.
        sampling: of the request.
        position: absolute, 0 is the first token of the prompt.
    """
    values = logits.astype(np.float64)
    values -= values.max()
    if sampling.temperature > 0:
        # Shifted first: dividing by a tiny temperature then yields -inf, never inf - inf.
        with np.errstate(over="ignore"):
            values /= sampling.temperature
    weights = np.exp(values)
    log_total = math.log(float(weights.sum()))
    token_id = (
        int(values.argmax())
        if sampling.temperature == 0
        else _draw(_cut(weights, sampling), uniform(sampling.seed, position))
    )
    return Sampled(token_id, float(values[token_id]) - log_total)


def _cut(weights: _Values, sampling: Sampling) -> _Values:
    """Zero what `top_k`, then `top_p` exclude. Tokens as likely as the last one kept stay."""
    if 0 < sampling.top_k < weights.size:
        least = np.partition(weights, weights.size - sampling.top_k)[weights.size - sampling.top_k]
        weights = np.where(weights >= least, weights, 0.0)
    if sampling.top_p < 1:
        falling = np.sort(weights)[::-1]
        covered = np.cumsum(falling)
        last = int(np.searchsorted(covered, sampling.top_p * covered[-1], side="left"))
        weights = np.where(weights >= falling[last], weights, 0.0)
    return weights


def _draw(weights: _Values, share: float) -> int:
    """Invert the cumulative weights, in the order of token ids."""
    covered = np.cumsum(weights)
    total = float(covered[-1])
    # Rounding can make the product the total itself, which no token's weight would reach beyond.
    target = min(share * total, math.nextafter(total, 0.0))
    return int(np.searchsorted(covered, target, side="right"))


def _check(name: str, value: object, low: float, high: float, *, integer: bool) -> None:
    kinds = (int,) if integer else (int, float)
    if type(value) not in kinds or not low <= value <= high:  # type: ignore[operator]
        raise InvalidRequest(f"{name} is {value!r}, expected {low}..{high}")
