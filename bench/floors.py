"""What the parts of a checkpoint cost with nothing around them, on the same data."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgpack

from bench.episodes import BareTasks
from bench.measure import timed

CHUNK_BYTES: Final = 2**20

_encode: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, separators=(",", ":")
).encode


def encode_each(states: Iterable[object]) -> None:
    """The interpreter's own JSON of each state, nothing checked, nothing kept."""
    for state in states:
        _encode(state).encode()


def write_and_sync(path: Path, size: int, *, hashed: bool = False) -> None:
    """So many bytes, one file, one sync."""
    chunk = os.urandom(CHUNK_BYTES)
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for _ in range(size // CHUNK_BYTES):
            os.write(descriptor, chunk)
            if hashed:
                digest.update(chunk)
        os.write(descriptor, chunk[: size % CHUNK_BYTES])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_and_hash(path: Path) -> str:
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while chunk := os.read(descriptor, CHUNK_BYTES):
            digest.update(chunk)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def decode_each(payloads: Sequence[bytes]) -> None:
    """The records' own encoding, which is what a restore looks into."""
    for payload in payloads:
        msgpack.unpackb(payload)


def parse_each(states: Sequence[bytes]) -> None:
    """The opaque states in them, which are looked into when they are claimed."""
    for state in states:
        json.loads(state)


async def bare_waking(tasks: BareTasks, ending_s: list[float], waking_s: list[float]) -> None:
    """End the steps of bare tasks in slices, then wake them all from where they parked."""
    with timed(ending_s):
        all_passed = tasks.passing.all_passed
        await tasks.steps.end()
        await all_passed.wait()
    with timed(waking_s):
        all_passed = tasks.passing.all_passed
        tasks.parked.unpark_all()
        await all_passed.wait()
