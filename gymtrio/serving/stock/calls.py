"""Calls of an engine's own routes, and its answers read strictly."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Final

import trio

from gymtrio.capture.tokens import are_token_ids
from gymtrio.errors import InvalidRequest
from gymtrio.serving.client import Reply, ServerClient, StreamedReply
from gymtrio.serving.http import HeadersLike, parse_json
from gymtrio.serving.sse import DONE_DATA, EventTooLong, SseDecoder
from gymtrio.serving.stock.engines import EngineBroke, EngineRefused

ERROR_BYTES_MAX: Final = 1024 * 1024
DESCRIBE_S_MAX: Final = 60.0
"""What an engine says of itself is known to it; one that does not say is not asked for longer."""


class EngineCalls:
    """
    Args:
        server: base URL or name of the engine.
        headers: of every call, such as its key.
    """

    def __init__(self, client: ServerClient, server: str, headers: HeadersLike = ()) -> None:
        self._client = client
        self._server = server
        self._headers = tuple(headers)

    async def get(self, path: str) -> dict[str, object]:
        """
        Raises:
            TransportError, EngineRefused, EngineBroke
        """
        reply = await self._client.request(
            self._server,
            "GET",
            path,
            headers=self._headers,
            context=None,
            deadline=trio.current_time() + DESCRIBE_S_MAX,
        )
        return _object_of(reply)

    async def post(self, path: str, body: dict[str, object]) -> dict[str, object]:
        """
        Raises:
            TransportError, EngineRefused, EngineBroke
        """
        reply = await self._client.request(
            self._server, "POST", path, json=body, headers=self._headers, context=None
        )
        return _object_of(reply)

    @asynccontextmanager
    async def events(
        self, path: str, body: dict[str, object]
    ) -> AsyncIterator[AsyncIterator[dict[str, object]]]:
        """The events of a stream; leaving the block ends it.

        Raises (also while iterating):
            TransportError, EngineRefused, EngineBroke
        """
        async with self._client.stream(
            self._server, "POST", path, json=body, headers=self._headers, context=None
        ) as reply:
            if reply.status != 200:
                _object_of(await reply.read(ERROR_BYTES_MAX))
            async with aclosing(_events(reply)) as events:
                yield events


async def _events(reply: StreamedReply) -> AsyncGenerator[dict[str, object]]:
    decoder = SseDecoder()
    async for chunk in reply.chunks():
        try:
            received = decoder.receive_data(chunk)
        except EventTooLong as error:
            raise EngineBroke(f"{reply.where}: {error}") from None
        for data in received:
            if data == DONE_DATA:
                return
            event = _parse(data, f"{reply.where}: an event")
            if "error" in event:
                raise EngineBroke(f"{reply.where}: {json.dumps(event['error'])[:400]}")
            yield event


def _object_of(reply: Reply) -> dict[str, object]:
    if reply.status == 200:
        return _parse(reply.body, reply.where)
    try:
        body = _parse(reply.body, reply.where)
    except EngineBroke:
        text = reply.body[:400].decode("utf-8", "replace")
        body = {"error": {"message": text, "type": "backend_error"}}
    raise EngineRefused(reply.status, body)


def _parse(data: bytes, where: str) -> dict[str, object]:
    try:
        value = parse_json(data, where)
    except InvalidRequest as error:
        raise EngineBroke(error.detail) from None
    if not isinstance(value, dict):
        raise EngineBroke(f"{where}: not a JSON object")
    return value


def token_ids_of(value: object, where: str) -> tuple[int, ...]:
    """
    Raises:
        EngineBroke: it is no list of token ids.
    """
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise EngineBroke(f"{where}: not a list of token ids")
    if not are_token_ids(value):
        raise EngineBroke(f"{where}: not all of them are token ids")
    return tuple(value)


def number_of(value: object, where: str) -> float:
    """
    Raises:
        EngineBroke: it is no finite number.
    """
    if type(value) is not int and type(value) is not float:
        raise EngineBroke(f"{where}: not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise EngineBroke(f"{where}: not a finite number")
    return number
