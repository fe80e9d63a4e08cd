"""Abort at once: whatever a checkpoint is doing, a resume ends it, and nothing of it comes later.

"At once" is measured in virtual time and in turns of the loop, so that it is the same on every machine;
seconds are `bench/checkpoint.py`'s.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.checkpoint.archive import Archive
from gymtrio.checkpoint.control import Control, open_control
from gymtrio.checkpoint.directory_archive import DirectoryArchive
from gymtrio.checkpoint.participant import Export
from gymtrio.errors import CheckpointError, DeadlineExceeded
from gymtrio.ids import CaptureKey, CheckpointId, EpisodeId
from gymtrio.ports import HostClock, HostRandomness
from gymtrio.storage.disk import Disk, HostFiles, Step, ThreadDisk
from gymtrio.storage.manifest import MANIFEST_NAME
from gymtrio.storage.records import Record
from gymtrio.storage.root import CheckpointRoot
from gymtrio.wire.control import CommitRequest, PrepareRequest, ResumeReply, ResumeRequest
from tests.helpers.clocks import FollowingClock
from tests.helpers.gated import begin
from tests.helpers.halting_disk import HaltingDisk, loop_meter
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.page_cache import PageCacheFiles
from tests.helpers.plane import GRACE_S, Plane, episode, open_plane
from tests.helpers.scripted_participant import ScriptedParticipant

RECORDS: Final = 16_000
PAYLOAD: Final = b"x" * 1000
C1: Final = CheckpointId("c1")
PASSES_MAX: Final = 12
"""Turns of the loop that a resume may take, however much is parked or written."""


class Full(ScriptedParticipant):
    """Has a checkpoint's worth of records, made while they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    async def export(self, scope: frozenset[CaptureKey] | None) -> Export:
        episodes = [episode(f"r{number}") for number in range(RECORDS)]
        keys = sorted(episode_id.capture_key for episode_id in episodes)
        return Export(records=self._make(episodes), episode_ids=tuple(keys))

    def _make(self, episodes: list[EpisodeId]) -> Iterator[Record]:
        for episode_id in episodes:
            self.made += 1
            yield Record(episode_id, PAYLOAD)


class Aborted:
    """A server that commits, and is resumed while it does."""

    def __init__(
        self, control: Control, calls: trio.Nursery, owner: trio.Nursery, clock: HostClock
    ) -> None:
        self.control = control
        self.answers: list[object] = []
        """Of the commit."""
        self._calls = calls
        self._owner = owner
        self._clock = clock
        self._standing = set(owner.child_tasks)

    def deadline_ts(self, timeout_s: float) -> float:
        return self._clock.now_s() + timeout_s

    async def begin_commit(self) -> None:
        await self.control.prepare(
            PrepareRequest(checkpoint_id=C1, deadline_ts=self.deadline_ts(30))
        )

        async def commit() -> None:
            request = CommitRequest(
                checkpoint_id=C1, deadline_ts=self.deadline_ts(3600), checkpoint_dir="d"
            )
            try:
                self.answers.append(await self.control.commit(request))
            except CheckpointError as error:
                self.answers.append(error)

        self._calls.start_soon(commit)

    async def resume(self, timeout_s: float = 30) -> ResumeReply:
        return await self.control.resume(
            ResumeRequest(checkpoint_id=C1, deadline_ts=self.deadline_ts(timeout_s))
        )

    @property
    def left_running(self) -> set[trio.lowlevel.Task]:
        return set(self._owner.child_tasks) - self._standing


@asynccontextmanager
async def open_aborted(
    disk: Disk, root: str, participant: ScriptedParticipant, clock: HostClock
) -> AsyncIterator[Aborted]:
    archive: Archive = DirectoryArchive(disk, CheckpointRoot(root), HostRandomness())
    async with (
        open_control(participant, archive=archive, wall_clock=clock, lease_grace_s=GRACE_S) as made,
        trio.open_nursery() as calls,
    ):
        owner = trio.lowlevel.current_task().child_nurseries[-2]
        yield Aborted(made, calls, owner, clock)


class VirtualClock(FollowingClock, HostClock):
    """Says what the virtual clock says."""


def root_in_memory() -> PageCacheFiles:
    files = PageCacheFiles(write_bytes_max=2**20)
    files.replace("/root/.keep", b"")
    return files


def of_checkpoint(files: PageCacheFiles) -> list[str]:
    return [path for path in files.tree() if path != "/root/.keep"]


async def steps_of_a_commit() -> tuple[int, int]:
    """How many calls to the disk a commit makes, and which of them publishes."""
    disk = HaltingDisk(root_in_memory())
    async with open_aborted(disk, "/root", Full(), VirtualClock()) as server:
        await server.begin_commit()
        await wait_all_tasks_blocked()
        assert len(server.answers) == 1
        (publishes,) = [n for n, names in enumerate(disk.names, 1) if "link" in names]
        return disk.steps, publishes


async def published_when_resumed_at(number: int) -> bool:
    """Resume in the instant of one of the commit's calls to the disk; say whether it was published."""
    files, participant = root_in_memory(), Full()
    server: Aborted | None = None
    seen: list[tuple[list[str], int]] = []

    async def resume() -> None:
        assert server is not None
        asked_at = trio.current_time()
        with loop_meter() as meter:
            assert (await server.resume()).phase == "idle"
        assert trio.current_time() == asked_at
        assert meter.passes <= PASSES_MAX
        seen.append((of_checkpoint(files), participant.made))

    async with trio.open_nursery() as resumes:

        def at_step(now: int) -> None:
            if now == number:
                resumes.start_soon(resume)

        disk = HaltingDisk(files, at_step=at_step)
        async with open_aborted(disk, "/root", participant, VirtualClock()) as server:
            await server.begin_commit()
            await wait_all_tasks_blocked()
            assert not participant.admission.closed
            assert server.left_running == set()
            # What there was at the reply is what there is: nothing came later.
            assert [(of_checkpoint(files), participant.made)] == seen
            assert files.open_descriptors == 0
    published = any(path.endswith(MANIFEST_NAME) for path in of_checkpoint(files))
    assert published or of_checkpoint(files) == []
    return published


async def test_a_resume_at_every_step_of_a_commit_of_16_000_records(
    autojump_clock: MockClock,
) -> None:
    """CTL-10, I31: no virtual time, a few turns of the loop; published before the reply or never."""
    steps, publishes = await steps_of_a_commit()
    assert steps > 10
    for number in range(1, steps + 1):
        published = await published_when_resumed_at(number)
        # Right before it begins to be published, either may be the first.
        assert number == publishes - 1 or published is (number >= publishes)


async def test_a_resume_while_any_call_to_the_disk_hangs(autojump_clock: MockClock) -> None:
    """CTL-10, I31: it waits half of what it may, not for the disk; only a publication is waited for."""
    steps, publishes = await steps_of_a_commit()
    for number in range(1, steps + 1):
        files, participant = root_in_memory(), Full()
        disk = HaltingDisk(files, halt_at=number)
        async with open_aborted(disk, "/root", participant, VirtualClock()) as server:
            await server.begin_commit()
            await disk.halted.wait()
            await wait_all_tasks_blocked()
            asked_at = trio.current_time()
            if number == publishes:
                with pytest.raises(DeadlineExceeded):
                    await server.resume(timeout_s=1)
                assert participant.admission.closed
                disk.let_go()
                await server.resume()
                assert [path for path in files.tree() if path.endswith(MANIFEST_NAME)]
                continue
            with loop_meter() as meter:
                await server.resume()
            assert trio.current_time() - asked_at <= 0.1
            assert meter.passes <= PASSES_MAX
            assert not participant.admission.closed
            assert server.left_running == set()
            await wait_all_tasks_blocked()
            assert isinstance(server.answers[0], CheckpointError)
            disk.let_go()
            await wait_all_tasks_blocked()
            assert of_checkpoint(files) == []
            assert files.open_descriptors == 0


# -- the real disk ----------------------------------------------------------------------------


class CountingDisk(ThreadDisk):
    """Tells when its calls begin."""

    def __init__(self, files: HostFiles | None = None) -> None:
        super().__init__(files)
        self.started = 0

    def start(self, call, *, closing: bool = False) -> Step:  # type: ignore[no-untyped-def]
        self.started += 1
        return super().start(call, closing=closing)


class HangingFiles(HostFiles):
    """The operating system's, but the first write hangs until it is let go."""

    def __init__(self) -> None:
        self.hanging = threading.Event()
        self.let_go = threading.Event()

    def write(self, file: int, data: memoryview) -> int:
        self.hanging.set()
        assert self.let_go.wait(60)
        return super().write(file, data)


async def until(condition: Callable[[], bool]) -> None:
    """Turn the loop until something that a thread does has happened."""
    while not condition():
        await trio.lowlevel.checkpoint()


def files_below(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*") if found.is_file())


@pytest.mark.parametrize("after_steps", [1, 3, 8])
async def test_a_resume_during_a_commit_to_the_real_disk(after_steps: int, tmp_path: Path) -> None:
    """CTL-10, I31: at most the call under way and the clean-up happen after it was asked for."""
    disk, participant = CountingDisk(), Full()
    async with open_aborted(disk, str(tmp_path), participant, HostClock()) as server:
        await server.begin_commit()
        await until(lambda: disk.started >= after_steps)
        started, made = disk.started, participant.made
        await server.resume()
        assert disk.started <= started + 2
        assert participant.made <= made + RECORDS // 8
        assert not participant.admission.closed
        assert server.left_running == set()
        started = disk.started
        await until(lambda: disk.steps_under_way == 0 and len(server.answers) == 1)
        assert isinstance(server.answers[0], CheckpointError)
        assert files_below(tmp_path) == []
        assert disk.started == started


async def test_a_resume_while_a_thread_hangs_in_a_write(tmp_path: Path) -> None:
    """CTL-10, I31: the thread is left, and removes what it made as soon as it can."""
    files, participant = HangingFiles(), Full()
    disk = ThreadDisk(files)
    try:
        async with open_aborted(disk, str(tmp_path), participant, HostClock()) as server:
            await server.begin_commit()
            await until(files.hanging.is_set)
            await server.resume()
            assert server.left_running == set()
            assert disk.steps_under_way == 1
            assert not any(name.endswith(MANIFEST_NAME) for name in files_below(tmp_path))
            files.let_go.set()
            await until(lambda: disk.steps_under_way == 0 and not files_below(tmp_path))
    finally:
        files.let_go.set()


# -- whatever else hangs ----------------------------------------------------------------------


async def archive_with_r0() -> MemoryArchive:
    archive = MemoryArchive()
    async with open_plane(archive=archive) as plane:
        plane.participant.parked[episode("r0")] = "note"
        await plane.prepare()
        await plane.commit(directory="d0")
    return archive


HANGS: Final[dict[str, Callable[[Plane], Awaitable[object]]]] = {
    "settling": lambda plane: plane.prepare(timeout_s=3600),
    "exporting": lambda plane: plane.commit(timeout_s=3600),
    "writing": lambda plane: plane.commit(timeout_s=3600),
    "reading": lambda plane: plane.restore(
        episode("r0"), name="c1", directory="d0", timeout_s=3600
    ),
    "installing": lambda plane: plane.restore(
        episode("r0"), name="c1", directory="d0", timeout_s=3600
    ),
}


@pytest.mark.parametrize(
    ("where", "recover"),
    [*((where, False) for where in HANGS), ("reading", True), ("installing", True)],
)
async def test_a_resume_ends_whatever_hangs(
    where: str, recover: bool, autojump_clock: MockClock
) -> None:
    """CTL-10, CTL-9, I29, I31: at once, and letting it go later changes nothing."""
    archive = await archive_with_r0()
    async with open_plane(archive=archive, recover=recover) as plane, trio.open_nursery() as calls:
        owner = trio.lowlevel.current_task().child_nurseries[-2]
        standing = set(owner.child_tasks)
        if where in ("exporting", "writing"):
            await plane.prepare()
        of = archive if where in ("writing", "reading") else plane.participant
        door = getattr(of, where)
        door.shut()
        hung = await begin(calls, lambda: HANGS[where](plane))
        assert set(owner.child_tasks) != standing
        parts, asked_at = dict(archive.parts), trio.current_time()
        with loop_meter() as meter:
            assert not (await plane.resume()).idempotent
        assert meter.passes <= PASSES_MAX
        assert set(owner.child_tasks) == standing
        await wait_all_tasks_blocked()
        assert trio.current_time() == asked_at
        assert len(hung) == 1
        assert plane.participant.admission.closed is recover
        door.let_go()
        await wait_all_tasks_blocked()
        assert archive.parts == parts
        assert len(plane.participant.restored) == 0
        assert set(owner.child_tasks) == standing
        assert plane.phase == "idle"


async def test_a_resume_does_not_wait_for_what_it_wakes(autojump_clock: MockClock) -> None:
    """CTL-10, I33: 16,000 at the gate; it answers in as many turns as with none."""
    async with open_plane() as plane, trio.open_nursery() as arrivals:
        await plane.prepare()
        for number in range(RECORDS):
            arrivals.start_soon(plane.participant.admission.enter, episode(f"r{number}"))
        await wait_all_tasks_blocked()
        assert plane.participant.admission.waiting == RECORDS
        with loop_meter() as meter:
            await plane.resume()
        assert meter.passes <= PASSES_MAX
        await wait_all_tasks_blocked()
        assert plane.participant.admission.waiting == 0
