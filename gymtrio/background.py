"""A nursery for what runs beside a block, that leaves the block's own errors as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def open_background() -> AsyncIterator[trio.Nursery]:
    """Open a nursery whose tasks are cancelled when the block ends.

    A plain nursery wraps whatever its block raises into an exception group; stacked owners would bury
    a `SettingsError` four groups deep. Here the block's error comes out as it was raised.

    Raises:
        ExceptionGroup: a background task failed; the block was cancelled for it.
    """
    raised: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except BaseException as error:  # noqa: BLE001 - raised again below, once the tasks are gone
            raised = error
        nursery.cancel_scope.cancel()
    if raised is not None:
        try:
            raise raised
        finally:
            # An error that refers to its own frame is garbage that only a collection finds.
            del raised
