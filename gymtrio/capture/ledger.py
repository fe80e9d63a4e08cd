"""Which model calls each episode made: token-free rows, in memory, exported with a checkpoint. Pure.

- L1 A row stands here from the instant its reply begins to leave, and is taken back if the reply turns
  out not to have left whole. So what is here was delivered (POL-3, I16).
- L2 Rows are installed under the replacement attempt; each keeps the capture key under which its tokens
  were staged (POL-7).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from gymtrio.capture.cuts import TerminalReason
from gymtrio.capture.tokens import StagingKey
from gymtrio.episodes.by_rollout import ByRollout
from gymtrio.ids import CaptureKey, EpisodeId


@attrs.frozen(kw_only=True)
class LedgerRow:
    """One delivered call."""

    model_call_id: str
    parent_call_id: str | None
    """The delivered call of the same episode that this conversation goes on from."""
    request_digest: str
    conversation_end: str
    """Digest of conversation and output, see `fingerprint.conversation_end`."""
    staged_under: CaptureKey
    """The attempt that made the call; stays what it was through every restore."""
    staging_key: StagingKey | None
    """Where the tokens lie; None: the backend gave none."""
    prompt_token_count: int = 0
    generated_token_count: int = 0
    continued_token_count: int = 0
    """How many of the generated ones came from a cut."""
    policy_version: int | None = None
    """The oldest that contributed."""
    finish_reason: TerminalReason | None = None


class EpisodeLedger:
    """The rows of one episode, in order of delivery."""

    def __init__(self, rows: Iterable[LedgerRow] = ()) -> None:
        self._rows: dict[str, LedgerRow] = {}
        self._ends: dict[str, str] = {}
        for row in rows:
            self.add(row)

    @property
    def rows(self) -> tuple[LedgerRow, ...]:
        return tuple(self._rows.values())

    def add(self, row: LedgerRow) -> None:
        assert row.model_call_id not in self._rows
        self._rows[row.model_call_id] = row
        self._ends[row.conversation_end] = row.model_call_id

    def take_back(self, model_call_id: str) -> None:
        if self._rows.pop(model_call_id, None) is not None:
            # Two calls may have ended alike: the one before is the parent again.
            self._ends = {row.conversation_end: row.model_call_id for row in self.rows}

    def find_parent(self, chain: Sequence[str]) -> str | None:
        """The call whose conversation and output are the longest prefix of this conversation.

        Args:
            chain: of the new call, see `fingerprint.conversation_chain`.
        """
        return next((self._ends[end] for end in reversed(chain) if end in self._ends), None)


class Ledger:
    """The rows of every episode that this server served or restored."""

    def __init__(self) -> None:
        self._episodes: dict[EpisodeId, EpisodeLedger] = {}
        self._by_rollout: ByRollout[EpisodeId] = ByRollout()

    def __len__(self) -> int:
        """How many episodes have rows."""
        return len(self._episodes)

    def add(self, episode_id: EpisodeId, row: LedgerRow) -> None:
        self._of(episode_id).add(row)

    def take_back(self, episode_id: EpisodeId, model_call_id: str) -> None:
        """Undo `add`; harmless when the episode was discarded meanwhile."""
        episode = self._episodes.get(episode_id)
        if episode is not None:
            episode.take_back(model_call_id)

    def find_parent(self, episode_id: EpisodeId, chain: Sequence[str]) -> str | None:
        """See `EpisodeLedger.find_parent`."""
        episode = self._episodes.get(episode_id)
        return None if episode is None else episode.find_parent(chain)

    def rows(self, episode_id: EpisodeId) -> tuple[LedgerRow, ...]:
        """In order of delivery; empty for an episode that is not known."""
        episode = self._episodes.get(episode_id)
        return () if episode is None else episode.rows

    def install(self, episode_id: EpisodeId, rows: EpisodeLedger) -> None:
        """Set the rows of a replacement attempt."""
        if episode_id not in self._episodes:
            self._by_rollout.add(episode_id, episode_id)
        self._episodes[episode_id] = rows

    def take_over(self, made: Ledger) -> None:
        """Have the rows of another ledger, which is given away; at once when there are none here."""
        if self._episodes:
            for episode_id, rows in made._episodes.items():
                self.install(episode_id, rows)
        else:
            self._episodes, self._by_rollout = made._episodes, made._by_rollout

    def discard(self, episode_id: EpisodeId) -> None:
        """Drop the rows of this very attempt."""
        if self._episodes.pop(episode_id, None) is not None:
            self._by_rollout.remove(episode_id, episode_id)

    def discard_up_to(self, episode_id: EpisodeId) -> None:
        """Drop the rows of this attempt and the earlier ones: they were retired."""
        for attempt in self._by_rollout.up_to(episode_id):
            self.discard(attempt)

    def _of(self, episode_id: EpisodeId) -> EpisodeLedger:
        episode = self._episodes.get(episode_id)
        if episode is None:
            episode = self._episodes[episode_id] = EpisodeLedger()
            self._by_rollout.add(episode_id, episode_id)
        return episode


def staging_keys_of(rows: Iterable[LedgerRow]) -> list[StagingKey]:
    return [row.staging_key for row in rows if row.staging_key is not None]
