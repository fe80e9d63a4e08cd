"""One engine for all tests that call it: loading takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.served_engine import ServedEngine, serve_engine


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    with serve_engine(tmp_path_factory.mktemp("engine")) as engine:
        yield engine
