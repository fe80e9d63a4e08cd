from __future__ import annotations

from typing import Any

import attrs
import pytest

from gymtrio.capture.replies import Route
from gymtrio.errors import InvalidRequest
from servers.model.embedded.vocabulary import Vocabulary
from servers.model.engine_api.prompts import Prompting
from servers.model.engine_api.requests import parse_call

ADD: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.fixture
def prompting(byte_vocabulary: Vocabulary) -> Prompting:
    return Prompting(
        vocabulary=byte_vocabulary, context_tokens=600, default_system=None, describe_tools=True
    )


def text_of(prompting: Prompting, *messages: dict[str, str], **more: Any) -> str:
    ids = prompting.encode(parse_call(Route.CHAT, {"messages": list(messages), **more}))
    return prompting.vocabulary.decode(ids).decode()


def test_a_conversation_is_encoded_as_it_is(prompting: Prompting) -> None:
    assert text_of(prompting, USER) == "user\nhi\nassistant\n"


def test_a_default_system_turn_stands_where_there_is_none(prompting: Prompting) -> None:
    with_default = attrs.evolve(prompting, default_system="be kind")
    assert text_of(with_default, USER).startswith("system\nbe kind\nuser\n")
    assert "be kind" not in text_of(with_default, SYSTEM, USER)


def test_tools_join_the_system_turn(prompting: Prompting) -> None:
    told = text_of(prompting, SYSTEM, USER, tools=[ADD])
    assert told.startswith("system\nbe brief\n\nTo call a function")
    assert told.count("system\n") == 1
    assert '{"name": "add"}' in told
    assert text_of(prompting, USER, tools=[ADD]).startswith("system\nTo call a function")


def test_tools_are_not_told_where_examples_show_them(prompting: Prompting) -> None:
    silent = attrs.evolve(prompting, describe_tools=False)
    assert text_of(silent, USER, tools=[ADD]) == text_of(prompting, USER)


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "empty"),
        ([USER] * 151, "151 turns"),
        ([{"role": "user", "content": "x" * 601}], "601 characters"),
        ([{"role": "user", "content": "x" * 590}], "over 600"),
    ],
)
def test_what_does_not_fit_is_refused(
    prompting: Prompting, messages: list[dict[str, str]], what: str
) -> None:
    with pytest.raises(InvalidRequest, match=what):
        text_of(prompting, *messages)
