"""Whatever comes in whatever order: the counters are right, and nothing is left over."""

from __future__ import annotations

from typing import Final

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.episodes.episode import StepMode
from gymtrio.participants.resources import Mode
from tests.helpers.memory_archive import Door
from tests.helpers.plane import episode
from tests.participants.resources.harness import Caller, Resources, open_resources, shut_door

REQUESTS: Final = ("seed", "increment", "verify", "close")
STEPS: Final = st.lists(
    st.tuples(
        st.sampled_from((*REQUESTS, "leave", "go on", "prepare", "commit", "resume", "retire")),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=40,
)


class Play:
    """Takes steps, and looks at everything after each."""

    def __init__(self, plane: Resources) -> None:
        self.plane = plane
        self.callers: list[Caller] = []
        self.doors: list[Door] = []
        self.checkpoint = 0
        self.attempts = [0, 0]

    async def take(self, name: str, number: int, held: bool) -> None:
        plane, rollout = self.plane, number % 2
        attempt = self.attempts[rollout]
        owner = episode(f"r{rollout}", attempt)
        if name in REQUESTS:
            args = {}
            if held and name != "close":
                self.doors.append(shut_door())
                args["door"] = self.doors[-1]
            call = getattr(plane, name)
            self.callers.append(plane.begin(call, f"s{number}-{attempt}", owner, **args))
        elif name == "leave" and self.callers:
            self.callers.pop(number % len(self.callers)).leave()
        elif name == "go on" and self.doors:
            self.doors.pop(number % len(self.doors)).let_go()
        elif name == "prepare":
            plane.begin(plane.prepare, f"c{self.checkpoint}", 1)
        elif name == "commit" and plane.phase == "prepared":
            scope = None if held else (owner,)
            await plane.commit(f"c{self.checkpoint}", scope, f"c{self.checkpoint}")
        elif name == "resume":
            await plane.resume(f"c{self.checkpoint}")
            self.checkpoint += 1
        elif name == "retire":
            plane.begin(plane.retire, owner)
            self.attempts[rollout] += 1
        await wait_all_tasks_blocked()
        self.look()

    def look(self) -> None:
        desk, keeper = self.plane.resources._desk, self.plane.resources._keeper
        assert desk.tickets.blocking == sum(t.blocks for t in desk.tickets._all)
        assert keeper.sessions.blocking == sum(map(keeper.sessions._blocks, keeper.sessions))
        tracked = {session.session_id for session in keeper.sessions}
        assert set(self.plane.server.counts) <= tracked, "the server holds what nobody can retire"
        assert set(keeper.ended) <= tracked
        assert self.plane.resources.ready() == self.plane.resources.report().ready

    async def finish(self) -> None:
        plane = self.plane
        for door in self.doors:
            door.let_go()
        await plane.resume(f"c{self.checkpoint}")
        await plane.retire(episode("r0", 99), episode("r1", 99))
        await wait_all_tasks_blocked()
        assert all(caller.ended.is_set() for caller in self.callers)
        assert plane.server.counts == {}
        assert {name: count for name, count in plane.counts.items() if count} == {}
        await plane.forget("r0", "r1")
        assert plane.extra["retired_sessions"] == plane.extra["restored_pending_count"] == 0
        assert plane.control.status().retired_rollouts == 0
        assert (await plane.prepare("last")).phase == "prepared"


@given(
    steps=STEPS,
    mode=st.sampled_from([Mode.EXPORTED, Mode.RESTART_ONLY]),
    verify=st.sampled_from(StepMode),
)
def test_no_order_of_things_leaves_anything_behind(
    steps: list[tuple[str, int, bool]], mode: Mode, verify: StepMode
) -> None:
    """I34, I29: sessions, requests and marks are gone when every attempt was retired."""

    async def run() -> None:
        async with open_resources(mode=mode, verify=verify) as plane:
            play = Play(plane)
            for step in steps:
                await play.take(*step)
            await play.finish()

    trio.run(run, clock=MockClock(autojump_threshold=0))
