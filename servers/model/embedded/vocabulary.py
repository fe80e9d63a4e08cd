"""Tokens as bytes: exact also where a token is a part of a character."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import attrs

from gymtrio.errors import InvalidRequest


def _letters_of_bytes() -> dict[str, int]:
    """Invert the table by which byte-level vocabularies write bytes as visible letters.

    Source: `bytes_to_unicode` of GPT-2's encoder.py.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    visible += range(ord("®"), ord("ÿ") + 1)
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF_LETTER: Final = _letters_of_bytes()


def piece_bytes(written: str) -> bytes:
    """The bytes that an ordinary token stands for, from how the vocabulary writes it."""
    return bytes(_BYTE_OF_LETTER[letter] for letter in written)


@attrs.frozen
class Vocabulary:
    """Text to token ids and back."""

    pieces: tuple[bytes, ...]
    """By token id; empty for control tokens, which are no text."""
    end_ids: frozenset[int]
    """Tokens with which the model ends its turn."""
    control_ids: Mapping[str, int]
    """Control tokens by name, `<|im_start|>` for one."""
    tokenize: Callable[[str], list[int]] = attrs.field(repr=False)
    """Native; reads the names of control tokens in the text as text."""
    piece_bytes_max: int = attrs.field(init=False)

    @piece_bytes_max.default
    def _longest_piece(self) -> int:
        return max(map(len, self.pieces))

    def encode(self, text: str, tokens_max: int) -> list[int]:
        """Tokenise `text`; what looks like a control token in it stays text, so that no content can
        begin or end a turn. A lone surrogate, which has no bytes, becomes `?`; bytes that the
        vocabulary has no token for (some control characters, the first of those beyond U+3FFFF)
        are left out.

        Raises:
            InvalidRequest: it has more than `tokens_max` tokens; far too long a text is refused
                before the work.
        """
        clean = text.encode("utf-8", "replace")
        ids = None
        if len(clean) <= tokens_max * self.piece_bytes_max:
            ids = self.tokenize(clean.decode())
        if ids is None or len(ids) > tokens_max:
            raise InvalidRequest(f"a text of {len(clean)} bytes is over {tokens_max} tokens")
        return ids

    def decode(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(self.pieces[token_id] for token_id in token_ids)
