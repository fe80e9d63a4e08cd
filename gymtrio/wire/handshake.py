"""How two sides of a fresh stream come to talk."""

from __future__ import annotations

from typing import Final

import trio

from gymtrio.wire.bounds import ChannelLimits
from gymtrio.wire.dialogue import Dialogue
from gymtrio.wire.errors import ChannelLost, shown
from gymtrio.wire.events import Ended, Event

RECEIVE_BYTES: Final = 64 * 2**10
"""What is taken in one turn of the loop: some two thousand of the shortest calls."""


async def shake_hands(
    stream: trio.abc.Stream, dialogue: Dialogue, limits: ChannelLimits
) -> list[Event]:
    """Exchange hellos over a fresh stream, and give what came with the peer's: a `Welcomed` first.

    Raises:
        ChannelLost: it failed or did not end in time; says why, and the peer was told.
    """
    with trio.move_on_after(limits.handshake_timeout_s):
        events: list[Event] = []
        while not events:
            await _send(stream, dialogue)
            try:
                data = await stream.receive_some(RECEIVE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            events = dialogue.receive_data(data) if data else dialogue.receive_eof()
        if not isinstance(events[0], Ended):
            return events
        ended = events[0]
        await _send(stream, dialogue)
        raise ChannelLost(f"no handshake: {shown(ended.code)}: {shown(ended.detail)}")
    raise ChannelLost(f"no handshake within {limits.handshake_timeout_s:g} s")


async def _send(stream: trio.abc.Stream, dialogue: Dialogue) -> None:
    if dialogue.has_data_to_send:
        try:
            await stream.send_all(dialogue.data_to_send().data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
