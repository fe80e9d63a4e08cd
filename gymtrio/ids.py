"""Names of rollouts, attempts and checkpoints: made, checked and parsed in this module only.

An episode attempt is `EpisodeId(rollout_id, attempt)`; its *capture key* is what names it in paths,
files and replies. Key and id are exact inverses of each other (ID-1, ID-2), which is why a rollout
id may not itself end in the suffix that marks an attempt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import total_ordering
from typing import Final, NewType

import attrs

from gymtrio.errors import InvalidRolloutId
from gymtrio.limits import ATTEMPT_MAX, ID_CHARACTERS_MAX

RolloutId = NewType("RolloutId", str)
CaptureKey = NewType("CaptureKey", str)
CheckpointId = NewType("CheckpointId", str)

_SAFE_ID: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{ID_CHARACTERS_MAX - 1}}}", re.ASCII)
_ATTEMPT_MARK: Final = "-a"
"""Looked for first: thousands of ids are read in a row, and the pattern tries every place."""
_ATTEMPT_SUFFIX: Final = re.compile(r"-a([1-9][0-9]*)\Z", re.ASCII)


def is_safe_id(text: str) -> bool:
    """Say whether `text` may name a checkpoint, a server or a rollout: no path can be made of
    it."""
    return _SAFE_ID.fullmatch(text) is not None


def parse_rollout_id(text: str) -> RolloutId:
    """Check a rollout id.

    Raises:
        InvalidRolloutId: it is not 1-128 safe characters, or ends in the reserved `-aN` (N >= 1).
    """
    if not is_safe_id(text):
        raise InvalidRolloutId(
            f"rollout id {text[: ID_CHARACTERS_MAX + 1]!r}: 1-{ID_CHARACTERS_MAX} characters, "
            "first a letter or digit, then letters, digits, '.', '_', '-'"
        )
    if _ATTEMPT_MARK in text and _ATTEMPT_SUFFIX.search(text) is not None:
        raise InvalidRolloutId(f"rollout id {text!r} ends in '-aN', which names an attempt")
    return RolloutId(text)


@total_ordering
@attrs.frozen(eq=False, init=False)
class EpisodeId:
    """One attempt of a rollout, as the servers see it (ID-1). In order of rollout, then attempt.

    Raises:
        InvalidRolloutId: see `parse_rollout_id`; or the attempt is not in 0..`ATTEMPT_MAX`.
    """

    rollout_id: RolloutId
    attempt: int = 0
    """How many attempts came before: 0 for the first."""
    # Kept, and what makes two ids the same: a checkpoint asks many times for those of thousands.
    capture_key: CaptureKey = attrs.field(init=False, repr=False)
    """`r` for attempt 0, `r-aN` for attempt N (ID-2)."""
    _next: EpisodeId | None = attrs.field(init=False, repr=False)
    """Once it was asked for: whatever a restore does, it does under that one."""

    # By hand, since thousands are read in a row: converters and validators take half as long again.
    def __init__(self, rollout_id: str, attempt: int = 0) -> None:
        if _SAFE_ID.fullmatch(rollout_id) is None or _ATTEMPT_MARK in rollout_id:
            parse_rollout_id(rollout_id)
        if type(attempt) is not int or not 0 <= attempt <= ATTEMPT_MAX:
            raise InvalidRolloutId(f"attempt {attempt!r} of {rollout_id!r}: 0..{ATTEMPT_MAX}")
        _SET_ROLLOUT_ID(self, rollout_id)
        _SET_ATTEMPT(self, attempt)
        _SET_CAPTURE_KEY(self, f"{rollout_id}-a{attempt}" if attempt else rollout_id)
        _SET_NEXT(self, None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EpisodeId):
            return NotImplemented
        return self.capture_key == other.capture_key

    def __hash__(self) -> int:
        return hash(self.capture_key)

    def __lt__(self, other: object) -> bool:
        # Thousands are sorted at once: attrs' own order is seven times slower.
        if not isinstance(other, EpisodeId):
            return NotImplemented
        if self.rollout_id == other.rollout_id:
            return self.attempt < other.attempt
        return self.rollout_id < other.rollout_id

    def next_attempt(self) -> EpisodeId:
        """The attempt as which a restored episode continues (ID-3)."""
        made = self._next
        if made is None:
            attempt = self.attempt + 1
            if attempt > ATTEMPT_MAX:
                return EpisodeId(self.rollout_id, attempt)
            # The rollout id was checked already, and thousands are restored at once.
            made = _new(EpisodeId)
            _SET_ROLLOUT_ID(made, self.rollout_id)
            _SET_ATTEMPT(made, attempt)
            _SET_CAPTURE_KEY(made, f"{self.rollout_id}-a{attempt}")
            _SET_NEXT(made, None)
            _SET_NEXT(self, made)
        return made

    def __str__(self) -> str:
        return self.capture_key


# What a frozen class leaves to its own making.
_new: Final = object.__new__
_SET_ROLLOUT_ID: Final = EpisodeId.__dict__["rollout_id"].__set__
_SET_ATTEMPT: Final = EpisodeId.__dict__["attempt"].__set__
_SET_CAPTURE_KEY: Final = EpisodeId.__dict__["capture_key"].__set__
_SET_NEXT: Final = EpisodeId.__dict__["_next"].__set__


def parse_capture_key(text: str) -> EpisodeId:
    """Invert `EpisodeId.capture_key` exactly.

    Raises:
        InvalidRolloutId: no episode has this key.
    """
    suffix = _ATTEMPT_SUFFIX.search(text) if _ATTEMPT_MARK in text else None
    if suffix is None:
        return EpisodeId(RolloutId(text))
    # A number of 20 digits would be beyond any attempt; int() of thousands would be slow.
    if len(suffix[1]) > len(str(ATTEMPT_MAX)):
        raise InvalidRolloutId(f"capture key ends in an attempt beyond {ATTEMPT_MAX}")
    return EpisodeId(RolloutId(text[: suffix.start()]), int(suffix[1]))


def keys_of(episode_ids: Iterable[EpisodeId]) -> frozenset[CaptureKey]:
    """The capture keys of a scope."""
    return frozenset([episode_id.capture_key for episode_id in episode_ids])
