from __future__ import annotations

from enum import Enum

import attrs
import pytest

from gymtrio.errors import InvalidRolloutId
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.strict import MalformedValue, structure, unstructure


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@attrs.frozen
class Inner:
    count: int
    ratio: float = 0.5


@attrs.frozen
class Outer:
    name: str
    inner: Inner
    many: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] = attrs.field(factory=dict)
    colour: Colour = Colour.RED
    note: str | None = None
    flag: bool = False
    data: bytes = b""
    opaque: object = None
    episode: EpisodeId | None = None


FULL = Outer(
    "n",
    Inner(1, 2.0),
    (Inner(3),),
    {"a": Inner(4)},
    Colour.BLUE,
    "text",
    True,
    b"\x00",
    {"z": [1, None], "a": {}},
    EpisodeId(RolloutId("r"), 1),
)


def test_structure_inverts_unstructure() -> None:
    assert structure(Outer, unstructure(FULL)) == FULL
    assert list(unstructure(FULL)["opaque"]) == ["z", "a"]


GOOD = {"name": "n", "inner": {"count": 1}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 7}, "name: expected str, got 7"),
        ({"inner": {"count": "3"}}, "inner.count: expected int, got str"),
        ({"inner": {"count": 3.9}}, "inner.count: expected int, got 3.9"),
        ({"inner": {"count": True}}, "inner.count: expected int, got True"),
        ({"inner": {"count": 1, "ratio": True}}, "inner.ratio: expected a number, got True"),
        ({"inner": {"count": 1, "ratio": float("nan")}}, "inner.ratio: expected a finite number"),
        ({"inner": {"count": 1, "ratio": 10**400}}, "inner.ratio: expected a number within"),
        ({"inner": {}}, "inner.count: missing"),
        ({"inner": []}, "inner: expected an object, got list"),
        ({"many": "abc"}, "many: expected a list, got str"),
        (
            {"many": [{"count": 1}, {"cuont": 1}]},
            "many[1].cuont: unknown key; did you mean 'count'",
        ),
        ({"by_name": {"x": {"count": None}}}, "by_name.x.count: expected int, got null"),
        ({"by_name": {1: {"count": 1}}}, "by_name: expected text as key"),
        ({"colour": "green"}, "colour: expected one of 'red', 'blue'"),
        ({"flag": 1}, "flag: expected bool, got 1"),
        ({"nmae": "n"}, "nmae: unknown key; did you mean 'name'?"),
        ({"zzz": "n"}, "zzz: unknown key; known: "),
    ],
)
def test_what_does_not_fit_is_named_with_its_path(change: dict[str, object], message: str) -> None:
    with pytest.raises(MalformedValue) as caught:
        structure(Outer, GOOD | change)
    assert str(caught.value).startswith(message)


def test_a_whole_number_is_a_float_and_nothing_else_is_bent() -> None:
    made = structure(Outer, GOOD | {"inner": {"count": 1, "ratio": 3}})
    assert made.inner.ratio == 3.0
    assert type(made.inner.ratio) is float


def test_a_refusal_of_a_fields_own_type_comes_through() -> None:
    with pytest.raises(InvalidRolloutId):
        structure(Outer, GOOD | {"episode": {"rollout_id": "r-a1"}})


def test_the_top_must_be_an_object() -> None:
    with pytest.raises(MalformedValue, match="expected an object, got list"):
        structure(Outer, [])
