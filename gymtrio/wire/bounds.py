"""The bounds of a channel, with reasons."""

from __future__ import annotations

from typing import Any, Final

import attrs

from gymtrio.limits import DATA_BODY_BYTES_MAX
from gymtrio.wire.messages import Capacity

CHUNK_BYTES_MAX: Final = 64 * 2**10
"""Of one DATA frame: what other calls of the lane wait for at a time."""

BATCH_BYTES_MAX: Final = 256 * 2**10
"""Of one send: what a control message waits for at most before it overtakes."""

FRAME_ROOM_BYTES: Final = 4096
"""Of a frame beside its head, body or chunk: ids, kind, lengths."""

SMALL_ANSWER_BYTES_MAX: Final = 1024
"""A body up to this goes within the frame of its reply however much is queued: one for each call that
may be open is no more than `outgoing_bytes_max`."""


def _positive(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value > 0:
        raise ValueError(f"{attribute.name} must be more than 0, got {value}")


@attrs.frozen(kw_only=True)
class ChannelLimits:
    """What one side takes, queues and waits for.

    Memory of a channel is bounded by `outgoing_bytes_max` (twice, see there) and by `window_bytes` for
    each call whose body is awaited and not read.
    """

    frame_bytes_max: int = attrs.field(default=2**20, validator=_positive)
    """Payload of one frame: a post with a report on 16,000 episodes, or a call with head and body."""
    head_bytes_max: int = attrs.field(default=256 * 2**10, validator=_positive)
    """Four times what a request may have as head, which is answered 431; this ends the connection."""
    body_inline_bytes_max: int = attrs.field(default=64 * 2**10, validator=_positive)
    """A body up to this goes within the frame of its call or reply; a larger one in chunks. So does an
    answer of the data lane while more than `outgoing_bytes_max` is queued: thousands that are held and
    let go at once are no sign of a peer that does not read."""
    window_bytes: int = attrs.field(default=2**20, validator=_positive)
    """Of each body, how much a peer may send ahead of what was read: a local round trip is hidden
    with a tenth of it."""
    body_bytes_max: int = attrs.field(default=DATA_BODY_BYTES_MAX, validator=_positive)
    """Of a reply that `request` collects."""
    calls_open_max: int = attrs.field(default=65_536, validator=_positive)
    """That the peer may have open here: four times the largest deployment we measure."""
    outgoing_bytes_max: int = attrs.field(default=64 * 2**20, validator=_positive)
    """Queued for a peer that does not read. Over it posts and calls are refused here; over twice of it,
    which answers and errors may still use, the peer is given up."""
    handshake_timeout_s: float = attrs.field(default=5.0, validator=_positive)
    """A peer that connects and does not introduce itself is gone after this."""
    ping_interval_s: float = attrs.field(default=5.0, validator=_positive)
    """A peer that has been silent for this long is asked whether it is there."""
    silence_timeout_s: float = attrs.field(default=15.0, validator=_positive)
    """A peer that sent no whole frame for this long is gone, also when its process only stands still.
    Longer than any pause of a loop that we allow, many times."""
    flush_timeout_s: float = attrs.field(default=2.0, validator=_positive)
    """At the end of a channel, what is queued still gets this long to leave."""

    def __attrs_post_init__(self) -> None:
        if max(self.head_bytes_max, CHUNK_BYTES_MAX) + FRAME_ROOM_BYTES > self.frame_bytes_max:
            raise ValueError("frame_bytes_max has no room for a head or a chunk")

    def capacity(self) -> Capacity:
        """What is told to the peer."""
        return Capacity(
            frame_bytes_max=self.frame_bytes_max,
            head_bytes_max=self.head_bytes_max,
            window_bytes=self.window_bytes,
            calls_open_max=self.calls_open_max,
        )
