"""Makes the tokens of a reply durable, and its ledger row, which refers to them."""

from __future__ import annotations

from gymtrio.capture.fingerprint import conversation_end
from gymtrio.capture.ledger import LedgerRow
from gymtrio.capture.tokens import StagingKey, TokenRecord, TokenStore, TokenStoreFailed
from gymtrio.errors import BackendFailed, Unavailable
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.calls import PolicyCall
from gymtrio.participants.policy.exchange import Exchanged


async def stage(
    store: TokenStore,
    episode_id: EpisodeId,
    call: PolicyCall,
    exchanged: Exchanged,
    *,
    model_call_id: str,
    request_digest: str,
    parent_call_id: str | None,
) -> LedgerRow:
    """Stage what came of a rollout's call.

    Returns:
        Its row, for the instant in which the reply leaves.

    Raises:
        BackendFailed: tokens were asked for, and there are none.
        Unavailable: the store could not keep them.

    Durable: after return, the tokens that the row refers to.
    """
    tokens, extension = exchanged.tokens, exchanged.extension
    key: StagingKey | None = None
    if tokens is not None:
        key = StagingKey(f"{episode_id.capture_key}/{model_call_id}/whole")
        record = TokenRecord(
            staging_key=key,
            capture_key=episode_id.capture_key,
            model_call_id=model_call_id,
            prompt_token_ids=tokens.prompt_token_ids,
            token_ids=tokens.token_ids,
            log_probs=tokens.log_probs,
            mask=(1,) * len(tokens.token_ids),
            policy_version=0 if extension is None else extension.policy_version,
        )
        try:
            await store.put((record,))
        except TokenStoreFailed as error:
            raise Unavailable(f"the reply's tokens could not be kept: {error}") from error
    elif call.capture_tokens:
        raise BackendFailed("token capture was asked for, and the backend gives no token ids")
    return LedgerRow(
        model_call_id=model_call_id,
        parent_call_id=parent_call_id,
        request_digest=request_digest,
        conversation_end=conversation_end(call.route, call.body, exchanged.body),
        staged_under=episode_id.capture_key,
        staging_key=key,
        prompt_token_count=0 if tokens is None else len(tokens.prompt_token_ids),
        generated_token_count=0 if tokens is None else len(tokens.token_ids),
        continued_token_count=0 if extension is None else extension.continued_token_count,
        policy_version=None if extension is None else extension.policy_version,
        finish_reason=None if extension is None else extension.finish_reason,
    )
