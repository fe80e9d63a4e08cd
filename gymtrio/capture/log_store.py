"""The embedded token store: a directory of append-only segments, shared by processes on one host.

Each incarnation of a process appends to segments of its own and reads those of all. Puts that come
while a sync runs are gathered, and the next one of them commits them all: one sync for many.

All file work of a store runs in one thread at a time, which also guards its index. The index holds a
few hundred bytes per record, never tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import attrs
import trio

from gymtrio.capture.segments import (
    SUFFIX,
    Location,
    Segment,
    SegmentWriter,
    encode_record,
    list_segments,
    make_directory,
)
from gymtrio.capture.tokens import (
    StagingKey,
    TokenRecord,
    TokensDamaged,
    TokensMissing,
    TokenStoreFailed,
)
from gymtrio.ports import Randomness

BATCH_RECORDS_MAX: Final = 256
"""Records of one sync: bounds the memory of a batch and how long its thread holds the interpreter.
More would not be faster: a sync is spread over enough of them."""


@attrs.define(eq=False)
class _Put:
    """One call of `put` while it waits."""

    records: tuple[TokenRecord, ...]
    done: bool = False
    error: TokenStoreFailed | None = None


class _Files:
    """Segments and index of one store. Blocking; used by one thread at a time."""

    def __init__(self, directory: Path, incarnation: str) -> None:
        self._directory = directory
        self._incarnation = incarnation
        self._writer: SegmentWriter | None = None
        self._written = 0
        self._own: set[str] = set()
        self._foreign: dict[str, Segment] = {}
        self._index: dict[StagingKey, tuple[Location, ...]] = {}
        """More than one place: a write that was torn, or two processes put the same record."""

    def open(self) -> None:
        try:
            make_directory(self._directory)
            list_segments(self._directory)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def commit(self, puts: Sequence[_Put]) -> None:
        """Make puts durable together; each that cannot be gets its error."""
        frames: dict[StagingKey, bytes] = {}
        try:
            self._catch_up()
            for put in puts:
                self._gather(put, frames)
            if frames:
                self._append(frames)
        except OSError as error:
            for put in puts:
                put.error = put.error or self._failed(error)

    def _gather(self, put: _Put, frames: dict[StagingKey, bytes]) -> None:
        """Add what a put needs written; a put is taken whole or not at all."""
        wanted: dict[StagingKey, bytes] = {}
        try:
            for record in put.records:
                key, frame = record.staging_key, encode_record(record)
                pending = frames.get(key, wanted.get(key))
                if pending is not None and pending != frame:
                    raise TokenStoreFailed(f"{key} is taken by another record")
                if pending is None and not self._is_stored(record):
                    wanted[key] = frame
        except TokenStoreFailed as error:
            put.error = error
        else:
            frames.update(wanted)

    def _is_stored(self, record: TokenRecord) -> bool:
        """Say whether a record is known to be durable.

        Raises:
            TokenStoreFailed: its key holds another record.
        """
        key = record.staging_key
        durable = False
        for location in self._index.get(key, ()):
            try:
                stored = location.segment.read(key, location)
            except (TokensMissing, TokensDamaged):
                # It is written anew: whoever puts it still has it.
                continue
            if stored != record:
                raise TokenStoreFailed(f"{key} is taken by another record")
            # Another process may not have synced its copy yet, or may never have.
            durable = durable or location.segment.synced
        return durable

    def _append(self, frames: dict[StagingKey, bytes]) -> None:
        if self._writer is None:
            self._written += 1
            name = f"{self._incarnation}-{self._written}{SUFFIX}"
            self._own.add(name)
            self._writer = SegmentWriter(self._directory, name)
        try:
            placed = self._writer.append(frames)
        except OSError:
            self.close()
            raise
        for key, location in placed:
            self._index[key] = (location, *self._index.get(key, ()))

    def get(self, key: StagingKey) -> TokenRecord:
        try:
            if key not in self._index:
                self._catch_up()
            return self._read(key)
        except OSError as error:
            raise self._failed(error) from error

    def _read(self, key: StagingKey) -> TokenRecord:
        failure: TokensMissing | TokensDamaged | None = None
        for location in self._index.get(key, ()):
            try:
                return location.segment.read(key, location)
            except TokensDamaged as error:
                failure = error
            except TokensMissing as error:
                failure = failure or error
        damaged = [s for s in self._foreign.values() if s.damaged_at_bytes is not None]
        if failure is None and damaged:
            where = ", ".join(f"{s.path.name} at byte {s.damaged_at_bytes}" for s in damaged)
            failure = TokensDamaged(f"{key}: not found, and the store is damaged: {where}")
        raise failure or TokensMissing(f"{key}: no such record")

    def _catch_up(self) -> None:
        """Index what other processes, and earlier incarnations, wrote since the last look."""
        for name in list_segments(self._directory):
            if name not in self._own:
                segment = self._foreign.setdefault(name, Segment(self._directory / name))
                for key, location in segment.read_new():
                    self._index[key] = (*self._index.get(key, ()), location)

    def _failed(self, error: OSError) -> TokenStoreFailed:
        return TokenStoreFailed(f"token store {self._directory}: {error.strerror or error}")


class LogTokenStore:
    """See `gymtrio.capture.tokens.TokenStore`; made by `open_log_store`."""

    def __init__(self, files: _Files) -> None:
        self._files = files
        self._thread = trio.CapacityLimiter(1)
        self._turn = trio.Lock()
        self._waiting: list[_Put] = []
        self._closed = False

    async def put(self, records: tuple[TokenRecord, ...]) -> None:
        put = _Put(records)
        self._waiting.append(put)
        try:
            async with self._turn:
                while not put.done:
                    await self._commit()
        finally:
            # Once it is being written, another call of this has taken it out.
            if not put.done and put in self._waiting:
                self._waiting.remove(put)
        if put.error is not None:
            raise put.error

    async def _commit(self) -> None:
        if self._closed:
            raise TokenStoreFailed("the token store is closed")
        puts = self._take()
        try:
            # Others wait for this commit, and a thread cannot be cancelled anyhow.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._files.commit, puts, limiter=self._thread)
        except BaseException as error:
            for put in puts:
                # Nobody may take what was not written for durable.
                put.error = put.error or TokenStoreFailed(f"the write failed: {error!r}")
            raise
        finally:
            for put in puts:
                put.done = True

    def _take(self) -> list[_Put]:
        taken: list[_Put] = []
        count = 0
        for put in self._waiting:
            count += len(put.records)
            if taken and count > BATCH_RECORDS_MAX:
                break
            taken.append(put)
        del self._waiting[: len(taken)]
        return taken

    async def get(self, staging_key: StagingKey) -> TokenRecord:
        if self._closed:
            raise TokenStoreFailed("the token store is closed")
        return await trio.to_thread.run_sync(self._files.get, staging_key, limiter=self._thread)

    async def aclose(self) -> None:
        """Refuse what still waits, and close the files. Cancelled: it is closed."""
        self._closed = True
        with trio.CancelScope(shield=True):
            async with self._turn:
                await trio.to_thread.run_sync(self._files.close, limiter=self._thread)


@asynccontextmanager
async def open_log_store(
    directory: Path, *, randomness: Randomness
) -> AsyncIterator[LogTokenStore]:
    """Open a token store for the time of the block.

    Args:
        directory: created if need be; shared by every process that puts or gets.
        randomness: names this incarnation's segments.

    Raises:
        TokenStoreFailed: the directory cannot be made or read.

    Durable: what was put survives the block, the process and the machine's crash.
    """
    files = _Files(directory, randomness.hex(8))
    await trio.to_thread.run_sync(files.open)
    store = LogTokenStore(files)
    try:
        yield store
    finally:
        await store.aclose()
