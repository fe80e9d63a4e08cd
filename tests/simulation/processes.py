"""Simulated processes: incarnations that can be killed between any two steps.

A kill is a dead flag, an exception and a cancellation, in one instant. Cancellation alone would not do:
`finally` blocks and shielded scopes still run, as ghosts. So every port of a process (network, disk,
token store) asks `check` first, and a ghost gets `ProcessDied` instead of an effect.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import trio

from tests.helpers.page_cache import PowerLost

CURRENT: Final[contextvars.ContextVar[Process | None]] = contextvars.ContextVar(
    "simulated process", default=None
)
"""Whose request a task serves."""


class ProcessDied(PowerLost):
    """Not an `Exception`: nothing of the code under test may handle its own death."""


class Process:
    """One incarnation."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.alive = True
        self.stopped_until = 0.0
        """Stopped by a signal until then, as seen from outside: nothing leaves it or reaches it."""
        self.ended = trio.Event()
        """Nothing of it runs any more, not even as a ghost."""
        self.panic: BaseException | None = None
        """What ended it, if that was not a kill."""
        self._nursery: trio.Nursery | None = None
        self._on_death: list[Callable[[], None]] = []

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"

    def check(self) -> None:
        """
        Raises:
            ProcessDied: whoever asks is a ghost.
        """
        if not self.alive:
            raise ProcessDied(str(self))

    async def running(self) -> None:
        """Wait out a stop.

        Raises:
            ProcessDied: whoever asks is a ghost.
        """
        self.check()
        while trio.current_time() < self.stopped_until:
            await trio.sleep_until(self.stopped_until)
            self.check()

    def spawn(self, work: Callable[..., Awaitable[object]], *args: object, name: str) -> None:
        """Start a task of this process."""
        self.check()
        assert self._nursery is not None
        contextvars.Context().run(self._nursery.start_soon, work, *args, name=f"{self}: {name}")

    def on_death(self, release: Callable[[], None]) -> None:
        """What the kernel does when the process is gone, such as closing its files."""
        self._on_death.append(release)

    def _die(self) -> None:
        if self.alive:
            self.alive = False
            for release in self._on_death:
                release()

    async def live(
        self,
        main: Callable[[Process], Awaitable[object]],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run until `main` ends or a kill; what it raises is its panic."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                self.spawn(main, self, name="main")
        except BaseException as error:  # noqa: BLE001 - a process dies alone
            rest = _without_kill(error)
            if self.alive and rest is not None:
                self.panic = rest
        finally:
            self._die()
            self.ended.set()

    def tasks(self) -> list[str]:
        """Names of what runs in it."""
        return [] if self._nursery is None else [task.name for task in _tasks(self._nursery)]

    def kill(self) -> None:
        """kill -9; takes effect at once."""
        self._die()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()
            for task in _tasks(self._nursery):
                _wake(task)

    async def bury(self) -> None:
        """Wait until the ghosts of a killed process are gone, those behind shields included."""
        while not self.ended.is_set():
            self.kill()
            with trio.move_on_after(0.01):
                await self.ended.wait()


def _without_kill(error: BaseException) -> BaseException | None:
    if isinstance(error, BaseExceptionGroup):
        return error.split((trio.Cancelled, PowerLost))[1]
    return None if isinstance(error, trio.Cancelled | PowerLost) else error


def _tasks(nursery: trio.Nursery) -> Iterator[trio.lowlevel.Task]:
    # The set of child tasks is ordered by address; the counter is the order of birth.
    for task in sorted(nursery.child_tasks, key=lambda task: task._counter):
        yield task
        for child in task.child_nurseries:
            yield from _tasks(child)


def _wake(task: Any) -> None:
    """Wake a waiting task with `ProcessDied`: a shield holds off a cancellation, not a kill."""

    def raise_died() -> None:
        raise ProcessDied

    if task._abort_func is not None:
        task._attempt_abort(raise_died)


class Processes:
    """All of a run: one live incarnation of each name, twins apart (HARD-10)."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._latest: dict[str, Process] = {}

    def get(self, name: str) -> Process | None:
        process = self._latest.get(name)
        return process if process is not None and process.alive else None

    async def start(self, name: str, main: Callable[[Process], Awaitable[object]]) -> Process:
        """Start the next incarnation, once nothing of the former one is left."""
        former = self._latest.get(name)
        if former is not None:
            await former.bury()
        process = Process(name, 1 if former is None else former.incarnation + 1)
        self._latest[name] = process
        await self._nursery.start(process.live, main, name=str(process))
        return process

    async def start_twin(
        self, name: str, main: Callable[[Process], Awaitable[object]]
    ) -> Process | None:
        """Start a second incarnation beside the live one; None: there is none."""
        live = self.get(name)
        if live is None:
            return None
        twin = Process(name, live.incarnation + 1000)
        await self._nursery.start(twin.live, main, name=str(twin))
        return twin

    def all(self) -> list[Process]:
        """The latest incarnation of each, in order of their first start."""
        return list(self._latest.values())

    def kill(self, name: str) -> Process | None:
        """Kill the live incarnation; None: there is none."""
        process = self.get(name)
        if process is not None:
            process.kill()
        return process

    def died(self) -> list[tuple[str, BaseException]]:
        """Processes that ended by an error of their own."""
        return [(str(p), p.panic) for p in self._latest.values() if p.panic is not None]
