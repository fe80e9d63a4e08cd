"""A vocabulary that writes every byte as a token of its own, for tests that need no model."""

from __future__ import annotations

import pytest

from servers.model.embedded.vocabulary import Vocabulary

END = 256


@pytest.fixture(scope="session")
def byte_vocabulary() -> Vocabulary:
    return Vocabulary(
        pieces=(*(bytes([byte]) for byte in range(256)), b"", b""),
        end_ids=frozenset({END}),
        control_ids={"<|im_end|>": END, "<|im_start|>": END + 1},
        tokenize=lambda text: list(text.encode()),
    )
