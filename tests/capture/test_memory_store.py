"""The token store in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gymtrio.capture.memory_store import MemoryTokenStore
from tests.capture.token_store_conformance import TokenStoreConformance


class TestMemoryTokenStore(TokenStoreConformance):
    """CUT-1: runs the conformance suite."""

    @pytest.fixture(autouse=True)
    def _shared(self) -> None:
        self.store = MemoryTokenStore()

    @asynccontextmanager
    async def open_store(self, directory: Path) -> AsyncIterator[MemoryTokenStore]:
        yield self.store
