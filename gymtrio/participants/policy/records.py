"""What a policy server keeps of an episode in a checkpoint. Pure."""

from __future__ import annotations

import attrs

from gymtrio.capture.cuts import Continuation, CutRecord, digest_tokens
from gymtrio.capture.ledger import LedgerRow, staging_keys_of
from gymtrio.capture.tokens import StagingKey
from gymtrio.errors import InvalidCheckpointState
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.tickets import Ticket


@attrs.frozen(kw_only=True)
class PolicyRecord:
    """One episode: its delivered calls, and the cut of the one in flight (I28)."""

    rows: tuple[LedgerRow, ...] = ()
    cut: CutRecord | None = None
    uncertain: tuple[str, ...] = ()
    """Calls among the rows of whose replies nobody knows whether they arrived."""

    @property
    def empty(self) -> bool:
        return not self.rows and self.cut is None

    def staging_keys(self) -> list[StagingKey]:
        """Every key that the episode refers to, sorted (I17)."""
        cut_keys = () if self.cut is None else self.cut.continuation.staging_keys
        return sorted({*staging_keys_of(self.rows), *cut_keys})


def finished_cut(ticket: Ticket) -> CutRecord | None:
    """The cut of a call whose reply is held: everything, so that nothing has to be generated again."""
    exchanged, row = ticket.exchanged, ticket.row
    if exchanged is None or row is None or row.staging_key is None or ticket.constrained:
        return None
    if exchanged.tokens is None or exchanged.extension is None:
        return None
    extension = exchanged.extension
    return CutRecord(
        model_call_id=ticket.model_call_id,
        request_digest=ticket.request_digest,
        continuation=Continuation(
            source_capture_key=row.staged_under,
            source_model_call_id=ticket.model_call_id,
            staging_keys=(row.staging_key,),
            prefix_token_count=len(exchanged.tokens.token_ids),
            prefix_digest=digest_tokens(exchanged.tokens.token_ids),
            effective_output_limit=extension.effective_output_limit,
            policy_version=extension.policy_version,
            engine_digest=extension.engine_digest,
            terminal_finish_reason=extension.finish_reason,
            terminal_stop_reason=extension.stop_reason,
        ),
    )


def check_record(episode_id: EpisodeId, record: PolicyRecord) -> None:
    """Check what the types of a restored record do not say.

    Raises:
        InvalidCheckpointState: naming the episode.
    """
    known: set[str] = set()
    for row in record.rows:
        if row.model_call_id in known:
            raise InvalidCheckpointState(f"{episode_id}: call {row.model_call_id} is in it twice")
        if row.parent_call_id is not None and row.parent_call_id not in known:
            raise InvalidCheckpointState(
                f"{episode_id}: call {row.model_call_id} names a parent that is not before it"
            )
        known.add(row.model_call_id)
    if not known.issuperset(record.uncertain):
        raise InvalidCheckpointState(f"{episode_id}: an uncertain call that has no row")
    if record.cut is not None:
        if record.cut.model_call_id in known:
            raise InvalidCheckpointState(
                f"{episode_id}: call {record.cut.model_call_id} is both delivered and cut"
            )
        if not record.cut.continuation.staging_keys:
            raise InvalidCheckpointState(f"{episode_id}: a cut without staging keys")
