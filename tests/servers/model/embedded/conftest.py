"""A vocabulary small enough to read, for tests that need no model."""

from __future__ import annotations

import pytest

from servers.model.embedded.vocabulary import Vocabulary

PIECES = (
    b"",  # 0: ends a turn
    b"",  # 1: begins a turn
    b"a",
    b"b",
    b"ab",
    b"\xc3",  # 5, 6: the halves of U+00E9
    b"\xa9",
    b"ST",
    b"OP",
    b"STOP",
    b" ",
    "漢".encode(),
)


@pytest.fixture(scope="session")
def small_vocabulary() -> Vocabulary:
    return Vocabulary(
        pieces=PIECES,
        end_ids=frozenset({0}),
        control_ids={"<|im_end|>": 0, "<|im_start|>": 1},
        tokenize=lambda text: [PIECES.index(letter.encode()) for letter in text],
    )
