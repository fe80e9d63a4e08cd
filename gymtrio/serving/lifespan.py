"""The lifespan protocol of ASGI, from the server's side."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from gymtrio.background import open_background
from gymtrio.context import AsgiApp, Message

SHUTDOWN_S_MAX: Final = 60.0
"""After this an application that does not end is cancelled."""


class StartFailed(Exception):
    """The application said that it cannot start."""


@asynccontextmanager
async def open_lifespan(app: AsgiApp) -> AsyncIterator[None]:
    """Start an application, keep it started for the block, stop it.

    Raises:
        StartFailed: the application said so.
        ExceptionGroup: it raised, at any time; a running block was cancelled for it.
    """
    async with open_background() as nursery:
        conversation = _Conversation()
        nursery.start_soon(conversation.run, app)
        await conversation.say("startup")
        try:
            yield
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + SHUTDOWN_S_MAX):
                await conversation.say("shutdown")


class _Conversation:
    def __init__(self) -> None:
        # Both that there are: an application need not ask for the first before the second is said.
        self._to_app, self._for_app = trio.open_memory_channel[Message](2)
        self._to_us, self._for_us = trio.open_memory_channel[Message](1)

    async def run(self, app: AsgiApp) -> None:
        scope = {"type": "lifespan", "asgi": {"spec_version": "2.0", "version": "3.0"}, "state": {}}
        with self._to_us, self._for_app:
            await app(scope, self._for_app.receive, self._to_us.send)

    async def say(self, what: str) -> None:
        try:
            self._to_app.send_nowait({"type": f"lifespan.{what}"})
            answer = await self._for_us.receive()
        except (trio.EndOfChannel, trio.BrokenResourceError):
            # It ended or raised; in the second case the nursery reports it.
            return
        if answer["type"] == f"lifespan.{what}.failed":
            raise StartFailed(f"{what}: {answer.get('message', '')}")
