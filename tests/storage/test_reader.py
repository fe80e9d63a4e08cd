"""Reading: all of it is verified, nothing is changed, nothing damaged is taken."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.errors import InvalidCheckpointState
from gymtrio.ids import CaptureKey
from gymtrio.storage import opaque
from gymtrio.storage.bounds import MANIFEST_BYTES_MAX, READ_CHUNK_BYTES, RECORD_CHUNK_BYTES
from gymtrio.storage.disk import ThreadDisk
from gymtrio.storage.publication import Publication
from gymtrio.storage.reader import read_checkpoint
from gymtrio.storage.records import Record
from gymtrio.storage.writer import publish_manifest, write_part
from tests.helpers.checkpoints import (
    IDENTITY,
    OTHER_ID,
    commit,
    episode,
    keyed,
    load,
    place,
    some_records,
)
from tests.helpers.page_cache import InlineDisk, PageCacheFiles
from tests.helpers.passes import Passes
from tests.helpers.states import STATES, same

FOLDER: Final = "/root/step-7/gym/resources/counter"


async def written(records: list[Record], **changes: object) -> dict[str, bytes]:
    """The files of a checkpoint."""
    files = PageCacheFiles(write_bytes_max=2**30)
    files.replace("/root/.keep", b"")
    await commit(InlineDisk(files), place(), records, **changes)  # type: ignore[arg-type]
    return {path: data for path, data in files.tree().items() if FOLDER in path}


def stored(tree: dict[str, bytes]) -> InlineDisk:
    files = PageCacheFiles()
    files.replace("/root/.keep", b"")
    for path, data in tree.items():
        files.replace(path, data)
    return InlineDisk(files)


@given(st.lists(STATES, max_size=4))
async def test_opaque_state_comes_back_through_a_checkpoint(states: list[object]) -> None:
    """STO-3, I24, V20."""
    records = [
        Record(episode(f"r{number}"), opaque.encode(state, f"episode r{number}"))
        for number, state in enumerate(states)
    ]
    loaded = await load(stored(await written(records)), place())
    for number, state in enumerate(states):
        record = loaded.records[CaptureKey(f"r{number}")]
        assert same(opaque.decode(record.payload), state)


async def test_every_flipped_byte_of_every_file_is_refused() -> None:
    """STO-4, I23, V19."""
    tree = await written(some_records(3, 20))
    assert len(tree) == 2
    for path, data in tree.items():
        for position in range(len(data)):
            for bit in (1, 0x20, 0x80):
                damaged = bytearray(data)
                damaged[position] ^= bit
                disk = stored(tree | {path: bytes(damaged)})
                # Also when nothing of what is damaged is in the scope.
                with pytest.raises(InvalidCheckpointState, match="step-7/gym/resources/counter/"):
                    await load(disk, place(), scope=frozenset())
                assert disk.files.open_descriptors == 0


async def test_every_truncation_and_addition_is_refused() -> None:
    """STO-4, I23, V19."""
    tree = await written(some_records(3, 20))
    for path, data in tree.items():
        changed = [data[:size] for size in range(len(data))]
        changed += [data + b"\0", data + data, bytes(len(data)), data[::-1]]
        for other in changed:
            with pytest.raises(InvalidCheckpointState, match="step-7/gym/resources/counter/"):
                await load(stored(tree | {path: other}), place(), scope=frozenset())


async def test_a_file_that_is_missing_is_named() -> None:
    """STO-4."""
    tree = await written(some_records())
    for path in tree:
        rest = {other: data for other, data in tree.items() if other != path}
        with pytest.raises(
            InvalidCheckpointState, match=f"cannot read {path[6:]}: it does not exist"
        ):
            await load(stored(rest), place())
    with pytest.raises(InvalidCheckpointState, match="cannot open step-7: it does not exist"):
        await load(stored({}), place())


async def test_a_part_of_another_checkpoint_under_the_right_name_is_refused() -> None:
    """STO-4, V19."""
    tree = await written(some_records())
    (part,) = [path for path in tree if path.endswith(".part")]
    for changes in ({"identity": OTHER_ID}, {"nonce": "1" * 32}):
        other = await written(some_records(), **changes)
        (data,) = [data for path, data in other.items() if path.endswith(".part")]
        assert len(data) == len(tree[part])
        with pytest.raises(InvalidCheckpointState, match=r"checkpoint_id 'step-8'|digest"):
            await load(stored(tree | {part: data}), place())


async def test_another_participants_checkpoint_is_refused() -> None:
    """STO-4."""
    tree = await written(some_records())
    for kind, instance in (("agent", "counter"), ("resources", "other")):
        moved = {
            path.replace("/resources/counter/", f"/{kind}/{instance}/"): data
            for path, data in tree.items()
        }
        with pytest.raises(InvalidCheckpointState, match=f"where '({kind}|{instance})' was asked"):
            await read_checkpoint(
                stored(moved), place(), kind=kind, instance=instance, scope=frozenset()
            )


async def test_a_wrong_count_in_the_manifest_is_refused() -> None:
    """STO-4."""
    tree = await written(some_records(3))
    path = f"{FOLDER}/manifest.json"
    body = opaque.decode(tree[path])
    assert isinstance(body, dict)
    del body["manifest_sha256"]
    body["record_count"] = body["parts"][0]["record_count"] = 4
    digest = hashlib.sha256(opaque.encode(body, "x", sort_keys=True)).hexdigest()
    body["manifest_sha256"] = digest
    data = opaque.encode(body, "x", sort_keys=True) + b"\n"
    with pytest.raises(InvalidCheckpointState, match="3 records where the manifest says 4"):
        await load(stored(tree | {path: data}), place())


async def test_an_episode_in_two_parts_is_refused() -> None:
    """STO-4, I18: also where the writer did not notice."""
    files = PageCacheFiles()
    files.replace("/root/.keep", b"")
    disk = InlineDisk(files)
    parts = []
    for nonce in ("a" * 32, "b" * 32):
        part = await write_part(disk, place(), IDENTITY, some_records(1), nonce=nonce)
        assert part is not None
        parts.append(part)
    unnoticed = [type(part)(part.part, ()) for part in parts]
    await publish_manifest(disk, place(), IDENTITY, unnoticed, {}, publication=Publication())
    with pytest.raises(InvalidCheckpointState, match="episode r0 is in it twice"):
        await load(disk, place(), scope=frozenset())


async def test_reading_changes_nothing(tmp_path: Path) -> None:
    """I9, V21: byte for byte, and no file comes or goes."""

    def picture() -> dict[str, tuple[int, bytes]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes())
            for path in tmp_path.rglob("*")
            if path.is_file()
        }

    where = place(str(tmp_path))
    await commit(ThreadDisk(), where, some_records(5))
    before = picture()
    first = await load(ThreadDisk(), where)
    assert await load(ThreadDisk(), where) == first
    assert picture() == before


async def test_reading_streams() -> None:
    """STO-5: in chunks of bounded size, with the loop free between them."""
    sizes: list[int] = []
    passes = Passes()

    class Measured(PageCacheFiles):
        def read(self, file: int, bytes_max: int) -> bytes:
            sizes.append(bytes_max)
            return super().read(file, bytes_max)

    records = [Record(episode("large"), bytes(range(256)) * (3 * RECORD_CHUNK_BYTES // 256 + 1))]
    records += some_records(300, 10_000)
    tree = await written(records)
    files = Measured()
    for path, data in tree.items():
        files.replace(path, data)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(passes.run)
        loaded = await load(InlineDisk(files), place())
        nursery.cancel_scope.cancel()
    assert loaded.records == keyed(records)
    assert max(sizes) <= READ_CHUNK_BYTES
    assert passes.count > 6


async def test_a_cancel_while_reading_leaves_nothing_open() -> None:
    tree = await written(some_records())
    for step in range(1, 7):
        disk = stored(tree)
        with trio.CancelScope() as scope:
            cancelling = InlineDisk(
                disk.files,
                before_step=lambda n, at=step, s=scope: s.cancel() if n == at else None,  # type: ignore[misc]
            )
            await load(cancelling, place())
        assert disk.files.open_descriptors == 0


async def test_a_manifest_that_is_far_too_large_is_not_read_to_its_end() -> None:
    """STO-4, STO-5."""
    disk = stored({f"{FOLDER}/manifest.json": b" " * (4 * MANIFEST_BYTES_MAX)})
    with pytest.raises(InvalidCheckpointState, match=f"over {MANIFEST_BYTES_MAX} bytes"):
        await load(disk, place())
    assert len([op for op in disk.files.operations if op.name == "read"]) == 1
