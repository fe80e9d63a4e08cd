"""A gate with episodes behind it, closed and opened as a participant does: in one instant."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio
from trio.testing import wait_all_tasks_blocked

from gymtrio.episodes.admission import Admission
from gymtrio.episodes.episode import Episode, Episodes
from gymtrio.episodes.signal import Signal
from gymtrio.errors import GymtrioError
from gymtrio.ids import EpisodeId


class Gated:
    """`Admission` and `Episodes` of one server."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.admission = Admission()
        self.changed = Signal()
        self.episodes = Episodes(self.admission, self.changed)

    def close(self) -> None:
        self.admission.close()
        self.episodes.close()

    def open(self) -> None:
        self.admission.open()
        self.episodes.open()

    async def start(
        self,
        episode_id: EpisodeId,
        body: Callable[[Episode], Awaitable[object]],
        *,
        boundary: object = None,
        timeout_s: float | None = None,
    ) -> list[object]:
        """Run an episode in the background; its result or error appears in the list."""

        async def run() -> object:
            return await self.episodes.run(episode_id, body, boundary=boundary, timeout_s=timeout_s)

        return await begin(self.nursery, run)

    def only(self) -> Episode:
        (episode,) = self.episodes.live.values()
        return episode


async def begin(nursery: trio.Nursery, call: Callable[[], Awaitable[object]]) -> list[object]:
    """Start a call that is going to wait; its answer or error appears in the list."""
    answers: list[object] = []

    async def run() -> None:
        try:
            answers.append(await call())
        except GymtrioError as error:
            answers.append(error)

    nursery.start_soon(run)
    await wait_all_tasks_blocked()
    return answers


@asynccontextmanager
async def open_gated() -> AsyncIterator[Gated]:
    """Leaving the block cancels what still runs."""
    async with trio.open_nursery() as nursery:
        gated = Gated(nursery)
        nursery.start_soon(gated.admission.run)
        yield gated
        nursery.cancel_scope.cancel()
