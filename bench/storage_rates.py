"""How fast a checkpoint is written and read, and how long the loop is held meanwhile (STO-5).

    python -m bench.storage_rates [--records N] [--bytes N] [--json FILE] [--check]

Storage alone, with payloads that are there already. The floor of writing is the same bytes hashed,
written to one file and synced; that of reading, the same file read and hashed.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from collections.abc import Sequence, Set
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import trio

from bench import floors
from bench.episodes import Conversation
from bench.measure import Heart, Sample, open_heart, timed
from bench.report import Row, Section, Target, add_arguments, conclude
from gymtrio.ids import CaptureKey, CheckpointId, EpisodeId, RolloutId
from gymtrio.storage import opaque
from gymtrio.storage.disk import ThreadDisk
from gymtrio.storage.publication import Publication
from gymtrio.storage.reader import read_checkpoint
from gymtrio.storage.records import Identity, Record
from gymtrio.storage.root import CheckpointRoot
from gymtrio.storage.writer import write_checkpoint

HELD_S: Final = 0.020
PEAK_BYTES: Final = 64 * 2**20
IDENTITY: Final = partial(Identity, kind="agent", instance="bench")


@attrs.define
class Rates:
    """What the rounds gave, one entry for each."""

    write: list[Sample] = attrs.field(factory=list)
    read: list[Sample] = attrs.field(factory=list)
    verify: list[Sample] = attrs.field(factory=list)
    encode: list[Sample] = attrs.field(factory=list)
    decode: list[Sample] = attrs.field(factory=list)
    writing_s: list[float] = attrs.field(factory=list)
    reading_s: list[float] = attrs.field(factory=list)
    encoding_s: list[float] = attrs.field(factory=list)
    parsing_s: list[float] = attrs.field(factory=list)


async def measure(count: int, payload_bytes: int, rounds: int, directory: str) -> Section:
    rates = Rates()
    payload = secrets.token_bytes(payload_bytes)
    states = [Conversation.of_size(0, payload_bytes).state()] * count
    async with open_heart() as heart:
        for number in range(rounds):
            await _files(rates, heart, count, payload, directory, f"step-{number}")
            _encodings(rates, heart, states)
    total = count * payload_bytes
    held = partial(Target, held_s=HELD_S, peak_bytes=PEAK_BYTES)
    return Section(
        title=f"{count} records of {payload_bytes} bytes, {total / 1e6:.0f} MB",
        facts={"records": count, "payload_bytes": payload_bytes, "rounds": rounds},
        rows=[
            Row(name="write", samples=rates.write, floors_s=rates.writing_s, target=held()),
            Row(
                name="read everything",
                samples=rates.read,
                floors_s=rates.reading_s,
                kept_bytes=total,
                target=held(),
            ),
            Row(
                name="read an empty scope",
                samples=rates.verify,
                floors_s=rates.reading_s,
                target=held(),
            ),
            Row(name="opaque encode", samples=rates.encode, floors_s=rates.encoding_s),
            Row(name="opaque decode", samples=rates.decode, floors_s=rates.parsing_s),
        ],
    )


async def _files(
    rates: Rates, heart: Heart, count: int, payload: bytes, directory: str, name: str
) -> None:
    disk = ThreadDisk()
    place = await CheckpointRoot(directory).accept(disk, name)
    records = (Record(EpisodeId(RolloutId(f"r{n}")), payload) for n in range(count))
    with heart.measuring() as sample:
        await write_checkpoint(
            disk,
            place,
            IDENTITY(checkpoint_id=CheckpointId(name)),
            records,
            {},
            nonce=secrets.token_hex(16),
            publication=Publication(),
        )
    rates.write.append(sample)
    floor = Path(directory) / f"{name}.floor"
    with timed(rates.writing_s):
        floors.write_and_sync(floor, count * len(payload), hashed=True)
    with timed(rates.reading_s):
        floors.read_and_hash(floor)
    floor.unlink()
    everything: Set[CaptureKey] | None = None
    for samples, scope in ((rates.read, everything), (rates.verify, frozenset[CaptureKey]())):
        with heart.measuring() as sample:
            await read_checkpoint(disk, place, kind="agent", instance="bench", scope=scope)
        samples.append(sample)


def _encodings(rates: Rates, heart: Heart, states: Sequence[object]) -> None:
    # One call for each state; nothing else runs between them, so they hold the loop.
    with heart.measuring() as sample:
        encoded = [opaque.encode(state, "bench") for state in states]
    rates.encode.append(sample)
    with timed(rates.encoding_s):
        floors.encode_each(states)
    with heart.measuring() as sample:
        for data in encoded:
            opaque.decode(data)
    rates.decode.append(sample)
    with timed(rates.parsing_s):
        floors.parse_each(encoded)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, default=16_000)
    parser.add_argument("--bytes", type=int, default=10_000, help="of each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--directory", help="on the disk to be measured; default: the temporary one"
    )
    add_arguments(parser)
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as made:
        section = trio.run(measure, arguments.records, arguments.bytes, arguments.rounds, made)
    section.print()
    return conclude([section], arguments)


if __name__ == "__main__":
    sys.exit(main())
