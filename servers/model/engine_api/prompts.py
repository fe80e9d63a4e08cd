"""From the turns of a call to the tokens that the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from gymtrio.errors import InvalidRequest
from servers.model.embedded.prompt import Turn, encode_turns, with_system
from servers.model.embedded.toolcalls import tools_text
from servers.model.embedded.vocabulary import Vocabulary
from servers.model.engine_api.requests import ModelCall

TOKENS_PER_TURN: Final = 4
"""Begin, role, line break, end: what an empty turn costs."""


@attrs.frozen(kw_only=True)
class Prompting:
    """How conversations are put before the model."""

    vocabulary: Vocabulary
    context_tokens: int
    default_system: str | None
    """Put first where a conversation has no system turn; None: nothing is."""
    describe_tools: bool

    def encode(self, call: ModelCall) -> tuple[int, ...]:
        """
        Raises:
            InvalidRequest: the conversation is empty, or over the context.
        """
        turns = call.turns
        if self.default_system is not None:
            turns = with_system(turns, self.default_system)
        if self.describe_tools and call.tools:
            turns = _told_of(turns, tools_text(call.tools))
        self._check_size(turns)
        return encode_turns(turns, self.vocabulary, self.context_tokens)

    def _check_size(self, turns: Sequence[Turn]) -> None:
        """Refuse what cannot fit before its tokens are counted, which takes time on the loop."""
        if len(turns) * TOKENS_PER_TURN > self.context_tokens:
            raise InvalidRequest(
                f"a conversation of {len(turns)} turns is over {self.context_tokens} tokens"
            )
        characters = sum(len(turn.text) for turn in turns)
        if characters > self.context_tokens * self.vocabulary.piece_bytes_max:
            raise InvalidRequest(
                f"a conversation of {characters} characters is over {self.context_tokens} tokens"
            )


def _told_of(turns: tuple[Turn, ...], text: str) -> tuple[Turn, ...]:
    first = turns[0] if turns else None
    if first is None or first.role != "system":
        return with_system(turns, text)
    return (attrs.evolve(first, text=f"{first.text}\n\n{text}"), *turns[1:])
