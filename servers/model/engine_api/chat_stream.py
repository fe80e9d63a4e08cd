"""Chat completions as a stream of chunks."""

from __future__ import annotations

from collections.abc import Sequence

from gymtrio.errors import Refusal
from gymtrio.serving.sse import DONE, encode_event
from servers.model.embedded.generation import Emission, Generated
from servers.model.engine_api.chat import (
    PROMPT_IDS,
    TOKEN_IDS,
    chat_head,
    finish_name,
    log_probs_object,
    tool_call,
    usage_object,
)
from servers.model.engine_api.errors import error_object
from servers.model.engine_api.outputs import Envelope, TextGate, read_output, usage_of
from servers.model.engine_api.requests import ModelCall


class ChatStream:
    """Implements `reply_stream.ReplyStream`."""

    def __init__(self, call: ModelCall, envelope: Envelope, prompt_ids: Sequence[int]) -> None:
        self._call = call
        self._envelope = envelope
        self._prompt_ids = prompt_ids
        self._gates = [TextGate(may_call=bool(call.tools)) for _ in range(call.choices)]
        self._results: list[Generated] = []

    def begin(self) -> bytes:
        delta: dict[str, object] = {"role": "assistant", "content": ""}
        chunks = [self._chunk([_choice(index, delta)]) for index in range(self._call.choices)]
        if self._call.token_ids:
            chunks[0][PROMPT_IDS] = list(self._prompt_ids)
        return b"".join(map(encode_event, chunks))

    def emit(self, choice: int, emission: Emission) -> bytes:
        call = self._call
        text = self._gates[choice].take(emission.text)
        if not text and not call.token_ids and not call.log_probs:
            return b""
        told = _choice(choice, {"content": text} if text else {})
        told["logprobs"] = log_probs_object(
            call, self._envelope, emission.token_ids, emission.logprobs
        )
        if call.token_ids:
            told[TOKEN_IDS] = list(emission.token_ids)
        return encode_event(self._chunk([told]))

    def finish(self, choice: int, generated: Generated) -> bytes:
        self._results.append(generated)
        output = read_output(self._call, generated)
        delta: dict[str, object] = {}
        if output.call is not None:
            delta["tool_calls"] = [{"index": 0, **tool_call(self._envelope, choice, output.call)}]
        elif rest := self._gates[choice].rest():
            delta["content"] = rest
        events = encode_event(self._chunk([_choice(choice, delta)])) if delta else b""
        last = _choice(choice, {}, finish_name(output))
        return events + encode_event(self._chunk([last]))

    def end(self) -> bytes:
        if not self._call.stream_usage:
            return DONE
        usage = usage_object(usage_of(self._prompt_ids, self._results))
        return encode_event(self._chunk([]) | {"usage": usage}) + DONE

    def fail(self, refusal: Refusal) -> bytes:
        return encode_event({"error": error_object(refusal)}) + DONE

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        chunk = {**chat_head(self._envelope, "chat.completion.chunk"), "choices": choices}
        # Where usage is asked for, every chunk has the field.
        return chunk | {"usage": None} if self._call.stream_usage else chunk


def _choice(index: int, delta: dict[str, object], finish: str | None = None) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
