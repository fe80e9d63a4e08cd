"""The ledger of a policy server through checkpoints: what is exported, restored, freed."""

from __future__ import annotations

import attrs
import pytest
from trio.testing import wait_all_tasks_blocked

from gymtrio.capture.replies import Route
from gymtrio.errors import (
    InvalidCheckpointState,
    InvalidPhase,
    InvalidRequest,
    RetireIncomplete,
    StaleAttempt,
)
from gymtrio.participants.base import make_record
from gymtrio.participants.policy.calls import PolicyCall
from gymtrio.participants.policy.records import PolicyRecord
from tests.helpers.plane import episode
from tests.participants.policy.harness import World, chat, is_readable, open_policy, text_of

R = episode("r")
R1 = episode("r", 1)
R2 = episode("r", 2)


async def test_a_call_finds_the_call_it_goes_on_from(autojump_clock: object) -> None:
    """POL-7's lineage: the longest conversation with its output wins; a fork has the same parent."""
    async with open_policy(World()) as policy:
        first = text_of(await policy.ask_at_once(R, chat("a")))
        second = text_of(await policy.ask_at_once(R, chat("a", first, "b")))
        await policy.ask_at_once(R, chat("a", first, "b", second, "c"))
        await policy.ask_at_once(R, chat("a", first, "other"))
        await policy.ask_at_once(R, chat("unrelated"))
        await policy.ask_at_once(episode("other"), chat("a", first, "b"))
        await policy.checkpoint(R, episode("other"))
        rows = policy.records()["r"].rows
        ids = [row.model_call_id for row in rows]
        assert [row.parent_call_id for row in rows] == [None, ids[0], ids[1], ids[0], None]
        assert policy.records()["other"].rows[0].parent_call_id is None


async def test_a_row_says_what_its_call_was(autojump_clock: object) -> None:
    """I16, I17."""
    world = World()
    async with open_policy(world) as policy:
        await policy.ask_at_once(R, chat("a"))
        extra = await policy.checkpoint(R)
        (row,) = policy.records()["r"].rows
        assert row.staged_under == "r"
        assert row.generated_token_count == 20
        assert row.policy_version == 3
        assert row.continued_token_count == 0
        record = await world.store.get(row.staging_key)
        assert len(record.prompt_token_ids) == row.prompt_token_count
        assert extra["staging_keys"] == [row.staging_key]


async def test_a_row_of_a_held_call_is_not_in_the_checkpoint(autojump_clock: object) -> None:
    """POL-3, I16: its tokens are staged, its reply has not left."""
    world = World()
    async with open_policy(world, cuts=False) as policy:
        await policy.ask_at_once(R, chat("a"))
        caller, live = await policy.begin_live(R, chat("b"))
        await policy.prepare()
        live.finish.set()
        await wait_all_tasks_blocked()
        assert len(world.store.keys()) == 2
        extra = (await policy.commit(episodes=(R,))).extra
        assert len(policy.records()["r"].rows) == 1
        assert len(extra["staging_keys"]) == 1
        await policy.resume()
        await caller.ended.wait()
        await policy.checkpoint(R, name="c2", directory="d2")
        assert len(policy.records("d2")["r"].rows) == 2


async def test_a_reply_that_did_not_leave_whole_was_not_delivered(autojump_clock: object) -> None:
    """I16: the caller left while it was being sent."""
    async with open_policy(World()) as policy:
        policy.backend.at_once = True
        reply = await policy.policy.call(R, chat("a"))
        reply.done(False)
        await policy.checkpoint(R)
        assert policy.records() == {}


async def test_the_replacement_goes_on_in_the_restored_ledger(autojump_clock: object) -> None:
    """POL-3, ID-3: its call finds its parent; each row keeps the key it was staged under."""
    world = World()
    async with open_policy(world) as policy:
        first = text_of(await policy.ask_at_once(R, chat("a")))
        await policy.checkpoint(R)
        await policy.resume()
        await policy.ask_at_once(R, chat("a", first, "after the checkpoint"))
    async with open_policy(world) as policy:
        restored = await policy.restore(R)
        assert restored.restored == ("r-a1",)
        await policy.resume("x1")
        await policy.ask_at_once(R1, chat("a", first, "b"))
        extra = await policy.checkpoint(R1, name="c2", directory="d2")
        old, new = policy.records("d2")["r-a1"].rows
        assert new.parent_call_id == old.model_call_id
        assert (old.staged_under, new.staged_under) == ("r", "r-a1")
        assert extra["staging_keys_by_episode"] == {
            "r-a1": sorted([old.staging_key, new.staging_key])
        }
        assert await is_readable(world, extra["staging_keys"])


async def test_a_chain_of_restores_keeps_every_row(autojump_clock: object) -> None:
    """I8, I9: also of an attempt that never called before the next crash."""
    world = World()
    async with open_policy(world) as policy:
        first = text_of(await policy.ask_at_once(R, chat("a")))
        await policy.checkpoint(R)
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        await policy.checkpoint(R1, directory="d1")
    async with open_policy(world) as policy:
        await policy.restore(R1, directory="d1")
        await policy.resume("x1")
        await policy.ask_at_once(R2, chat("a", first, "b"))
        await policy.checkpoint(R2, directory="d2")
        rows = policy.records("d2")["r-a2"].rows
        assert [row.staged_under for row in rows] == ["r", "r-a2"]


async def test_the_same_checkpoint_restored_again_has_only_its_rows(
    autojump_clock: object,
) -> None:
    """I9: what the first replacement called, and staged, does not change the second."""
    world = World()
    async with open_policy(world) as policy:
        first = text_of(await policy.ask_at_once(R, chat("a")))
        await policy.checkpoint(R)
    for directory in ("d1", "d2"):
        async with open_policy(world) as policy:
            await policy.restore(R)
            await policy.resume("x1")
            await policy.checkpoint(R1, directory=directory)
            await policy.resume()
            await policy.ask_at_once(R1, chat("a", first, "b"))
    assert len(policy.records("d1")["r-a1"].rows) == 1
    assert policy.records("d1") == policy.records("d2")


async def test_the_same_cut_is_continued_after_every_restore_of_its_checkpoint(
    autojump_clock: object,
) -> None:
    """I9, CUT-4: the replacement of the first has used it up, and went on; the next one finds its
    parent and the prefix as they were."""
    world = World()
    async with open_policy(world) as policy:
        first = text_of(await policy.ask_at_once(R, chat("a")))
        _, live = await policy.begin_live(R, chat("a", first, "b"))
        live.emit(7)
        await policy.checkpoint(R)
    for directory in ("d1", "d2", "d3"):
        async with open_policy(world) as policy:
            await policy.restore(R)
            await policy.resume("x1")
            second = text_of(await policy.ask_at_once(R1, chat("a", first, "b")))
            assert policy.backend.calls[-1].generated == 13
            await policy.ask_at_once(R1, chat("a", first, "b", second, "c"))
            extra = await policy.checkpoint(R1, directory=directory)
            rows = policy.records(directory)["r-a1"].rows
            assert [row.staged_under for row in rows] == ["r", "r-a1", "r-a1"]
            assert [row.parent_call_id for row in rows[1:]] == [
                row.model_call_id for row in rows[:2]
            ]
            assert len(extra["staging_keys"]) == 3
            assert await is_readable(world, extra["staging_keys"])


async def test_the_ledger_of_a_superseded_or_retired_attempt_is_not_read(
    autojump_clock: object,
) -> None:
    """POL-7: it says that it is refused, not that there were no calls."""
    world = World()
    async with open_policy(world) as policy:
        for attempt in range(3):
            await policy.ask_at_once(episode("r", attempt), chat("a"))
        await policy.checkpoint(R2)
        await policy.retire(R1)
        for e in (R, R1):
            with pytest.raises(StaleAttempt):
                policy.policy.rows(e)
        assert len(policy.policy.rows(R2)) == 1
    async with open_policy(world) as policy:
        await policy.restore(R2)
        with pytest.raises(StaleAttempt):
            policy.policy.rows(R2)
        assert len(policy.policy.rows(episode("r", 3))) == 1


async def test_the_old_attempt_is_refused_from_the_restore_on(autojump_clock: object) -> None:
    """I11, CTL-5: also of an episode that had no record."""
    world = World()
    async with open_policy(world) as policy:
        await policy.checkpoint(R)
        assert policy.records() == {}
    async with open_policy(world) as policy:
        await policy.restore(R)
        caller = policy.begin(R, chat("a"))
        await caller.ended.wait()
        assert caller.error.code == "stale_attempt"


async def test_an_episode_without_calls_is_in_the_checkpoint(autojump_clock: object) -> None:
    """CTL-13: it needs no record, and is not missing; one that was retired is."""
    async with open_policy(World()) as policy:
        await policy.retire(episode("gone"))
        await policy.prepare()
        reply = await policy.commit(episodes=(R, episode("gone")))
        assert reply.episode_ids == ("r",)


async def test_a_commit_frees_restored_episodes_it_leaves_out_unless_they_began(
    autojump_clock: object,
) -> None:
    """CTL-13, I19: freed without a refusal; a replacement that has called keeps its ledger."""
    world = World()
    s = episode("s")
    async with open_policy(world) as policy:
        for e in (R, s):
            await policy.ask_at_once(e, chat("a"))
        await policy.checkpoint(R, s)
    async with open_policy(world) as policy:
        await policy.restore(R, s)
        await policy.resume("x1")
        await policy.ask_at_once(R1, chat("b"))
        await policy.checkpoint(directory="d1")
        await policy.resume()
        await policy.checkpoint(R1, episode("s", 1), name="c2", directory="d2")
        await policy.resume("c2")
        assert {key: len(r.rows) for key, r in policy.records("d2").items()} == {"r-a1": 2}
        reply = await policy.ask_at_once(episode("s", 1), chat("a"))
        assert reply.status == 200


async def test_retire_frees_the_ledger_of_this_and_earlier_attempts(
    autojump_clock: object,
) -> None:
    """CTL-12, I34: not that of later ones."""
    async with open_policy(World()) as policy:
        for attempt in range(3):
            await policy.ask_at_once(episode("r", attempt), chat("a"))
        await policy.retire(R1)
        # Without the marks, what were still there would be exported.
        policy.policy.admission.fences.forget([R.rollout_id])
        await policy.checkpoint(R, R1, R2)
        assert list(policy.records()) == ["r-a2"]


async def test_forgetting_a_rollout_frees_what_is_kept_of_it(autojump_clock: object) -> None:
    """CTL-12, I34: finished for good, also where nothing was retired."""
    async with open_policy(World()) as policy:
        for e in (R, R1, episode("s")):
            await policy.ask_at_once(e, chat("a"))
        policy.policy.forget([R.rollout_id])
        await policy.checkpoint(R, R1, episode("s"))
        assert list(policy.records()) == ["s"]


async def test_a_second_restore_over_unclaimed_state_is_refused(autojump_clock: object) -> None:
    """CTL-14: it would mix two checkpoints."""
    world = World()
    async with open_policy(world) as policy:
        await policy.ask_at_once(R, chat("a"))
        await policy.checkpoint(R)
    async with open_policy(world) as policy:
        await policy.restore(R)
        await policy.resume("x1")
        with pytest.raises(InvalidPhase, match="wait for their calls"):
            await policy.restore(R, name="x2")
        await policy.retire(R1)
        with pytest.raises(StaleAttempt, match="r-a1"):
            await policy.restore(R, name="x2")
        await policy.forget("r")
        await policy.restore(R, name="x2")


async def test_of_two_attempts_in_a_checkpoint_the_later_one_continues(
    autojump_clock: object,
) -> None:
    """ID-3, I11: the replacement of the earlier is the attempt that the later one supersedes."""
    world = World()
    async with open_policy(world) as policy:
        for e in (R, R1):
            await policy.ask_at_once(e, chat("a"))
        _, live = await policy.begin_live(R, chat("b"))
        live.emit(3)
        await policy.checkpoint(R, R1)
    async with open_policy(world) as policy:
        with pytest.raises(InvalidRequest, match="r and r-a1 are attempts of one rollout"):
            await policy.restore(R, R1)
        await policy.restore(R1)
        assert policy.restored_cuts == []
        await policy.resume("x1")
        await policy.prepare()
        reply = await policy.commit(episodes=(R1, R2), directory="d1")
        assert reply.episode_ids == ("r-a2",)
        assert list(policy.records("d1")) == ["r-a2"]
        assert policy.policy.unclaimed_outside(frozenset()) == [R2]


async def test_a_rollout_with_a_call_under_way_is_not_forgotten(autojump_clock: object) -> None:
    """CTL-12: also when nothing of it was retired; its ledger stays."""
    async with open_policy(World()) as policy:
        await policy.ask_at_once(R, chat("a"))
        await policy.begin_live(R, chat("b"))
        with pytest.raises(RetireIncomplete, match="r"):
            await policy.forget("r")
        await policy.checkpoint(R)
        assert list(policy.records()) == ["r"]


async def test_a_record_outside_the_scope_is_refused(autojump_clock: object) -> None:
    """I19."""
    async with open_policy(World()) as policy:
        record = make_record(R, PolicyRecord())
        with pytest.raises(InvalidCheckpointState, match="r is not in the scope"):
            await policy.policy.install([record], [episode("s")])


@pytest.mark.parametrize("what", ["twice", "orphan", "not a record"])
async def test_a_record_that_does_not_hold_together_installs_nothing(
    what: str, autojump_clock: object
) -> None:
    """I23, CTL-14: the detail names the episode, nothing is fenced, the server serves."""
    world = World()
    s = episode("s")
    async with open_policy(world) as policy:
        for e in (R, s):
            await policy.ask_at_once(e, chat("a"))
        await policy.checkpoint(R, s)
        record = policy.records()["s"]
    (row,) = record.rows
    wrong = {
        "twice": attrs.evolve(record, rows=(row, row)),
        "orphan": attrs.evolve(record, rows=(attrs.evolve(row, parent_call_id="nobody"),)),
        "not a record": row,
    }[what]
    where, part = next(iter(world.archive.parts.items()))
    world.archive.parts[where] = attrs.evolve(
        part, records=(part.records[0], make_record(s, wrong))
    )
    async with open_policy(world) as policy:
        with pytest.raises(InvalidCheckpointState, match="s"):
            await policy.restore(R, s)
        assert policy.phase == "idle"
        assert (await policy.ask_at_once(R, chat("a"))).status == 200


async def test_two_participants_in_one_process_share_nothing(autojump_clock: object) -> None:
    """POL-4."""
    world = World()
    async with open_policy(world, instance="one") as one, open_policy(world, instance="two") as two:
        first = text_of(await one.ask_at_once(R, chat("a")))
        await two.ask_at_once(R, chat("a", first, "b"))
        await one.prepare()
        assert (await two.ask_at_once(R, chat("c"))).status == 200
        await one.commit(episodes=(R,))
        await one.resume()
        await two.checkpoint(R)
        assert len(one.records()["r"].rows) == 1
        assert [row.parent_call_id for row in two.records()["r"].rows] == [None, None]


async def test_a_foreign_backend_is_served_without_extension(autojump_clock: object) -> None:
    """POL-1: rows without tokens, an error for a caller that needs them, its tokens if it has some."""
    world = World()
    world.backend.native = world.backend.gives_tokens = False
    async with open_policy(world) as policy:
        await policy.ask_at_once(R, chat("a"))
        wanting = PolicyCall(route=Route.CHAT, body=chat("a").body, capture_tokens=True)
        caller, live = await policy.begin_live(R, wanting)
        live.finish.set()
        await caller.ended.wait()
        assert caller.error.code == "backend_failed"
        policy.backend.gives_tokens = True
        await policy.ask_at_once(R, wanting)
        extra = await policy.checkpoint(R)
        without, with_tokens = policy.records()["r"].rows
        assert without.staging_key is None
        assert extra["staging_keys"] == [with_tokens.staging_key]
