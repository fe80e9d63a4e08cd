"""What we need of an engine that nobody here wrote: tokens in, tokens with log-probs out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import Protocol

import attrs

from gymtrio.capture.cuts import TerminalReason
from gymtrio.errors import Refusal
from gymtrio.serving.stock.chats import Chat


class StockApi(Enum):
    """Engines whose API is known here."""

    VLLM = "vllm"
    """Also others that speak its completions API with `return_token_ids`."""
    LLAMA_CPP = "llama_cpp"


class EngineRefused(Refusal):
    """The engine answered a call with an error; status and body are its own."""

    code = "backend_refused"

    def __init__(self, status: int, reply: dict[str, object]) -> None:
        super().__init__(f"the engine answered {status}")
        self.engine_status = status
        self.reply = reply


class EngineBroke(Exception):
    """The engine said something that its API does not say; costs this call its reply."""


@attrs.frozen(kw_only=True)
class Facts:
    """What an engine says of itself."""

    model: str
    """What calls must name."""
    context_tokens: int
    """Prompt and output together."""
    fingerprint: dict[str, object]
    """What its results depend on, as far as it says."""


@attrs.frozen(kw_only=True)
class Wanted:
    """The rest of a generation."""

    prompt_token_ids: tuple[int, ...]
    prefix_token_ids: tuple[int, ...] = ()
    """Generated before; the engine goes on behind them."""
    output_tokens_max: int
    """Prefix included."""
    sampling: Mapping[str, object]
    """Fields of the request as the caller wrote them."""
    seed: int
    """Of the whole generation, from its first call on; used where nothing says greedy."""
    seeded: bool
    """The caller gave it."""


@attrs.frozen(kw_only=True)
class Piece:
    """What an engine generated next."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """As many."""
    text: str
    """Only to notice stop strings early: a character that lies in two pieces may be damaged."""
    finish: TerminalReason | None = None
    """How it ended; set on the last piece."""


class StockEngine(Protocol):
    """One engine API: how prompts become tokens, and how tokens become more tokens."""

    async def describe(self) -> Facts:
        """
        Raises:
            TransportError, EngineRefused, EngineBroke
        """
        ...

    async def tokenize(self, chat: Chat) -> tuple[int, ...]:
        """The prompt of a conversation, by the engine's own template.

        Raises:
            TransportError, EngineRefused, EngineBroke
        """
        ...

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """
        Raises:
            TransportError, EngineRefused, EngineBroke
        """
        ...

    def generate(self, wanted: Wanted) -> AbstractAsyncContextManager[AsyncIterator[Piece]]:
        """Generate; leaving the block stops it.

        Raises (also while iterating):
            TransportError, EngineRefused, EngineBroke
        """
        ...
