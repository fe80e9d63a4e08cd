"""What a checkpoint of a policy server costs, counted: work of a report, files, directories, syncs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import trio
from trio.testing import wait_all_tasks_blocked

from gymtrio.checkpoint.participant import Export
from tests.helpers.page_cache import PageCacheFiles
from tests.helpers.plane import episode
from tests.participants.policy.harness import World, chat, open_policy
from tests.participants.policy.workers import make_archive

HELLO: Final = chat("hello")


@contextmanager
def counting_calls() -> Iterator[Counter[str]]:
    """Which functions are called in the block, by their names, and how often."""
    made: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            made[frame.f_code.co_name] += 1
        elif event == "c_call":
            made[argument.__qualname__] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield made
    finally:
        sys.setprofile(before)


async def test_readiness_does_not_grow_with_the_calls_that_are_held(
    autojump_clock: object,
) -> None:
    """POL-6, I33: what is called, and how often, is the same for 10 held calls and for 500."""
    made: list[Counter[str]] = []
    for count in (10, 500):
        async with open_policy(World()) as policy:
            for number in range(count):
                _, live = await policy.begin_live(episode(f"e{number}"), HELLO)
                live.emit(2)
            await policy.prepare()
            for live in list(policy.backend.live)[: count // 2]:
                live.finish.set()
            await wait_all_tasks_blocked()
            assert policy.counts | {"held": count, "cut": count} == policy.counts
            with counting_calls() as calls:
                policy.policy.ready()
                policy.policy.report()
            made.append(calls)
    assert made[0] == made[1]
    assert made[0]["report"] == 2


async def test_the_undelivered_calls_are_gone_through_at_commit_and_not_before(
    autojump_clock: object,
) -> None:
    """POL-6: 50 held replies, of each of which the commit makes a cut, once."""
    async with open_policy(World()) as policy:
        episodes = [episode(f"e{number}") for number in range(50)]
        for e in episodes:
            await policy.begin_live(e, HELLO)
        await policy.prepare()
        for live in list(policy.backend.live):
            live.finish.set()
        await wait_all_tasks_blocked()
        with counting_calls() as calls:
            for _ in range(20):
                await policy.prepare()
                policy.control.status()
        assert (calls["report"] >= 20, calls["digest_tokens"]) == (True, 0)
        with counting_calls() as calls:
            await policy.commit(episodes=tuple(episodes))
        assert calls["digest_tokens"] == 50


async def operations(count: int, *, restored: bool) -> Counter[tuple[str, str]]:
    """What a commit, or a restore, of so many episodes of three calls asks the disk for."""
    files = PageCacheFiles(write_bytes_max=2**20)
    episodes = tuple(episode(f"e{number:05d}") for number in range(count))
    world = World()
    world.archive = cast("Any", make_archive(files))
    async with open_policy(world) as policy:
        policy.backend.at_once = True
        for e in episodes:
            for text in "abc":
                await policy.ask(e, chat(text))
        await policy.prepare()
        files.operations.clear()
        await policy.commit(episodes=episodes, directory="/d")
    if restored:
        files.operations.clear()
        async with open_policy(world) as policy:
            await policy.restore(*episodes, directory="/d")
            last = policy.policy.books.ledger.rows(episodes[-1].next_attempt())
            assert [row.staged_under for row in last] == [episodes[-1].capture_key] * 3
    return Counter(
        (each.name, each.what if each.name == "sync" else "")
        for each in files.operations
        if each.name not in {"write", "read"}
    )


async def test_an_export_makes_two_files_whatever_it_holds(autojump_clock: object) -> None:
    """POL-7, STO-1: ledger and manifest, each synced once, and then the directory."""
    one, many = await operations(1, restored=False), await operations(400, restored=False)
    assert many == one
    assert (many["create", ""], many["sync", "file"]) == (2, 2)


async def test_an_import_reads_two_files_whatever_they_hold(autojump_clock: object) -> None:
    """POL-7: nothing is listed, and nothing is written: the checkpoint is the durable copy."""
    one, many = await operations(1, restored=True), await operations(400, restored=True)
    assert many == one
    assert many["open", ""] == 2
    assert many.keys().isdisjoint({("create", ""), ("sync", "file"), ("sync", "directory")})


async def test_an_episode_retired_during_an_export_is_in_it_whole_or_not_at_all() -> None:
    """I16, CTL-12: thousands are gone through in slices, and a retirement waits for no commit."""
    episodes = [episode(f"e{number:05d}") for number in range(4000)]
    retired = episodes[-1]
    exports: list[Export] = []
    begun = trio.Event()
    async with open_policy(World()) as policy:
        await policy.ask_at_once(retired, HELLO)
        await policy.prepare()

        async def export() -> None:
            scope = frozenset(e.capture_key for e in episodes)
            begun.set()
            exports.append(await policy.policy.export(scope))
            assert policy.policy.admission.fences.is_stale(retired)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(export)
            await begun.wait()
            policy.policy.refuse([retired])
            await policy.policy.retire(retired)
    (made,) = exports
    rows = [record for record in made.records if record.episode_id == retired]
    assert (retired.capture_key in made.episode_ids) == bool(rows)
    assert (retired.capture_key in made.reply_fields["staging_keys_by_episode"]) == bool(rows)
