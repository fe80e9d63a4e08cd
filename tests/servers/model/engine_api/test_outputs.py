from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from servers.model.embedded.generation import Generated
from servers.model.embedded.vocabulary import Vocabulary
from servers.model.engine_api.logprobs import TokenNames
from servers.model.engine_api.outputs import TextGate, usage_of


@given(st.lists(st.text(max_size=4)), st.booleans())
def test_a_gate_gives_all_text_once_and_in_order(parts: list[str], may_call: bool) -> None:
    gate = TextGate(may_call=may_call)
    given_text = [gate.take(part) for part in parts]
    assert "".join(given_text) + gate.rest() == "".join(parts)


@given(st.lists(st.text(max_size=4)))
def test_a_gate_without_tools_holds_nothing(parts: list[str]) -> None:
    gate = TextGate(may_call=False)
    assert [gate.take(part) for part in parts] == parts


def test_a_gate_holds_what_may_be_a_call() -> None:
    gate = TextGate(may_call=True)
    assert gate.take(" \n") == ""
    assert gate.take('{"na') == ""
    assert gate.take('me"}') == ""
    assert gate.rest() == ' \n{"name"}'


def test_a_gate_opens_at_the_first_sign_of_a_message() -> None:
    gate = TextGate(may_call=True)
    assert gate.take(" ") == ""
    assert gate.take("so {") == " so {"
    assert gate.take("}") == "}"


def test_entries_tell_bytes_exactly_where_text_cannot(byte_vocabulary: Vocabulary) -> None:
    names = TokenNames(byte_vocabulary)
    ids = (*"é".encode(), 256)
    entries = names.entries(ids, (-1.0, -2.0, -3.0))
    assert [entry["token"] for entry in entries] == ["\ufffd", "\ufffd", "<|im_end|>"]
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9], []]
    assert [entry["logprob"] for entry in entries] == [-1.0, -2.0, -3.0]
    as_ids = names.entries(ids, (-1.0, -2.0, -3.0), as_ids=True)
    assert [entry["token"] for entry in as_ids] == ["token_id:195", "token_id:169", "token_id:256"]


def test_usage_counts_the_prompt_once_and_the_outputs_of_all_choices() -> None:
    def result(tokens: int, cached: int) -> Generated:
        return Generated((1,) * tokens, (0.0,) * tokens, "", "stop", None, 9, cached)

    usage = usage_of((1, 2, 3), [result(2, 0), result(4, 2)])
    assert (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens) == (3, 6, 0)
    # What is cached of a continued prefix is no part of the prompt.
    assert usage_of((1, 2, 3), [result(4, 6)]).cached_tokens == 3
