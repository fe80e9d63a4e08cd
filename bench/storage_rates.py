"""How fast a checkpoint is written and read, and how long the loop is held meanwhile (STO-5).

    python bench/storage_rates.py [records] [bytes of each] [directory]

The floor is the same bytes hashed, written to one file and synced, with nothing else.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from gymtrio.ids import CheckpointId, EpisodeId, RolloutId
from gymtrio.storage import opaque
from gymtrio.storage.disk import ThreadDisk
from gymtrio.storage.publication import Publication
from gymtrio.storage.reader import read_checkpoint
from gymtrio.storage.records import Identity, Record
from gymtrio.storage.root import CheckpointRoot
from gymtrio.storage.writer import write_checkpoint

ROUNDS = 3


class Stall:
    """The longest time that a task which is always ready had to wait."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        last = time.perf_counter()
        while True:
            await trio.sleep(0.001)
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - last - 0.001)
            last = now


@contextmanager
def row(name: str, total_bytes: int, stall: Stall | None = None) -> Iterator[None]:
    if stall is not None:
        stall.longest_s = 0.0
    began, cpu = time.perf_counter(), time.process_time()
    yield
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    held = "" if stall is None else f"{stall.longest_s * 1e3:8.1f}"
    print(f"{name:34}{took_s:8.3f}{cpu_s:8.3f}{total_bytes / took_s / 1e6:8.0f}{held}")


def state_of(payload_bytes: int) -> dict[str, object]:
    """A conversation of about this size."""
    text = "the quick brown fox jumps over the lazy dog " * 10
    message = {"role": "user", "content": [{"type": "input_text", "text": text}]}
    return {"messages": [message] * max(1, payload_bytes // 500), "step": 3}


def floor(directory: str, payload: bytes, count: int) -> None:
    batch = payload * max(1, 2**20 // len(payload))
    path = os.path.join(directory, "floor")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    digest = hashlib.sha256()
    for _ in range(count * len(payload) // len(batch)):
        digest.update(batch)
        os.write(descriptor, batch)
    os.fsync(descriptor)
    os.close(descriptor)
    os.unlink(path)


async def main(count: int, payload_bytes: int, directory: str) -> None:
    payload = secrets.token_bytes(payload_bytes)
    total = count * payload_bytes
    state = state_of(payload_bytes)
    data = opaque.encode(state, "bench")
    disk, root, stall = ThreadDisk(), CheckpointRoot(directory), Stall()
    print(f"{count} records of {payload_bytes} bytes; state of {len(data)} bytes")
    print(f"{'':34}{'s':>8}{'cpu s':>8}{'MB/s':>8}{'held ms':>8}")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stall.watch)
        for number in range(ROUNDS):
            with row("floor: hash, write, sync", total):
                floor(directory, payload, count)
            place = await root.accept(disk, f"step-{number}")
            identity = Identity(
                kind="agent", instance="bench", checkpoint_id=CheckpointId(f"step-{number}")
            )
            records = (Record(EpisodeId(RolloutId(f"r{n}")), payload) for n in range(count))
            with row("write", total, stall):
                await write_checkpoint(
                    disk,
                    place,
                    identity,
                    records,
                    {},
                    nonce=secrets.token_hex(16),
                    publication=Publication(),
                )
            for name, scope in (("read everything", None), ("read an empty scope", frozenset())):
                with row(name, total, stall):
                    await read_checkpoint(disk, place, kind="agent", instance="bench", scope=scope)
        nursery.cancel_scope.cancel()
    with row("opaque encode", count * len(data)):
        for _ in range(count):
            opaque.encode(state, "bench")
    with row("opaque decode", count * len(data)):
        for _ in range(count):
            opaque.decode(data)


if __name__ == "__main__":
    given = sys.argv[1:]
    numbers = [int(text) for text in given[:2]] + [16_000, 10_000][len(given[:2]) :]
    with tempfile.TemporaryDirectory(dir=given[2] if len(given) > 2 else None) as made:
        trio.run(main, numbers[0], numbers[1], made)
