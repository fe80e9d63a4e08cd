"""The token store in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gymtrio.capture.conformance import TOKEN_STORE_CHECKS, NotConforming, TokenStoreCheck
from gymtrio.capture.memory_store import MemoryTokenStore
from gymtrio.capture.tokens import StagingKey, TokenRecord


@pytest.mark.parametrize("check", TOKEN_STORE_CHECKS, ids=lambda check: check.__name__)
async def test_it_conforms(check: TokenStoreCheck) -> None:
    """CUT-1"""
    shared = MemoryTokenStore()

    @asynccontextmanager
    async def open_store() -> AsyncIterator[MemoryTokenStore]:
        yield shared

    await check(open_store)


async def test_the_checks_find_a_store_that_loses_a_token() -> None:
    """The oracle is tested, too."""

    class Losing(MemoryTokenStore):
        async def get(self, staging_key: StagingKey) -> TokenRecord:
            record = await super().get(staging_key)
            return TokenRecord(
                staging_key=record.staging_key,
                capture_key=record.capture_key,
                model_call_id=record.model_call_id,
                token_ids=record.token_ids[1:],
                log_probs=record.log_probs[1:],
                mask=record.mask[1:],
                policy_version=record.policy_version,
            )

    @asynccontextmanager
    async def open_store() -> AsyncIterator[MemoryTokenStore]:
        yield Losing()

    with pytest.raises(NotConforming):
        await TOKEN_STORE_CHECKS[0](open_store)
