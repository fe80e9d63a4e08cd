"""Imports go one way; the contracts stand in pyproject.toml."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]


@pytest.fixture
def _loggers_stay_on() -> Iterator[None]:
    """The linter configures logging for itself, and turns off every logger that is there."""
    yield
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.disabled = False


@pytest.mark.usefixtures("_loggers_stay_on")
def test_every_import_contract_holds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    status = lint_imports(no_cache=True, no_logo=True)
    assert status == 0, capsys.readouterr().out
