"""Which calls a token prefix cannot rebuild: those whose decoding follows a grammar (CUT-6, I27).

A grammar's state is not in the tokens, so such a call is never cut and never continues a cut; after a
crash it is generated anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_FREE_TOOL_CHOICES: Final = frozenset({"auto", "none"})
_GUIDED: Final = (
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "structural_tag",
    "structured_outputs",
    # llama.cpp's names for the same.
    "grammar",
    "json_schema",
)


def constrained_reason(body: Mapping[str, object]) -> str | None:
    """Name what constrains the decoding of a model call, of any route.

    Returns:
        The reason as it is counted and logged, such as `tool_choice:required`; None: nothing does.
    """
    choice = body.get("tool_choice")
    if isinstance(choice, str) and choice not in _FREE_TOOL_CHOICES:
        return f"tool_choice:{choice[:40]}"
    if choice is not None and not isinstance(choice, str):
        return "tool_choice:constrained"
    text = body.get("text")
    for name, wanted in (
        ("response_format", body.get("response_format")),
        ("text.format", text.get("format") if isinstance(text, Mapping) else None),
    ):
        if wanted is not None:
            kind = wanted.get("type") if isinstance(wanted, Mapping) else None
            if kind != "text":
                return f"{name}:{str(kind or 'unknown')[:40]}"
    return next((name for name in _GUIDED if body.get(name) is not None), None)
