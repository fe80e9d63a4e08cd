"""Rules that linters do not know: who may touch the machine, and how long things may be.

Whatever may run in a simulation takes clock, randomness, files and threads from what it is given.
The tables below name the shells that own the real ones; a new entry is a decision, not a formality.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]

MODULE_LINES_MAX: Final = 400
"""Of code. A backstop: a typical module has 50-250, more needs to be obviously one thing."""

FUNCTION_LINES_MAX: Final = 80
"""Of code, functions inside it apart. A typical one has under 50 lines."""

COMMAND_LINE: Final = "gymtrio/cli"
DISK: Final = "gymtrio/storage/disk"
ENGINE: Final = "servers/model/embedded"
HOST: Final = "gymtrio/ports"
TOKENS: Final = ("gymtrio/capture/log_store", "gymtrio/capture/segments")
PROCESSES: Final = (
    "gymtrio/serving/child",
    "gymtrio/serving/coordinating",
    "gymtrio/serving/deployment",
    "gymtrio/serving/launch",
    "gymtrio/serving/processes",
    "gymtrio/serving/supervisor",
)
WIRES: Final = ("gymtrio/wire/tcp", "gymtrio/wire/unix")

IMPORTED_ONLY_BY: Final[dict[str, tuple[str, ...]]] = {
    "asyncio": (),
    "concurrent": (),
    "datetime": (),
    "marshal": (),
    "multiprocessing": (),
    "pickle": (),
    "random": (),
    "secrets": (HOST,),
    "shelve": (),
    "shutil": (DISK, COMMAND_LINE),
    "signal": (*PROCESSES, COMMAND_LINE),
    "socket": ("gymtrio/serving", *WIRES),
    "subprocess": (*PROCESSES, COMMAND_LINE),
    "tempfile": (COMMAND_LINE, "gymtrio/wire/unix"),
    "threading": (ENGINE,),
    "time": (HOST, COMMAND_LINE, ENGINE),
    "unittest": (),
    "uuid": (),
}
"""Top-level module, and the paths (a module or everything below a package) that may import it."""

FILES: Final = (DISK, *TOKENS, COMMAND_LINE, ENGINE, *PROCESSES)

USED_ONLY_BY: Final[dict[str, tuple[str, ...]]] = {
    "__import__": (),
    "compile": (),
    "eval": (),
    "exec": (),
    "input": (),
    "open": FILES,
    "print": (COMMAND_LINE,),
}
"""Builtin, and the paths that may name it."""

ATTRIBUTE_ONLY_BY: Final[dict[str, tuple[str, ...]]] = {
    "fdopen": FILES,
    "from_thread": (ENGINE,),
    "fsync": (DISK, *TOKENS),
    "open_file": FILES,
    "read_bytes": FILES,
    "read_text": FILES,
    "to_thread": (DISK, *TOKENS, ENGINE),
    "urandom": (HOST,),
    "uuid4": (),
    "write_bytes": FILES,
    "write_text": FILES,
}
"""Attribute (`trio.to_thread`, `path.read_text`), and the paths that may name it."""


def _sources() -> list[Path]:
    return sorted([*ROOT.glob("gymtrio/**/*.py"), *ROOT.glob("servers/**/*.py")])


def _is_of(module: str, owners: tuple[str, ...]) -> bool:
    return any(module == owner or module.startswith(f"{owner}/") for owner in owners)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
        return [node.module]
    return []


def _reaches_for_the_machine(tree: ast.AST, module: str) -> Iterator[str]:
    def refused(name: str, owners: tuple[str, ...] | None) -> bool:
        return owners is not None and not _is_of(module, owners)

    for node in ast.walk(tree):
        names: list[tuple[str, tuple[str, ...] | None]] = []
        for name in _imported(node):
            names.append((name, IMPORTED_ONLY_BY.get(name.partition(".")[0])))
        if isinstance(node, ast.ImportFrom):
            # `from trio import to_thread` reaches for the attribute as well.
            names += [(alias.name, ATTRIBUTE_ONLY_BY.get(alias.name)) for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names.append((node.attr, ATTRIBUTE_ONLY_BY.get(node.attr)))
        elif isinstance(node, ast.Name):
            names.append((node.id, USED_ONLY_BY.get(node.id)))
        for name, owners in names:
            if refused(name, owners):
                yield f"{module}.py:{getattr(node, 'lineno', 0)}: {name}"


def _span(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _code_lines(tree: ast.AST, span: set[int], *, with_inner_functions: bool) -> int:
    """Count lines without docstrings, so that nobody saves on contracts to stay below a limit."""
    left = set(span)
    for node in ast.walk(tree):
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node is not tree
        if isinstance(node, ast.stmt) and (
            _is_docstring(node) or (inner and not with_inner_functions)
        ):
            left -= _span(node)
    return len(left)


def _too_long(text: str, tree: ast.Module, module: str) -> Iterator[str]:
    filled = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    length = _code_lines(tree, filled, with_inner_functions=True)
    if length > MODULE_LINES_MAX:
        yield f"{module}.py: {length} lines of code"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = _code_lines(node, filled & _span(node), with_inner_functions=False)
            if length > FUNCTION_LINES_MAX:
                yield f"{module}.py:{node.lineno}: {node.name} has {length} lines of code"


def _module_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def test_only_the_named_shells_touch_the_machine() -> None:
    found: list[str] = []
    for path in _sources():
        found += _reaches_for_the_machine(ast.parse(path.read_text()), _module_of(path))
    assert not found, "\n".join(found)


def test_modules_and_functions_stay_short() -> None:
    found: list[str] = []
    for path in _sources():
        text = path.read_text()
        found += _too_long(text, ast.parse(text), _module_of(path))
    assert not found, "\n".join(found)


def test_tests_neither_mock_nor_sleep() -> None:
    found: list[str] = []
    for path in sorted(ROOT.glob("tests/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            mocks = any(name.startswith("unittest") for name in _imported(node))
            sleeps = isinstance(node, ast.Attribute) and ast.unparse(node) == "time.sleep"
            if mocks or sleeps:
                found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio",
        "import asyncio.events as loop",
        "from time import time",
        "import uuid",
        "from trio import to_thread",
        "trio.to_thread.run_sync(f)",
        "open('x')",
        "with path.open() as file, open(path) as other: pass",
        "path.write_text('x')",
        "print('x')",
        "eval('x')",
    ],
)
def test_the_rules_notice_what_they_forbid(source: str) -> None:
    assert list(_reaches_for_the_machine(ast.parse(source), "gymtrio/participants/agent"))


def test_an_owner_may_use_what_it_owns_and_a_namesake_may_not() -> None:
    tree = ast.parse("import time")
    assert not list(_reaches_for_the_machine(tree, "gymtrio/ports"))
    assert not list(_reaches_for_the_machine(tree, "gymtrio/cli/demo"))
    assert list(_reaches_for_the_machine(tree, "gymtrio/ports_of_call"))


def test_a_long_function_is_noticed_and_its_docstring_does_not_count() -> None:
    body = "\n".join("    x = 1" for _ in range(FUNCTION_LINES_MAX))
    docstring = '    """' + "\n" * 50 + '    """'
    long = f"def f():\n{body}\n"
    short = f"def f():\n{docstring}\n    x = 1\n"
    assert list(_too_long(long, ast.parse(long), "m"))
    assert not list(_too_long(short, ast.parse(short), "m"))
