"""A checkpoint directory is below the root, whatever the path says and whoever moves links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.errors import InvalidCheckpointState, SettingsError
from gymtrio.storage.disk import HostFiles, ThreadDisk
from gymtrio.storage.folder import Folder
from gymtrio.storage.root import CheckpointRoot, Place
from tests.helpers.checkpoints import commit, load, some_records
from tests.helpers.page_cache import InlineDisk, PageCacheFiles


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    (tmp_path / "outside").mkdir()
    return made


async def accept(root: Path, text: str) -> Place:
    return await CheckpointRoot(str(root)).accept(ThreadDisk(), text)


@pytest.mark.parametrize(
    ("text", "components"),
    [
        ("step-1", ("step-1",)),
        ("run/step-1", ("run", "step-1")),
        ("run//./step-1/", ("run", "step-1")),
        ("ü b\\c", ("ü b\\c",)),
        (".", ()),
        (".hidden", (".hidden",)),
        ("a..b", ("a..b",)),
    ],
)
async def test_a_relative_path_is_below_the_root(
    root: Path, text: str, components: tuple[str, ...]
) -> None:
    """STO-7."""
    assert await accept(root, text) == Place(str(root), components)


async def test_an_absolute_path_below_the_root_is_taken(root: Path) -> None:
    """STO-7."""
    assert await accept(root, f"{root}/a/b") == Place(str(root), ("a", "b"))
    assert await accept(root, str(root)) == Place(str(root), ())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("..", "'..' is not resolved"),
        ("a/../b", "'..' is not resolved"),
        ("a/..", "'..' is not resolved"),
        ("~/x", "'~' is not expanded"),
        ("a\0b", "cannot be printed"),
        ("a\nb", "cannot be printed"),
        ("a\x1b[2J", "cannot be printed"),
        ("a\u202eb", "cannot be printed"),
        ("a\ud800", "cannot be printed"),
        ("x" * 256, "longer than 255 bytes"),
        ("ü" * 128, "longer than 255 bytes"),
        ("a/" * 2049, "longer than 4096 characters"),
        ("a/" * 33, "more than 32 levels deep"),
        ("/", "not below checkpoint.root"),
        ("/etc", "not below checkpoint.root"),
        ("//etc", "not below checkpoint.root"),
    ],
)
async def test_path_tricks_are_refused(root: Path, text: str, why: str) -> None:
    """STO-7, I36: the detail names the field and is fit for a log."""
    with pytest.raises(InvalidCheckpointState, match=why) as caught:
        await accept(root, text)
    assert caught.value.detail.startswith("checkpoint_dir")
    assert caught.value.detail.isprintable()
    assert len(caught.value.detail) < 400


async def test_a_sibling_whose_name_begins_like_the_root_is_outside(root: Path) -> None:
    """STO-7."""
    with pytest.raises(InvalidCheckpointState, match="not below"):
        await accept(root, f"{root}-too/a")


async def test_links_are_resolved_before_the_place_is_judged(root: Path) -> None:
    """STO-7."""
    (root / "real").mkdir()
    (root / "latest").symlink_to("real")
    (root / "out").symlink_to(root.parent / "outside")
    (root / "up").symlink_to("..")
    (root / "round").symlink_to("round")
    assert await accept(root, "latest/x") == Place(str(root), ("real", "x"))
    for text in ("out", "out/x", "up/outside", f"{root}/out"):
        with pytest.raises(InvalidCheckpointState, match="not below"):
            await accept(root, text)
    where = await accept(root, "round")
    with pytest.raises(InvalidCheckpointState, match=r"cannot open round: .*(ELOOP|ENOTDIR)"):
        await commit(ThreadDisk(), where, some_records())


async def test_a_root_that_is_itself_a_link_is_meant_by_both_names(root: Path) -> None:
    """STO-7."""
    alias = root.parent / "alias"
    alias.symlink_to(root)
    for configured in (root, alias):
        for text in ("a", f"{root}/a", f"{alias}/a"):
            assert await accept(configured, text) == Place(str(root), ("a",))


@pytest.mark.parametrize("component", ["step", "step/gym", "step/gym/resources"])
async def test_a_link_swapped_in_after_the_check_is_not_followed(
    root: Path, component: str
) -> None:
    """STO-7: neither by writing nor by reading, also where it points below the root."""
    disk = ThreadDisk()
    where = await accept(root, "step")
    await commit(disk, where, some_records())
    moved = root / component
    for target in (root.parent / "outside" / "moved", root / "moved"):
        moved.rename(target)
        moved.symlink_to(target)
        with pytest.raises(InvalidCheckpointState, match=f"cannot open {component}: "):
            await commit(disk, where, some_records(5))
        with pytest.raises(InvalidCheckpointState, match=f"cannot open {component}: "):
            await load(disk, where)
        moved.unlink()
        target.rename(moved)
    assert (await load(disk, where)).manifest.record_count == 3


@pytest.mark.parametrize("name", ["manifest.json", "part"])
async def test_a_link_in_place_of_a_file_is_not_followed(root: Path, name: str) -> None:
    """STO-7."""
    disk = ThreadDisk()
    where = await accept(root, "step")
    written = await commit(disk, where, some_records())
    if name == "part":
        name = written.manifest.parts[0].file
    moved = root / "step/gym/resources/counter" / name
    moved.rename(root / "elsewhere")
    moved.symlink_to(root / "elsewhere")
    with pytest.raises(InvalidCheckpointState, match=f"{name}: a symbolic link stands there"):
        await load(disk, where)


async def test_a_fifo_in_place_of_a_file_does_not_hang(root: Path) -> None:
    """STO-7."""
    disk = ThreadDisk()
    where = await accept(root, "step")
    await commit(disk, where, some_records())
    manifest = root / "step/gym/resources/counter/manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(InvalidCheckpointState, match=r"manifest\.json: not possible"):
        await load(disk, where)


@given(st.text(max_size=40) | st.lists(st.sampled_from(["..", ".", "", "a", "/"])).map("/".join))
async def test_no_text_leads_out_of_the_root(text: str) -> None:
    """STO-7, I36."""
    try:
        where = await CheckpointRoot("/root").accept(InlineDisk(PageCacheFiles()), text)
    except InvalidCheckpointState:
        return
    assert where.root == "/root"
    assert not {"", ".", ".."} & set(where.components)
    assert not any("/" in component or "\0" in component for component in where.components)


async def test_the_file_system_root_may_be_the_root(tmp_path: Path) -> None:
    where = await CheckpointRoot("/").accept(ThreadDisk(), str(tmp_path))
    assert str(where) == str(tmp_path).removeprefix("/")


@pytest.mark.parametrize("path", ["", "relative/x", "/a\0b"])
def test_a_root_that_is_no_absolute_path_is_refused_at_start(path: str) -> None:
    with pytest.raises(SettingsError, match=r"checkpoint\.root"):
        CheckpointRoot(path)


async def test_a_root_that_is_missing_or_a_file_is_found_at_start(root: Path) -> None:
    disk = ThreadDisk()
    await CheckpointRoot(str(root)).check(disk)
    with pytest.raises(SettingsError, match=r"checkpoint\.root: .*it does not exist"):
        await CheckpointRoot(f"{root}/none").check(disk)
    (root / "file").touch()
    with pytest.raises(SettingsError, match=r"checkpoint\.root: .*ENOTDIR"):
        await CheckpointRoot(f"{root}/file").check(disk)


async def test_directories_and_files_are_for_their_owner_only(root: Path) -> None:
    where = await accept(root, "a/step")
    await commit(ThreadDisk(), where, some_records())
    for path in (root / "a").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_that_could_not_be_opened_leaks_no_descriptor() -> None:
    files = PageCacheFiles()
    files.replace("/root/step-7/file", b"")
    folder = Folder(files, Place("/root", ("step-7", "file")))
    with pytest.raises(InvalidCheckpointState, match="cannot open step-7/file: a file or"):
        folder.open(create=True)
    folder.close()
    assert files.open_descriptors == 0


async def test_a_directory_that_another_server_makes_meanwhile_is_used() -> None:
    """STO-1: several servers write below one checkpoint directory at once."""

    class Raced(PageCacheFiles):
        def make_directory(self, directory: int, name: str) -> None:
            super().make_directory(directory, name)
            super().make_directory(directory, name)

    files = Raced()
    files.replace("/root/.keep", b"")
    where = Place("/root", ("step-7",))
    await commit(InlineDisk(files), where, some_records())
    assert (await load(InlineDisk(files), where)).manifest.record_count == 3


def test_a_name_that_the_locale_cannot_write_is_an_error_of_the_system() -> None:
    """I36: and not one that ends a server."""
    with pytest.raises(OSError, match="this locale has no such characters"):
        HostFiles().resolve("/\ud800")
