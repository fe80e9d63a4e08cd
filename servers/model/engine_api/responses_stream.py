"""Responses as a stream of typed events, in this order:

    created, in_progress
    a message:  output_item.added, content_part.added, output_text.delta...,
                output_text.done, content_part.done, output_item.done
    a call:     output_item.added, function_call_arguments.delta, function_call_arguments.done,
                output_item.done
    completed, or incomplete

Where the engine ends in the middle, `error` and `failed` are the last.
"""

from __future__ import annotations

from collections.abc import Sequence

from gymtrio.errors import Refusal
from gymtrio.serving.sse import encode_event
from servers.model.embedded.generation import Emission, Generated
from servers.model.embedded.toolcalls import FunctionCall
from servers.model.engine_api.outputs import Envelope, Output, TextGate, read_output
from servers.model.engine_api.requests import ModelCall
from servers.model.engine_api.responses import (
    call_item,
    entries_of,
    message_item,
    response_object,
    responses_reply,
    text_part,
)


class ResponsesStream:
    """Implements `reply_stream.ReplyStream`; a response has one choice."""

    def __init__(self, call: ModelCall, envelope: Envelope, prompt_ids: Sequence[int]) -> None:
        self._call = call
        self._envelope = envelope
        self._prompt_ids = prompt_ids
        self._gate = TextGate(may_call=bool(call.tools))
        self._sequence_number = 0
        self._untold: list[dict[str, object]] = []
        """Log-prob entries of tokens whose text is not told yet."""
        self._message_open = False

    def begin(self) -> bytes:
        response = response_object(self._call, self._envelope, "in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def emit(self, choice: int, emission: Emission) -> bytes:
        self._untold += entries_of(
            self._call, self._envelope, emission.token_ids, emission.logprobs
        )
        return self._tell(self._gate.take(emission.text))

    def finish(self, choice: int, generated: Generated) -> bytes:
        output = read_output(self._call, generated)
        reply = responses_reply(self._call, self._envelope, self._prompt_ids, generated)
        if output.call is not None:
            events = self._function_call(output.call)
        else:
            events = self._tell(self._gate.rest()) + self._end_message(output)
        items = reply["output"]
        assert isinstance(items, list)
        events += self._event("response.output_item.done", output_index=0, item=items[0])
        return events + self._event(f"response.{reply['status']}", response=reply)

    def end(self) -> bytes:
        return b""

    def fail(self, refusal: Refusal) -> bytes:
        error = {"code": "server_error", "message": refusal.detail}
        response = response_object(self._call, self._envelope, "failed") | {"error": error}
        return self._event("error", param=None, **error) + self._event(
            "response.failed", response=response
        )

    def _tell(self, text: str) -> bytes:
        if not text:
            return b""
        events = self._open_message()
        entries, self._untold = self._untold, []
        return events + self._event(
            "response.output_text.delta", **self._place(), delta=text, logprobs=entries
        )

    def _open_message(self) -> bytes:
        if self._message_open:
            return b""
        self._message_open = True
        item = message_item(self._envelope, [], "in_progress")
        return self._event("response.output_item.added", output_index=0, item=item) + self._event(
            "response.content_part.added", **self._place(), part=text_part("", [])
        )

    def _end_message(self, output: Output) -> bytes:
        generated = output.generated
        entries = entries_of(self._call, self._envelope, generated.token_ids, generated.logprobs)
        events = self._open_message()
        events += self._event(
            "response.output_text.done", **self._place(), text=output.text, logprobs=entries
        )
        part = text_part(output.text, entries)
        return events + self._event("response.content_part.done", **self._place(), part=part)

    def _function_call(self, call: FunctionCall) -> bytes:
        item = call_item(self._envelope, call, "in_progress", arguments="")
        place = {"output_index": 0, "item_id": item["id"]}
        arguments = {"name": call.name, "arguments": call.arguments}
        events = self._event("response.output_item.added", output_index=0, item=item)
        events += self._event(
            "response.function_call_arguments.delta", **place, delta=call.arguments
        )
        return events + self._event("response.function_call_arguments.done", **place, **arguments)

    def _place(self) -> dict[str, object]:
        item = self._envelope.part_id("msg", 0)
        return {"item_id": item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, /, **fields: object) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        return encode_event({"type": kind, "sequence_number": number, **fields}, kind)
