"""What is known from outside of one incarnation of a server: its hold, its fences, what it did last."""

from __future__ import annotations

import math

import attrs

from gymtrio.ids import RolloutId, parse_capture_key


@attrs.define(eq=False)
class Hold:
    checkpoint_id: str
    nonce: str | None
    until: float
    """When its lease ends at the earliest, by what the server has accepted."""
    until_latest: float
    """Another time only if the wall clock jumped while a call was under way."""
    prepared: bool = False
    expired: bool = False


@attrs.define(eq=False)
class Seen:
    """What is known of one incarnation of a server."""

    awaiting: bool
    """Started to recover, and neither restored nor opened."""
    hold: Hold | None = None
    resuming: set[str] = attrs.field(factory=set)
    """Checkpoint ids of which a resume was delivered."""
    ended: dict[str, float] = attrs.field(factory=dict)
    """Checkpoint id to when its resume was answered."""
    fences: dict[RolloutId, int] = attrs.field(factory=dict)
    """By the replies to retire and restore."""
    seeded: set[str] = attrs.field(factory=set)
    failed: set[str] = attrs.field(factory=set)
    """Checkpoint ids of which a commit failed."""
    committed: set[str] = attrs.field(factory=set)
    """Checkpoint ids of which a commit was answered."""
    replacements: dict[RolloutId, int] = attrs.field(factory=dict)
    """Attempts that a restore made here."""
    lapsed: set[str] = attrs.field(factory=set)
    """Checkpoint ids of which the lease was over here."""
    closed_at: float = -math.inf
    """When it last closed, by its log; unless it was resumed in the same instant."""
    unsure: set[str] = attrs.field(factory=set)
    """Checkpoint ids of calls whose caller left before the answer."""
    last_call: tuple[float, str] = (-math.inf, "")
    """When it last called another server, and for what."""
    stopped: set[str] = attrs.field(factory=set)
    """Attempts that were retired while the gate was open: not even a clean-up is owed."""

    def refuses(self, key: str | None) -> bool:
        """Whether the attempt is one that it has answered to refuse."""
        if key is None:
            return False
        episode_id = parse_capture_key(key)
        return episode_id.attempt <= self.fences.get(episode_id.rollout_id, -1)

    def refuse(self, rollout_id: RolloutId, attempt: int) -> None:
        self.fences[rollout_id] = max(attempt, self.fences.get(rollout_id, -1))
