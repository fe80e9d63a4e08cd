"""Log-probs in the OpenAI form: one entry for each token, also for the token that ended the turn.

Invariant: as many entries as tokens, so that ids, log-probs and entries can be aligned by place. A
token that is a part of a character has its bytes exactly and its text with U+FFFD.
"""

from __future__ import annotations

from collections.abc import Sequence

from servers.model.embedded.vocabulary import Vocabulary


class TokenNames:
    """How tokens are written in replies."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pieces = vocabulary.pieces
        self._control = {token_id: name for name, token_id in vocabulary.control_ids.items()}

    def entries(
        self, token_ids: Sequence[int], log_probs: Sequence[float], *, as_ids: bool = False
    ) -> list[dict[str, object]]:
        """
        Args:
            as_ids: write a token as `token_id:<id>`, which vLLM calls `return_tokens_as_token_ids`.
        """
        return [
            {
                "token": f"token_id:{token_id}" if as_ids else self.text(token_id),
                "logprob": log_prob,
                "bytes": list(self._pieces[token_id]),
                "top_logprobs": [],
            }
            for token_id, log_prob in zip(token_ids, log_probs, strict=True)
        ]

    def text(self, token_id: int) -> str:
        name = self._control.get(token_id)
        return self._pieces[token_id].decode("utf-8", "replace") if name is None else name
