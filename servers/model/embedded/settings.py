"""What a deployment chooses about the engine, and the bounds of a request."""

from __future__ import annotations

from typing import Final

import attrs

from gymtrio.errors import SettingsError

CONTEXT_GRAIN_TOKENS: Final = 256
"""The native library rounds the memory of a sequence up to this."""

PARALLEL_CALLS_MAX: Final = 64
CACHED_SEQUENCES_MAX: Final = 192
"""Together 256, the most sequences the native library keeps."""

STOP_STRINGS_MAX: Final = 16
STOP_STRING_CHARACTERS_MAX: Final = 256
"""Every token is searched for them; real requests have up to four, of a few characters."""

PREFILL_TOKENS_MIN: Final = 8
"""Prompt tokens that a step takes however many calls decode: a prompt is never starved."""


@attrs.frozen
class EngineSettings:
    """Sizes of one engine. Memory is `(parallel_calls + cached_sequences) * context_tokens` tokens.

    Raises:
        SettingsError: a value is out of range.
    """

    parallel_calls: int = 8
    """Calls that decode together; more than 8 gain little on one thread."""
    cached_sequences: int = 8
    """Finished conversations that are kept besides those of the slots."""
    context_tokens: int = 2048
    """Prompt and output of one call."""
    step_tokens: int = 32
    """Tokens of one step: what a decoding call waits for when others bring prompts (0.3 s)."""
    waiting_calls_max: int = 256
    """Calls that wait for a slot; the next one is refused."""

    def __attrs_post_init__(self) -> None:
        _in_range("parallel_calls", self.parallel_calls, 1, PARALLEL_CALLS_MAX)
        _in_range("cached_sequences", self.cached_sequences, 0, CACHED_SEQUENCES_MAX)
        _in_range("context_tokens", self.context_tokens, CONTEXT_GRAIN_TOKENS, 8192)
        _in_range("step_tokens", self.step_tokens, 1, 512)
        _in_range("waiting_calls_max", self.waiting_calls_max, 1, 100_000)
        if self.context_tokens % CONTEXT_GRAIN_TOKENS:
            raise SettingsError(
                f"embedded engine: context_tokens {self.context_tokens} is not a multiple of "
                f"{CONTEXT_GRAIN_TOKENS}"
            )

    @property
    def sequences(self) -> int:
        return self.parallel_calls + self.cached_sequences

    @property
    def batch_tokens_max(self) -> int:
        """Most tokens that one step holds: a token of each slot, and the prompt share."""
        return self.parallel_calls + max(self.step_tokens, PREFILL_TOKENS_MIN)


def _in_range(key: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise SettingsError(f"embedded engine: {key} is {value!r}, expected {low}..{high}")
