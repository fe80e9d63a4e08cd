"""What the parts of a checkpoint cost with nothing around them, on the same data."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final
from zlib import crc32

import msgpack
import orjson

from bench.episodes import BareTasks
from bench.measure import timed

CHUNK_BYTES: Final = 2**20

_DIGEST: Final = "0" * 64
_HEADER: Final = struct.Struct(">2sBBII")
_CHECKED: Final = struct.Struct(">BBI")
_RECORD_HEAD: Final = struct.Struct(">BI")
_RECORD_TYPE: Final = 2
_SCALARS: Final = (str, int, float, bool, type(None))

_encode: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, separators=(",", ":")
).encode


def encode_each(states: Iterable[object]) -> None:
    """JSON of each state by the fastest library, nothing checked, nothing kept."""
    for state in states:
        orjson.dumps(state)


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


def check_exact(value: object) -> None:
    """What JSON would not give back as it was is refused (STO-3), in the plainest way."""
    if type(value) is dict:
        for key, item in value.items():
            assert type(key) is str
            check_exact(item)
    elif type(value) is list:
        for item in value:
            check_exact(item)
    else:
        assert type(value) in _SCALARS


def write_states(path: Path, states: Iterable[tuple[str, object]]) -> None:
    """The same records in the same form by the shortest loop: looked at, the interpreter's own JSON,
    packed, framed with a checksum, hashed and written by the megabyte, synced. Nothing else goes on
    meanwhile."""
    pack = msgpack.Packer().pack

    def packed() -> Iterator[tuple[str, bytes]]:
        for key, state in states:
            check_exact(state)
            yield key, pack({"task_digest": _DIGEST, "boundary": _encode(state).encode()})

    write_records(path, packed())


def write_records(path: Path, records: Iterable[tuple[str, bytes]]) -> None:
    """Packed records: framed with a checksum, hashed and written by the megabyte, synced."""
    digest = hashlib.sha256()
    gathered: list[bytes] = []
    gathered_bytes = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for key, packed in records:
            payload = _RECORD_HEAD.pack(len(key), len(packed)) + key.encode() + packed
            checksum = crc32(payload, crc32(_CHECKED.pack(1, _RECORD_TYPE, len(payload))))
            header = _HEADER.pack(b"gy", 1, _RECORD_TYPE, len(payload), checksum)
            gathered += (header, payload)
            gathered_bytes += len(payload)
            if gathered_bytes >= CHUNK_BYTES:
                _write_and_hash(descriptor, gathered, digest)
                gathered_bytes = 0
        _write_and_hash(descriptor, gathered, digest)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_and_hash(descriptor: int, gathered: list[bytes], digest: hashlib._Hash) -> None:
    data = b"".join(gathered)
    gathered.clear()
    os.write(descriptor, data)
    digest.update(data)


def read_records(path: Path) -> list[object]:
    """A part by the shortest loop: read, hashed, cut, checksums compared, unpacked."""
    digest = hashlib.sha256()
    unpacked: list[object] = []
    data = b""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while chunk := os.read(descriptor, CHUNK_BYTES):
            digest.update(chunk)
            data += chunk
            start = 0
            while len(data) - start >= _HEADER.size:
                _, _, kind, length, checksum = _HEADER.unpack_from(data, start)
                end = start + _HEADER.size + length
                if end > len(data):
                    break
                payload = data[start + _HEADER.size : end]
                assert crc32(payload, crc32(data[start + 2 : start + 8])) == checksum
                if kind == _RECORD_TYPE:
                    key_bytes, _ = _RECORD_HEAD.unpack_from(payload)
                    unpacked.append(msgpack.unpackb(payload[_RECORD_HEAD.size + key_bytes :]))
                start = end
            data = data[start:]
    finally:
        os.close(descriptor)
    return unpacked


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
        orjson.loads(state)


async def bare_waking(
    tasks: BareTasks,
    ending_s: list[float],
    waking_s: list[float],
    ending_cpu_s: list[float] | None = None,
    waking_cpu_s: list[float] | None = None,
) -> None:
    """End the steps of bare tasks in slices, then wake them all from where they parked."""
    with timed(ending_s, ending_cpu_s):
        all_passed = tasks.passing.all_passed
        await tasks.steps.end()
        await all_passed.wait()
    with timed(waking_s, waking_cpu_s):
        all_passed = tasks.passing.all_passed
        tasks.parked.unpark_all()
        await all_passed.wait()
