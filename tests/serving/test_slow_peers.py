"""Peers that are slow: what each time limit bounds, and what it does not. In virtual time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from gymtrio.serving.app import ServerApp, open_asgi
from gymtrio.serving.asgi import ForeignExchange
from gymtrio.serving.connection import SEND_SLICE_BYTES, Connection, HttpLimits, Shared
from gymtrio.serving.exchange import BODY_TIMEOUT_S, send_answer
from gymtrio.serving.http import Handler, Request, Response, StreamingResponse, json_response
from tests.helpers.serving import make_app

GET = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n"
LIMITS = HttpLimits()
ANSWER_BYTES = 16 * SEND_SLICE_BYTES


async def x(request: Request) -> Response:
    return json_response({"bytes": len(request.body)})


def app_of(handler: Handler) -> ServerApp[Any]:
    return make_app({("GET", "/x"): handler, ("POST", "/x"): handler})


@asynccontextmanager
async def served(
    app: ServerApp[Any], streams: Callable[[], Any] = trio.testing.memory_stream_pair
) -> AsyncIterator[Any]:
    """The peer's side of a connection to `app`."""
    ours, theirs = streams()
    async with open_asgi(app) as asgi, trio.open_nursery() as nursery:
        nursery.start_soon(Connection(asgi, theirs, Shared(LIMITS)).run)
        yield ours
        await ours.aclose()


async def everything(stream: trio.abc.ReceiveStream) -> bytes:
    received = b""
    while data := await stream.receive_some():
        received += data
    return received


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["detail"]


async def drip(stream: trio.abc.SendStream, data: bytes, every_s: float) -> None:
    """Send byte by byte until nobody takes them."""
    try:
        for byte in data:
            await stream.send_all(bytes([byte]))
            await trio.sleep(every_s)
        await trio.sleep_forever()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


@pytest.mark.parametrize(("data", "every_s"), [(b"G", 1.0), (GET[:-1], 0.5), (b"GET /" * 99, 0.1)])
async def test_a_slow_head_is_told_its_limit(
    autojump_clock: MockClock, data: bytes, every_s: float
) -> None:
    """SRV-5: 408, however it trickles; counted from its first byte."""
    async with served(app_of(x)) as stream, trio.open_nursery() as nursery:
        await trio.sleep(LIMITS.keep_alive_s - 5)
        began = trio.current_time()
        nursery.start_soon(drip, stream, data, every_s)
        assert error_of(await everything(stream)) == (408, "head not received within 10 s")
        assert LIMITS.head_timeout_s <= trio.current_time() - began < LIMITS.head_timeout_s + 3
        nursery.cancel_scope.cancel()


async def test_a_slow_head_of_a_second_request_as_well(autojump_clock: MockClock) -> None:
    async with served(app_of(x)) as stream:
        await stream.send_all(GET + b"GET /x HT")
        first, _, second = (await everything(stream)).partition(b'{"bytes":0}')
    assert first.startswith(b"HTTP/1.1 200")
    assert error_of(second) == (408, "head not received within 10 s")


async def test_who_says_nothing_is_closed_without_a_word(autojump_clock: MockClock) -> None:
    async with served(app_of(x)) as stream:
        assert await everything(stream) == b""
        assert trio.current_time() < LIMITS.keep_alive_s + 2


@pytest.mark.parametrize("every_s", [1.0, 30.0])
async def test_a_slow_body_is_told_its_limit(autojump_clock: MockClock, every_s: float) -> None:
    """SRV-5: 408, however it trickles."""
    async with served(app_of(x)) as stream, trio.open_nursery() as nursery:
        await stream.send_all(POST)
        nursery.start_soon(drip, stream, b"y" * 999, every_s)
        assert error_of(await everything(stream)) == (408, "body not received within 60 s")
        assert trio.current_time() < BODY_TIMEOUT_S + 5
        nursery.cancel_scope.cancel()


async def test_a_parked_request_is_not_slow(autojump_clock: MockClock) -> None:
    """SRV-4: no limit is one of the time that a handler takes."""

    async def park(request: Request) -> Response:
        await trio.sleep(24 * 3600)
        return json_response({})

    async with served(app_of(park)) as stream:
        await stream.send_all(GET)
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")


def big(told: list[bool]) -> Handler:
    async def answer(request: Request) -> Response:
        return Response(200, b"y" * ANSWER_BYTES, on_done=told.append)

    return answer


def streamed(told: list[bool]) -> Handler:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"y" * (ANSWER_BYTES // 4)

    async def answer(request: Request) -> StreamingResponse:
        return StreamingResponse(200, chunks(), on_done=told.append)

    return answer


ANSWERS = pytest.mark.parametrize("answers", [big, streamed])


@ANSWERS
async def test_a_reader_that_stalls_is_given_up(
    autojump_clock: MockClock, answers: Callable[[list[bool]], Handler]
) -> None:
    """SRV-5: at the first byte, or after a while."""
    for taken in (0, ANSWER_BYTES // 2):
        told: list[bool] = []
        async with served(app_of(answers(told)), trio.testing.lockstep_stream_pair) as stream:
            await stream.send_all(GET)
            while taken > 0:
                taken -= len(await stream.receive_some(4096))
            stalled = trio.current_time()
            await trio.sleep(LIMITS.send_timeout_s - 1)
            assert told == []
            await trio.sleep(2)
            assert told == [False]
            assert trio.current_time() - stalled < LIMITS.send_timeout_s + 2


@ANSWERS
async def test_a_reader_that_is_slow_gets_everything(
    autojump_clock: MockClock, answers: Callable[[list[bool]], Handler]
) -> None:
    """SRV-5: what is bounded is the time without progress, not that of the whole answer."""
    told: list[bool] = []
    received = 0
    async with served(app_of(answers(told)), trio.testing.lockstep_stream_pair) as stream:
        await stream.send_all(GET)
        while received < ANSWER_BYTES:
            received += (await stream.receive_some(4096)).count(b"y")
            await trio.sleep(1)
        assert trio.current_time() > 3 * LIMITS.send_timeout_s
        with trio.move_on_after(1):
            # The end of a stream, which says that there is no more.
            while True:
                await stream.receive_some()
        assert told == [True]


async def test_who_takes_nothing_of_an_answer_of_the_framework_is_gone(
    autojump_clock: MockClock,
) -> None:
    """SRV-1, SRV-2: although the framework is not interrupted while it sends."""
    ours, theirs = trio.testing.lockstep_stream_pair()
    async with open_asgi(app_of(x)) as asgi, trio.open_nursery() as nursery:
        nursery.start_soon(Connection(asgi, theirs, Shared(LIMITS)).run)
        await ours.send_all(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        with trio.move_on_after(10 * LIMITS.send_timeout_s, shield=True) as late:
            await everything_but_the_answer(ours)
        assert not late.cancelled_caught


async def everything_but_the_answer(stream: trio.abc.SendStream) -> None:
    """Return when the peer has closed."""
    with pytest.raises(trio.BrokenResourceError):
        while True:
            await trio.sleep(1)
            await stream.send_all(b"G")


@pytest.mark.parametrize("size", [0, 10 * 65536])
async def test_who_takes_nothing_from_a_foreign_server_is_gone(
    size: int, autojump_clock: MockClock
) -> None:
    """SRV-2: such a server waits for its peer for ever, and would never be stopped."""
    told: list[bool] = []

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await trio.sleep_forever()

    scope = {"method": "GET", "path": "/x", "query_string": b"", "headers": []}
    exchange = ForeignExchange(scope, trio.sleep_forever, send)
    await send_answer(exchange, Response(200, b"y" * size, on_done=told.append))
    assert told == [False]
    assert 30 <= trio.current_time() <= 30 * (1 + size // 65536)
