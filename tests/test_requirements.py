"""Every requirement that is said to be met is named in the docstring of a test of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parent

MET: Final[dict[str, tuple[int, ...]]] = {
    "ID": (1, 2, 3, 4, 5),
    "HARD": (9, 11),
    "CTL": (1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 17),
    "STO": (1, 2, 3, 4),
    "STEP": (1, 2, 3, 4, 5, 6),
    "ENV": (1, 2, 3, 4, 5),
    "AGT": (1, 2, 5, 8),
    "POL": (1, 2, 3, 4, 5, 6, 7),
    "CUT": (1, 3, 4, 5, 6, 7, 8),
    "RES": (1, 2, 3, 4, 5, 6),
    "COORD": (1, 2, 3, 4),
    "SET": (1, 2),
    "SRV": (1, 2, 3, 4, 5, 6),
}

_ID: Final = re.compile(r"\b[A-Z]+-[0-9]+\b")


def _named_in_docstrings(source: str) -> set[str]:
    named: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) and node.name.startswith(("test_", "Test")):
            named |= set(_ID.findall(ast.get_docstring(node) or ""))
    return named


def test_every_requirement_that_is_met_has_a_test_that_names_it() -> None:
    named: set[str] = set()
    for path in sorted(TESTS.glob("**/test_*.py")):
        named |= _named_in_docstrings(path.read_text())
    met = [f"{area}-{number}" for area, numbers in MET.items() for number in numbers]
    missing = [name for name in met if name not in named]
    assert not missing, ", ".join(missing)


def test_only_docstrings_of_tests_count() -> None:
    source = '"""ID-1"""\ndef helper():\n    """ID-2"""\ndef test_x():\n    """ID-3, ID-4: so."""\n'
    assert _named_in_docstrings(source) == {"ID-3", "ID-4"}
