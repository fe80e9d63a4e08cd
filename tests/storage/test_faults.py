"""Every file operation fails once, and the power is lost before each: old or new, no third thing.

Each scenario runs again and again, with the fault at its first operation, its second, and so on
until a run ends without having met it. The oracles are tested too: named ways of getting it wrong,
each of which they must notice.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import pytest

from gymtrio.errors import InvalidCheckpointState
from gymtrio.storage.publication import Publication
from gymtrio.storage.writer import WrittenPart, publish_manifest, remove_parts, write_part
from tests.helpers.checkpoints import (
    FIELDS,
    IDENTITY,
    OTHER_ID,
    commit,
    keyed,
    load,
    place,
    some_records,
)
from tests.helpers.page_cache import (
    InlineDisk,
    Loss,
    Operation,
    PageCacheFiles,
    PowerLost,
    fail_at,
)

FOLDER: Final = "/root/step-7/gym/resources/counter"
MANIFEST: Final = f"{FOLDER}/manifest.json"
RECORDS: Final = some_records(4, 1500)
OLD_RECORDS: Final = some_records(2, 700)
SEEDS: Final = range(6)

Files = PageCacheFiles
Attempt = Callable[[InlineDisk], Awaitable[None]]


@attrs.frozen
class Scenario:
    """What is there, what is tried, and what a reader may find after it."""

    make: Callable[[type[Files]], Awaitable[Files]]
    attempt: Attempt
    old: bool = False
    """Another checkpoint is there, and stays."""
    same: bool = False
    """This one is there already, though not durably."""


async def nothing_there(kind: type[Files]) -> Files:
    files = kind(write_bytes_max=1000)
    files.replace("/root/.keep", b"")
    return files


async def another_there(kind: type[Files]) -> Files:
    files = await nothing_there(PageCacheFiles)
    await commit(
        InlineDisk(files), place(), OLD_RECORDS, identity=OTHER_ID, fields={}, nonce="e" * 32
    )
    durable = await nothing_there(kind)
    for path, data in files.tree().items():
        durable.replace(path, data)
    return durable


async def same_there(kind: type[Files]) -> Files:
    """Its writer died between the link and the sync."""
    files = await nothing_there(kind)

    def die(operation: Operation) -> None:
        if operation.name == "unlink":
            raise PowerLost

    files.hook = die
    with pytest.raises(PowerLost):
        await commit(InlineDisk(files), place(), RECORDS, nonce="d" * 32)
    again = await nothing_there(kind)
    again._root = files._root
    return again


async def write_one(disk: InlineDisk) -> None:
    await commit(disk, place(), RECORDS, nonce="f" * 32)


async def write_as_two_workers(disk: InlineDisk) -> None:
    parts: list[WrittenPart] = []
    try:
        for number, share in enumerate([RECORDS[:1], RECORDS[1:]]):
            part = await write_part(disk, place(), IDENTITY, share, nonce=f"{number:032}")
            assert part is not None
            parts.append(part)
    except InvalidCheckpointState:
        await remove_parts(disk, place, IDENTITY, [part.part.file for part in parts])
        raise
    await publish_manifest(disk, place(), IDENTITY, parts, FIELDS, publication=Publication())


SCENARIOS: Final = {
    "empty": Scenario(nothing_there, write_one),
    "workers": Scenario(nothing_there, write_as_two_workers),
    "another": Scenario(another_there, write_one, old=True),
    "same": Scenario(same_there, write_one, same=True),
}


async def found_by_a_reader(files: Files, scenario: Scenario) -> str:
    """Say which checkpoint is there; anything but a whole one or none is a third thing."""
    if MANIFEST not in files.tree():
        with pytest.raises(InvalidCheckpointState, match="it does not exist"):
            await load(InlineDisk(files), place())
        assert not scenario.old
        return "none"
    loaded = await load(InlineDisk(files), place())
    if loaded.manifest.checkpoint_id == OTHER_ID.checkpoint_id:
        assert loaded.records == keyed(OLD_RECORDS)
        return "old"
    assert loaded.records == keyed(RECORDS)
    return "new"


async def check_power_losses(scenario: Scenario, kind: type[Files]) -> int:
    """Lose the power before each operation, and after the last; give how many there were."""
    number = 0
    while True:
        number += 1
        files = await scenario.make(kind)
        before = len(files.operations)
        files.hook = fail_at(before + number, PowerLost())
        acknowledged = False
        refused = False
        try:
            await scenario.attempt(InlineDisk(files))
            acknowledged = True
        except InvalidCheckpointState:
            refused = True
        except PowerLost:
            pass
        survivors = [files.after(loss) for loss in Loss]
        survivors += [files.after(Loss.SOME, seed=seed) for seed in SEEDS]
        for survivor in survivors:
            found = await found_by_a_reader(survivor, scenario)
            if scenario.old:
                assert found == "old"
            elif acknowledged:
                assert found == "new"
        if acknowledged or refused:
            assert refused is scenario.old
            check_nothing_is_left(files, scenario)
        if len(files.operations) < before + number:
            return number


def check_nothing_is_left(files: Files, scenario: Scenario) -> None:
    names = [path.removeprefix(f"{FOLDER}/") for path in files.tree() if FOLDER in path]
    # What the dead writer left is not ours to remove.
    names = [name for name in names if not (scenario.same and name == ".manifest-0.tmp")]
    assert not [name for name in names if name.endswith(".tmp")], names
    assert len(names) <= 3
    assert files.open_descriptors == 0


@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_power_loss_at_every_operation_leaves_old_or_new(name: str) -> None:
    """STO-1, I20, I21, I22, V14, V15."""
    assert await check_power_losses(SCENARIOS[name], PageCacheFiles) > 30


class NoFileSync(PageCacheFiles):
    def sync(self, descriptor: int) -> None:
        if self._handle(descriptor).inode.is_directory:
            super().sync(descriptor)


class NoDirectorySync(PageCacheFiles):
    def sync(self, descriptor: int) -> None:
        if not self._handle(descriptor).inode.is_directory:
            super().sync(descriptor)


class NoParentSync(PageCacheFiles):
    """Only the participant's own directory is synced."""

    def sync(self, descriptor: int) -> None:
        inode = self._handle(descriptor).inode
        if not any(child.is_directory for child in inode.entries.values()):
            super().sync(descriptor)


class NoSyncAfterTheLink(PageCacheFiles):
    def sync(self, descriptor: int) -> None:
        if "manifest.json" not in self._handle(descriptor).inode.entries:
            super().sync(descriptor)


class TemporaryLeft(PageCacheFiles):
    def unlink(self, directory: int, name: str) -> None:
        pass


class ManifestReplaced(PageCacheFiles):
    """A link that is not create-only."""

    def link(self, directory: int, old: str, new: str) -> None:
        inode = self._directory(directory)
        inode.entries[new] = inode.durable_entries[new] = inode.entries[old]


@pytest.mark.parametrize(
    ("kind", "scenarios"),
    [
        (NoFileSync, ["empty", "workers", "same"]),
        (NoDirectorySync, ["empty", "workers", "same"]),
        (NoParentSync, ["empty", "workers", "same"]),
        (NoSyncAfterTheLink, ["empty", "workers", "same"]),
        (TemporaryLeft, ["empty", "workers", "another"]),
        (ManifestReplaced, ["another"]),
    ],
)
async def test_the_oracles_notice_what_they_are_for(
    kind: type[Files], scenarios: list[str]
) -> None:
    for name in scenarios:
        with pytest.raises((AssertionError, InvalidCheckpointState)):
            await check_power_losses(SCENARIOS[name], kind)


@pytest.mark.parametrize("code", ["EIO", "ENOSPC", "EACCES", "EROFS"])
@pytest.mark.parametrize("name", SCENARIOS)
async def test_an_error_at_every_operation_is_refused_or_harmless(name: str, code: str) -> None:
    """STO-2, STO-8, HARD-12, I22, V17, V18: and the next checkpoint elsewhere succeeds."""
    scenario = SCENARIOS[name]
    error = OSError(getattr(errno, code), code)
    details: list[str] = []
    number = 0
    while True:
        number += 1
        files = await scenario.make(PageCacheFiles)
        before = len(files.operations)
        files.hook = fail_at(before + number, error)
        refused = False
        try:
            await scenario.attempt(InlineDisk(files))
        except InvalidCheckpointState as refusal:
            refused = True
            details.append(refusal.detail)
        if len(files.operations) < before + number:
            break
        failed = files.operations[before + number - 1]
        assert files.open_descriptors == 0
        check_after_an_error(files, scenario, failed, refused=refused)
        found = await found_by_a_reader(files, scenario)
        survived = await found_by_a_reader(files.after(Loss.EVERYTHING), scenario)
        if not refused:
            assert found == survived == "new"
        elif found == "new" and not scenario.same:
            assert details[-1].endswith("the manifest can be read, but a crash may lose it")
        await commit(InlineDisk(files), place(directory="good"), RECORDS)
        assert (await load(InlineDisk(files), place(directory="good"))).records == keyed(RECORDS)
    assert len(details) > 15
    for detail in details:
        assert f"({code})" in detail or "was committed there" in detail


def check_after_an_error(
    files: Files, scenario: Scenario, failed: Operation, *, refused: bool
) -> None:
    names = sorted(path.removeprefix(f"{FOLDER}/") for path in files.tree() if FOLDER in path)
    if failed.name == "unlink":
        # The one thing that cannot be made good: the name stays until the directory goes.
        names = [name for name in names if name != failed.what]
    if scenario.same:
        names = [name for name in names if name != ".manifest-0.tmp"]
    assert not [name for name in names if name.endswith(".tmp")], names
    if (scenario.old or scenario.same) and failed.name in ("open", "read"):
        # Whether the manifest that is there is ours could not be found out: the part may stay.
        assert 2 <= len(names) <= 3, names
    elif scenario.old or scenario.same:
        assert len(names) == 2, names
    elif refused and "manifest.json" not in names:
        assert names == []


async def test_a_failed_sync_is_never_repeated_on_the_same_file() -> None:
    """HARD-12: the second would succeed without writing; a new attempt makes a new file."""
    files = await nothing_there(PageCacheFiles)

    def fail_first_sync(operation: Operation) -> None:
        if operation.name == "sync" and operation.what == "file":
            files.hook = lambda _: None
            raise OSError(errno.EIO, "EIO")

    files.hook = fail_first_sync
    with pytest.raises(InvalidCheckpointState, match=r"cannot sync .*\.tmp: input/output error"):
        await write_one(InlineDisk(files))
    assert files.operations[-1].name == "close"
    assert not [name for name in files.tree() if FOLDER in name]
    await write_one(InlineDisk(files))
    for loss in Loss:
        survivor = files.after(loss)
        assert (await load(InlineDisk(survivor), place())).records == keyed(RECORDS)


async def test_an_error_while_reading_is_a_refusal_and_leaves_nothing_open() -> None:
    """STO-4, I23."""
    files = await another_there(PageCacheFiles)
    number = 0
    while True:
        number += 1
        before = len(files.operations)
        files.hook = fail_at(before + number, OSError(errno.EIO, "EIO"))
        detail = ""
        try:
            assert (await load(InlineDisk(files), place())).records == keyed(OLD_RECORDS)
        except InvalidCheckpointState as refusal:
            detail = refusal.detail
        assert files.open_descriptors == 0
        if len(files.operations) < before + number:
            break
        failed = files.operations[before + number - 1]
        assert ("(EIO)" in detail) is (failed.name != "close")
    assert number > 15
