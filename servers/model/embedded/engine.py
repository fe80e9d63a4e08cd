"""The engine as a trio owner: one task plans, one thread at a time decodes, callers wait.

```
open_engine
└─ nursery: the serving task     plans a step, hands it to a thread, applies the outcome, repeats
   caller's tasks: generate      wait for their call's end
```
The event loop is free while a step is computed. All state lives on the loop; the thread gets a step
and returns its samples. When the engine's block ends, the step under way is awaited, since it uses
native memory, and calls that are left are refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeAlias

import attrs
import trio

from gymtrio.errors import InvalidRequest, Unavailable
from servers.model.embedded.generation import Emission, Generated, Generation, GenerationRequest
from servers.model.embedded.llama import Runtime, open_runtime
from servers.model.embedded.sampling import Sampled
from servers.model.embedded.scheduler import Call, Scheduler
from servers.model.embedded.settings import EngineSettings
from servers.model.embedded.steps import Step
from servers.model.embedded.vocabulary import Vocabulary

Listener: TypeAlias = Callable[[Emission], None]
"""Told of what a call adds, on the event loop; returns at once and does not raise."""


@attrs.frozen
class EngineCounters:
    """For metrics."""

    waiting_calls: int = 0
    active_calls: int = 0
    steps: int = 0
    computed_tokens: int = 0
    """Of prompts and outputs."""
    sampled_tokens: int = 0


@attrs.define(eq=False)
class _Waiter:
    """A caller and its call."""

    call: Call
    listener: Listener | None
    ended: trio.Event = attrs.Factory(trio.Event)


class Engine:
    """Made by `open_engine`."""

    def __init__(self, runtime: Runtime, settings: EngineSettings) -> None:
        self._runtime = runtime
        self._settings = settings
        self._scheduler = Scheduler(settings)
        self._waiters: dict[str, _Waiter] = {}
        self._submitted = trio.Event()
        self._closed = False
        self._thread = trio.CapacityLimiter(1)
        self._counters = EngineCounters()

    @property
    def vocabulary(self) -> Vocabulary:
        return self._runtime.vocabulary

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and output of one call."""
        return self._settings.context_tokens

    @property
    def fingerprint(self) -> Mapping[str, str | int | bool]:
        """What results depend on besides the request: for the manifest of a checkpoint."""
        return self._runtime.fingerprint

    async def generate(
        self,
        call_id: str,
        request: GenerationRequest,
        listener: Listener | None = None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> Generated:
        """Generate, or continue `request`'s prefix, to the end.

        Args:
            call_id: names the call for `snapshot` while it lives.
            request: what to generate.
            listener: told of the restored prefix, if there is one, then of each token.
            task_status: started once the call is accepted; afterwards only the end of the engine
                refuses it.

        Raises:
            InvalidRequest: the request does not fit the model, or `call_id` is alive already.
            Unavailable: too many calls wait, or the engine ends.

        Cancelled: the call is forgotten, its slot free from the next step on.
        """
        await trio.lowlevel.checkpoint()
        generation = Generation(request, self.vocabulary, self._settings.context_tokens)
        if call_id in self._waiters:
            raise InvalidRequest(f"call {call_id!r} is being generated already")
        if generation.finish_reason is not None:
            _tell(listener, generation.restored)
            task_status.started()
            return generation.snapshot()
        waiter = _Waiter(Call(generation), listener)
        self._submit(call_id, waiter)
        try:
            task_status.started()
            await waiter.ended.wait()
        finally:
            del self._waiters[call_id]
            self._scheduler.withdraw(waiter.call)
        result = generation.snapshot()
        if result.finish_reason is None:
            raise Unavailable("the embedded engine has ended")
        return result

    def snapshot(self, call_id: str) -> Generated | None:
        """What a live call has generated so far, prefix included; it goes on meanwhile.

        Returns:
            None if no call of this id is alive. One that has just ended is, until its `generate`
            returns: then `finish_reason` says how.
        """
        waiter = self._waiters.get(call_id)
        return None if waiter is None else waiter.call.generation.snapshot()

    def counters(self) -> EngineCounters:
        return attrs.evolve(
            self._counters,
            waiting_calls=self._scheduler.waiting_calls,
            active_calls=self._scheduler.active_calls,
        )

    def _submit(self, call_id: str, waiter: _Waiter) -> None:
        if self._closed:
            raise Unavailable("the embedded engine has ended")
        self._scheduler.submit(waiter.call)
        self._waiters[call_id] = waiter
        if waiter.call.generation.restored.token_ids:
            _tell(waiter.listener, waiter.call.generation.restored)
        self._submitted.set()

    async def serve(self) -> None:
        """Step until cancelled; only `open_engine` calls this."""
        try:
            while True:
                step = self._scheduler.plan()
                if step is None:
                    self._submitted = trio.Event()
                    await self._submitted.wait()
                    continue
                samples = await trio.to_thread.run_sync(
                    self._runtime.run, step, limiter=self._thread
                )
                self._apply(step, samples)
        finally:
            self._closed = True
            for waiter in self._waiters.values():
                waiter.ended.set()

    def _apply(self, step: Step, samples: tuple[Sampled, ...]) -> None:
        waiters = {waiter.call: waiter for waiter in self._waiters.values()}
        for call, emission in self._scheduler.apply(step, samples):
            waiter = waiters[call]
            _tell(waiter.listener, emission)
            if emission.finish_reason is not None:
                waiter.ended.set()
        count = self._counters
        self._counters = attrs.evolve(
            count,
            steps=count.steps + 1,
            computed_tokens=count.computed_tokens + step.tokens,
            sampled_tokens=count.sampled_tokens + len(samples),
        )


@asynccontextmanager
async def open_engine(settings: EngineSettings) -> AsyncIterator[Engine]:
    """Load the model and serve calls inside the block; starting takes a second or two.

    The block is a nursery: what its body raises comes out in an exception group.

    Raises:
        HostError: package, weights or memory are missing; the message says what to do.
    """
    runtime = await trio.to_thread.run_sync(open_runtime, settings)
    try:
        async with trio.open_nursery() as nursery:
            engine = Engine(runtime, settings)
            nursery.start_soon(engine.serve)
            yield engine
            nursery.cancel_scope.cancel()
    finally:
        # No thread is in it: a step that is under way holds the nursery until it is done.
        runtime.close()


def _tell(listener: Listener | None, emission: Emission) -> None:
    if listener is not None:
        listener(emission)
