"""What is imported is declared, what is declared is imported, and each has its reason in the docs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]

DISTRIBUTION: Final = {"yaml": "pyyaml"}
"""Of the modules that are not called as the package that brings them."""

OURS: Final = {"gymtrio", "servers"}


def _project() -> dict[str, Any]:
    loaded: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return loaded


def _names(requirements: list[str]) -> set[str]:
    found = (re.match(r"[A-Za-z0-9._-]+", requirement) for requirement in requirements)
    return {match[0].lower().replace("_", "-") for match in found if match is not None}


def _imported(package: str) -> Iterator[str]:
    for path in sorted(ROOT.glob(f"{package}/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module]
            yield from (name.partition(".")[0] for name in names)


def _packages_imported_by(package: str) -> set[str]:
    modules = set(_imported(package)) - set(sys.stdlib_module_names) - OURS
    return {DISTRIBUTION.get(module, module).replace("_", "-") for module in modules}


def test_every_package_that_is_imported_is_declared() -> None:
    project = _project()
    runtime = _names(project["dependencies"])
    demo = _names(project["optional-dependencies"]["demo"])
    assert _packages_imported_by("gymtrio") | _packages_imported_by("servers") <= runtime | demo


def test_every_runtime_dependency_is_imported() -> None:
    imported = _packages_imported_by("gymtrio") | _packages_imported_by("servers")
    assert _names(_project()["dependencies"]) <= imported


def test_every_dependency_has_its_reason_in_the_docs() -> None:
    project = _project()
    declared = _names(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        declared |= _names(extra)
    rows = re.findall(
        r"^\| (.+?) \|", (ROOT / "docs" / "dependencies.md").read_text(), re.MULTILINE
    )
    explained = {
        name.strip().lower() for row in rows for name in row.partition(" ==")[0].split(",")
    }
    assert not declared - explained


def test_every_supported_python_has_its_pins() -> None:
    prefix = "Programming Language :: Python :: 3."
    minors = [row.removeprefix(prefix) for row in _project()["classifiers"] if prefix in row]
    assert minors
    for minor in minors:
        pins = (ROOT / "requirements" / f"py3.{minor}.txt").read_text().splitlines()
        assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
        declared = _names(_project()["dependencies"])
        for extra in _project()["optional-dependencies"].values():
            declared |= _names(extra)
        assert not declared - _names(pins)
