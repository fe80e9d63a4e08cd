from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gymtrio.errors import InvalidRequest
from servers.model.embedded.toolcalls import (
    FunctionCall,
    Tool,
    parse_call,
    refuse_constrained,
    tools_of,
    tools_text,
)

ADD = Tool("add", {"name": "add"})
GET = Tool("get", {"name": "get", "description": "Gets."})


def test_both_apis_declare_tools() -> None:
    parameters = {"type": "object"}
    flat = {"type": "function", "name": "add", "parameters": parameters, "strict": True}
    nested = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    assert tools_of([flat]) == tools_of([nested])
    assert tools_of([flat])[0].definition == {"name": "add", "parameters": parameters}
    assert tools_of(None) == ()


@pytest.mark.parametrize(
    "tools", [{}, [1], [{"type": "web_search"}], [{"type": "function"}], [{}] * 257]
)
def test_other_tools_are_refused(tools: object) -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        tools_of(tools)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "arguments": {"n": 4}}',
        ' \n{"arguments":{"n":4},"name":"add"}\n',
    ],
)
def test_a_call_is_read_and_its_arguments_compacted(text: str) -> None:
    assert parse_call(text, [GET, ADD]) == FunctionCall("add", '{"n":4}')


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The count is 4.",
        '{"name": "drop", "arguments": {}}',
        '{"name": "add"}',
        '{"name": "add", "arguments": {}, "id": 1}',
        '{"name": "add", "arguments": "{}"}',
        '{"name": "add", "arguments": []}',
        '{"name": ["add"], "arguments": {}}',
        '{"name": "add", "arguments": {"n": 1, "n": 2}}',
        '{"name": "add", "arguments": {"n": NaN}}',
        '{"name": "add", "arguments": {"n": 1e999}}',
        '{"name": "add", "arguments": {}} {"name": "add", "arguments": {}}',
        '{"name": "add", "arguments": {}} done',
        'ok: {"name": "add", "arguments": {}}',
        '[{"name": "add", "arguments": {}}]',
    ],
)
def test_anything_else_is_a_message(text: str) -> None:
    assert parse_call(text, [ADD]) is None


def test_without_tools_nothing_is_a_call() -> None:
    assert parse_call('{"name": "add", "arguments": {}}', []) is None


@given(st.text(alphabet='{}[]":,0123.eE-nametrugsd\\u \n', max_size=60))
@example('{"name": "add", "arguments": {"n": ' + "9" * 5000 + "}}")
@example('{"name": "add", "arguments": ' + '{"a":' * 330 + "1" + "}" * 330 + "}")
@example('{"name": "add", "arguments": ' + '{"a":' * 100_000)
@example('{"name": "add", "arguments": {"\\ud800": "\\ud800"}}')
def test_no_text_makes_it_raise(text: str) -> None:
    call = parse_call(text, [ADD])
    assert call is None or call.arguments.isascii()


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.integers() | st.text() | st.floats(allow_nan=False, width=32),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=6,
        ),
    ).filter(lambda value: "Infinity" not in json.dumps(value))
)
def test_what_was_written_is_what_is_called(arguments: dict[str, Any]) -> None:
    call = parse_call(json.dumps({"name": "get", "arguments": arguments}), [ADD, GET])
    assert call is not None
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "name": "add"}},
        {"response_format": {"type": "json_schema"}},
        {"text": {"format": {"type": "json_object"}}},
        {"guided_regex": "a"},
        {"structured_outputs": {}},
    ],
)
def test_constrained_decoding_is_refused_by_name(body: dict[str, Any]) -> None:
    """CUT-6: such a call is never generated here, so none is cut."""
    with pytest.raises(InvalidRequest, match=next(iter(body))):
        refuse_constrained(body)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tool_choice": "auto", "response_format": {"type": "text"}},
        {"tool_choice": "none", "text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"tool_choice": None, "text": {}, "guided_json": None},
    ],
)
def test_free_decoding_is_not(body: dict[str, Any]) -> None:
    refuse_constrained(body)


def test_tools_can_be_described() -> None:
    assert tools_text([GET]).splitlines()[-1] == '{"name": "get", "description": "Gets."}'
