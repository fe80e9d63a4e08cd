"""What a generation came to, as replies of both APIs tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from servers.model.embedded.generation import FinishReason, Generated
from servers.model.embedded.toolcalls import FunctionCall, parse_call
from servers.model.engine_api.logprobs import TokenNames
from servers.model.engine_api.requests import ModelCall

_TEXT_BEFORE_A_CALL: Final = " \t\r\n"


@attrs.frozen(kw_only=True)
class Envelope:
    """What a reply says of itself and of whoever made it."""

    reply_id: str
    """Hexadecimal; ids of the parts of the reply are made of it."""
    created_s: int
    model: str
    system_fingerprint: str
    """Equal for equal builds and settings of the engine."""
    names: TokenNames

    def part_id(self, kind: str, index: int) -> str:
        """Name a part: unique in every conversation, the same in every event of one reply."""
        return f"{kind}_{self.reply_id}{index}"


@attrs.frozen(kw_only=True)
class Output:
    """The end of one choice."""

    generated: Generated
    call: FunctionCall | None
    """The function call that the text is, if it is one."""

    @property
    def text(self) -> str:
        """That of a message; empty if the output is a function call."""
        return self.generated.text if self.call is None else ""

    @property
    def finish(self) -> FinishReason:
        assert self.generated.finish_reason is not None
        return self.generated.finish_reason


def read_output(call: ModelCall, generated: Generated) -> Output:
    return Output(generated=generated, call=parse_call(generated.text, call.tools))


@attrs.frozen(kw_only=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    """Of all choices; a continued prefix counts as output."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def usage_of(prompt_ids: Sequence[int], results: Sequence[Generated]) -> Usage:
    # Of several choices the first that came found least of the prompt computed.
    cached = min((result.cached_prompt_tokens for result in results), default=0)
    return Usage(
        prompt_tokens=len(prompt_ids),
        cached_tokens=min(cached, len(prompt_ids)),
        output_tokens=sum(len(result.token_ids) for result in results),
    )


class TextGate:
    """Holds the text of a stream back while it may still be a function call.

    Args:
        may_call: the request has tools; without, every text is a message.
    """

    def __init__(self, *, may_call: bool) -> None:
        self._held = ""
        self._message = not may_call

    def take(self, text: str) -> str:
        """Take new text; give what is certain to be text of a message."""
        if self._message:
            return text
        self._held += text
        begun = self._held.lstrip(_TEXT_BEFORE_A_CALL)
        if not begun or begun[0] == "{":
            return ""
        return self.rest()

    def rest(self) -> str:
        """What is held, once it is known to be no call."""
        self._message = True
        held, self._held = self._held, ""
        return held
