"""Going on from a durable prefix, or refusing it while nothing is generated yet (CUT-4).

Invariant: a generation that is continued has the seed, limit and ends of the one that was cut. A
request without a seed samples by one that follows from the id of its first call. That call's id
stands in the first record of every prefix of the generation, however often it was cut.
"""

from __future__ import annotations

import hashlib

import attrs

from gymtrio.capture.cuts import Continuation, ContinuationRefused
from gymtrio.capture.prefixes import Prefix
from gymtrio.errors import InvalidRequest
from servers.model.embedded.generation import Generation, GenerationRequest
from servers.model.embedded.vocabulary import Vocabulary


def seed_of(text: str) -> int:
    """An unsigned 64-bit seed: the same for the same text, on every machine, for ever."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def continued(
    request: GenerationRequest,
    prefix: Prefix,
    continuation: Continuation,
    *,
    vocabulary: Vocabulary,
    context_tokens: int,
) -> GenerationRequest:
    """Put a prefix into a request that would be valid without it.

    Raises:
        ContinuationRefused: the request would not have generated this prefix, or less would follow
            it here than where it was cut.
    """
    limit = continuation.effective_output_limit
    own = min(request.output_tokens_max, context_tokens - len(request.prompt_ids))
    if own < limit:
        raise ContinuationRefused(f"at most {own} output tokens here, {limit} where it was cut")
    try:
        made = attrs.evolve(
            request,
            output_tokens_max=limit,
            prefix_ids=prefix.token_ids,
            prefix_logprobs=prefix.log_probs,
        )
        generation = Generation(made, vocabulary, context_tokens)
    except InvalidRequest as error:
        raise ContinuationRefused(error.detail) from None
    ended = continuation.terminal_finish_reason
    if ended is not None and (generation.finish_reason, generation.stop) != (
        ended.value,
        continuation.terminal_stop_reason,
    ):
        raise ContinuationRefused("the prefix does not end as it was said to")
    return made
