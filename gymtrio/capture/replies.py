"""Where the tokens of a model call stand in an OpenAI-shaped reply.

Clients of rollouts look for `prompt_token_ids`, `generation_token_ids` and `generation_log_probs` on
the message of a chat completion, and on the last output item of a response. Everything else of a reply
belongs to its writer and is passed on untouched.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, Final

import attrs

from gymtrio.capture.cuts import EXTENSION_KEY, ReplyExtension
from gymtrio.capture.storable import check_storable
from gymtrio.capture.tokens import are_token_ids
from gymtrio.errors import GymtrioError
from gymtrio.strict import MalformedValue, structure, unstructure

PROMPT_IDS: Final = "prompt_token_ids"
TOKEN_IDS: Final = "generation_token_ids"
LOG_PROBS: Final = "generation_log_probs"
TOKEN_FIELDS: Final = (PROMPT_IDS, TOKEN_IDS, LOG_PROBS)

_INTEGERS: Final[frozenset[type]] = frozenset({int})
_NUMBERS: Final[frozenset[type]] = frozenset({float, int})


class Route(Enum):
    """What a policy model is called under (POL-1)."""

    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


class MalformedReply(GymtrioError):
    """A reply in which the tokens are not where or what they must be."""


@attrs.frozen(kw_only=True)
class CallTokens:
    """Prompt and generated tokens of one call, as a reply carries them.

    Raises:
        MalformedReply: ids and log-probs are not of one length.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] = attrs.field()

    @log_probs.validator
    def _same_length(self, attribute: object, value: tuple[float, ...]) -> None:
        # An engine that drops an entry (llama.cpp does) must never be zipped: all would shift.
        if len(value) != len(self.token_ids):
            raise MalformedReply(f"{len(self.token_ids)} token ids, {len(value)} log-probs")


def token_carrier(route: Route, reply: dict[str, object]) -> dict[str, object]:
    """Find the object of a reply that carries its tokens; changing it changes the reply.

    Raises:
        MalformedReply: the reply has no such object.
    """
    if route is Route.CHAT:
        choices = reply.get("choices")
        first = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        carrier = first.get("message") if isinstance(first, dict) else None
    elif route is Route.RESPONSES:
        output = reply.get("output")
        carrier = output[-1] if isinstance(output, list) and output else None
    else:
        raise MalformedReply(f"{route.value} carries no tokens")
    if not isinstance(carrier, dict):
        raise MalformedReply(f"a reply to {route.value} without exactly one message")
    return carrier


def read_tokens(route: Route, reply: dict[str, object]) -> CallTokens:
    """Take a copy of the tokens that a reply carries.

    Raises:
        MalformedReply: they are missing, not numbers, or of unequal lengths.
    """
    carrier = token_carrier(route, reply)
    return CallTokens(
        prompt_token_ids=_token_ids(carrier, PROMPT_IDS),
        token_ids=_token_ids(carrier, TOKEN_IDS),
        log_probs=_log_probs(carrier, LOG_PROBS),
    )


def _token_ids(carrier: dict[str, object], name: str) -> tuple[int, ...]:
    values = _list(carrier, name, _INTEGERS)
    if not are_token_ids(values):
        raise MalformedReply(f"{name}: not all of them are token ids")
    return tuple(values)


def _log_probs(carrier: dict[str, object], name: str) -> tuple[float, ...]:
    values = _list(carrier, name, _NUMBERS)
    try:
        finite = all(map(math.isfinite, values))
    except OverflowError:
        # An integer beyond the range of a double.
        finite = False
    if not finite:
        raise MalformedReply(f"{name}: not finite")
    return tuple(map(float, values))


def _list(carrier: dict[str, object], name: str, types: frozenset[type]) -> list[Any]:
    """Check a list at the speed of its length: a long generation must not stall the loop."""
    if name not in carrier:
        raise MalformedReply(f"{name}: missing")
    values = carrier[name]
    if not isinstance(values, list) or not set(map(type, values)) <= types:
        raise MalformedReply(f"{name}: not a list of {'/'.join(sorted(t.__name__ for t in types))}")
    return values


def write_tokens(route: Route, reply: dict[str, object], tokens: CallTokens) -> None:
    """Put tokens where clients of rollouts look for them.

    Raises:
        MalformedReply: see `token_carrier`.
    """
    token_carrier(route, reply).update(
        {
            PROMPT_IDS: list(tokens.prompt_token_ids),
            TOKEN_IDS: list(tokens.token_ids),
            LOG_PROBS: list(tokens.log_probs),
        }
    )


def take_extension(reply: dict[str, object]) -> ReplyExtension:
    """Remove the `ReplyExtension` from a reply and read it.

    Raises:
        MalformedReply: it is missing or not one.
    """
    if EXTENSION_KEY not in reply:
        raise MalformedReply(f"a reply without {EXTENSION_KEY!r}: the backend is not a native one")
    try:
        extension = structure(ReplyExtension, reply.pop(EXTENSION_KEY))
        check_storable(extension)
    except MalformedValue as error:
        raise MalformedReply(f"{EXTENSION_KEY}.{error}") from None
    if extension.effective_output_limit < 1:
        raise MalformedReply(f"{EXTENSION_KEY}.effective_output_limit: out of range")
    return extension


def put_extension(reply: dict[str, object], extension: ReplyExtension) -> None:
    """Add a `ReplyExtension`; `take_extension` is its inverse."""
    reply[EXTENSION_KEY] = unstructure(extension)
