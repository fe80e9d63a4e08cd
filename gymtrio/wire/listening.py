"""Accepting connections, each in a task of its own that nothing but its own end concerns."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from gymtrio.errors import GymtrioError

CONNECTIONS_MAX: Final = 1024
"""Of one listener: with 16,000 calls on each, no deployment comes near."""

S = TypeVar("S", bound=trio.abc.AsyncResource)

_log = logging.getLogger(__name__)


async def serve_channels(
    listener: trio.abc.Listener[S],
    serve: Callable[[S], Awaitable[None]],
    *,
    connections_max: int = CONNECTIONS_MAX,
    task_status: trio.TaskStatus[list[trio.abc.Listener[S]]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Accept connections for ever; each is served in a task, and its errors end it alone (SRV-1).

    Args:
        serve: serves one stream, usually an `open_channel` around `channel.closed.wait()`.
        connections_max: one over it is closed at once.

    Cancelled: every connection is closed.
    """
    open_count = 0

    async def serve_one(stream: S) -> None:
        nonlocal open_count
        if open_count >= connections_max:
            _log.warning("connection refused: %d are open", open_count)
            await trio.aclose_forcefully(stream)
            return
        open_count += 1
        try:
            await serve(stream)
        except* GymtrioError as errors:
            _log.warning("connection ended: %s", errors.exceptions[0])
        except* Exception as errors:  # noqa: BLE001 - the edge
            _log.error("error in a connection", exc_info=errors)
        finally:
            open_count -= 1
            await trio.aclose_forcefully(stream)

    await trio.serve_listeners(serve_one, [listener], task_status=task_status)
