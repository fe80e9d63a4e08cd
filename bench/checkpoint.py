"""What a checkpoint costs: prepare, commit, resume, abort, restore, beside their floors.

    python -m bench.checkpoint [--quick] [--json FILE] [--check]

1,000, 4,000 and 16,000 episodes with 1 kB and 10 kB of state each live in one environment's
participant, every one in a step when the prepare comes. Spoken to directly (its `Control`), through the
controller's library over the control route of an embedded deployment, and over real connections. Each
size runs in a process of its own, so that memory is not what an earlier one has left.

    what             from .. to                               floor, measured in the same round
    status           call .. reply, all block
    given up         resume, all block .. reply of prepare
    prepare          call .. reply, steps ending meanwhile    as many bare tasks ending the same steps
    commit           call .. reply                            the same file by the shortest loop
      beside raw     the same                                 states by orjson + bytes written, synced
    resume           call .. reply
      all gone on    call .. each episode has gone on         as many bare tasks woken
    busy status      status during a commit, call .. reply
    abort            resume during a commit, call .. reply
    restore          call .. reply, and the resume after it   read + hash + decode by the shortest loop
      to their states  the same, and then each state parsed   the same
      beside unpacking the same as restore                    that loop with the states left unparsed
      beside raw     the same                                 bytes read + hashed + records unpacked
    claim            start of replacements .. all in a step   each state parsed + bare tasks started
    retire           call .. reply, all in a step

*The shortest loop* makes and reads the same bytes with nothing around it. `floors.write_states` uses
the interpreter's own JSON, and looks at what a state may be in the plainest way, since JSON alone would
change it silently (STO-3); *beside raw* leaves that out, and framing, hashing and packing too.
`floors.read_records` reads, hashes, compares checksums and unpacks, `floors.parse_each` parses the
states by the fastest library. A restore leaves their parsing to whoever claims them: *to their states*
adds it, as claims do it, and *beside unpacking* leaves it out on both sides.
To wake 16,000 bare tasks takes 60 to 130 ms on two cores, more than what a resume may take to answer:
how long it takes until all have gone on is held to that floor.

*of cpu*: what it costs beside its floor in processor time, which a loaded machine does not lengthen.
*held*: the longest time that another task had to wait meanwhile; *cpu*: the same in processor time of
the loop's thread, which no other process can lengthen. *MiB*: memory at its highest beyond what was
there before and what stays (restored records).
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import attrs
import trio

from bench import floors
from bench.episodes import BareTasks, Conversation, LiveEpisodes, episode_ids
from bench.measure import Heart, Sample, open_heart, timed
from bench.planes import INSTANCE, WAYS, OpenPlane, Plane
from bench.report import Row, Section, Target, add_arguments, conclude
from gymtrio.background import open_background
from gymtrio.errors import GymtrioError
from gymtrio.participants.environment import EnvironmentParticipant, EnvironmentRecord
from gymtrio.serving.garbage import spare_long_lived_objects, spare_the_loop
from gymtrio.storage import opaque
from gymtrio.storage.disk import ThreadDisk
from gymtrio.storage.reader import read_checkpoint
from gymtrio.storage.root import CheckpointRoot
from gymtrio.wire.codec import unpack
from gymtrio.wire.control import Kind

HELD_S: Final = 0.020
"""STO-5."""
PEAK_BYTES: Final = 64 * 2**20
"""STO-5."""
AT_ONCE_S: Final = 0.1
COMMIT_RATIO: Final = 1.5
RESTORE_RATIO: Final = 2.0
GONE_ON_RATIO: Final = 2.5
"""An episode that goes on is a task below five others, and enters its next step."""
RATIO_FROM_S: Final = 0.1
"""A commit syncs every directory up to the root, however little is in it."""
GROWTH: Final = 1.5
"""Time per episode, at one size and at the next smaller: what a shared machine makes of linear."""
GROWTH_FROM_S: Final = 0.02

REMOVED_S_MAX: Final = 2.0
"""A write that was in a system call removes its file when that has ended."""
ABORTED_AFTER: Final = 0.4
"""Of the states."""
ABORTABLE_FROM: Final = 1_000
"""Episodes from which on a commit takes long enough to be aborted for sure."""


@attrs.frozen(kw_only=True)
class Case:
    """One size and one way to the control plane."""

    way: str
    count: int
    state_bytes: int
    rounds: int
    directory: str

    @property
    def title(self) -> str:
        return f"{self.count} episodes, {self.state_bytes} bytes of state, {self.way}"


@attrs.define
class Measured:
    """What the rounds of one case gave, one entry for each."""

    given_up: list[Sample] = attrs.field(factory=list)
    status: list[Sample] = attrs.field(factory=list)
    busy_status: list[Sample] = attrs.field(factory=list)
    gone_on: list[Sample] = attrs.field(factory=list)
    prepare: list[Sample] = attrs.field(factory=list)
    commit: list[Sample] = attrs.field(factory=list)
    resume: list[Sample] = attrs.field(factory=list)
    abort: list[Sample] = attrs.field(factory=list)
    restore: list[Sample] = attrs.field(factory=list)
    restore_to_states: list[Sample] = attrs.field(factory=list)
    claim: list[Sample] = attrs.field(factory=list)
    retire: list[Sample] = attrs.field(factory=list)
    ending_s: list[float] = attrs.field(factory=list)
    waking_s: list[float] = attrs.field(factory=list)
    starting_s: list[float] = attrs.field(factory=list)
    ending_cpu_s: list[float] = attrs.field(factory=list)
    waking_cpu_s: list[float] = attrs.field(factory=list)
    committing_cpu_s: list[float] = attrs.field(factory=list)
    restoring_cpu_s: list[float] = attrs.field(factory=list)
    committing_s: list[float] = attrs.field(factory=list)
    restoring_s: list[float] = attrs.field(factory=list)
    encoding_s: list[float] = attrs.field(factory=list)
    writing_s: list[float] = attrs.field(factory=list)
    reading_s: list[float] = attrs.field(factory=list)
    decoding_s: list[float] = attrs.field(factory=list)
    parsing_s: list[float] = attrs.field(factory=list)
    parsing_cpu_s: list[float] = attrs.field(factory=list)
    reading_states_s: list[float] = attrs.field(factory=list)
    reading_states_cpu_s: list[float] = attrs.field(factory=list)
    state_bytes: int = 0
    stored_bytes: int = 0


def run_case(case: Case) -> Section:
    """Measure one case; a process of its own calls this."""
    spare_long_lived_objects()
    measured = Measured()
    with tempfile.TemporaryDirectory(dir=case.directory) as made:
        trio.run(_run_rounds, case, measured, Path(made))
    return _section(case, measured)


async def _run_rounds(case: Case, measured: Measured, directory: Path) -> None:
    for number in range(case.rounds):
        root = directory / str(number)
        (root / "checkpoints").mkdir(parents=True)
        # What the round before has left is not looked for in this one.
        spare_long_lived_objects()
        async with open_heart() as heart, open_background() as nursery:
            # As in the process of a server that waits for so many callers.
            nursery.start_soon(spare_the_loop, lambda: case.count)
            await _Round(case, measured, heart, root).run()


class _Round:
    """One life of the episodes: checkpointed, resumed, checkpointed and aborted, lost, restored."""

    def __init__(self, case: Case, measured: Measured, heart: Heart, root: Path) -> None:
        self._measured = measured
        self._heart = heart
        self._root = root
        self._open: OpenPlane = WAYS[case.way]
        self._ids = episode_ids(case.count)
        self._state_bytes = case.state_bytes

    async def run(self) -> None:
        await self._bare()
        await self._live()
        # What a life leaves behind, its process takes along.
        gc.collect()
        await self._restored_floors()
        gc.collect()
        await self._restored()

    async def _bare(self) -> None:
        measured = self._measured
        async with trio.open_nursery() as nursery:
            tasks = BareTasks(len(self._ids))
            with timed(measured.starting_s):
                await tasks.start(nursery)
            await floors.bare_waking(
                tasks,
                measured.ending_s,
                measured.waking_s,
                measured.ending_cpu_s,
                measured.waking_cpu_s,
            )
            nursery.cancel_scope.cancel()

    async def _live(self) -> None:
        participant = EnvironmentParticipant(INSTANCE)
        conversations = [Conversation.of_size(n, self._state_bytes) for n in range(len(self._ids))]
        async with self._open(participant, self._root) as plane, trio.open_nursery() as nursery:
            live = LiveEpisodes(participant, self._ids, conversations)
            await live.start(nursery)
            await self._blocked(plane, live)
            await self._prepare(plane, live, "saved")
            await self._commit(plane)
            await self._resume(plane, live)
            await self._prepare(plane, live, "aborted")
            await self._abort(plane, live)
            self._commit_floors(live)
            nursery.cancel_scope.cancel()

    async def _blocked(self, plane: Plane, live: LiveEpisodes) -> None:
        """While every episode blocks, and none stops."""
        answered = trio.Event()

        async def prepare() -> None:
            await plane.prepare("given-up")
            answered.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(prepare)
            while not live.participant.admission.closed:
                await trio.lowlevel.checkpoint()
            with self._heart.measuring() as status:
                report = await plane.status()
            with self._heart.measuring() as given_up:
                await plane.resume("given-up")
                await answered.wait()
        assert report.blocker_count == len(self._ids)
        self._measured.status.append(status)
        self._measured.given_up.append(given_up)

    async def _prepare(self, plane: Plane, live: LiveEpisodes, name: str) -> None:
        with self._heart.measuring() as sample:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(plane.prepare, name)
                while not live.participant.admission.closed:
                    await trio.lowlevel.checkpoint()
                await live.steps.end()
        if name == "saved":
            self._measured.prepare.append(sample)

    async def _commit(self, plane: Plane) -> None:
        with self._heart.measuring() as sample:
            await plane.commit("saved", self._ids)
        self._measured.commit.append(sample)

    async def _resume(self, plane: Plane, live: LiveEpisodes) -> None:
        all_passed = live.gone_on.all_passed
        with self._heart.measuring() as gone_on:
            began = trio.current_time()
            await plane.resume("saved")
            answered_s = trio.current_time() - began
            await all_passed.wait()
        self._measured.gone_on.append(gone_on)
        self._measured.resume.append(attrs.evolve(gone_on, took_s=answered_s))

    async def _abort(self, plane: Plane, live: LiveEpisodes) -> None:
        under_way = live.exported(max(1, round(len(self._ids) * ABORTED_AFTER)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._commit_that_fails, plane)
            await under_way.wait()
            with self._heart.measuring() as status:
                await plane.status()
            with self._heart.measuring() as sample:
                await plane.resume("aborted")
        self._measured.busy_status.append(status)
        self._measured.abort.append(sample)
        with trio.move_on_after(REMOVED_S_MAX):
            while left := self._left():  # noqa: ASYNC110 - a thread removes it, and tells nobody
                await trio.sleep(REMOVED_S_MAX / 100)
        if len(self._ids) < ABORTABLE_FROM and any(path.name == "manifest.json" for path in left):
            # So few are published before the resume arrives; nothing was aborted then.
            return
        assert not left, f"something of an aborted commit stayed: {left}"

    def _left(self) -> list[Path]:
        return list((self._root / "checkpoints" / "aborted").rglob("*.*"))

    async def _commit_that_fails(self, plane: Plane) -> None:
        try:
            await plane.commit("aborted", self._ids)
        except GymtrioError:
            return
        assert len(self._ids) < ABORTABLE_FROM, "the commit ended before it was aborted"

    def _commit_floors(self, live: LiveEpisodes) -> None:
        measured = self._measured
        part = self._part()
        measured.stored_bytes = part.stat().st_size
        assert live.conversations is not None
        with timed(measured.encoding_s):
            floors.encode_each(conversation.state() for conversation in live.conversations)
        with timed(measured.writing_s):
            floors.write_and_sync(self._root / "raw", measured.stored_bytes)
        states = zip(self._ids, live.conversations, strict=True)
        with timed(measured.committing_s, measured.committing_cpu_s):
            floors.write_states(
                self._root / "floor", ((str(each), one.state()) for each, one in states)
            )

    def _part(self) -> Path:
        (part,) = (self._root / "checkpoints" / "saved").rglob("*.part")
        return part

    async def _restored_floors(self) -> None:
        measured = self._measured
        with timed(measured.reading_s):
            floors.read_and_hash(self._part())
        with timed(measured.restoring_s, measured.restoring_cpu_s):
            floors.read_records(self._part())
        disk = ThreadDisk()
        place = await CheckpointRoot(str(self._root / "checkpoints")).accept(disk, "saved")
        loaded = await read_checkpoint(
            disk, place, kind=Kind.ENVIRONMENT.value, instance=INSTANCE, scope=None
        )
        payloads = [record.payload for record in loaded.records.values()]
        with timed(measured.decoding_s):
            floors.decode_each(payloads)
        states = [unpack(EnvironmentRecord, payload).boundary or b"" for payload in payloads]
        measured.state_bytes = sum(map(len, states))
        with timed(measured.parsing_s, measured.parsing_cpu_s):
            floors.parse_each(states)
        with timed(measured.reading_states_s, measured.reading_states_cpu_s):
            for state in states:
                opaque.decode(state)

    async def _restored(self) -> None:
        participant = EnvironmentParticipant(INSTANCE)
        async with self._open(participant, self._root) as plane, trio.open_nursery() as nursery:
            with self._heart.measuring() as sample:
                await plane.restore("saved", self._ids)
            measured = self._measured
            measured.restore.append(sample)
            measured.restore_to_states.append(
                attrs.evolve(
                    sample,
                    took_s=sample.took_s + measured.reading_states_s[-1],
                    cpu_s=sample.cpu_s + measured.reading_states_cpu_s[-1],
                )
            )
            replacements = [episode_id.next_attempt() for episode_id in self._ids]
            live = LiveEpisodes(participant, replacements, None)
            await trio.lowlevel.checkpoint()
            with self._heart.measuring() as sample:
                await live.start(nursery)
            self._measured.claim.append(sample)
            assert not len(participant.restored)
            with self._heart.measuring() as sample:
                await plane.retire("retired", replacements)
            self._measured.retire.append(sample)
            assert not participant.episodes.live


def _section(case: Case, measured: Measured) -> Section:
    held = partial(Target, held_s=HELD_S)
    beside_decoding = partial(
        Row,
        floors_s=_sums(measured.restoring_s, measured.parsing_s),
        floors_cpu_s=_sums(measured.restoring_cpu_s, measured.parsing_cpu_s),
        kept_bytes=measured.stored_bytes,
    )
    return Section(
        title=case.title,
        facts={
            "way": case.way,
            "episodes": case.count,
            "rounds": case.rounds,
            "state_bytes_per_episode": measured.state_bytes / case.count,
            "stored_bytes_per_episode": measured.stored_bytes / case.count,
            "encode_s": measured.encoding_s,
            "write_and_sync_s": measured.writing_s,
            "read_and_hash_s": measured.reading_s,
            "decode_s": measured.decoding_s,
        },
        rows=[
            Row(name="status", samples=measured.status, target=held(took_s=AT_ONCE_S)),
            Row(name="given up", samples=measured.given_up, target=held(took_s=AT_ONCE_S)),
            Row(
                name="prepare",
                samples=measured.prepare,
                floors_s=measured.ending_s,
                floors_cpu_s=measured.ending_cpu_s,
                target=held(over_floor_s=AT_ONCE_S),
            ),
            Row(
                name="commit",
                samples=measured.commit,
                floors_s=measured.committing_s,
                floors_cpu_s=measured.committing_cpu_s,
                target=held(ratio=COMMIT_RATIO, ratio_from_s=RATIO_FROM_S, peak_bytes=PEAK_BYTES),
            ),
            Row(
                name="  beside raw",
                samples=measured.commit,
                floors_s=_sums(measured.encoding_s, measured.writing_s),
            ),
            Row(name="resume", samples=measured.resume, target=held(took_s=AT_ONCE_S)),
            Row(
                name="  all gone on",
                samples=measured.gone_on,
                floors_s=measured.waking_s,
                floors_cpu_s=measured.waking_cpu_s,
                target=held(ratio=GONE_ON_RATIO, ratio_from_s=GROWTH_FROM_S),
            ),
            Row(name="busy status", samples=measured.busy_status, target=held(took_s=AT_ONCE_S)),
            Row(name="abort", samples=measured.abort, target=held(took_s=AT_ONCE_S)),
            beside_decoding(
                name="restore",
                samples=measured.restore,
                target=held(ratio=RESTORE_RATIO, ratio_from_s=GROWTH_FROM_S, peak_bytes=PEAK_BYTES),
            ),
            beside_decoding(name="  to their states", samples=measured.restore_to_states),
            Row(
                name="  beside unpacking",
                samples=measured.restore,
                floors_s=measured.restoring_s,
                floors_cpu_s=measured.restoring_cpu_s,
                kept_bytes=measured.stored_bytes,
                target=Target(ratio=RESTORE_RATIO, ratio_from_s=RATIO_FROM_S),
            ),
            Row(
                name="  beside raw",
                samples=measured.restore,
                floors_s=_sums(measured.reading_s, measured.decoding_s),
                kept_bytes=measured.stored_bytes,
            ),
            Row(
                name="claim",
                samples=measured.claim,
                floors_s=_sums(measured.parsing_s, measured.starting_s),
            ),
            Row(name="retire", samples=measured.retire, target=Target(held_s=AT_ONCE_S)),
        ],
    )


def _sums(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)]


def growth_missed(sections: Sequence[Section]) -> list[str]:
    """Where the time per episode grew from one size to the next."""
    missed = []
    for smaller, larger in pairwise(sections):
        if larger.facts["way"] != smaller.facts["way"]:
            continue
        counts = [section.facts["episodes"] for section in (smaller, larger)]
        assert isinstance(counts[0], int)
        assert isinstance(counts[1], int)
        if counts[1] <= counts[0]:
            continue
        for one, other in zip(smaller.rows, larger.rows, strict=True):
            growth = (other.took_s / counts[1]) / (one.took_s / counts[0])
            if one.took_s >= GROWTH_FROM_S and growth > GROWTH:
                missed.append(
                    f"{larger.title}: {other.name}: {growth:.2f} times the time per episode of "
                    f"{counts[0]}, target {GROWTH:g}"
                )
    return missed


def cases(*, quick: bool, rounds: int | None, directory: str) -> list[Case]:
    """Everything that is measured, each way's sizes in order."""
    if quick:
        shapes = [("direct", 1_000, 1_000), ("direct", 4_000, 1_000), ("in process", 1_000, 1_000)]
    else:
        sizes = [(count, state) for state in (1_000, 10_000) for count in (1_000, 4_000, 16_000)]
        shapes = [(way, *size) for way in ("direct", "in process") for size in sizes]
        shapes.append(("sockets", 16_000, 10_000))
    return [
        Case(
            way=way,
            count=count,
            state_bytes=state_bytes,
            rounds=rounds or 3,
            directory=directory,
        )
        for way, count, state_bytes in shapes
    ]


def run(given: Sequence[Case], *, in_process: bool = False) -> list[Section]:
    """Measure and print, one after the other.

    Args:
        in_process: not each in a process of its own; memory then says little.
    """
    sections = []
    for case in given:
        if in_process:
            section = run_case(case)
        else:
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
                section = pool.submit(run_case, case).result()
        section.print()
        sections.append(section)
    return sections


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--rounds", type=int, help="default: 3")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose title has TEXT")
    parser.add_argument(
        "--directory", help="on the disk to be measured; default: the temporary one"
    )
    add_arguments(parser)
    arguments = parser.parse_args(given)
    directory = arguments.directory or tempfile.gettempdir()
    wanted = cases(quick=arguments.quick, rounds=arguments.rounds, directory=directory)
    sections = run([case for case in wanted if arguments.only in case.title])
    return conclude(sections, arguments, growth_missed(sections))


if __name__ == "__main__":
    sys.exit(main())
