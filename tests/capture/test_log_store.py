"""The embedded token store: conformance, group commit, crashes, damage and full disks."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.capture.conformance import TOKEN_STORE_CHECKS, TokenStoreCheck
from gymtrio.capture.conformance import make_record as record
from gymtrio.capture.log_store import BATCH_RECORDS_MAX, LogTokenStore, open_log_store
from gymtrio.capture.segments import SUFFIX, Segment, SegmentWriter, encode_record
from gymtrio.capture.tokens import (
    StagingKey,
    TokenRecord,
    TokensDamaged,
    TokensMissing,
    TokenStoreFailed,
)
from gymtrio.ports import HostRandomness

GOLDEN_SEGMENT_SHA256 = "34dd3ecfd56e25d736226aacb91f4492e0f5c02653fb580d1a8260aeb2f2117e"


def open_store(directory: Path) -> AbstractAsyncContextManager[LogTokenStore]:
    return open_log_store(directory, randomness=HostRandomness())


@pytest.mark.parametrize("check", TOKEN_STORE_CHECKS, ids=lambda check: check.__name__)
async def test_it_conforms(check: TokenStoreCheck, tmp_path: Path) -> None:
    """CUT-1, I17, I25"""
    await check(lambda: open_store(tmp_path / "made" / "when needed"))


def segments_of(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"*{SUFFIX}"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the syncs and writes of the system."""
    counted = {"fdatasync": 0, "write": 0}

    def counting(name: str) -> Any:
        real = getattr(os, name)

        def call(descriptor: int, *rest: Any) -> Any:
            counted[name] += 1
            return real(descriptor, *rest)

        return call

    for name in counted:
        monkeypatch.setattr(os, name, counting(name))
    return counted


async def test_puts_that_come_together_share_a_sync(tmp_path: Path, calls: dict[str, int]) -> None:
    """One sync for the first, then one for each batch that gathered behind it."""
    puts = 2 * BATCH_RECORDS_MAX
    async with open_store(tmp_path) as store:
        async with trio.open_nursery() as nursery:
            for number in range(puts):
                nursery.start_soon(store.put, (record(f"k{number}"),))
        assert calls["fdatasync"] <= 3


async def test_a_put_that_another_one_writes_may_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUT-7: as the deadline of a round does; it is written all the same."""
    writing, go_on = threading.Event(), threading.Event()
    real = os.fdatasync

    def sync(descriptor: int) -> None:
        writing.set()
        assert go_on.wait(10)
        go_on.clear()
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    async with open_store(tmp_path) as store, trio.open_nursery() as nursery:
        for names in (("first",), ("second", "third")):
            for name in names:
                scope = trio.CancelScope()
                nursery.start_soon(_put_within, scope, store, name)
                await trio.testing.wait_all_tasks_blocked()
            if names == ("first",):
                await trio.to_thread.run_sync(writing.wait)
                writing.clear()
        go_on.set()
        await trio.to_thread.run_sync(writing.wait)
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert scope.cancelled_caught
        go_on.set()
    assert await _readable(tmp_path, "first", "second", "third") == dict.fromkeys(
        ("first", "second", "third"), "whole"
    )


async def _put_within(scope: trio.CancelScope, store: LogTokenStore, name: str) -> None:
    with scope:
        await store.put((record(name),))


async def test_an_incarnation_has_segments_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        async with open_store(tmp_path) as store:
            await store.put((record("a"),))
    assert len(segments_of(tmp_path)) == 2
    async with open_store(tmp_path) as store:
        await store.get(StagingKey("a"))
    assert len(segments_of(tmp_path)) == 2, "a reader makes no file"


async def test_a_closed_store_refuses(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        pass
    with pytest.raises(TokenStoreFailed, match="closed"):
        await store.put((record("a"),))
    with pytest.raises(TokenStoreFailed, match="closed"):
        await store.get(StagingKey("a"))


async def test_a_directory_that_cannot_be_made_fails_the_opening(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TokenStoreFailed, match="file/store"):
        async with open_store(tmp_path / "file" / "store"):
            pass


async def _put_each(store: LogTokenStore, *names: str) -> None:
    for name in names:
        await store.put((record(name),))


async def _readable(directory: Path, *names: str) -> dict[str, str]:
    found = {}
    async with open_store(directory) as store:
        for name in names:
            try:
                found[name] = "whole" if await store.get(StagingKey(name)) == record(name) else "?"
            except TokensMissing:
                found[name] = "missing"
            except TokensDamaged:
                found[name] = "damaged"
    return found


async def test_a_tail_cut_at_any_byte_is_only_missing(tmp_path: Path) -> None:
    """I20, CUT-7: a torn write is nothing that anybody was told of."""
    async with open_store(tmp_path / "whole") as store:
        await _put_each(store, "a", "b", "c")
    (segment,) = segments_of(tmp_path / "whole")
    data = segment.read_bytes()
    ends = [len(data) * part // 3 for part in (1, 2, 3)]
    assert len(data) % 3 == 0, "three batches of one size"
    for cut in range(len(data)):
        torn = tmp_path / f"torn{cut}"
        torn.mkdir()
        (torn / segment.name).write_bytes(data[:cut])
        expected = {
            name: "whole" if end <= cut else "missing"
            for name, end in zip("abc", ends, strict=True)
        }
        assert await _readable(torn, "a", "b", "c") == expected


@given(st.data())
def test_a_damaged_byte_is_never_read_as_tokens(data: st.DataObject) -> None:
    """I25: damage in a batch that was followed by another is damage; in the last it is a torn write."""

    async def main(directory: Path) -> None:
        async with open_store(directory) as store:
            await _put_each(store, "a", "b", "c")
        (segment,) = segments_of(directory)
        content = bytearray(segment.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        segment.write_bytes(content)
        found = await _readable(directory, "a", "b", "c")
        hit = place * 3 // len(content)
        assert found == {
            name: "whole" if number != hit else "missing" if hit == 2 else "damaged"
            for number, name in enumerate("abc")
        }

    with tempfile.TemporaryDirectory() as name:
        trio.run(main, Path(name))


async def test_a_key_nobody_wrote_is_damaged_in_a_store_that_lost_a_list(tmp_path: Path) -> None:
    """Whether it was ever there cannot be told, so it is not said to be missing."""
    async with open_store(tmp_path) as store:
        await _put_each(store, "a", "b")
    (segment,) = segments_of(tmp_path)
    content = bytearray(segment.read_bytes())
    content[0] ^= 1
    segment.write_bytes(content)
    assert await _readable(tmp_path, "a", "b", "x") == {
        "a": "damaged",
        "b": "whole",
        "x": "damaged",
    }


async def test_a_torn_record_may_be_put_again_by_the_next_incarnation(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        await store.put((record("a"),))
    (segment,) = segments_of(tmp_path)
    content = bytearray(segment.read_bytes())
    content[-1] ^= 1
    segment.write_bytes(content)
    assert await _readable(tmp_path, "a") == {"a": "missing"}
    async with open_store(tmp_path) as store:
        await store.put((record("a"),))
        assert await store.get(StagingKey("a")) == record("a")
    assert await _readable(tmp_path, "a") == {"a": "whole"}


class _FailingDisk:
    """Fails the n-th call of one system function, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, nth: int) -> None:
        real = getattr(os, name)
        self.left = nth

        def call(*arguments: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("name", ["write", "fdatasync", "fsync"])
@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_a_disk_that_fails_costs_the_puts_of_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, nth: int
) -> None:
    """S2: what failed was not stored, the store goes on in a new segment, nothing is synced twice."""
    async with open_store(tmp_path) as store:
        disk = _FailingDisk(monkeypatch, name, nth)
        stored: list[str] = []
        failed: list[str] = []
        reasons: list[str] = []
        for number in range(5):
            try:
                await store.put((record(f"k{number}"),))
                stored.append(f"k{number}")
            except TokenStoreFailed as error:
                reasons.append(str(error))
                failed.append(f"k{number}")
        assert all("No space left" in reason for reason in reasons)
        if disk.left <= 0:
            assert len(failed) == 1
            assert len(segments_of(tmp_path)) == 2
        for key in failed:
            await store.put((record(key),))
        for key in stored + failed:
            assert await store.get(StagingKey(key)) == record(key)
    assert set((await _readable(tmp_path, *stored, *failed)).values()) == {"whole"}


async def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data)[:7]))
    async with open_store(tmp_path) as store:
        await _put_each(store, "a", "b")
    assert await _readable(tmp_path, "a", "b") == {"a": "whole", "b": "whole"}


async def test_a_record_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    huge = record("huge", *([2**31] * 6_000_000))
    async with open_store(tmp_path) as store:
        with pytest.raises(TokenStoreFailed, match="limit"):
            await store.put((huge,))
        for wrong in (-1, 2**32):
            with pytest.raises(TokenStoreFailed, match="wrong"):
                await store.put((record("wrong", wrong),))
        await store.put((record("a"),))


async def test_a_segment_is_written_as_it_was_in_every_version_before(tmp_path: Path) -> None:
    """I22: a store of an older version stays readable; a change here needs a reader for both."""
    writer = SegmentWriter(tmp_path, f"x-1{SUFFIX}")
    records = [record("r-a1/m1/0-3"), record("r-a1/m1/whole", 0, 49151)]
    writer.append({r.staging_key: encode_record(r) for r in records})
    writer.close()
    digest = hashlib.sha256(writer.segment.path.read_bytes()).hexdigest()
    assert digest == GOLDEN_SEGMENT_SHA256


async def test_a_reader_waits_for_a_batch_that_is_being_written(tmp_path: Path) -> None:
    """Seen by halves it is not there yet; seen whole it is."""
    whole = tmp_path / "whole"
    whole.mkdir()
    writer = SegmentWriter(whole, f"x-1{SUFFIX}")
    writer.append({StagingKey("a"): encode_record(record("a"))})
    writer.close()
    data = writer.segment.path.read_bytes()
    growing = tmp_path / f"x-1{SUFFIX}"
    reader = Segment(growing)
    for end in range(len(data)):
        growing.write_bytes(data[:end])
        assert reader.read_new() == []
    growing.write_bytes(data)
    ((key, location),) = reader.read_new()
    assert reader.read(key, location) == record("a")


KILLED = """
import sys, trio
from pathlib import Path
from gymtrio.capture.log_store import open_log_store
from gymtrio.ports import HostRandomness
from gymtrio.capture.conformance import make_record as record

async def main():
    async with open_log_store(Path(sys.argv[1]), randomness=HostRandomness()) as store:
        async def put(worker):
            for number in range(100000):
                await store.put((record(f"{worker}/{number}", number),))
                sys.stdout.write(f"{worker}/{number}\\n")
                sys.stdout.flush()
        async with trio.open_nursery() as nursery:
            for worker in range(8):
                nursery.start_soon(put, worker)

trio.run(main)
"""


async def _acknowledged_until_killed(directory: Path) -> AsyncIterator[str]:
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", KILLED, str(directory)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    data = b""
    async with process.stdout:
        while chunk := await process.stdout.receive_some():
            data += chunk
            if data.count(b"\n") > 200:
                process.kill()
    await process.wait()
    for line in data.decode().split("\n")[:-1]:
        yield line


async def test_what_was_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    """I17, I20: every put that returned is there after the process was killed amid others."""
    acknowledged = [line async for line in _acknowledged_until_killed(tmp_path)]
    assert len(acknowledged) > 200
    async with open_store(tmp_path) as store:
        for name in acknowledged:
            number = int(name.partition("/")[2])
            assert await store.get(StagingKey(name)) == record(name, number)


def test_a_record_knows_its_lengths() -> None:
    """I25: ids, log-probs and mask are of one length, or there is no record."""
    with pytest.raises(TokensDamaged, match="1 values for 2 tokens"):
        TokenRecord(
            staging_key=StagingKey("a"),
            capture_key=record("a").capture_key,
            model_call_id="m",
            token_ids=(1, 2),
            log_probs=(0.5,),
            mask=(1, 1),
            policy_version=0,
        )
