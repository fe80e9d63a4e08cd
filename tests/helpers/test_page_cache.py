"""The file system in memory does what the real one does, and loses what its fault model says."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from gymtrio.storage.disk import HostFiles
from gymtrio.storage.files import Files
from tests.helpers.page_cache import (
    Loss,
    Operation,
    PageCacheFiles,
    PowerLost,
    fail_at,
)


def check_files(files: Files, root: str) -> None:
    """The contract of the port, as far as one process can see it."""
    top = files.open_root(files.resolve(root))
    files.make_directory(top, "a")
    with pytest.raises(FileExistsError):
        files.make_directory(top, "a")
    directory = files.open_directory(top, "a")
    file = files.create(directory, "one")
    with pytest.raises(FileExistsError):
        files.create(directory, "one")
    rest = memoryview(b"x" * 10_000)
    while rest:
        rest = rest[files.write(file, rest) :]
    files.sync(file)
    files.close(file)
    files.sync(directory)
    files.sync(top)

    file = files.open(directory, "one")
    assert files.size(file) == 10_000
    read = b""
    while chunk := files.read(file, 3_000):
        assert len(chunk) <= 3_000
        read += chunk
    assert read == b"x" * 10_000
    files.sync(file)
    files.close(file)

    files.link(directory, "one", "two")
    with pytest.raises(FileExistsError):
        files.link(directory, "one", "two")
    files.unlink(directory, "one")
    files.rename(directory, "two", "three")
    other = files.create(directory, "four")
    files.close(other)
    files.rename(directory, "three", "four")
    file = files.open(directory, "four")
    assert files.size(file) == 10_000
    files.close(file)

    held = files.lock(directory, "lock")
    with pytest.raises(BlockingIOError):
        files.lock(directory, "lock")
    files.close(held)
    held = files.lock(directory, "lock")
    files.close(held)

    for missing in (
        lambda: files.open(directory, "none"),
        lambda: files.open_directory(directory, "none"),
        lambda: files.unlink(directory, "none"),
        lambda: files.rename(directory, "none", "some"),
        lambda: files.link(directory, "none", "some"),
        lambda: files.open_root(f"{root}/none"),
    ):
        with pytest.raises(FileNotFoundError):
            missing()
    with pytest.raises(NotADirectoryError):
        files.open_directory(directory, "four")
    with pytest.raises(OSError):
        files.open(top, "a")
    files.close(directory)
    files.close(top)
    with pytest.raises(OSError) as caught:
        files.size(top)
    assert caught.value.errno == errno.EBADF


def test_both_file_systems_keep_the_contract(tmp_path: Path) -> None:
    check_files(HostFiles(), str(tmp_path))
    in_memory = PageCacheFiles()
    check_files(in_memory, "/")
    assert in_memory.open_descriptors == 0


def _one_file(files: PageCacheFiles, *, sync_file: bool, sync_directory: bool) -> None:
    root = files.open_root("/")
    file = files.create(root, "f")
    files.write(file, memoryview(b"new"))
    if sync_file:
        files.sync(file)
    if sync_directory:
        files.sync(root)


@pytest.mark.parametrize(
    ("loss", "sync_file", "sync_directory", "found"),
    [
        (Loss.NOTHING, False, False, {"/f": b"new"}),
        (Loss.EVERYTHING, False, False, {}),
        (Loss.EVERYTHING, True, False, {}),
        (Loss.EVERYTHING, False, True, {"/f": b""}),
        (Loss.EVERYTHING, True, True, {"/f": b"new"}),
        (Loss.BYTES, False, False, {"/f": b""}),
        (Loss.ENTRIES, False, False, {}),
        (Loss.SOME, True, True, {"/f": b"new"}),
    ],
)
def test_a_power_loss_takes_what_was_not_synced(
    loss: Loss, sync_file: bool, sync_directory: bool, found: dict[str, bytes]
) -> None:
    files = PageCacheFiles()
    _one_file(files, sync_file=sync_file, sync_directory=sync_directory)
    assert files.after(loss).tree() == found
    assert files.tree() == {"/f": b"new"}


def test_a_renaming_is_kept_or_lost_as_a_whole() -> None:
    files = PageCacheFiles()
    _one_file(files, sync_file=True, sync_directory=True)
    files.rename(files.open_root("/"), "f", "g")
    seen = {tuple(files.after(Loss.SOME, seed=seed).tree()) for seed in range(50)}
    assert seen == {("/f",), ("/g",)}


def test_some_losses_tear_a_write_at_a_sector() -> None:
    files = PageCacheFiles()
    root = files.open_root("/")
    files.sync(root)
    file = files.create(root, "f")
    files.sync(root)
    files.write(file, memoryview(b"x" * 2000))
    sizes = {len(files.after(Loss.SOME, seed=seed).tree()["/f"]) for seed in range(100)}
    assert sizes == {0, 512, 1024, 1536, 2000}


def test_a_sync_after_a_failed_sync_succeeds_and_writes_nothing() -> None:
    files = PageCacheFiles()
    _one_file(files, sync_file=False, sync_directory=True)
    file = files.open(files.open_root("/"), "f")
    files.hook = fail_at(len(files.operations) + 1, OSError(errno.EIO, "EIO"))
    with pytest.raises(OSError):
        files.sync(file)
    files.sync(file)
    assert files.tree() == {"/f": b"new"}
    assert files.after(Loss.EVERYTHING).tree() == {"/f": b""}


def test_nothing_works_after_the_power_is_lost() -> None:
    files = PageCacheFiles()
    root = files.open_root("/")

    def lose(operation: Operation) -> None:
        if operation.name == "size":
            raise PowerLost

    files.hook = lose
    calls: list[Callable[[], object]] = [
        lambda: files.size(root),
        lambda: files.create(root, "f"),
        lambda: files.close(root),
    ]
    for call in calls:
        with pytest.raises(PowerLost):
            call()
    assert files.tree() == {}
