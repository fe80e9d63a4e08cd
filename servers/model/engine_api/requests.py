"""A request of either API as the engine takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from gymtrio.capture.replies import Route
from gymtrio.errors import InvalidRequest
from gymtrio.strict import describe
from servers.model.embedded.prompt import Turn, turns_of_chat, turns_of_responses
from servers.model.embedded.sampling import SEED_MAX, SEED_MIN, Sampling
from servers.model.embedded.toolcalls import Tool, tools_of
from servers.model.engine_api.fields import Fields, check_fields

CHOICES_MAX: Final = 16
"""Of one request; each takes a slot or waits for one."""

ITEMS_MAX: Final = 10_000
"""Messages, or items of an input: more fit no context of the model, and reading them holds the loop."""

TOP_LOG_PROBS_MAX: Final = 0
"""The engine keeps the log-prob of the chosen token only."""

INTEGER_MAX: Final = 2**31 - 1
LOG_PROBS_INCLUDED: Final = "message.output_text.logprobs"
"""How a Responses request asks for log-probs, in `include`."""


@attrs.frozen(kw_only=True)
class ModelCall:
    """What one request asks for."""

    route: Route
    asked: Mapping[str, object]
    """The body, for what a reply repeats of it."""
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    """Those that the model may call: none if the request forbids it."""
    sampling: Sampling
    seeded: bool
    """The request brings its seed; else that of `sampling` is to be replaced."""
    output_tokens_max: int | None = None
    """None: what the context leaves."""
    stop: tuple[str, ...] = ()
    choices: int = 1
    stream: bool = False
    stream_usage: bool = False
    """A stream of chat chunks ends with one that tells the usage."""
    log_probs: bool = False
    token_ids: bool = False
    """The caller wants the token ids of prompt and output."""
    tokens_as_ids: bool = False
    """Tokens in log-probs are written `token_id:<id>`."""


def parse_call(route: Route, body: Mapping[str, object]) -> ModelCall:
    """Read the body of a chat completions or Responses request.

    Raises:
        InvalidRequest: naming the first field that is unknown, not supported or wrong.
    """
    check_fields(route, body)
    fields = Fields(body)
    fields.text("model")
    tools = tools_of(body.get("tools"))
    call = _chat(fields) if route is Route.CHAT else _responses(fields)
    fields.flag("parallel_tool_calls")
    _check_top_log_probs(fields)
    return attrs.evolve(
        call,
        tools=() if body.get("tool_choice") == "none" else tools,
        stop=fields.texts("stop"),
        stream=fields.flag("stream"),
        stream_usage=Fields(fields.object("stream_options")).flag("include_usage"),
        token_ids=fields.flag("return_token_ids"),
    )


def _chat(fields: Fields) -> ModelCall:
    limit = fields.integer("max_tokens", 1, INTEGER_MAX)
    newer = fields.integer("max_completion_tokens", 1, INTEGER_MAX)
    return ModelCall(
        route=Route.CHAT,
        asked=fields.body,
        turns=turns_of_chat(_bounded(fields, "messages")),
        sampling=_sampling(fields),
        seeded=fields.body.get("seed") is not None,
        output_tokens_max=limit if newer is None else newer,
        choices=fields.integer("n", 1, CHOICES_MAX) or 1,
        log_probs=fields.flag("logprobs"),
        tokens_as_ids=fields.flag("return_tokens_as_token_ids"),
    )


def _responses(fields: Fields) -> ModelCall:
    return ModelCall(
        route=Route.RESPONSES,
        asked=fields.body,
        turns=turns_of_responses(_bounded(fields, "input"), fields.body.get("instructions")),
        sampling=_sampling(fields),
        seeded=fields.body.get("seed") is not None,
        output_tokens_max=fields.integer("max_output_tokens", 1, INTEGER_MAX),
        log_probs=LOG_PROBS_INCLUDED in fields.texts("include"),
    )


def _bounded(fields: Fields, name: str) -> object:
    items = fields.body.get(name)
    if isinstance(items, list) and len(items) > ITEMS_MAX:
        raise InvalidRequest(f"{name}: {len(items)} items, at most {ITEMS_MAX}")
    return items


def _sampling(fields: Fields) -> Sampling:
    # vLLM writes -1 for all.
    top_k = fields.integer("top_k", -1, INTEGER_MAX)
    return Sampling(
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        top_k=max(0, top_k or 0),
        seed=fields.integer("seed", SEED_MIN, SEED_MAX) or 0,
    )


def _check_top_log_probs(fields: Fields) -> None:
    value = fields.body.get("top_logprobs")
    if value is not None and (type(value) is not int or value != TOP_LOG_PROBS_MAX):
        raise InvalidRequest(
            f"top_logprobs: at most {TOP_LOG_PROBS_MAX}, since this engine keeps the log-prob of the "
            f"chosen token only; got {describe(value)}"
        )
