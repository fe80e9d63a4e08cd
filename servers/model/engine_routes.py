"""The data routes of an engine: the OpenAI APIs, the list of models, and `/tokenize` as vLLM has it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import attrs
import trio

from gymtrio.capture.cuts import EXTENSION_KEY, CallExtension, EngineDescription
from gymtrio.capture.replies import Route
from gymtrio.errors import InvalidRequest
from gymtrio.ids import is_safe_id
from gymtrio.ports import Randomness, WallClock
from gymtrio.serving.http import (
    Answer,
    Handler,
    Request,
    Response,
    StreamingResponse,
    json_response,
)
from gymtrio.strict import MalformedValue, structure
from servers.model.embedded.engine import Engine
from servers.model.embedded.generation import Generated, Generation, GenerationRequest
from servers.model.engine_api.chat import chat_reply
from servers.model.engine_api.chat_stream import ChatStream
from servers.model.engine_api.errors import answering_refusals
from servers.model.engine_api.logprobs import TokenNames
from servers.model.engine_api.outputs import Envelope
from servers.model.engine_api.prompts import Prompting
from servers.model.engine_api.reply_stream import ReplyStream
from servers.model.engine_api.requests import ModelCall, parse_call
from servers.model.engine_api.responses import responses_reply
from servers.model.engine_api.responses_stream import ResponsesStream
from servers.model.engine_api.streaming import StreamedReply, generate_choices
from servers.model.engine_native.backend import NativeBackend
from servers.model.engine_native.continuations import seed_of

_ID_BYTES: Final = 12
_SEED_BYTES: Final = 8


class EngineService:
    """Answers the data routes.

    Args:
        native: serves the calls that come with an extension.
        nursery: runs generations whose reply is a stream.
    """

    def __init__(
        self,
        engine: Engine,
        native: NativeBackend,
        prompting: Prompting,
        *,
        description: EngineDescription,
        nursery: trio.Nursery,
        randomness: Randomness,
        wall_clock: WallClock,
    ) -> None:
        self._engine = engine
        self._native = native
        self._prompting = prompting
        self._description = description
        self._nursery = nursery
        self._randomness = randomness
        self._wall_clock = wall_clock
        self._started_s = int(wall_clock.now_s())
        self._names = TokenNames(engine.vocabulary)

    def routes(self) -> dict[tuple[str, str], Handler]:
        handlers: dict[tuple[str, str], Handler] = {
            ("POST", Route.CHAT.value): partial(self._answer, Route.CHAT),
            ("POST", Route.RESPONSES.value): partial(self._answer, Route.RESPONSES),
            ("POST", "/tokenize"): self._tokenize,
            ("GET", "/v1/models"): self._list_models,
            ("GET", f"/v1/models/{self._description.model}"): self._show_model,
        }
        return {place: answering_refusals(handler) for place, handler in handlers.items()}

    async def _answer(self, route: Route, request: Request) -> Answer:
        """Serve one call.

        Cancelled: the caller left; its slot is free from the next step on.
        """
        body = _object_of(request)
        extension = _take_extension(body)
        call = parse_call(route, body)
        wanted = self._wanted(call)
        if extension is not None:
            return await self._answer_native(extension, call, wanted)
        seed = wanted.sampling.seed if call.seeded else int(self._randomness.hex(_SEED_BYTES), 16)
        choices = [
            _with_seed(wanted, seed if not index else seed_of(f"{seed}/{index}"))
            for index in range(call.choices)
        ]
        envelope = self._envelope()
        call_id = f"plain/{envelope.reply_id}"
        if call.stream:
            return await self._stream(call, envelope, call_id, choices)
        results = await generate_choices(self._engine, call_id, choices)
        return json_response(_reply(call, envelope, wanted.prompt_ids, results))

    def _wanted(self, call: ModelCall) -> GenerationRequest:
        """What is to be generated, but for the seed of a request without one.

        Raises:
            InvalidRequest: it is out of range, or does not fit the model.
        """
        wanted = GenerationRequest(
            prompt_ids=self._prompting.encode(call),
            output_tokens_max=call.output_tokens_max or self._engine.context_tokens,
            sampling=call.sampling,
            stop=call.stop,
        )
        # The engine checks the same, but a wrong request is not to look like a refused continuation.
        Generation(wanted, self._engine.vocabulary, self._engine.context_tokens)
        return wanted

    async def _stream(
        self,
        call: ModelCall,
        envelope: Envelope,
        call_id: str,
        choices: list[GenerationRequest],
    ) -> StreamingResponse:
        writer = ChatStream if call.route is Route.CHAT else ResponsesStream
        stream: ReplyStream = writer(call, envelope, choices[0].prompt_ids)
        reply = StreamedReply(self._engine, call_id, choices, stream)
        answer: StreamingResponse | None = None
        try:
            await self._nursery.start(reply.generate)
            answer = StreamingResponse(
                200, reply.chunks(), [("cache-control", "no-cache")], on_done=reply.stop
            )
        finally:
            if answer is None:
                reply.stop(False)
        return answer

    async def _answer_native(
        self, extension: CallExtension, call: ModelCall, wanted: GenerationRequest
    ) -> Response:
        """Serve a call of a rollout, which can be cut until its reply was handed over."""
        if call.choices != 1 or call.stream:
            raise InvalidRequest(f"n, stream: a call with {EXTENSION_KEY!r} has one whole reply")
        live = await self._native.begin(extension, wanted)
        answer: Response | None = None
        try:
            result = await self._native.generate(live, wanted, seeded=call.seeded)
            reply = _reply(call, self._envelope(), wanted.prompt_ids, [result])
            self._native.add_evidence(reply, call.route, live, result)
            answer = json_response(reply, on_done=lambda _: self._native.end(live))
        finally:
            if answer is None:
                self._native.end(live)
        return answer

    def _envelope(self) -> Envelope:
        return Envelope(
            reply_id=self._randomness.hex(_ID_BYTES),
            created_s=int(self._wall_clock.now_s()),
            model=self._description.model,
            system_fingerprint=f"fp_{self._description.digest[:12]}",
            names=self._names,
        )

    async def _tokenize(self, request: Request) -> Answer:
        """The tokens of a text, or of a conversation as a chat completion would read it."""
        body = _object_of(request)
        tokens_max = self._engine.context_tokens
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            ids = self._engine.vocabulary.encode(prompt, tokens_max)
        else:
            ids = list(self._prompting.encode(parse_call(Route.CHAT, body)))
        return json_response({"count": len(ids), "max_model_len": tokens_max, "tokens": ids})

    async def _list_models(self, request: Request) -> Answer:
        return json_response({"object": "list", "data": [self._model()]})

    async def _show_model(self, request: Request) -> Answer:
        return json_response(self._model())

    def _model(self) -> Mapping[str, object]:
        return {
            "id": self._description.model,
            "object": "model",
            "created": self._started_s,
            "owned_by": "gymtrio",
            "max_model_len": self._engine.context_tokens,
        }


def _object_of(request: Request) -> dict[str, object]:
    body = request.json()
    if not isinstance(body, dict):
        raise InvalidRequest("the body of a model call is a JSON object")
    return body


def _take_extension(body: dict[str, object]) -> CallExtension | None:
    """
    Raises:
        InvalidRequest, InvalidRolloutId: it is not one.
    """
    if EXTENSION_KEY not in body:
        return None
    try:
        extension = structure(CallExtension, body.pop(EXTENSION_KEY))
    except MalformedValue as error:
        raise InvalidRequest(f"{EXTENSION_KEY}.{error}") from None
    if not is_safe_id(extension.model_call_id):
        raise InvalidRequest(f"{EXTENSION_KEY}.model_call_id: not a safe id")
    # An episode that cannot be is refused now, not at its cut.
    _ = extension.capture_key
    return extension


def _with_seed(wanted: GenerationRequest, seed: int) -> GenerationRequest:
    return attrs.evolve(wanted, sampling=attrs.evolve(wanted.sampling, seed=seed))


def _reply(
    call: ModelCall, envelope: Envelope, prompt_ids: tuple[int, ...], results: list[Generated]
) -> dict[str, object]:
    if call.route is Route.CHAT:
        return chat_reply(call, envelope, prompt_ids, results)
    return responses_reply(call, envelope, prompt_ids, results[0])
