"""What the ledger of a policy server costs in a checkpoint (POL-7).

    python -m bench.ledger [--quick] [--json FILE] [--check]

1,000, 4,000 and 16,000 episodes with 8 delivered calls each: a commit that names them all, and a
restore into a new server. Floors, of the same round: the same rows packed, framed with a checksum,
hashed and written in one file that is synced; and that file read, hashed and unpacked.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import attrs
import msgpack
import trio

from bench import floors
from bench.episodes import episode_ids
from bench.measure import Heart, Sample, open_heart, timed
from bench.planes import open_direct
from bench.report import Row, Section, Target, add_arguments, conclude
from gymtrio.background import open_background
from gymtrio.capture.cuts import CutInventory, CutReceipt, TerminalReason
from gymtrio.capture.ledger import LedgerRow
from gymtrio.capture.memory_store import MemoryTokenStore
from gymtrio.capture.replies import Route
from gymtrio.capture.tokens import StagingKey
from gymtrio.errors import TransportError
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.calls import BackendReply
from gymtrio.participants.policy.keeper import Entry
from gymtrio.participants.policy.participant import PolicyParticipant
from gymtrio.ports import HostRandomness
from gymtrio.serving.garbage import spare_the_loop
from gymtrio.strict import unstructure

ROWS: Final = 8
SIZES: Final = (1_000, 4_000, 16_000)
QUICK_SIZES: Final = (200, 800)
ROUNDS: Final = 3
HELD_S: Final = 0.020
GROWTH: Final = 1.6
"""How much more an episode may cost at four times the size."""


class NoBackend:
    """Implements `gymtrio.participants.policy.calls.Backend`; nothing is generated here."""

    native = False

    async def generate(
        self, route: Route, body: dict[str, object], *, call_id: str | None
    ) -> BackendReply:
        raise TransportError("there is no engine")

    async def cut(self, inventory: CutInventory, *, deadline: float) -> CutReceipt:
        raise TransportError("there is no engine")

    async def describe(self, *, deadline: float) -> None:
        return None


def make_participant() -> PolicyParticipant:
    return PolicyParticipant(
        "policy",
        backend=NoBackend(),
        token_store=MemoryTokenStore(),
        randomness=HostRandomness(),
        generation_cuts=False,
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def rows_of(episode_id: EpisodeId) -> Iterator[LedgerRow]:
    parent: str | None = None
    for number in range(ROWS):
        call_id = _digest(episode_id, number)[:32]
        yield LedgerRow(
            model_call_id=call_id,
            parent_call_id=parent,
            request_digest=_digest(episode_id, number, "request"),
            conversation_end=_digest(episode_id, number, "end"),
            staged_under=episode_id.capture_key,
            staging_key=StagingKey(f"{episode_id.capture_key}/{call_id}/whole"),
            prompt_token_count=400 + number,
            generated_token_count=120,
            policy_version=3,
            finish_reason=TerminalReason.STOP,
        )
        parent = call_id


def deliver(participant: PolicyParticipant, ids: Sequence[EpisodeId]) -> None:
    """Make the calls of every episode, as a gate would."""
    for episode_id in ids:
        for row in rows_of(episode_id):
            participant.books.enter(
                Entry(
                    call_id=row.model_call_id,
                    episode_id=episode_id,
                    epoch=None,
                    request_digest=row.request_digest,
                    continues=False,
                    chain=(),
                )
            )
            participant.books.deliver(row.model_call_id, row)
            participant.books.end(row.model_call_id, sent=True)


@attrs.define
class Rounds:
    commit: list[Sample] = attrs.field(factory=list)
    restore: list[Sample] = attrs.field(factory=list)
    writing_s: list[float] = attrs.field(factory=list)
    writing_cpu_s: list[float] = attrs.field(factory=list)
    reading_s: list[float] = attrs.field(factory=list)
    reading_cpu_s: list[float] = attrs.field(factory=list)


def write_rows(path: Path, states: Sequence[tuple[str, object]]) -> None:
    """The same rows by the shortest loop."""
    pack = msgpack.Packer().pack
    floors.write_records(path, ((key, pack(state)) for key, state in states))


async def measure(count: int, rounds: int, root: Path) -> Section:
    ids = episode_ids(count)
    found = Rounds()
    plain = [
        (e.capture_key, {"rows": [unstructure(row) for row in rows_of(e)], "cut": None})
        for e in ids
    ]
    async with open_heart() as heart, open_background() as nursery:
        # As in the process of a server that waits for so many callers.
        nursery.start_soon(spare_the_loop, lambda: count)
        for number in range(rounds):
            await _round(found, heart, ids, f"step-{count}-{number}", root)
            floor = root / f"floor-{number}"
            with timed(found.writing_s, found.writing_cpu_s):
                write_rows(floor, plain)
            with timed(found.reading_s, found.reading_cpu_s):
                floors.read_records(floor)
            floor.unlink()
    target = Target(held_s=HELD_S)
    return Section(
        title=f"{count} episodes, {ROWS} rows each",
        facts={"episodes": count, "rows": ROWS, "rounds": rounds},
        rows=[
            Row(
                name="commit",
                samples=found.commit,
                floors_s=found.writing_s,
                floors_cpu_s=found.writing_cpu_s,
                target=target,
            ),
            Row(
                name="restore",
                samples=found.restore,
                floors_s=found.reading_s,
                floors_cpu_s=found.reading_cpu_s,
                target=target,
            ),
        ],
    )


async def _round(
    found: Rounds, heart: Heart, ids: Sequence[EpisodeId], name: str, root: Path
) -> None:
    before, after = make_participant(), make_participant()
    deliver(before, ids)
    async with open_direct(before, root) as plane:
        await plane.prepare(name)
        with heart.measuring() as sample:
            await plane.commit(name, ids)
        found.commit.append(sample)
        await plane.resume(name)
    async with open_direct(after, root) as plane:
        with heart.measuring() as sample:
            await plane.restore(name, ids)
        found.restore.append(sample)
    last = ids[-1].next_attempt()
    assert len(after.books.ledger.rows(last)) == ROWS


def growth(sections: Sequence[Section]) -> list[str]:
    """What does not grow linearly, from one size to the next."""
    missed = []
    for smaller, larger in pairwise(sections):
        times = larger.facts["episodes"] / smaller.facts["episodes"]  # type: ignore[operator]
        for few, many in zip(smaller.rows, larger.rows, strict=True):
            grown = many.took_s / few.took_s / times
            if grown > GROWTH:
                missed.append(
                    f"{many.name}: {grown:.1f} times the cost of an episode, {larger.title}"
                )
    return missed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.ledger", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    sections = []
    for count in QUICK_SIZES if arguments.quick else SIZES:
        with tempfile.TemporaryDirectory(prefix="gymtrio-bench-") as directory:
            root = Path(directory)
            (root / "checkpoints").mkdir()
            section = trio.run(measure, count, 1 if arguments.quick else ROUNDS, root)
        section.print()
        sections.append(section)
    return conclude(sections, arguments, [] if arguments.quick else growth(sections))


if __name__ == "__main__":
    sys.exit(main())
