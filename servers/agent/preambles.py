"""Few-shot input that an agent puts before every request of a taskset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from gymtrio.errors import SettingsError
from gymtrio.storage.disk import Disk
from gymtrio.storage.files import Files

PREAMBLE_BYTES_MAX: Final = 2**20
"""It is sent with every model call."""

Preamble = tuple[dict[str, object], ...]


async def read_preambles(paths: Mapping[str, str], disk: Disk) -> dict[str, Preamble]:
    """Read and check the preambles of an agent's settings.

    Args:
        paths: taskset to a file with one Responses input item (a JSON object) per line; relative to the
            working directory.

    Raises:
        SettingsError: a file cannot be read, or a line is not such an item; names file and line.
    """
    read: dict[str, Preamble] = {}
    for taskset, path in paths.items():
        try:
            data = await disk.start(partial(_read, disk.files, path)).wait()
        except OSError as error:
            raise SettingsError(f"preambles.{taskset}: {path}: {error.strerror}") from None
        read[taskset] = parse_preamble(data, f"preambles.{taskset}: {path}")
    return read


def parse_preamble(data: bytes, where: str) -> Preamble:
    """
    Raises:
        SettingsError: see `read_preambles`.
    """
    if len(data) > PREAMBLE_BYTES_MAX:
        raise SettingsError(f"{where}: over {PREAMBLE_BYTES_MAX} bytes")
    items: list[dict[str, object]] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"{where}, line {number}: not JSON: {error}") from None
        if not isinstance(item, dict):
            raise SettingsError(f"{where}, line {number}: an input item is a JSON object")
        items.append(item)
    return tuple(items)


def _read(files: Files, path: str) -> bytes:
    place = Path(files.resolve(path))
    directory = files.open_root(str(place.parent))
    try:
        file = files.open(directory, place.name)
        try:
            return _read_all(files, file)
        finally:
            files.close(file)
    finally:
        files.close(directory)


def _read_all(files: Files, file: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while size <= PREAMBLE_BYTES_MAX and (part := files.read(file, PREAMBLE_BYTES_MAX + 1)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)
