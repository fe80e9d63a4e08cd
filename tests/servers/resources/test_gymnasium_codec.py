"""Values and environments as JSON and back."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics

from gymtrio.errors import InvalidCheckpointState, SettingsError
from gymtrio.storage import opaque
from gymtrio.strict import structure, unstructure
from servers.resources.gymnasium_codec import (
    SavedEnv,
    check_env,
    decode,
    encode,
    load_env,
    save_env,
)

VALUES = [
    None,
    True,
    3,
    2**70,
    -0.0,
    float("inf"),
    "x",
    [1, [2.5, None]],
    (1, (2, "x")),
    {"a": 1, 2: (3,)},
    np.int64(7),
    np.float32(0.1),
    np.bool_(True),
    np.str_("H"),
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.array([], dtype=np.float64),
    np.array(5, dtype=np.uint8),
]


def same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_with_its_exact_type(value: object) -> None:
    """RES-8, STO-3: through what a checkpoint keeps."""
    kept = opaque.decode(opaque.encode(encode(value, "x"), "x"))
    assert same(decode(kept, "x"), value)


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.array([object()]), np.datetime64("2026-01-01"), b"x"], ids=repr
)
def test_what_cannot_be_kept_is_refused_by_name(value: object) -> None:
    """STO-3."""
    with pytest.raises(InvalidCheckpointState, match="deck"):
        encode(value, "deck")


@pytest.mark.parametrize(
    "kept",
    [
        {},
        {"dtype": "<i8"},
        {"scalar": 1, "dtype": "nonsense"},
        {"scalar": "x", "dtype": "<i8"},
        {"scalar": 1, "dtype": "O"},
        {"array": [1, 2], "dtype": "<i8", "shape": [3]},
        {"array": [[1], [2, 3]], "dtype": "<i8", "shape": [2]},
        {"tuple": 3},
        {"object": [[1]]},
        {"object": [[[1], 2]]},
    ],
    ids=repr,
)
def test_what_is_not_kept_so_is_refused(kept: object) -> None:
    """STO-4: nothing is unpickled, and a wrong shape is an error, not another value."""
    with pytest.raises(InvalidCheckpointState, match="deck"):
        decode(kept, "deck")


def lake(**kwargs: object) -> gymnasium.Env:
    return gymnasium.make("FrozenLake-v1", disable_env_checker=True, **kwargs)


FIELDS = ("s", "lastaction")


def test_an_environment_comes_back_with_its_generator_and_what_its_wrappers_count() -> None:
    """RES-8: the 100th step is the last, also when the first 60 were taken elsewhere."""
    one = lake(map_name="8x8")
    one.reset(seed=5)
    for _ in range(60):
        one.step(0)
    saved = structure(
        SavedEnv, opaque.decode(opaque.encode(unstructure(save_env(one, FIELDS)), ""))
    )
    other = lake(map_name="8x8")
    load_env(other, FIELDS, saved)
    truncated = []
    for _ in range(61, 101):
        seen = other.step(0)[:4]
        assert one.step(0)[:4] == seen
        truncated.append(seen[3])
    assert truncated == [False] * 39 + [True]
    assert one.reset()[0] == other.reset()[0]
    assert one.unwrapped.np_random.random() == other.unwrapped.np_random.random()


def test_restoring_calls_nothing_of_the_environment() -> None:
    """RES-8: neither a reset nor a step, which would draw from the generator."""

    class Untouchable(gymnasium.Env):
        def reset(self, **_: object) -> tuple[int, dict[str, object]]:
            raise AssertionError

        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, object]]:
            raise AssertionError

    one = lake()
    one.reset(seed=5)
    saved = save_env(one, FIELDS)
    other = Untouchable()
    load_env(other, FIELDS, saved)
    assert other.s == one.unwrapped.s


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fields": {"deck": 1}}, "no field 'deck'"),
        ({"wrappers": {}}, "nothing was kept of its wrapper TimeLimit"),
        ({"generator": {"bit_generator": "MT19937"}}, "other than PCG64"),
        ({"generator": {"bit_generator": "PCG64"}}, "random generator: "),
        ({"generator": {"bit_generator": "PCG64", "state": {"state": "x", "inc": 1}}}, "random"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(changes: dict[str, object], why: str) -> None:
    """STO-4."""
    one = lake()
    one.reset(seed=5)
    saved = unstructure(save_env(one, FIELDS))
    with pytest.raises(InvalidCheckpointState, match=why):
        load_env(lake(), FIELDS, structure(SavedEnv, {**saved, **changes}))


def test_an_environment_with_a_wrapper_that_is_not_known_fails_at_start() -> None:
    """RES-1: it fails closed."""
    with pytest.raises(SettingsError, match="RecordEpisodeStatistics is not known"):
        check_env(RecordEpisodeStatistics(lake()))
