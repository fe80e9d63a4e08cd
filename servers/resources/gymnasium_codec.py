"""The state of a gymnasium environment as JSON, exactly, and back beside any constructor.

What is kept: the fields by which an environment differs from a new one of the same arguments, what its
wrappers count, and its random generator. Restoring sets these and calls nothing of the environment's:
a `reset` would draw from the generator, and a constructor may derive one field from another.

Nothing is pickled. A value is a JSON scalar, a list, or an object with one of the tags `tuple`,
`object`, `scalar` and `array`; numpy's come back with their exact type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import gymnasium
import numpy as np

from gymtrio.errors import InvalidCheckpointState, SettingsError

_WRAPPER_COUNTS: Final = {"TimeLimit": "_elapsed_steps", "OrderEnforcing": "_has_reset"}
"""Wrappers that gymnasium puts around an environment, and what each remembers of an episode."""

_GENERATOR: Final = "PCG64"
_KINDS_KEPT: Final = "biufU"
"""Of numpy's dtypes: truth values, integers, floats and text."""

Env = gymnasium.Env[Any, Any]


@attrs.frozen
class SavedEnv:
    """An environment in the middle of an episode."""

    fields: dict[str, object]
    wrappers: dict[str, object]
    generator: dict[str, object]


def check_env(env: Env) -> None:
    """
    Raises:
        SettingsError: something around it may have state that is not known here.
    """
    for wrapper in _wrappers(env):
        name = type(wrapper).__name__
        if name not in _WRAPPER_COUNTS:
            raise SettingsError(f"{env.spec}: the state of its wrapper {name} is not known")


def save_env(env: Env, fields: Sequence[str]) -> SavedEnv:
    """Take an environment's state; it is not changed.

    Args:
        fields: of the innermost environment; one that is not there yet is left out.

    Raises:
        InvalidCheckpointState: a field holds what cannot be kept.
    """
    inner: Any = env.unwrapped
    return SavedEnv(
        fields={
            name: encode(getattr(inner, name), name) for name in fields if hasattr(inner, name)
        },
        wrappers={
            type(wrapper).__name__: getattr(wrapper, _WRAPPER_COUNTS[type(wrapper).__name__])
            for wrapper in _wrappers(env)
        },
        generator=dict(inner.np_random.bit_generator.state),
    )


def load_env(env: Env, fields: Sequence[str], saved: SavedEnv) -> None:
    """Put a saved state into a new environment that was made with the same arguments.

    Raises:
        InvalidCheckpointState: it is not a state of such an environment.
    """
    unknown = saved.fields.keys() - set(fields)
    if unknown:
        raise InvalidCheckpointState(f"{env.spec}: it has no field {sorted(unknown)[0]!r}")
    inner: Any = env.unwrapped
    for name, value in saved.fields.items():
        setattr(inner, name, decode(value, name))
    for wrapper in _wrappers(env):
        name = type(wrapper).__name__
        if name not in saved.wrappers:
            raise InvalidCheckpointState(f"{env.spec}: nothing was kept of its wrapper {name}")
        setattr(wrapper, _WRAPPER_COUNTS[name], saved.wrappers[name])
    inner.np_random = _generator(saved.generator)


def _generator(state: Mapping[str, object]) -> np.random.Generator:
    if state.get("bit_generator") != _GENERATOR:
        raise InvalidCheckpointState(f"a random generator other than {_GENERATOR}")
    generator = np.random.Generator(np.random.PCG64(0))
    try:
        generator.bit_generator.state = state
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidCheckpointState(f"the state of the random generator: {error}") from None
    return generator


def _wrappers(env: Env) -> Iterator[Env]:
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


def encode(value: object, where: str) -> object:
    """
    Raises:
        InvalidCheckpointState: a type that is not kept; `where` names the place.
    """
    if isinstance(value, np.ndarray):
        return {
            "array": _items(value.ravel().tolist(), value.dtype, where),
            "dtype": value.dtype.str,
            "shape": list(value.shape),
        }
    if isinstance(value, np.generic):
        return {"scalar": _items([value.item()], value.dtype, where)[0], "dtype": value.dtype.str}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(item, where) for item in value]
    if type(value) is tuple:
        return {"tuple": [encode(item, where) for item in value]}
    if type(value) is dict:
        return {"object": [[encode(k, where), encode(v, where)] for k, v in value.items()]}
    raise InvalidCheckpointState(f"{where}: a {type(value).__name__} cannot be kept")


def _items(items: list[object], dtype: np.dtype[Any], where: str) -> list[object]:
    if dtype.kind not in _KINDS_KEPT:
        raise InvalidCheckpointState(f"{where}: an array of {dtype} cannot be kept")
    return items


def decode(value: object, where: str) -> object:
    """Invert `encode`.

    Raises:
        InvalidCheckpointState: it is nothing that `encode` makes.
    """
    try:
        return _decode(value)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidCheckpointState(f"{where}: {type(error).__name__}: {error}") from None


def _decode(value: Any) -> object:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_decode(item) for item in value["tuple"])
    if "object" in value:
        return {_decode(key): _decode(item) for key, item in value["object"]}
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in _KINDS_KEPT:
        raise ValueError(f"dtype {dtype}")
    if "scalar" in value:
        return dtype.type(value["scalar"])
    return np.array(value["array"], dtype=dtype).reshape(value["shape"])
