"""A token store that survives every crash, with one port per process."""

from __future__ import annotations

import random

import trio

from gymtrio.capture.tokens import StagingKey, TokenRecord, TokensMissing, TokenStoreFailed
from tests.simulation.processes import Process


class TokenShelf:
    """What is durable."""

    def __init__(self, rng: random.Random) -> None:
        self.records: dict[StagingKey, TokenRecord] = {}
        self.rng = rng


class TokenPort:
    """A process's access; what a ghost puts does not arrive."""

    def __init__(self, shelf: TokenShelf, process: Process) -> None:
        self._shelf = shelf
        self._process = process

    async def put(self, records: tuple[TokenRecord, ...]) -> None:
        await self._wait()
        for record in records:
            if self._shelf.records.get(record.staging_key, record) != record:
                raise TokenStoreFailed(f"{record.staging_key} is taken by another record")
        self._shelf.records.update({record.staging_key: record for record in records})
        # A crash may come between the record being durable and anybody knowing.
        await self._wait()

    async def get(self, staging_key: StagingKey) -> TokenRecord:
        await self._wait()
        record = self._shelf.records.get(staging_key)
        if record is None:
            raise TokensMissing(f"{staging_key}: no such record")
        return record

    async def _wait(self) -> None:
        self._process.check()
        await trio.sleep(self._shelf.rng.randrange(2) * 0.01)
        self._process.check()
