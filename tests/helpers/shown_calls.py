"""A conversation that shows the embedded model how a tool is called, so that it calls it next."""

from __future__ import annotations

from typing import Any, Final

FLAT: Final[dict[str, Any]] = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object"},
    "strict": False,
}
"""The tool as Responses requests have it."""

NESTED: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object"}},
}
"""As chat completions requests have it."""

SHOWN: Final[list[dict[str, str]]] = [
    {"role": "user", "content": "add 4"},
    {"role": "assistant", "content": '{"name": "add", "arguments": {"count": 4}}'},
    {"role": "user", "content": "add 6"},
    {"role": "assistant", "content": '{"name": "add", "arguments": {"count": 6}}'},
    {"role": "user", "content": "add 5"},
]
"""The next turn of the assistant, decoded greedily, calls `add` with count 5."""
