"""What every transport promises: one suite over real sockets and in process."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from gymtrio.context import RolloutContext, current_episode, rollout_context
from gymtrio.errors import (
    InvalidRequest,
    PeerRefused,
    SettingsError,
    StaleAttempt,
    TransportError,
)
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.serving.client import CallTimedOut, ClientSettings
from gymtrio.serving.http import (
    Request,
    Response,
    StreamingResponse,
    json_response,
)
from gymtrio.wire.control import Kind
from tests.helpers.serving import TRANSPORTS, Transported, make_app

pytestmark = pytest.mark.parametrize("open_client", TRANSPORTS.values(), ids=TRANSPORTS.keys())

EPISODE = EpisodeId(RolloutId("task-7"), 2)


async def echo(request: Request) -> Response:
    return json_response(
        {
            "method": request.method,
            "path": request.path,
            "query": request.query,
            "body": request.body.decode("latin-1"),
            "cookies": request.cookies(),
            "x-test": request.header("X-Test"),
            "idempotency-key": request.header("idempotency-key"),
            "content-type": request.header("content-type"),
            "episode": str(request.context.episode_id) if request.context else None,
            "current": str(current_episode()),
            "captures": request.context.capture_tokens if request.context else None,
        }
    )


def echo_app(kind: Kind = Kind.RESOURCES) -> Any:
    return make_app({}, fallback=echo, kind=kind)


class Parked:
    """A handler that waits, and tells how it ended."""

    def __init__(self) -> None:
        self.entered = trio.Event()
        self.release = trio.Event()
        self.cancelled = trio.Event()

    async def __call__(self, request: Request) -> Response:
        self.entered.set()
        try:
            await self.release.wait()
        except trio.Cancelled:
            self.cancelled.set()
            raise
        return json_response({"released": True})


async def test_a_request_arrives_as_it_was_sent(open_client: Transported) -> None:
    async with open_client(echo_app()) as client:
        reply = await client.request(
            "peer",
            "POST",
            "/tool/ü and more?a=1&b=x%20y",
            body=b"\x00\xff body",
            headers=[("X-Test", "value")],
            cookies={"session": "abc", "other": "d"},
        )
        assert reply.status == 200
        seen: Any = reply.json()
        assert seen["method"] == "POST"
        assert seen["path"] == "/tool/ü and more"
        assert seen["query"] == "a=1&b=x%20y"
        assert seen["body"] == "\x00\xff body"
        assert seen["x-test"] == "value"
        assert seen["cookies"] == {"session": "abc", "other": "d"}
        assert seen["episode"] is None


async def test_json_keeps_key_order_and_what_only_python_writes(open_client: Transported) -> None:
    """SRV-5: key order of JSON replies is kept."""

    async def back(request: Request) -> Response:
        value: Any = request.json()
        assert math.isnan(value["nan"])
        return json_response(value)

    value = {"z": 1, "a": [2**80, -0.0, "\ud800"], "nan": math.nan, "": None}
    async with open_client(make_app({("POST", "/back"): back})) as client:
        reply = await client.request("peer", "POST", "/back", json=value)
        assert reply.header("content-type") == "application/json"
        text = '{"z":1,"a":[1208925819614629174706176,-0.0,"\\ud800"],"nan":NaN,"":null}'
        assert reply.body.decode() == text


async def test_what_is_not_json_is_refused_in_json(open_client: Transported) -> None:
    async def read(request: Request) -> Response:
        return json_response(request.json())

    async with open_client(make_app({("POST", "/read"): read})) as client:
        for body in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
            reply = await client.request("peer", "POST", "/read", body=body)
            assert reply.status == 422
            answer: Any = reply.json()
            assert answer["error"]["code"] == "invalid_request"


async def test_a_refusal_becomes_its_error_body(open_client: Transported) -> None:
    """CTL-17: error bodies are `{"error": {"code", "detail"}}`, also out of a nursery."""

    async def refuse(request: Request) -> Response:
        raise StaleAttempt("task-7 was retired")

    async def refuse_in_a_nursery(request: Request) -> Response:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse, request)
        raise AssertionError

    routes = {("POST", "/plain"): refuse, ("POST", "/nursery"): refuse_in_a_nursery}
    async with open_client(make_app(routes)) as client:
        for path in ("/plain", "/nursery"):
            reply = await client.request("peer", "POST", path)
            assert reply.status == 409
            assert reply.json() == {
                "error": {"code": "stale_attempt", "detail": "task-7 was retired"}
            }
            with pytest.raises(PeerRefused) as caught:
                reply.raise_for_status()
            assert caught.value.code == "stale_attempt"
            assert caught.value.status == 409
            assert caught.value.where == f"POST peer{path}"


async def test_a_fault_of_a_handler_costs_its_request_only(
    open_client: Transported, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(request: Request) -> Response:
        raise ValueError("secret detail")

    async with open_client(make_app({("POST", "/fail"): fail}, fallback=echo)) as client:
        reply = await client.request("peer", "POST", "/fail")
        assert reply.status == 500
        assert b"secret detail" not in reply.body
        assert reply.header("content-type") == "application/json"
        assert (await client.request("peer", "POST", "/other")).status == 200
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("leave", ["cancel", "deadline"])
async def test_a_caller_that_leaves_has_its_handler_cancelled(
    open_client: Transported, leave: str
) -> None:
    """SRV-3: a caller that leaves has its handler cancelled."""
    parked = Parked()
    async with open_client(make_app({("POST", "/park"): parked}, fallback=echo)) as client:
        if leave == "cancel":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.request, "peer", "POST", "/park")
                await parked.entered.wait()
                nursery.cancel_scope.cancel()
        else:
            with pytest.raises(CallTimedOut):
                await client.request("peer", "POST", "/park", deadline=trio.current_time() + 1)
        with trio.fail_after(30):
            await parked.cancelled.wait()
        assert (await client.request("peer", "POST", "/other")).status == 200


async def test_a_stream_arrives_while_it_is_made(open_client: Transported) -> None:
    go_on = trio.Event()

    async def stream(request: Request) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"first"
            await go_on.wait()
            yield b""
            yield b"second"

        return StreamingResponse(200, chunks(), headers=[("x-kind", "stream")])

    async with open_client(make_app({("GET", "/stream"): stream})) as client:
        async with client.stream("peer", "GET", "/stream") as reply:
            assert reply.status == 200
            assert reply.header("x-kind") == "stream"
            assert reply.header("content-type") == "text/event-stream"
            chunks = reply.chunks()
            assert await anext(chunks) == b"first"
            go_on.set()
            assert b"".join([chunk async for chunk in chunks]) == b"second"


async def test_leaving_a_stream_cancels_what_makes_it(open_client: Transported) -> None:
    """SRV-3: also while the answer is being streamed."""
    closed = trio.Event()

    async def stream(request: Request) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                yield b"first"
                await trio.sleep_forever()
            finally:
                closed.set()

        return StreamingResponse(200, chunks())

    async with open_client(make_app({("GET", "/stream"): stream})) as client:
        async with client.stream("peer", "GET", "/stream") as reply:
            assert await anext(reply.chunks()) == b"first"
        with trio.fail_after(30):
            await closed.wait()


async def test_a_stream_that_fails_midway_is_no_whole_reply(
    open_client: Transported, caplog: pytest.LogCaptureFixture
) -> None:
    async def stream(request: Request) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"first"
            raise InvalidRequest("too late for a status")

        return StreamingResponse(200, chunks())

    async with open_client(make_app({("GET", "/stream"): stream})) as client:
        with pytest.raises(TransportError):
            await client.request("peer", "GET", "/stream")
    assert "too late for a status" in caplog.text


async def test_who_answers_is_told_when_the_answer_was_handed_over(
    open_client: Transported,
) -> None:
    """HARD-9: a result stays until its reply was delivered."""
    done: list[tuple[str, bool]] = []

    async def whole(request: Request) -> Response:
        return json_response({}, on_done=lambda delivered: done.append(("whole", delivered)))

    async def streamed(request: Request) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"x"
            assert done == [("whole", True)]

        return StreamingResponse(
            200, chunks(), on_done=lambda delivered: done.append(("streamed", delivered))
        )

    routes: Any = {("POST", "/whole"): whole, ("POST", "/streamed"): streamed}
    async with open_client(make_app(routes, fallback=echo)) as client:
        await client.request("peer", "POST", "/whole")
        await client.request("peer", "POST", "/streamed")
        await client.request("peer", "POST", "/other")
    assert done == [("whole", True), ("streamed", True)]


@pytest.mark.parametrize("streams", [False, True])
async def test_who_answers_is_told_that_the_caller_had_left(
    open_client: Transported, streams: bool
) -> None:
    """HARD-9: what was not delivered is not reported as delivered, and is reported."""
    told: list[bool] = []
    entered = trio.Event()
    ended = trio.Event()

    def done(delivered: bool) -> None:
        told.append(delivered)
        ended.set()

    async def stubborn(request: Request) -> Response:
        entered.set()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            # As clean-up does: it finishes although its caller has gone.
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
            return json_response({}, on_done=done)
        raise AssertionError

    async def endless(request: Request) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"x"
            entered.set()
            await trio.sleep_forever()

        return StreamingResponse(200, chunks(), on_done=done)

    routes: Any = {("POST", "/park"): endless if streams else stubborn}
    async with open_client(make_app(routes, fallback=echo)) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.request, "peer", "POST", "/park")
            await entered.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(30):
            await ended.wait()
        await client.request("peer", "POST", "/other")
    assert told == [False]


async def test_a_failed_stream_was_not_delivered(open_client: Transported) -> None:
    told: list[bool] = []

    async def failing(request: Request) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"x"
            raise InvalidRequest("midway")

        return StreamingResponse(200, chunks(), on_done=told.append)

    async with open_client(make_app({("POST", "/x"): failing})) as client:
        with pytest.raises(TransportError):
            await client.request("peer", "POST", "/x")
    assert told == [False]


async def test_cookies_go_both_ways(open_client: Transported) -> None:
    async def seed(request: Request) -> Response:
        return json_response({}, cookies={"session": "one", "second": "two"})

    async with open_client(make_app({("POST", "/seed"): seed}, fallback=echo)) as client:
        reply = await client.request("peer", "POST", "/seed")
        assert reply.cookies() == {"session": "one", "second": "two"}
        seen: Any = (await client.request("peer", "POST", "/x", cookies=reply.cookies())).json()
        assert seen["cookies"] == {"session": "one", "second": "two"}


async def test_calls_to_a_resources_server_carry_the_episode(open_client: Transported) -> None:
    """ID-4, ID-5: the prefix is put by the client and stripped by the server."""
    async with open_client(echo_app()) as client:
        with rollout_context(RolloutContext(EPISODE)):
            seen: Any = (await client.request("peer", "POST", "/increment")).json()
            assert (seen["path"], seen["episode"]) == ("/increment", "task-7-a2")
            assert seen["current"] == "task-7-a2"
            seen = (await client.request("peer", "POST", "/x", context=None)).json()
            assert seen["episode"] is None
        context = RolloutContext(EPISODE, capture_tokens=True)
        seen = (await client.request("peer", "POST", "/x", context=context)).json()
        assert (seen["path"], seen["episode"], seen["captures"]) == ("/x", "task-7-a2", True)
        already = context.path("/x")
        seen = (await client.request("peer", "POST", already, context=context)).json()
        assert (seen["path"], seen["episode"]) == ("/x", "task-7-a2")


async def test_a_resources_server_is_one_under_its_url_too(open_client: Transported) -> None:
    """ID-5: an agent is given its tools by URL."""
    async with open_client(echo_app()) as client:
        url = client.url_of("peer")
        with rollout_context(RolloutContext(EPISODE)):
            seen: Any = (await client.request(url, "POST", "/increment")).json()
            assert seen["episode"] == "task-7-a2"
            below = (await client.request(f"{url}/base/", "POST", "/increment")).json()
            assert isinstance(below, dict)
            assert (below["path"], below["episode"]) == ("/base/increment", "task-7-a2")


async def test_of_other_servers_only_the_model_routes_carry_the_episode(
    open_client: Transported,
) -> None:
    """ID-5: resources servers and the model routes."""
    async with open_client(echo_app(Kind.MODEL)) as client:
        with rollout_context(RolloutContext(EPISODE)):
            for path in ("/v1/responses", "/v1/chat/completions", "/v1/messages"):
                seen: Any = (await client.request("peer", "POST", path)).json()
                assert (seen["path"], seen["episode"]) == (path, "task-7-a2")
            seen = (await client.request("peer", "GET", "/v1/models")).json()
            assert seen["episode"] is None


async def test_a_prefix_that_names_no_episode_is_refused(open_client: Transported) -> None:
    """ID-1: anything else is 400 `invalid_rollout_id`."""
    async with open_client(echo_app()) as client:
        reply = await client.request("peer", "POST", "/ng-rollout/-bad-/x")
        assert reply.status == 400
        answer: Any = reply.json()
        assert answer["error"]["code"] == "invalid_rollout_id"


async def test_an_idempotency_key_is_sent(open_client: Transported) -> None:
    async with open_client(echo_app()) as client:
        reply = await client.request("peer", "POST", "/x", idempotency_key="once-1")
        seen: Any = reply.json()
        assert seen["idempotency-key"] == "once-1"


async def test_errors_of_the_framework_are_json(open_client: Transported) -> None:
    """SRV-5: errors are JSON, never HTML."""
    async with open_client(make_app({("POST", "/tool"): echo})) as client:
        missing = await client.request("peer", "GET", "/nowhere")
        wrong = await client.request("peer", "GET", "/tool")
        framework = await client.request("peer", "POST", "/health")
        for reply, status, code in (
            (missing, 404, "not_found"),
            (wrong, 405, "method_not_allowed"),
            (framework, 405, "method_not_allowed"),
        ):
            answer: Any = reply.json()
            assert (reply.status, answer["error"]["code"]) == (status, code)
        assert wrong.header("allow") == "POST"


async def test_health_and_readiness(open_client: Transported) -> None:
    """SRV-6: alive, and accepting."""
    async with open_client(make_app({}, fallback=echo)) as client:
        alive = await client.request("peer", "GET", "/health")
        assert alive.json() == {"status": "alive", "kind": "resources", "instance": "peer"}
        ready = await client.request("peer", "GET", "/ready")
        assert ready.json() == {"status": "ready", "kind": "resources", "instance": "peer"}


async def test_without_checkpointing_there_is_no_control_plane(open_client: Transported) -> None:
    """SET-1: when off, no participant is installed; the routes are not tools either."""
    async with open_client(make_app({}, fallback=echo)) as client:
        path = "/ng-control/v1/checkpoint/status"
        assert (await client.request("peer", "GET", path, control=True)).status == 404


async def test_a_reply_over_the_limit_is_given_up(open_client: Transported) -> None:
    async def big(request: Request) -> Response:
        return Response(200, b"x" * 1001)

    settings = ClientSettings(reply_bytes_max=1000)
    async with open_client(make_app({("GET", "/big"): big}), settings) as client:
        with pytest.raises(TransportError, match="limit of 1000 bytes"):
            await client.request("peer", "GET", "/big")


async def test_large_bodies_go_both_ways(open_client: Transported) -> None:
    async def back(request: Request) -> Response:
        return Response(200, request.body, content_type="application/octet-stream")

    body = bytes(range(256)) * 16384
    async with open_client(make_app({("POST", "/back"): back})) as client:
        reply = await client.request("peer", "POST", "/back", body=body)
        assert reply.body == body


async def test_a_server_that_is_not_known_is_a_wrong_setting(open_client: Transported) -> None:
    async with open_client(echo_app()) as client:
        with pytest.raises(SettingsError, match=r"no server 'pear' .* did you mean 'peer'"):
            await client.request("pear", "GET", "/")
        with pytest.raises(SettingsError, match="not an http or https URL"):
            await client.request("ftp://peer", "GET", "/")


async def test_a_server_that_is_not_there_is_a_transport_error(open_client: Transported) -> None:
    async with open_client(echo_app()) as client:
        with pytest.raises(TransportError, match=r"GET http://127\.0\.0\.1:9/x: .*cannot connect"):
            await client.request("http://127.0.0.1:9", "GET", "/x")


async def test_many_calls_at_once_get_their_own_replies(open_client: Transported) -> None:
    replies: dict[int, str] = {}
    async with open_client(echo_app(), ClientSettings(data_connections_max=7)) as client:

        async def call(number: int) -> None:
            reply: Any = (await client.request("peer", "POST", "/x", body=b"%d" % number)).json()
            replies[number] = reply["body"]

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(call, number)
    assert replies == {number: str(number) for number in range(100)}
