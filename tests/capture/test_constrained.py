"""Which calls a token prefix cannot rebuild."""

from __future__ import annotations

from typing import Any

import pytest

from gymtrio.capture.constrained import constrained_reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, None),
        ({"tool_choice": None}, None),
        ({"tool_choice": "auto"}, None),
        ({"tool_choice": "none"}, None),
        ({"tool_choice": "required"}, "tool_choice:required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice:constrained"),
        ({"tool_choice": []}, "tool_choice:constrained"),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, "response_format:json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format:json_schema"),
        ({"response_format": {}}, "response_format:unknown"),
        ({"response_format": "json"}, "response_format:unknown"),
        ({"text": {"verbosity": "low"}}, None),
        ({"text": {"format": {"type": "text"}}}, None),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format:json_schema"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structural_tag": {}}, "structural_tag"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": None}, None),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"tools": [{"type": "function", "strict": True}]}, None),
        ({"temperature": 0, "stop": ["a"], "max_tokens": 3}, None),
    ],
)
def test_what_constrains_decoding_is_named(body: dict[str, Any], reason: str | None) -> None:
    """CUT-6, I27."""
    assert constrained_reason(body) == reason
