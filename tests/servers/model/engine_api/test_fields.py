from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from gymtrio.capture.constrained import constrained_reason
from gymtrio.capture.replies import Route
from gymtrio.errors import InvalidRequest
from servers.model.engine_api.fields import Fields, check_fields, known_fields


@pytest.mark.parametrize(
    ("route", "params"),
    [
        (Route.CHAT, completion_create_params.CompletionCreateParamsBase),
        (Route.RESPONSES, response_create_params.ResponseCreateParamsBase),
    ],
)
def test_every_field_of_the_sdk_is_known(route: Route, params: Any) -> None:
    assert params.__annotations__.keys() <= known_fields(route)
    assert "stream" in known_fields(route)


@pytest.mark.parametrize("route", [Route.CHAT, Route.RESPONSES])
def test_every_constraint_is_refused(route: Route) -> None:
    """CUT-6: what cannot be cut does not get to the engine."""
    values: list[Any] = ["required", {"type": "json_schema"}, {"format": {"type": "json_object"}}]
    for name in sorted(known_fields(route)):
        for value in [*values, "x", 1, True, [{}]]:
            body = {name: value}
            if constrained_reason(body) is None:
                continue
            with pytest.raises(InvalidRequest, match=name):
                check_fields(route, body)


@pytest.mark.parametrize("route", [Route.CHAT, Route.RESPONSES])
def test_null_asks_for_nothing(route: Route) -> None:
    check_fields(route, dict.fromkeys(known_fields(route)))


def test_neutral_values_pass_and_others_are_refused_by_name() -> None:
    neutral: dict[str, Any] = {
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "min_p": 0,
        "modalities": ["text"],
        "repetition_penalty": 1.0,
        "skip_special_tokens": True,
        "store": True,
        "user": "somebody",
    }
    check_fields(Route.CHAT, neutral)
    with pytest.raises(InvalidRequest, match=r"^logit_bias: .*only null, \{\}"):
        check_fields(Route.CHAT, neutral | {"logit_bias": {"5": 1}})
    with pytest.raises(InvalidRequest, match=r"^previous_response_id: .*only null"):
        check_fields(Route.RESPONSES, {"previous_response_id": "resp_1"})


def test_fields_of_the_other_api_are_unknown() -> None:
    with pytest.raises(InvalidRequest, match="^max_output_tokens: unknown field"):
        check_fields(Route.CHAT, {"max_output_tokens": 5})
    with pytest.raises(InvalidRequest, match="^messages: unknown field"):
        check_fields(Route.RESPONSES, {"messages": []})


def test_a_long_unknown_name_is_shown_in_part() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_fields(Route.CHAT, {"x" * 10_000: 1})
    assert len(refused.value.detail) < 200


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("flag", 1),
        ("flag", "true"),
        ("text", 5),
        ("texts", [1]),
        ("texts", {}),
        ("object", []),
        ("number", True),
        ("number", "1"),
    ],
)
def test_typed_reading_converts_nothing(method: str, value: object) -> None:
    read = getattr(Fields({"name": value}), method)
    more = (1.0,) if method == "number" else ()
    with pytest.raises(InvalidRequest, match="^name: expected"):
        read("name", *more)


@pytest.mark.parametrize("value", [0, 11, 5.0, True, "5"])
def test_integers_are_integers_within_their_range(value: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^n: expected an integer in 1\.\.10"):
        Fields({"n": value}).integer("n", 1, 10)
    assert Fields({"n": 10}).integer("n", 1, 10) == 10
    assert Fields({}).integer("n", 1, 10) is None
