"""Writing: manifest last, nothing left behind, stopped when it is told to."""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.errors import InvalidCheckpointState, StaleCheckpoint
from gymtrio.ids import CaptureKey
from gymtrio.storage import opaque
from gymtrio.storage.bounds import (
    PUBLISH_S_MAX,
    RECORD_CHUNK_BYTES,
    RELEASE_S_MAX,
    WRITE_BATCH_BYTES,
)
from gymtrio.storage.disk import HostFiles, ThreadDisk
from gymtrio.storage.manifest_file import ManifestFile
from gymtrio.storage.publication import Publication
from gymtrio.storage.reader import read_checkpoint
from gymtrio.storage.records import Record
from gymtrio.storage.writer import publish_manifest, remove_parts, write_part
from tests.helpers.checkpoints import (
    FIELDS,
    IDENTITY,
    OTHER_ID,
    commit,
    episode,
    keyed,
    load,
    place,
    some_records,
)
from tests.helpers.page_cache import InlineDisk, Operation, PageCacheFiles, SlowDisk
from tests.helpers.passes import Passes
from tests.helpers.ticking import TickingClock

HANG_S_MAX = 30.0
FOLDER = "/root/step-7/gym/resources/counter"


@pytest.fixture
def files() -> PageCacheFiles:
    made = PageCacheFiles()
    made.replace("/root/.keep", b"")
    return made


def listing(files: PageCacheFiles) -> list[str]:
    """Names in the participant's directory."""
    return [path.removeprefix(f"{FOLDER}/") for path in files.tree() if path.startswith(FOLDER)]


def test_the_loop_turns_while_a_record_is_still_being_made(files: PageCacheFiles) -> None:
    """STO-5: an iterable says None where it may, and no record comes of it."""
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    def made() -> Iterator[Record | None]:
        for record in some_records(3):
            yield from [None] * 20
            yield record

    async def main() -> int:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(turn)
            written = await write_part(InlineDisk(files), place(), IDENTITY, made(), nonce="n1")
            nursery.cancel_scope.cancel()
        assert written is not None
        return len(written.episodes)

    assert trio.run(main, clock=TickingClock()) == 3
    assert turns >= 60


async def test_a_checkpoint_is_parts_named_by_digest_and_a_manifest(tmp_path: Path) -> None:
    """STO-1."""
    where = place(str(tmp_path))
    written = await commit(ThreadDisk(), where, some_records(5))
    folder = tmp_path / "step-7/gym/resources/counter"
    (part,) = written.manifest.parts
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", part.file]
    data = (folder / part.file).read_bytes()
    assert part.file == f"records-{hashlib.sha256(data).hexdigest()}.part"
    assert part.bytes == len(data)
    assert written.manifest.fields == FIELDS
    assert written.episodes == ("r0", "r1-a1", "r2", "r3-a1", "r4")
    loaded = await load(ThreadDisk(), where)
    assert loaded.manifest == written.manifest
    assert loaded.records == keyed(some_records(5))


async def test_the_order_is_data_then_names_then_manifest(files: PageCacheFiles) -> None:
    """STO-1, I20: file sync, rename, sync of the whole way; then the link, then the directory."""
    await commit(InlineDisk(files), place(), some_records())
    done = [
        operation
        for operation in files.operations
        if operation.name in ("create", "sync", "rename", "link")
    ]
    way = ["sync directory"] * 5
    assert [
        operation.name + (f" {operation.what}" if operation.name == "sync" else "")
        for operation in done
    ] == ["create", "sync file", "rename", *way, "create", "sync file", *way, "link", way[0]]


async def test_no_records_are_a_manifest_alone(files: PageCacheFiles) -> None:
    written = await commit(InlineDisk(files), place(), [])
    assert written.manifest.parts == ()
    assert listing(files) == ["manifest.json"]
    assert (await load(InlineDisk(files), place())).records == {}


async def test_records_may_be_made_while_they_are_written(files: PageCacheFiles) -> None:
    async def made_slowly() -> AsyncIterator[Record]:
        for record in some_records():
            await trio.lowlevel.checkpoint()
            yield record

    part = await write_part(InlineDisk(files), place(), IDENTITY, made_slowly(), nonce="n")
    assert part is not None
    assert part.episodes == ("r0", "r1-a1", "r2")


async def test_writing_streams(files: PageCacheFiles) -> None:
    """STO-5: in batches of bounded size, with the loop free between them."""
    files.write_bytes_max = 2**30
    sizes: list[int] = []
    passes = Passes()

    class Measured(PageCacheFiles):
        def write(self, file: int, data: memoryview) -> int:
            sizes.append(len(data))
            return len(data)

    measured = Measured()
    measured.replace("/root/.keep", b"")
    total = 32 * 2**20
    payload = b"x" * 10_000
    large = Record(episode("large"), b"y" * (6 * RECORD_CHUNK_BYTES))

    def records() -> Iterator[Record]:
        yield large
        for number in range(total // len(payload)):
            yield Record(episode(f"r{number}"), payload)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(passes.run)
        await write_part(InlineDisk(measured), place(), IDENTITY, records(), nonce="n")
        nursery.cancel_scope.cancel()
    assert sum(sizes) > total
    assert max(sizes) < WRITE_BATCH_BYTES + 2 * RECORD_CHUNK_BYTES
    assert passes.count >= total // WRITE_BATCH_BYTES


async def test_a_batch_is_written_while_the_next_one_is_made(tmp_path: Path) -> None:
    """STO-5: the disk and the encoding do not wait for each other, and two batches are all there is."""
    payload = b"x" * WRITE_BATCH_BYTES
    made = 0
    second_made = threading.Event()
    ahead: list[int] = []

    class Waiting(HostFiles):
        def write(self, file: int, data: memoryview) -> int:
            assert second_made.wait(HANG_S_MAX)
            ahead.append(made)
            return super().write(file, data)

    def records() -> Iterator[Record]:
        nonlocal made
        for number in range(4):
            made += 1
            if number:
                second_made.set()
            yield Record(episode(f"r{number}"), payload)

    await write_part(ThreadDisk(Waiting()), place(str(tmp_path)), IDENTITY, records(), nonce="n")
    assert ahead[0] == 2


async def test_a_batch_that_fails_while_the_next_one_is_made_fails_the_commit(
    tmp_path: Path,
) -> None:
    """STO-8: also when nothing is written after it but the end."""

    class Full(HostFiles):
        def write(self, file: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "no space")

    records = [Record(episode("r"), b"x")]
    with pytest.raises(InvalidCheckpointState, match="no space"):
        await write_part(ThreadDisk(Full()), place(str(tmp_path)), IDENTITY, records, nonce="n")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# -- refusals -------------------------------------------------------------------------------


async def test_an_episode_that_is_exported_twice_is_refused(files: PageCacheFiles) -> None:
    """I18."""
    with pytest.raises(InvalidCheckpointState, match="episode r0: exported twice"):
        await commit(InlineDisk(files), place(), some_records(1) * 2)
    assert listing(files) == []
    assert files.open_descriptors == 0


async def test_state_that_is_not_json_fails_the_commit_and_leaves_nothing(
    files: PageCacheFiles,
) -> None:
    """STO-3: the detail names the episode and the path inside its state."""

    def records() -> Iterator[Record]:
        yield from some_records(3, 5000)
        yield Record(episode("r9", 2), opaque.encode({"a": {1, 2}}, "episode r9-a2"))

    with pytest.raises(InvalidCheckpointState, match=r"^episode r9-a2: \$\.a: a builtins\.set"):
        await commit(InlineDisk(files), place(), records())
    assert listing(files) == []
    assert files.open_descriptors == 0


async def test_fields_that_are_not_json_fail_the_commit_and_leave_nothing(
    files: PageCacheFiles,
) -> None:
    """STO-3."""
    with pytest.raises(InvalidCheckpointState, match=r"manifest.json: \$\.fields\.a: a builtins"):
        await commit(InlineDisk(files), place(), some_records(), fields={"a": b""})
    assert listing(files) == []


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/root/step-7", "cannot open step-7: a file or a symbolic link stands where a directory"),
        ("/root/step-7/gym", "cannot open step-7/gym: a file or"),
        (f"{FOLDER}/manifest.json/x", "manifest.json: "),
    ],
)
async def test_something_else_in_the_way_is_refused(
    files: PageCacheFiles, path: str, why: str
) -> None:
    """STO-8."""
    files.replace(path, b"")
    with pytest.raises(InvalidCheckpointState, match=why):
        await commit(InlineDisk(files), place(), some_records())
    assert files.open_descriptors == 0


async def test_a_root_that_went_away_is_refused(tmp_path: Path) -> None:
    """STO-8."""
    with pytest.raises(InvalidCheckpointState, match=r"cannot open checkpoint\.root: .*ENOENT"):
        await commit(ThreadDisk(), place(f"{tmp_path}/gone"), some_records())


async def test_a_disk_that_takes_no_bytes_is_refused(files: PageCacheFiles) -> None:
    """STO-8: rather than asked for ever."""
    files.write_bytes_max = 0
    with pytest.raises(InvalidCheckpointState, match=r"cannot write .*\.tmp: .*EIO"):
        await commit(InlineDisk(files), place(), some_records())
    assert listing(files) == []


async def test_leftovers_of_killed_processes_are_passed_over(files: PageCacheFiles) -> None:
    """I22: nobody else's file is ever written to or removed."""
    for number in range(3):
        files.replace(f"{FOLDER}/.records-{number}.tmp", b"half")
        files.replace(f"{FOLDER}/.manifest-{number}.tmp", b"half")
    await commit(InlineDisk(files), place(), some_records())
    assert [name for name in listing(files) if name.endswith(".tmp")] == [
        f".{stem}-{number}.tmp" for stem in ("manifest", "records") for number in range(3)
    ]
    assert (await load(InlineDisk(files), place())).manifest.record_count == 3


async def test_a_directory_full_of_leftovers_is_refused(files: PageCacheFiles) -> None:
    for number in range(1000):
        files.replace(f"{FOLDER}/.records-{number}.tmp", b"half")
    with pytest.raises(InvalidCheckpointState, match="1000 temporary files of killed processes"):
        await commit(InlineDisk(files), place(), some_records())


# -- a manifest that is there already ---------------------------------------------------------


async def test_the_same_checkpoint_again_is_success_and_leaves_one_set_of_files(
    files: PageCacheFiles,
) -> None:
    """STO-2: a retry after a lost reply."""
    disk = InlineDisk(files)
    first = await commit(disk, place(), some_records(), nonce="a" * 32)
    before = files.tree()
    second = await commit(disk, place(), some_records(), nonce="b" * 32)
    assert second == first
    assert files.tree() == before


async def test_the_same_checkpoint_again_is_made_durable_again(files: PageCacheFiles) -> None:
    """STO-2: whoever linked it may have died before its sync."""
    disk = InlineDisk(files)
    written = await commit(disk, place(), some_records(), nonce="a" * 32)
    synced: list[str] = []
    names: dict[int, str] = {}

    class Watched(PageCacheFiles):
        def open(self, directory: int, name: str) -> int:
            descriptor = super().open(directory, name)
            names[descriptor] = name
            return descriptor

        def sync(self, descriptor: int) -> None:
            synced.append(names.pop(descriptor, "directory"))
            super().sync(descriptor)

    watched = Watched()
    for path, data in files.tree().items():
        watched.replace(path, data)
    await commit(InlineDisk(watched), place(), some_records(), nonce="b" * 32)
    assert synced[-7:] == [written.manifest.parts[0].file, "manifest.json", *["directory"] * 5]


async def test_the_same_checkpoint_with_a_part_missing_is_refused(files: PageCacheFiles) -> None:
    """I20: it cannot be made durable."""
    disk = InlineDisk(files)
    written = await commit(disk, place(), some_records(), nonce="a" * 32)
    part = written.manifest.parts[0].file
    spoiled = PageCacheFiles()
    for path, data in files.tree().items():
        if not path.endswith(part):
            spoiled.replace(path, data)
    with pytest.raises(InvalidCheckpointState, match=f"cannot sync .*{part}: it does not exist"):
        await commit(InlineDisk(spoiled), place(), some_records(), nonce="b" * 32)
    assert listing(spoiled) == ["manifest.json"]
    spoiled.replace(f"{FOLDER}/{part}", b"short")
    with pytest.raises(InvalidCheckpointState, match=f"{part}: 5 bytes where"):
        await commit(InlineDisk(spoiled), place(), some_records(), nonce="b" * 32)


@pytest.mark.parametrize("change", ["id", "records", "fields"])
async def test_another_checkpoint_there_is_refused_and_the_loser_leaves_nothing(
    files: PageCacheFiles, change: str
) -> None:
    """STO-2."""
    disk = InlineDisk(files)
    await commit(disk, place(), some_records(), nonce="a" * 32)
    before = files.tree()
    with pytest.raises(InvalidCheckpointState, match="checkpoint step-7 was committed there"):
        await commit(
            disk,
            place(),
            some_records(4 if change == "records" else 3),
            identity=OTHER_ID if change == "id" else IDENTITY,
            fields={} if change == "fields" else FIELDS,
            nonce="b" * 32,
        )
    assert files.tree() == before
    assert (await load(disk, place())).records == keyed(some_records())


async def test_a_damaged_manifest_there_is_refused_and_stays(files: PageCacheFiles) -> None:
    """STO-2: it may be somebody's."""
    files.replace(f"{FOLDER}/manifest.json", b"{}")
    with pytest.raises(InvalidCheckpointState, match="manifest.json: schema_version is null"):
        await commit(InlineDisk(files), place(), some_records())
    assert listing(files) == ["manifest.json"]


async def test_a_link_whose_reply_was_lost_is_recognised(files: PageCacheFiles) -> None:
    """STO-2: a network file system repeats the call and finds our own name taken."""

    class Repeating(PageCacheFiles):
        def link(self, directory: int, old: str, new: str) -> None:
            super().link(directory, old, new)
            super().link(directory, old, new)

    repeating = Repeating()
    repeating.replace("/root/.keep", b"")
    written = await commit(InlineDisk(repeating), place(), some_records())
    assert (await load(InlineDisk(repeating), place())).manifest == written.manifest
    assert len(listing(repeating)) == 2


# -- races --------------------------------------------------------------------------------------


@pytest.mark.parametrize("same", [True, False])
async def test_racing_writers_leave_one_whole_checkpoint(same: bool) -> None:
    """STO-2, I13: the same one is success for both, of two one wins."""
    winners: set[str] = set()
    for seed in range(60):
        files = PageCacheFiles()
        files.replace("/root/.keep", b"")
        outcomes: dict[str, str] = {}

        async def write(name: str, disk: SlowDisk, outcomes: dict[str, str]) -> None:
            identity = IDENTITY if same or name == "a" else OTHER_ID
            try:
                await commit(disk, place(), some_records(), identity=identity, nonce=name * 32)
                outcomes[name] = "written"
            except InvalidCheckpointState as error:
                outcomes[name] = error.detail.partition(" was ")[2]

        async with trio.open_nursery() as nursery:
            disk = SlowDisk(files, nursery, Random(seed))
            for name in "ab":
                nursery.start_soon(write, name, disk, outcomes)
        loaded = await load(InlineDisk(files), place())
        assert loaded.records == keyed(some_records())
        assert len(listing(files)) == 2
        assert files.open_descriptors == 0
        if same:
            assert outcomes == {"a": "written", "b": "written"}
            winners.add(loaded.manifest.parts[0].file)
        else:
            assert sorted(outcomes.values()) == ["committed there, not this one", "written"]
            winners.add(loaded.manifest.checkpoint_id)
    assert len(winners) == 2


async def test_a_writer_that_is_stopped_takes_nothing_from_one_of_the_same_checkpoint() -> None:
    """STO-2, I22: their parts have equal contents and different names."""
    stopped = 0
    for seed in range(80):
        files = PageCacheFiles()
        files.replace("/root/.keep", b"")
        scope = trio.CancelScope()
        rng = Random(seed)
        ended: list[str] = []

        async def write(name: str, disk: SlowDisk, ended: list[str]) -> None:
            await commit(disk, place(), some_records(), nonce=name * 32)
            ended.append(name)

        async def write_until_stopped(disk: SlowDisk, scope: trio.CancelScope) -> None:
            with scope:
                await write("b", disk, [])

        async def stop_later(scope: trio.CancelScope, passes: int) -> None:
            for _ in range(passes):
                await trio.lowlevel.checkpoint()
            scope.cancel()

        async with trio.open_nursery() as nursery:
            disk = SlowDisk(files, nursery, rng)
            nursery.start_soon(write, "a", disk, ended)
            nursery.start_soon(write_until_stopped, disk, scope)
            nursery.start_soon(stop_later, scope, rng.randrange(60))
        stopped += scope.cancelled_caught
        assert ended == ["a"]
        assert (await load(InlineDisk(files), place())).records == keyed(some_records())
        assert len(listing(files)) == 2
        assert files.open_descriptors == 0
    assert 10 < stopped < 80


# -- several workers ------------------------------------------------------------------------------


async def test_parts_of_several_workers_are_published_by_one_manifest(
    files: PageCacheFiles,
) -> None:
    """STO-6."""
    disk = InlineDisk(files)
    records = some_records(5)
    parts = [
        await write_part(disk, place(), IDENTITY, share, nonce=f"{number:032}")
        for number, share in enumerate([records[:2], records[2:], []])
    ]
    assert parts[2] is None
    written = await publish_manifest(
        disk,
        place(),
        IDENTITY,
        [part for part in parts if part is not None],
        FIELDS,
        publication=Publication(),
    )
    assert written.episodes == tuple(sorted(keyed(records)))
    loaded = await load(disk, place())
    assert loaded.manifest.record_count == 5
    assert len(loaded.manifest.parts) == 2
    assert loaded.records == keyed(records)
    some = await load(disk, place(), scope={CaptureKey("r0"), CaptureKey("r4")})
    assert sorted(some.records) == ["r0", "r4"]


async def test_an_episode_may_be_in_two_sections_and_is_read_from_both(
    files: PageCacheFiles,
) -> None:
    """STO-6, I18: what one process has of it and what another has; once in each section."""
    disk = InlineDisk(files)
    shares = {"ledger": some_records(3), "cuts": some_records(2, payload_bytes=7)}
    parts = []
    for section, share in shares.items():
        part = await write_part(
            disk, place(), IDENTITY, share, nonce=section.rjust(32, "0"), section=section
        )
        assert part is not None
        parts.append(part)
    written = await publish_manifest(
        disk, place(), IDENTITY, parts, FIELDS, publication=Publication()
    )
    assert written.episodes == ("r0", "r1-a1", "r2")
    loaded = await load(disk, place())
    assert loaded.manifest.schema_version == 2
    assert loaded.sections == shares
    assert [r.episode_id.capture_key for r in loaded.every_record()] == [
        *("r0", "r0"),
        *("r1-a1", "r1-a1"),
        "r2",
    ]
    some = await load(disk, place(), scope={CaptureKey("r2")})
    assert some.every_record() == [shares["ledger"][2]]


async def test_an_episode_of_two_workers_is_refused_and_their_parts_removed(
    files: PageCacheFiles,
) -> None:
    """STO-6, I18."""
    disk = InlineDisk(files)
    parts = [
        await write_part(disk, place(), IDENTITY, some_records(2), nonce=nonce)
        for nonce in ("a" * 32, "b" * 32)
    ]
    assert len(listing(files)) == 2
    with pytest.raises(InvalidCheckpointState, match="episode r0: exported by two workers"):
        await publish_manifest(
            disk,
            place(),
            IDENTITY,
            [part for part in parts if part is not None],
            {},
            publication=Publication(),
        )
    assert listing(files) == []


async def test_parts_that_nobody_publishes_can_be_removed(files: PageCacheFiles) -> None:
    """STO-2."""
    disk = InlineDisk(files)
    part = await write_part(disk, place(), IDENTITY, some_records(2), nonce="a" * 32)
    assert part is not None
    await remove_parts(disk, place, IDENTITY, [part.part.file, "records-gone.part"])
    assert listing(files) == []
    await remove_parts(disk, partial(place, directory="never"), IDENTITY, [part.part.file])
    assert files.open_descriptors == 0


# -- stopping -------------------------------------------------------------------------------------


async def test_a_publication_that_was_stopped_publishes_nothing(files: PageCacheFiles) -> None:
    """CTL-10."""
    publication = Publication()
    assert publication.stop()
    with pytest.raises(StaleCheckpoint, match="step-7 was resumed before it was published"):
        await commit(InlineDisk(files), place(), some_records(), publication=publication)
    assert listing(files) == []
    assert publication.ended.is_set()


async def test_a_cancel_at_every_step_leaves_nothing_or_finishes() -> None:
    """STO-2, CTL-10, I31: by whether publication had begun."""
    finished = 0
    step = 0
    while True:
        step += 1
        files = PageCacheFiles()
        files.replace("/root/.keep", b"")
        publication = Publication()
        may_stop: list[bool] = []
        with trio.CancelScope() as scope:

            def cancel(
                number: int,
                at: int = step,
                scope: trio.CancelScope = scope,
                publication: Publication = publication,
                may_stop: list[bool] = may_stop,
            ) -> None:
                if number == at:
                    may_stop.append(publication.stop())
                    scope.cancel()

            disk = InlineDisk(files, before_step=cancel)
            await commit(disk, place(), some_records(), publication=publication)
        if not may_stop:
            break
        assert files.open_descriptors == 0
        assert publication.ended.is_set()
        if may_stop == [False]:
            finished += 1
            assert (await load(InlineDisk(files), place())).records == keyed(some_records())
            assert len(listing(files)) == 2
        else:
            assert listing(files) == []
    # The link, and the letting go after it.
    assert finished == 2
    assert step == 7


class HangingFiles(HostFiles):
    """Real files of which one kind of call hangs until it is let go."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.entered = threading.Event()
        self.may_go = threading.Event()
        self.removed = threading.Event()
        self.closed = threading.Event()
        self.renamed: list[str] = []

    def _maybe_hang(self, kind: str) -> None:
        if kind == self.kind and not self.may_go.is_set():
            self.entered.set()
            assert self.may_go.wait(HANG_S_MAX)

    def write(self, file: int, data: memoryview) -> int:
        self._maybe_hang("write")
        return super().write(file, data)

    def sync(self, descriptor: int) -> None:
        self._maybe_hang("sync")
        super().sync(descriptor)

    def link(self, directory: int, old: str, new: str) -> None:
        self._maybe_hang("link")
        super().link(directory, old, new)

    def rename(self, directory: int, old: str, new: str) -> None:
        self.renamed.append(new)
        super().rename(directory, old, new)

    def unlink(self, directory: int, name: str) -> None:
        super().unlink(directory, name)
        self.removed.set()

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        self.closed.set()


async def in_thread(event: threading.Event) -> None:
    assert await trio.to_thread.run_sync(event.wait, HANG_S_MAX)


@pytest.mark.parametrize("kind", ["write", "sync"])
async def test_a_disk_that_hangs_does_not_hold_a_stopped_write(tmp_path: Path, kind: str) -> None:
    """CTL-10, I31: the thread removes the file when its call ends; the next checkpoint succeeds."""
    files = HangingFiles(kind)
    disk = ThreadDisk(files, stop_grace_s=0.0)
    folder = tmp_path / "step-7/gym/resources/counter"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(commit, disk, place(str(tmp_path)), some_records())
        await in_thread(files.entered)
        nursery.cancel_scope.cancel()
    assert [path.name for path in folder.iterdir()] == [".records-0.tmp"]
    files.may_go.set()
    await in_thread(files.removed)
    assert list(folder.iterdir()) == []
    assert files.renamed == []
    await commit(disk, place(str(tmp_path)), some_records())
    assert (await load(disk, place(str(tmp_path)))).records == keyed(some_records())


async def test_a_publication_that_hangs_ends_at_its_deadline_and_keeps_its_parts(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    """CTL-10, I20: whether it is published is unknown, so nothing it names may go."""
    files = HangingFiles("link")
    disk = ThreadDisk(files, stop_grace_s=0.0)
    publication = Publication()

    async def write() -> None:
        with pytest.raises(InvalidCheckpointState, match="it may be published or not"):
            await commit(disk, place(str(tmp_path)), some_records(), publication=publication)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await in_thread(files.entered)
        assert not publication.stop()
        mock_clock.jump(PUBLISH_S_MAX)
        await wait_all_tasks_blocked()
        mock_clock.jump(RELEASE_S_MAX)
    assert publication.ended.is_set()
    files.closed.clear()
    files.may_go.set()
    await in_thread(files.closed)
    loaded = await load(ThreadDisk(), place(str(tmp_path)))
    assert loaded.records == keyed(some_records())


def test_a_publication_that_nobody_waits_for_any_more_does_not_begin(
    files: PageCacheFiles,
) -> None:
    """I31: its deadline may pass before its thread has started."""
    where = place().of_participant(IDENTITY.kind, IDENTITY.instance)
    file = ManifestFile(files, where, [])
    file.prepare(b"x")
    file.stopped = True
    with pytest.raises(InvalidCheckpointState, match=r"manifest\.json: stopped"):
        file.publish()
    file.release()
    assert listing(files) == []
    assert files.open_descriptors == 0


async def test_a_stop_after_publication_began_is_too_late(files: PageCacheFiles) -> None:
    """CTL-10: the write is finished first."""
    publication = Publication()
    answers: list[bool] = []

    def stop(operation: Operation) -> None:
        if operation.name == "link":
            answers.append(publication.stop())

    files.hook = stop
    with trio.CancelScope() as scope:
        files_at_cancel = InlineDisk(
            files, before_step=lambda number: scope.cancel() if publication._begun else None
        )
        await commit(files_at_cancel, place(), some_records(), publication=publication)
    assert answers == [False]
    assert (await load(InlineDisk(files), place())).records == keyed(some_records())


async def test_an_unreadable_scope_reads_nothing_else(files: PageCacheFiles) -> None:
    """STO-4: a scope without records is no error."""
    await commit(InlineDisk(files), place(), some_records())
    loaded = await read_checkpoint(
        InlineDisk(files),
        place(),
        kind=IDENTITY.kind,
        instance=IDENTITY.instance,
        scope=frozenset({CaptureKey("elsewhere")}),
    )
    assert loaded.records == {}
    assert loaded.manifest.record_count == 3
