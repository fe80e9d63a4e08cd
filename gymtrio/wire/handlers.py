"""The tasks in which a channel's calls are served.

A task whose call is done waits for the next one: making a task and its scope, and ending both, costs as
much as all else that a short call costs its callee. Rules:

- H1 A call has the task to itself, from the first step of its handler to the last.
- H2 The scope in which a call was cancelled serves no other, and cancelling a call that has ended
  touches nobody.
- H3 A call begins in a context (`contextvars`) of its own.
- H4 No more than `IDLE_TASKS_MAX` wait; whoever would be one more ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any, Final, TypeAlias

import outcome
import trio

from gymtrio.wire.calls_in import IncomingCall

_Abort: TypeAlias = Callable[[Any], trio.lowlevel.Abort]

IDLE_TASKS_MAX: Final = 64
"""What a batch of short calls needs at once; some 4 kB each."""


class HandlerTasks:
    """
    Args:
        nursery: owns the tasks; they end when it is cancelled.
        handler: serves one call.
        fail: told what a handler raised.
        end: told that a call has left its task; called once for each.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        handler: Callable[[IncomingCall], Awaitable[None]],
        fail: Callable[[IncomingCall, Exception], None],
        end: Callable[[IncomingCall], None],
    ) -> None:
        self._nursery = nursery
        self._handler = handler
        self._fail = fail
        self._end = end
        self._context = copy_context()
        self._idle: list[trio.lowlevel.Task] = []

    def start(self, call: IncomingCall) -> None:
        """Have a call served; its handler begins in a later turn of the loop."""
        if self._idle:
            trio.lowlevel.reschedule(self._idle.pop(), outcome.Value(call))
        else:
            self._nursery.start_soon(self._serve, call)

    async def _serve(self, first: IncomingCall) -> None:
        task = trio.lowlevel.current_task()

        def abort(raise_cancel: Any) -> trio.lowlevel.Abort:
            self._idle.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        call: IncomingCall | None = first
        while call is not None:
            call = await self._serve_some(call, task, abort)

    async def _serve_some(
        self, call: IncomingCall, task: trio.lowlevel.Task, abort: _Abort
    ) -> IncomingCall | None:
        """Serve calls until one needs another scope, and say which is next; None: none is."""
        try:
            with trio.CancelScope() as scope:
                while True:
                    call.enter(scope)
                    await self._handler(call)
                    if call.is_cancelled:
                        break
                    self._leave(call)
                    if not self._stand_by(task):
                        return None
                    call = await trio.lowlevel.wait_task_rescheduled(abort)
        except Exception as error:  # noqa: BLE001 - the edge: a handler's fault ends its own call
            self._fail(call, error)
        self._leave(call)
        if not self._stand_by(task):
            return None
        following: IncomingCall = await trio.lowlevel.wait_task_rescheduled(abort)
        return following

    def _leave(self, call: IncomingCall) -> None:
        call.leave()
        self._end(call)

    def _stand_by(self, task: trio.lowlevel.Task) -> bool:
        """Have the task that asks woken with the next call; False: there are enough who wait."""
        if len(self._idle) >= IDLE_TASKS_MAX:
            return False
        self._idle.append(task)
        # What the last handler set there is gone with the next step of this task.
        task.context = self._context.copy()
        return True
