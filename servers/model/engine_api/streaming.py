"""Generates all choices of a request, at once or while the reply leaves. The part that waits."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import TypeAlias

import trio

from gymtrio.errors import Refusal
from servers.model.embedded.engine import Engine
from servers.model.embedded.generation import Emission, Generated, GenerationRequest
from servers.model.engine_api.reply_stream import ReplyStream

ChoiceListener: TypeAlias = Callable[[int, Emission], None]
"""As `engine.Listener`, told which choice it is."""

ChoiceEnd: TypeAlias = Callable[[int, Generated], None]
"""Told of the end of a choice, after all its emissions; returns at once and does not raise."""


async def generate_choices(
    engine: Engine,
    call_id: str,
    requests: Sequence[GenerationRequest],
    *,
    on_emission: ChoiceListener | None = None,
    on_end: ChoiceEnd | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> list[Generated]:
    """Generate every choice of a request together.

    Args:
        task_status: started once every choice is accepted.

    Raises:
        InvalidRequest, Unavailable: as `Engine.generate` for some choice; the others are given up.

    Cancelled: every choice is forgotten.
    """
    found: dict[int, Generated] = {}

    async def one(
        index: int, request: GenerationRequest, *, task_status: trio.TaskStatus[None]
    ) -> None:
        listener = None if on_emission is None else partial(on_emission, index)
        found[index] = await engine.generate(
            f"{call_id}/{index}", request, listener, task_status=task_status
        )
        if on_end is not None:
            on_end(index, found[index])

    try:
        async with trio.open_nursery() as nursery:
            for index, request in enumerate(requests):
                await nursery.start(one, index, request)
            task_status.started()
    except BaseExceptionGroup as group:
        refused, others = group.split(Refusal)
        if refused is None or others is not None:
            raise
        raise _first(refused) from None
    return [found[index] for index in range(len(requests))]


class StreamedReply:
    """A reply that leaves while it is generated.

    The generation runs in a nursery of the service and not in the stream: an iterator that suspends
    inside a nursery of its own would leave its cancel scope with whoever iterates it. What the caller
    has not taken yet is kept as it came, at most the whole generation, and written when it is taken:
    a fault in writing ends one connection and not the engine.
    """

    def __init__(
        self, engine: Engine, call_id: str, requests: Sequence[GenerationRequest], to: ReplyStream
    ) -> None:
        self._engine = engine
        self._call_id = call_id
        self._requests = requests
        self._stream = to
        self._scope = trio.CancelScope()
        self._untaken: list[Callable[[], bytes]] = [to.begin]
        self._news = trio.Event()
        self._ended = False

    async def generate(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run until every choice has ended, or `stop`.

        Args:
            task_status: started once every choice is accepted.

        Raises:
            InvalidRequest, Unavailable: before it is started; afterwards the stream tells.
        """
        to = self._stream
        accepted = _Accepted(task_status)
        try:
            with self._scope:
                await generate_choices(
                    self._engine,
                    self._call_id,
                    self._requests,
                    on_emission=lambda index, part: self._tell(partial(to.emit, index, part)),
                    on_end=lambda index, result: self._tell(partial(to.finish, index, result)),
                    task_status=accepted,
                )
                self._tell(to.end)
        except Refusal as refusal:
            if not accepted.told:
                raise
            self._tell(partial(to.fail, refusal))
        finally:
            self._ended = True
            self._news.set()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The reply's events, as they come."""
        while self._untaken or not self._ended:
            if not self._untaken:
                self._news = trio.Event()
                await self._news.wait()
            taken, self._untaken = self._untaken, []
            yield b"".join(write() for write in taken)

    def stop(self, delivered: bool) -> None:
        """Give up what is still generated: the reply is out, or its caller has left."""
        self._scope.cancel()

    def _tell(self, write: Callable[[], bytes]) -> None:
        self._untaken.append(write)
        self._news.set()


class _Accepted:
    """A task status that remembers."""

    def __init__(self, status: trio.TaskStatus[None]) -> None:
        self._status = status
        self.told = False

    def started(self, value: None = None) -> None:
        self.told = True
        self._status.started()


def _first(group: BaseExceptionGroup[Refusal]) -> Refusal:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Refusal)
    return error
