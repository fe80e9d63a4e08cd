"""The list of scenarios names tests that exist, or says why a scenario is none of ours."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
LIST: Final = ROOT / "docs/scenarios.md"

_SCENARIO: Final = re.compile(r"^\d+\. ", re.MULTILINE)
_TEST: Final = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_NOT_OURS: Final = "Decided against:"


def _scenarios(text: str) -> list[str]:
    return [
        scenario
        for section in re.split(r"^#+ ", text, flags=re.MULTILINE)
        for scenario in _SCENARIO.split(section)[1:]
    ]


@cache
def _tests_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, functions) and node.name.startswith("test_")
    )


def test_every_scenario_has_a_test_or_a_reason() -> None:
    """E2E-1: and every test that is named exists."""
    scenarios = _scenarios(LIST.read_text())
    assert len(scenarios) > 40
    bare = [s for s in scenarios if not _TEST.search(s) and _NOT_OURS not in s]
    assert bare == []
    named = {found for scenario in scenarios for found in _TEST.findall(scenario)}
    gone = [f"{path}::{name}" for path, name in sorted(named) if name not in _tests_of(path)]
    assert gone == []


def test_what_is_listed_without_a_test_is_noticed() -> None:
    first, second = _scenarios("# a\n\n1. One.\n   `tests/a.py::test_b`\n2. Two.\n\n## b\n")
    assert _TEST.findall(first) == [("tests/a.py", "test_b")]
    assert _TEST.findall(second) == []
