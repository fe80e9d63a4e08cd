"""Every operation in every situation, by whoever may ask: what is answered, and what holds then.

The tables below are the expectation. A row is a situation, a column an operation, a cell the answer:

- `prepared`, `preparing`, `committed`, `restored`: the phase in the reply
- `renewed`, `retired`, `forgotten`; `resumed`, or `again` when nothing was open for that id
- `phase`, `conflict`, `stale`, `deadline`, `state`, `request`: refused, by the code of that name
- `~`: the answer comes when the deadline of the call does; every other one comes at once
- `> phase`: in which phase the server is then; without it nothing has changed at all
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.checkpoint.dispatch import perform
from gymtrio.errors import CheckpointError, InvalidCheckpointState, Refusal
from gymtrio.wire.control import REQUESTS, ResumeReply
from tests.helpers.gated import begin
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.plane import Plane, episode, open_plane

OPERATIONS: Final = ("prepare", "renew", "commit", "restore", "resume", "retire", "forget")

SAME = """
            prepare              renew    commit                 restore              resume          retire                forget
idle        prepared > prepared  phase    phase                  restored > restored  again           retired               forgotten
waiting     ~preparing           renewed  phase                  phase                resumed > idle  retired > prepared    forgotten
missed      ~preparing           renewed  phase                  phase                resumed > idle  retired               forgotten
prepared    prepared             renewed  committed > committed  phase                resumed > idle  retired               forgotten
exporting   prepared             renewed  ~deadline              phase                resumed > idle  retired               forgotten
writing     prepared             renewed  ~deadline              phase                resumed > idle  retired               forgotten
publishing  prepared             renewed  ~deadline              phase                ~deadline       retired               forgotten
failed      prepared             renewed  state                  phase                resumed > idle  retired               forgotten
committed   committed            renewed  committed              phase                resumed > idle  retired               forgotten
restoring   phase                renewed  phase                  ~deadline            resumed > idle  ~deadline             forgotten
restored    phase                renewed  phase                  restored             resumed > idle  retired               forgotten
awaiting    phase                phase    phase                  restored > restored  phase           phase                 phase
recovering  phase                renewed  phase                  ~deadline            resumed > idle  phase                 phase
recovered   phase                renewed  phase                  restored             resumed > idle  retired               forgotten
"""  # noqa: E501
"""The checkpoint that is open, asked for by the controller that holds it; or the first one to come."""

OTHER_ID = """
            prepare              renew     commit    restore              resume    retire              forget
idle        prepared > prepared  phase     phase     restored > restored  again     retired             forgotten
waiting     conflict             conflict  conflict  conflict             conflict  retired > prepared  forgotten
missed      conflict             conflict  conflict  conflict             conflict  retired             forgotten
prepared    conflict             conflict  conflict  conflict             conflict  retired             forgotten
exporting   conflict             conflict  conflict  conflict             conflict  retired             forgotten
writing     conflict             conflict  conflict  conflict             conflict  retired             forgotten
publishing  conflict             conflict  conflict  conflict             conflict  retired             forgotten
failed      conflict             conflict  conflict  conflict             conflict  retired             forgotten
committed   conflict             conflict  conflict  conflict             conflict  retired             forgotten
restoring   conflict             conflict  conflict  conflict             conflict  ~deadline           forgotten
restored    conflict             conflict  conflict  conflict             conflict  retired             forgotten
awaiting    phase                phase     phase     restored > restored  phase     phase               phase
recovering  phase                conflict  conflict  conflict             conflict  phase               phase
recovered   conflict             conflict  conflict  conflict             conflict  retired             forgotten
"""  # noqa: E501
"""Another checkpoint of the same controller; and, the same table, the same checkpoint asked for by
another controller or by one that names none."""

STALE = """
            prepare  renew  commit  restore  resume    retire              forget
idle        stale    stale  stale   stale    again     retired             forgotten
waiting     stale    stale  stale   stale    again     retired > prepared  forgotten
missed      stale    stale  stale   stale    again     retired             forgotten
prepared    stale    stale  stale   stale    again     retired             forgotten
exporting   stale    stale  stale   stale    again     retired             forgotten
writing     stale    stale  stale   stale    again     retired             forgotten
publishing  stale    stale  stale   stale    again     retired             forgotten
failed      stale    stale  stale   stale    again     retired             forgotten
committed   stale    stale  stale   stale    again     retired             forgotten
restoring   stale    stale  stale   stale    again     ~deadline           forgotten
restored    stale    stale  stale   stale    again     retired             forgotten
awaiting    phase    stale  stale   stale    again     phase               phase
recovering  phase    stale  stale   stale    again     phase               phase
recovered   stale    stale  stale   stale    again     retired             forgotten
"""
"""A checkpoint that was resumed here before."""

REFUSED_AT_ONCE = "\n".join(
    [
        f"    {'  '.join(OPERATIONS)}",
        *(
            f"{line.split()[0]}  " + "  ".join(["{code}"] * len(OPERATIONS))
            for line in SAME.strip().splitlines()[1:]
        ),
    ]
)

ASKED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "same": (SAME, {}),
    "other id": (OTHER_ID, {"checkpoint_id": "c2"}),
    "other nonce": (OTHER_ID, {"controller_nonce": "b"}),
    "no nonce": (OTHER_ID, {"controller_nonce": None}),
    "stale id": (STALE, {"checkpoint_id": "c0"}),
    "past deadline": (REFUSED_AT_ONCE.replace("{code}", "deadline"), {"ahead_s": 0.0}),
    "deadline tomorrow": (REFUSED_AT_ONCE.replace("{code}", "request"), {"ahead_s": 86_401.0}),
}
"""Who asks, the table, and in what that call differs from the holder's."""

CODES: Final = {
    "phase": "invalid_phase",
    "conflict": "checkpoint_conflict",
    "stale": "stale_checkpoint",
    "deadline": "deadline_exceeded",
    "state": "invalid_checkpoint_state",
    "request": "invalid_request",
}
NAMES: Final = {code: name for name, code in CODES.items()}
BODIES: Final[dict[str, dict[str, Any]]] = {
    "commit": {"checkpoint_dir": "d1"},
    "restore": {"checkpoint_dir": "d0", "episode_ids": (episode("r0"),)},
    "retire": {"episode_ids": (episode("r1"),)},
    "forget": {"rollout_ids": ("r9",)},
}
PREPARING: Final = ("waiting", "missed")
COMMITTING: Final = ("exporting", "writing", "publishing", "failed", "committed")
RECOVERS: Final = ("awaiting", "recovering", "recovered")


def rows(table: str) -> dict[str, dict[str, str]]:
    """Situation to operation to cell."""
    head, *lines = (re.split(r"\s{2,}", line.strip()) for line in table.strip().splitlines())
    assert tuple(head) == OPERATIONS
    return {name: dict(zip(OPERATIONS, cells, strict=True)) for name, *cells in lines}


CELLS: Final = [
    (asked, situation) for asked, (table, _) in ASKED.items() for situation in rows(table)
]


async def ask(
    plane: Plane,
    operation: str,
    *,
    checkpoint_id: str = "c1",
    controller_nonce: str | None = "a",
    ahead_s: float = 1.0,
) -> object:
    request = REQUESTS[operation](
        checkpoint_id=checkpoint_id,
        controller_nonce=controller_nonce,
        deadline_ts=plane.clock.now_s() + ahead_s,
        **BODIES.get(operation, {}),
    )
    return await perform(plane.control, operation, request)


async def archive_with_r0() -> MemoryArchive:
    archive = MemoryArchive()
    async with open_plane(archive=archive) as plane:
        plane.participant.parked[episode("r0")] = "note"
        await plane.prepare()
        await plane.commit(directory="d0")
    return archive


@asynccontextmanager
async def in_situation(name: str) -> AsyncIterator[Plane]:
    """A server in one of the situations; c0 was resumed there before."""
    archive = await archive_with_r0()
    async with (
        open_plane(archive=archive, recover=name in RECOVERS) as plane,
        trio.open_nursery() as calls,
    ):

        async def start(operation: str) -> None:
            # It may be refused later, by what the test does.
            await begin(calls, lambda: ask(plane, operation, ahead_s=1000.0))

        participant = plane.participant
        await fence_c0(plane, recovers=name in RECOVERS)
        if name in PREPARING:
            participant.running.add(episode("r1"))
        if name == "waiting":
            await start("prepare")
        elif name == "missed":
            await ask(plane, "prepare")
        elif name == "prepared" or name in COMMITTING:
            await start("prepare")
        if name in COMMITTING:
            doors = {
                "exporting": participant.exporting,
                "writing": archive.writing,
                "publishing": archive.publishing,
            }
            if name in doors:
                doors[name].shut()
            archive.failure = InvalidCheckpointState("full") if name == "failed" else None
            await start("commit")
            archive.failure = None
        elif name in ("restoring", "recovering"):
            participant.installing.shut()
            await start("restore")
        elif name in ("restored", "recovered"):
            await start("restore")
        yield plane
        calls.cancel_scope.cancel()
        if name == "publishing":
            # What has begun to be published is finished, whoever leaves.
            archive.publishing.let_go()


async def fence_c0(plane: Plane, *, recovers: bool) -> None:
    if not recovers:
        await ask(plane, "resume", checkpoint_id="c0")
        return
    # A server that waits to be restored remembers none but of its own restore (HARD-6).
    plane.participant.installing.shut()
    with pytest.raises(CheckpointError):
        await ask(plane, "restore", checkpoint_id="c0")
    await ask(plane, "resume", checkpoint_id="c0")
    plane.participant.installing.let_go()


def state(plane: Plane) -> dict[str, object]:
    """Everything that an operation may change, but the lease."""
    status = plane.control.status()
    participant = plane.participant
    return {
        "phase": status.phase,
        "open": status.checkpoint_id,
        "awaiting": status.awaiting_restore,
        "closed": participant.admission.closed,
        "marks": status.retired_rollouts,
        "running": frozenset(participant.running),
        "restored": participant.restored.waiting(),
        "exports": participant.exports,
        "writes": plane.archive.writes,
        "published": sorted(plane.archive.parts),
        "tasks": trio.lowlevel.current_statistics().tasks_living,
    }


def answer_of(reply: object) -> str:
    if isinstance(reply, Refusal):
        return NAMES[reply.code]
    if isinstance(reply, ResumeReply):
        assert reply.phase == "idle"
        return "again" if reply.idempotent else "resumed"
    for field, answer in (
        ("lease_expires_at", "renewed"),
        ("retired", "retired"),
        ("forgotten", "forgotten"),
    ):
        if hasattr(reply, field):
            return answer
    phase = getattr(reply, "phase")  # noqa: B009 - the replies that are left all have one
    assert isinstance(phase, str)
    return phase


async def seen(situation: str, operation: str, asked: dict[str, Any]) -> str:
    """Ask once, in a fresh server, and say what happened in the words of the tables."""
    async with in_situation(situation) as plane:
        before, asked_at = state(plane), trio.current_time()
        try:
            reply: object = await ask(plane, operation, **asked)
        except Refusal as refusal:
            reply = refusal
        waited_s = trio.current_time() - asked_at
        assert waited_s in (0.0, 1.0)
        await wait_all_tasks_blocked()
        after = state(plane)
        assert after["closed"] is bool(after["open"] is not None or after["awaiting"])
        cell = ("~" if waited_s else "") + answer_of(reply)
        if after["phase"] != before["phase"] or after["open"] != before["open"]:
            cell += f" > {after['phase']}"
        elif operation == "retire":
            assert {**after, "marks": 0, "running": 0, "tasks": 0} == {
                **before,
                "marks": 0,
                "running": 0,
                "tasks": 0,
            }
        else:
            assert after == before
        return cell


@pytest.mark.parametrize(("asked", "situation"), CELLS)
async def test_every_cell(asked: str, situation: str, autojump_clock: MockClock) -> None:
    """CTL-3, CTL-4, CTL-6, CTL-7, CTL-8, CTL-12, HARD-5, HARD-6, HARD-12, I12, I13: see the tables."""
    table, differs = ASKED[asked]
    found = {operation: await seen(situation, operation, differs) for operation in OPERATIONS}
    assert found == rows(table)[situation]


@pytest.mark.parametrize("situation", rows(SAME))
async def test_status_answers_in_every_situation(situation: str, autojump_clock: MockClock) -> None:
    """CTL-15: at once, and it changes nothing."""
    says = {
        "idle": "idle",
        "waiting": "preparing c1",
        "missed": "preparing c1",
        "committed": "committed c1",
        "restoring": "idle c1",
        "restored": "restored c1",
        "awaiting": "idle awaiting",
        "recovering": "idle c1 awaiting",
        "recovered": "restored c1",
    }
    async with in_situation(situation) as plane:
        before = state(plane)
        status = plane.control.status()
        words = [
            status.phase,
            status.checkpoint_id,
            "awaiting" if status.awaiting_restore else None,
        ]
        assert " ".join(filter(None, words)) == says.get(situation, "prepared c1")
        assert (status.lease_expires_at is None) is (status.checkpoint_id is None)
        assert state(plane) == before


def test_the_tables_have_every_situation() -> None:
    for table, _ in ASKED.values():
        assert list(rows(table)) == list(rows(SAME))
