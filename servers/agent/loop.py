"""The Simple Agent's turn loop, without I/O: what is asked next, and what an answer changes.

The state is everything that a request to the model is made of besides the task, so that after a restore
the request is the same to the byte and a generation that was cut can go on (CUT-4).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Final

import attrs

from gymtrio.errors import BackendFailed
from gymtrio.ids import RolloutId

_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)
"""What may become a segment of a path. A model chooses it."""

Item = dict[str, object]


@attrs.frozen(kw_only=True)
class Sampling:
    """How the policy samples where the task does not say."""

    temperature: float | None = None
    max_output_tokens: int | None = None
    seed: int | None = None
    """Makes every model call carry a seed of its own, the same in every attempt of a rollout."""


def call_seed(seed: int, rollout_id: RolloutId, activation: int, call: int) -> int:
    """The seed of one model call: 63 bits by SHA-256.

    The attempt is left out, so that a rollout that is run again samples the same.
    """
    text = json.dumps([seed, rollout_id, activation, call])
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:8], "big") >> 1


@attrs.frozen
class ToolAnswer:
    """What a tool call came to, as the model sees it."""

    output: str
    cookies: dict[str, str] = attrs.field(factory=dict)
    """Set by the resources server."""


@attrs.define(kw_only=True)
class LoopState:
    """Where an activation is: the whole of a boundary."""

    new_items: list[Item] = attrs.field(factory=list)
    """Output of the model and of tools since the request, in order."""
    pending: list[Item] = attrs.field(factory=list)
    """Function calls of the last response that were not executed yet."""
    over: bool = False
    """The last response called no function, or was cut short by the model."""
    model_calls: int = 0
    """How many were answered."""
    last_response: dict[str, object] | None = None
    """Without its output, which is in `new_items`."""
    usage: dict[str, object] = attrs.field(factory=dict)
    """Summed over the model calls."""
    model_cookies: dict[str, str] = attrs.field(factory=dict)
    resources_cookies: dict[str, str] = attrs.field(factory=dict)
    records: list[dict[str, object]] = attrs.field(factory=list)
    """Model calls and tool calls, in order: what the session observes."""

    def request(
        self,
        params: Mapping[str, object],
        preamble: Iterable[Item],
        sampling: Sampling,
        seed: int | None,
    ) -> dict[str, object]:
        """The next model call: the preamble, then what was asked, then what came since."""
        body = dict(params)
        asked = params.get("input")
        items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked or []
        assert isinstance(items, list)
        body["input"] = [*preamble, *items, *self.new_items]
        for name in ("temperature", "max_output_tokens"):
            value = getattr(sampling, name)
            if value is not None and body.get(name) is None:
                body[name] = value
        if seed is not None:
            body["seed"] = seed
        return body

    def model_answered(self, response: dict[str, object], cookies: dict[str, str]) -> None:
        """Take in a response.

        Raises:
            BackendFailed: it is none.
        """
        output = response.get("output")
        if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
            raise BackendFailed("the model's response has no list of output items")
        self.model_calls += 1
        self.new_items += output
        incomplete = response.get("incomplete_details") is not None
        self.pending = [] if incomplete else [i for i in output if i.get("type") == "function_call"]
        self.over = not self.pending
        self.last_response = {k: v for k, v in response.items() if k not in ("output", "usage")}
        _add_usage(self.usage, response.get("usage"))
        self.model_cookies |= cookies
        self.records.append({"type": "model_call", "response_id": response.get("id")})

    def tool_answered(self, answer: ToolAnswer) -> None:
        """Take in what the first pending call came to."""
        call = self.pending.pop(0)
        self.new_items.append(
            {
                "type": "function_call_output",
                "call_id": call.get("call_id"),
                "output": answer.output,
            }
        )
        self.resources_cookies |= answer.cookies
        self.records.append(
            {
                "type": "tool_call",
                "call_id": call.get("call_id"),
                "name": call.get("name"),
                "arguments": call.get("arguments"),
                "output": answer.output,
            }
        )

    def is_over(self, steps_max: int | None) -> bool:
        """Whether there is nothing to ask the model any more; no call may be pending."""
        return self.over or (steps_max is not None and self.model_calls >= steps_max)

    def reply(self) -> dict[str, object]:
        """The last response with everything that came of the activation as its output."""
        assert self.last_response is not None
        reply = {**self.last_response, "output": list(self.new_items)}
        if self.usage:
            reply["usage"] = self.usage
        return reply


def tool_request(call: Item, offered: Iterable[str]) -> dict[str, object] | ToolAnswer:
    """What a function call asks for: the arguments, or what the model is told is wrong with it.

    Args:
        offered: names of the functions that the task offers to the model.
    """
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or name not in offered or not _TOOL_NAME.fullmatch(name):
        return _wrong(f"unknown tool: {name}; known: {', '.join(sorted(offered)) or 'none'}")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError) as error:
        return _wrong(f"the arguments are not JSON: {error}")
    if not isinstance(parsed, dict):
        return _wrong("the arguments are not a JSON object")
    return parsed


def offered_tools(params: Mapping[str, object]) -> frozenset[str]:
    """Names of the functions that a request offers to the model."""
    tools = params.get("tools")
    if not isinstance(tools, list):
        return frozenset()
    return frozenset(
        tool["name"]
        for tool in tools
        if isinstance(tool, dict)
        and tool.get("type") == "function"
        and isinstance(tool.get("name"), str)
    )


def _wrong(what: str) -> ToolAnswer:
    return ToolAnswer(json.dumps({"error": what}))


def _add_usage(total: dict[str, object], usage: object) -> None:
    if not isinstance(usage, dict):
        return
    for name, value in usage.items():
        known = total.get(name)
        if isinstance(value, dict):
            inner = dict(known) if isinstance(known, dict) else {}
            _add_usage(inner, value)
            total[name] = inner
        elif isinstance(value, int) and not isinstance(value, bool):
            total[name] = value + known if isinstance(known, int) else value
