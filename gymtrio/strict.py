"""Structuring of outside values into attrs classes, without a single coercion.

cattrs by itself turns `"3"`, `3.9` and `True` into an `int`. Here every value must already have the
type that its field declares, every field without a default must be there, and a key that no field
has is refused with the nearest known name. The one liberty: an `int` is taken where a `float` is
declared, because JSON writers print whole floats without a point.

Opaque JSON is declared `object` and passed through untouched.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, Literal, NewType, TypeVar, Union, get_args, get_origin

import attrs
import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError

from gymtrio.errors import GymtrioError

T = TypeVar("T")

_KEY_SHOWN_MAX: Final = 80
_EXACT: Final = (str, bool, bytes, int)
_FAULTS: Final = (ValueError, TypeError, BaseExceptionGroup, GymtrioError)
"""What structuring raises; whoever walked there adds where."""


class MalformedValue(GymtrioError):
    """A value that is not what its place takes; carries where it is and why."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}" if path else why)
        self.path = path
        self.why = why


class _Unfit(ValueError):
    """Raised by a hook; the path is added by whoever walked there."""


def _exactly(kind: type) -> Callable[[object, object], object]:
    def hook(value: object, _: object) -> object:
        if type(value) is not kind:
            raise _Unfit(f"expected {kind.__name__}, got {describe(value)}")
        return value

    return hook


def _finite(value: object, _: object) -> float:
    if type(value) not in (int, float):
        raise _Unfit(f"expected a number, got {describe(value)}")
    assert isinstance(value, (int, float))
    try:
        number = float(value)
    except OverflowError:
        raise _Unfit("expected a number within the range of a double") from None
    if not math.isfinite(number):
        raise _Unfit(f"expected a finite number, got {number}")
    return number


def describe(value: object) -> str:
    """Name a value's type and, where short, the value; never a long or secret text."""
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        text = repr(value)
        return text if len(text) <= 24 else type(value).__name__
    return type(value).__name__


def nearest_name(name: str, known: list[str]) -> str:
    """Say which known name a wrong one may have meant."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


def _is_attrs(cls: Any) -> bool:
    return isinstance(cls, type) and attrs.has(cls)


def _is_enum(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, Enum)


def _is_literal(cls: Any) -> bool:
    return get_origin(cls) is Literal


def _is_sequence(cls: Any) -> bool:
    origin, arguments = get_origin(cls), get_args(cls)
    return origin in (list, frozenset) or (origin is tuple and arguments[1:] == (Ellipsis,))


def _is_mapping(cls: Any) -> bool:
    return cls is dict or get_origin(cls) is dict


def _is_optional(cls: Any) -> bool:
    if get_origin(cls) not in (Union, types.UnionType):
        return False
    arguments = get_args(cls)
    return len(arguments) == 2 and type(None) in arguments


def _taken_as_it_is(cls: Any) -> frozenset[type]:
    """The types whose values a field of this type takes as they are; empty: there is none."""
    if _is_optional(cls):
        (inner,) = (argument for argument in get_args(cls) if argument is not type(None))
        taken = _taken_as_it_is(inner)
        return taken | {type(None)} if taken else taken
    while isinstance(cls, NewType):
        cls = cls.__supertype__
    return frozenset({cls}) if cls in _EXACT else frozenset()


def is_flat(cls: type) -> bool:
    """Whether an attrs class needs all of its fields, and takes each by its exact type alone.

    Then whatever compares types exactly may read it in our place.
    """
    attrs.resolve_types(cls)
    return all(
        field.init
        and field.alias == field.name
        and field.default is attrs.NOTHING
        and field.converter is field.validator is None
        and _taken_as_it_is(field.type)
        for field in attrs.fields(cls)
    )


def build_converter() -> cattrs.Converter:
    """Make a converter with our hooks; each user may register unions of its own on it."""
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    for kind in _EXACT:
        converter.register_structure_hook(kind, _exactly(kind))
    converter.register_structure_hook(float, _finite)
    converter.register_structure_hook_func(lambda cls: cls is object, lambda value, _: value)
    converter.register_unstructure_hook_func(lambda cls: cls is object, lambda value: value)

    def below(step: str, value: object, cls: Any) -> Any:
        try:
            return converter.structure(value, cls)
        except _FAULTS as error:
            raise _At(step, error) from error

    def enum_factory(cls: Any) -> Callable[[object, object], object]:
        members = {member.value: member for member in cls}

        def hook(value: object, _: object) -> object:
            if type(value) is not str or value not in members:
                known = ", ".join(map(repr, members))
                raise _Unfit(f"expected one of {known}, got {describe(value)}")
            return members[value]

        return hook

    converter.register_structure_hook_factory(_is_enum, enum_factory)

    def literal_hook(value: object, cls: Any) -> object:
        known = get_args(cls)
        if not any(type(value) is type(one) and value == one for one in known):
            raise _Unfit(f"expected one of {', '.join(map(repr, known))}, got {describe(value)}")
        return value

    converter.register_structure_hook_func(_is_literal, literal_hook)

    def optional_factory(cls: Any) -> Callable[[object, object], object]:
        (inner,) = (argument for argument in get_args(cls) if argument is not type(None))

        # Found at the first value: a class may contain itself.
        found: list[Callable[[object, object], object]] = []

        def hook(value: object, _: object) -> object:
            if value is None:
                return None
            if not found:
                found.append(converter.get_structure_hook(inner))
            return found[0](value, inner)

        return hook

    converter.register_structure_hook_factory(_is_optional, optional_factory)

    def sequence_factory(cls: Any) -> Callable[[object, object], object]:
        make: Any = get_origin(cls)
        inner = get_args(cls)[0]
        # Scopes and replies name thousands: what has no content to check is looked at by type alone.
        plain = inner if inner in _EXACT else None

        def hook(value: object, _: object) -> object:
            if not isinstance(value, list | tuple):
                raise _Unfit(f"expected a list, got {describe(value)}")
            if plain is not None and set(map(type, value)) <= {plain}:
                return make(value)
            structure_item = converter.get_structure_hook(inner)
            made = []
            try:
                for item in value:
                    made.append(structure_item(item, inner))
            except _FAULTS as error:
                raise _At(f"[{len(made)}]", error) from error
            return make(made)

        return hook

    converter.register_structure_hook_factory(_is_sequence, sequence_factory)

    def mapping_factory(cls: Any) -> Callable[[object, object], object]:
        arguments = get_args(cls) or (str, object)

        def hook(value: object, _: object) -> object:
            if not isinstance(value, Mapping):
                raise _Unfit(f"expected an object, got {describe(value)}")
            made = {}
            for key, item in value.items():
                if type(key) is not str:
                    raise _Unfit(f"expected text as key, got {describe(key)}")
                step = f".{key[:_KEY_SHOWN_MAX]}"
                made[below(step, key, arguments[0])] = below(step, item, arguments[1])
            return made

        return hook

    converter.register_structure_hook_factory(_is_mapping, mapping_factory)

    def attrs_factory(cls: Any) -> Callable[[object, object], object]:
        attrs.resolve_types(cls)
        fields = {field.alias: field for field in attrs.fields(cls) if field.init}
        types = {name: field.type or object for name, field in fields.items()}
        required = [name for name, field in fields.items() if field.default is attrs.NOTHING]
        # Most fields are looked at by type alone; calling a hook for each would be most of the cost.
        plain = {name: taken for name in types if (taken := _taken_as_it_is(types[name]))}
        # Found at the first value: a class may contain itself.
        hooks: dict[str, Callable[[Any, Any], Any]] = {}

        def is_whole_and_plain(value: dict[object, object]) -> bool:
            if len(value) != len(fields):
                return False
            for key, item in value.items():
                if key not in plain or type(item) not in plain[key]:
                    return False
            return True

        def hook(value: object, _: object) -> object:
            if type(value) is dict and is_whole_and_plain(value):
                return cls(**value)
            if type(value) is not dict and not isinstance(value, Mapping):
                raise _Unfit(f"expected an object, got {describe(value)}")
            if not hooks:
                hooks.update((name, converter.get_structure_hook(types[name])) for name in types)
            made: dict[str, object] = {}
            for key, item in value.items():
                if key in plain and type(item) in plain[key]:
                    made[key] = item
                    continue
                if not isinstance(key, str) or key not in fields:
                    shown = str(key)[:_KEY_SHOWN_MAX]
                    raise _At(
                        f".{shown}", _Unfit("unknown key" + nearest_name(shown, list(fields)))
                    )
                try:
                    made[key] = hooks[key](item, types[key])
                except _FAULTS as error:
                    raise _At(f".{key[:_KEY_SHOWN_MAX]}", error) from error
            for name in required:
                if name not in made:
                    raise _At(f".{name}", _Unfit("missing"))
            return cls(**made)

        return hook

    converter.register_structure_hook_factory(_is_attrs, attrs_factory)
    return converter


class _At(ValueError):
    """A fault below a step of the path."""

    def __init__(self, step: str, cause: BaseException) -> None:
        super().__init__(step)
        self.step = step
        self.cause = cause


def _locate(error: BaseException) -> tuple[str, BaseException]:
    path = ""
    while True:
        if isinstance(error, _At):
            path, error = path + error.step, error.cause
        elif isinstance(error, ForbiddenExtraKeysError):
            return path, error
        elif isinstance(error, ClassValidationError | IterableValidationError):
            error = error.exceptions[0]
        else:
            return path, error


_CONVERTER: Final = build_converter()


def structure(cls: type[T], value: object, *, converter: cattrs.Converter = _CONVERTER) -> T:
    """Make a `cls` of plain data (what JSON, YAML or msgpack decode to).

    Raises:
        MalformedValue: at the first value that does not fit, with its path (`servers.a.bind`).
        Refusal: whatever a field's own type raises for content it refuses (an `EpisodeId`).
    """
    try:
        return converter.structure(value, cls)
    except GymtrioError:
        raise
    except (ValueError, TypeError, BaseExceptionGroup, AttributeError) as error:
        path, cause = _locate(error)
        if isinstance(cause, GymtrioError):
            raise cause from None
        raise MalformedValue(path.removeprefix("."), str(cause)) from None


def unstructure(value: object, *, converter: cattrs.Converter = _CONVERTER) -> Any:
    """Make plain data of an attrs value; `structure` is its inverse."""
    return converter.unstructure(value)
