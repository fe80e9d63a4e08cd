"""What one step asks of the model. Sequences hold tokens by position, gapless from 0."""

from __future__ import annotations

from typing import TypeAlias

import attrs

from servers.model.embedded.sampling import Sampling


@attrs.frozen
class Copy:
    """Make `target` hold exactly what `source` holds."""

    source: int
    target: int


@attrs.frozen
class Trim:
    """Drop what `sequence` holds from position `keep_tokens` on."""

    sequence: int
    keep_tokens: int


Move: TypeAlias = Copy | Trim


@attrs.frozen
class Chunk:
    """Tokens to append to a sequence."""

    sequence: int
    first_position: int
    token_ids: tuple[int, ...]
    sampling: Sampling | None
    """How to choose the token that follows the chunk; None inside a prompt."""

    @property
    def end_position(self) -> int:
        return self.first_position + len(self.token_ids)


@attrs.frozen
class Step:
    """Moves, in order; then all chunks in one decode."""

    moves: tuple[Move, ...]
    chunks: tuple[Chunk, ...]
    """By rising sequence, at most one each: the native library decodes neighbours together."""

    @property
    def tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)
