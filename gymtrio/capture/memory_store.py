"""A token store in memory: for embedding without durability, and for tests."""

from __future__ import annotations

import trio

from gymtrio.capture.tokens import StagingKey, TokenRecord, TokensMissing, TokenStoreFailed


class MemoryTokenStore:
    """See `gymtrio.capture.tokens.TokenStore`. Durable: nothing; it is gone with the process."""

    def __init__(self) -> None:
        self._records: dict[StagingKey, TokenRecord] = {}

    def keys(self) -> list[StagingKey]:
        return sorted(self._records)

    async def put(self, records: tuple[TokenRecord, ...]) -> None:
        await trio.lowlevel.checkpoint()
        wanted: dict[StagingKey, TokenRecord] = {}
        for record in records:
            key = record.staging_key
            stored = self._records.get(key, wanted.get(key))
            if stored is not None and stored != record:
                raise TokenStoreFailed(f"{key} is taken by another record")
            wanted[key] = record
        self._records.update(wanted)

    async def get(self, staging_key: StagingKey) -> TokenRecord:
        await trio.lowlevel.checkpoint()
        try:
            return self._records[staging_key]
        except KeyError:
            raise TokensMissing(f"{staging_key}: no such record") from None
