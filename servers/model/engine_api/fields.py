"""The fields of a request: which there are, and typed reading of them. An absent field is null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from gymtrio.capture.constrained import constrained_reason
from gymtrio.capture.replies import Route
from gymtrio.errors import InvalidRequest
from gymtrio.strict import describe, nearest_name
from servers.model.embedded.toolcalls import refuse_constrained

_SHOWN_CHARACTERS_MAX: Final = 80

_USED: Final = frozenset(
    {
        "model",
        "parallel_tool_calls",
        "return_token_ids",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
    }
)
_USED_BY: Final[Mapping[Route, frozenset[str]]] = {
    Route.CHAT: _USED
    | {
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "n",
        "response_format",
        "return_tokens_as_token_ids",
    },
    Route.RESPONSES: _USED | {"include", "input", "instructions", "max_output_tokens", "text"},
}

_CONSTRAINTS: Final = frozenset(
    {
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "guided_whitespace_pattern",
        "structural_tag",
        "structured_outputs",
    }
)
"""Refused by `toolcalls.refuse_constrained` unless they are null."""

_WITHOUT_EFFECT: Final = frozenset(
    {
        "access_programs",
        "background_options",
        "cache_salt",
        "chat_template_kwargs",
        "include_reasoning",
        "max_tool_calls",
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "reasoning_effort",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Hints, and what concerns accounts, billing, speed or models that reason: true of any generation."""

_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "audio": (),
    "background": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "context_management": ([],),
    "continue_final_message": (False,),
    "conversation": (),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "grammar": (),
    "ignore_eos": (False,),
    "image": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "presence_penalty": (0,),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "required_prefix_token_ids": (),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": (),
    "truncate_prompt_tokens": (),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that this engine cannot honour, with the values besides null that ask nothing of it."""


def known_fields(route: Route) -> frozenset[str]:
    """Every field that a request of this route may have, some with one value only."""
    return _USED_BY[route] | _CONSTRAINTS | _WITHOUT_EFFECT | _NEUTRAL.keys()


def check_fields(route: Route, body: Mapping[str, object]) -> None:
    """Refuse fields that nobody knows, and those that would have to be honoured.

    Raises:
        InvalidRequest: naming the field.
    """
    known = known_fields(route)
    for name, value in body.items():
        if name not in known:
            shown = name[:_SHOWN_CHARACTERS_MAX]
            raise InvalidRequest(f"{shown}: unknown field{_meant(shown, known)}")
        if value is not None and name in _NEUTRAL and value not in _NEUTRAL[name]:
            neutral = ", ".join(["null", *map(repr, _NEUTRAL[name])])
            raise InvalidRequest(f"{name}: not supported by this engine, only {neutral}")
    refuse_constrained(body)
    # Also what only looks like a constraint: such a call would be neither cut nor continued.
    reason = constrained_reason(body)
    if reason is not None:
        raise InvalidRequest(f"{reason}: not supported by this engine")


def _meant(name: str, known: frozenset[str]) -> str:
    hint = nearest_name(name, sorted(known))
    # Without a near one the hint lists all, which are too many to help.
    return hint if "did you mean" in hint else ""


@attrs.frozen
class Fields:
    """Typed access to a body; each method raises `InvalidRequest` naming the field."""

    body: Mapping[str, object]

    def flag(self, name: str) -> bool:
        value = self.body.get(name)
        if value is not None and type(value) is not bool:
            raise self._unfit(name, "true or false")
        return value is True

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.body.get(name)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            raise self._unfit(name, f"an integer in {low}..{high}")
        return value

    def number(self, name: str, default: float) -> float:
        """A number; its range is checked by whoever uses it."""
        value = self.body.get(name)
        if value is None:
            return default
        if type(value) is not int and type(value) is not float:
            raise self._unfit(name, "a number")
        return value

    def text(self, name: str) -> str | None:
        value = self.body.get(name)
        if value is not None and not isinstance(value, str):
            raise self._unfit(name, "a text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; a single text is a list of one."""
        value = self.body.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self._unfit(name, "a text or a list of texts")
        return tuple(value)

    def object(self, name: str) -> Mapping[str, object]:
        value = self.body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._unfit(name, "an object")
        return value

    def _unfit(self, name: str, expected: str) -> InvalidRequest:
        return InvalidRequest(f"{name}: expected {expected}, got {describe(self.body[name])}")
