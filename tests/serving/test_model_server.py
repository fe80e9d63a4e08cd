"""The policy model server over HTTP: OpenAI's routes, the engine behind them, and a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import openai
import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from gymtrio.capture.cuts import CUT_ROUTE, ENGINE_ROUTE, CutInventory
from gymtrio.capture.log_store import LogTokenStore, open_log_store
from gymtrio.capture.replies import LOG_PROBS, Route, token_carrier
from gymtrio.capture.tokens import StagingKey
from gymtrio.context import AsgiApp, RolloutContext
from gymtrio.errors import NotFound, SettingsError
from gymtrio.ports import HostRandomness
from gymtrio.serving.app import ServerApp, open_asgi
from gymtrio.serving.client import Reply, ServerClient
from gymtrio.serving.connection import Connection, HttpLimits, Shared
from gymtrio.serving.deployment import Deployment, DeploymentDirectory, ServerEntry
from gymtrio.serving.host import HostPorts, Service, ServiceHost
from gymtrio.serving.http import Handler, Request, Response, json_response
from gymtrio.serving.inprocess import open_network
from gymtrio.serving.ledger_route import LEDGER_ROUTE
from gymtrio.serving.model_server import ModelSettings
from gymtrio.settings import CheckpointSettings, Secret, load_settings
from gymtrio.strict import structure, unstructure
from gymtrio.wire.control import CONTROL_PREFIX, Kind
from servers.model.policy import app as policy_app
from tests.helpers.clocks import FollowingClock
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.plane import episode
from tests.helpers.scripted_backend import ScriptedBackend, uncut_tokens
from tests.helpers.serving import NoSettings, serve_on_sockets

TOKEN = "a-token-of-sixteen"
BEARER = f"Bearer {TOKEN}"
R = RolloutContext(episode("r"))
R1 = RolloutContext(episode("r", 1))
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
INPUT: dict[str, Any] = {"input": "hello"}


class EngineOverHttp:
    """A native engine as an HTTP server: what was sent, and a scripted backend behind it."""

    def __init__(self, backend: ScriptedBackend) -> None:
        self.backend = backend
        self.requests: list[Request] = []
        self.contexts: list[RolloutContext | None] = []
        self.bare = False
        """Replies lack what engines leave out, and are not native."""
        self.answer: Response | None = None
        """Given to every call instead of a generation."""
        self.carried: dict[str, object] = {}
        """Said in replies where they carry their tokens, in place of what is true."""
        self.describes = True
        self.cut: Handler | None = None
        """Answers inventories instead of the backend."""

    def app(self) -> ServerApp[NoSettings]:
        @asynccontextmanager
        async def open_service(host: ServiceHost[NoSettings]) -> AsyncIterator[Service]:
            yield Service(
                routes={
                    ("POST", Route.CHAT.value): self._generate,
                    ("POST", Route.RESPONSES.value): self._generate,
                    ("POST", CUT_ROUTE): self._cut,
                    ("GET", ENGINE_ROUTE): self._describe,
                }
            )

        return ServerApp(
            kind=Kind.MODEL,
            default_instance="engine",
            settings_class=NoSettings,
            open_service=open_service,
        )

    async def _generate(self, request: Request) -> Response:
        self.requests.append(request)
        if self.answer is not None:
            return self.answer
        body = request.json()
        call_id = request.header("idempotency-key")
        reply = await self.backend.generate(Route(request.path), body, call_id=call_id)
        if self.bare:
            for name in ("object", "created", "created_at", "model", "tools", "tool_choice"):
                reply.body.pop(name, None)
        if self.carried:
            token_carrier(Route(request.path), reply.body).update(self.carried)
        return json_response(reply.body, reply.status)

    async def _cut(self, request: Request) -> Response:
        self.requests.append(request)
        if self.cut is not None:
            return await self.cut(request)
        inventory = structure(CutInventory, request.json())
        return json_response(unstructure(await self.backend.cut(inventory, deadline=0)))

    async def _describe(self, request: Request) -> Response:
        assert request.header("authorization") == BEARER
        if not self.describes:
            raise NotFound("no such route")
        return json_response(unstructure(await self.backend.describe(deadline=0)))


@attrs.define
class Running:
    client: ServerClient
    asgi: AsgiApp
    engine: EngineOverHttp
    clock: FollowingClock
    archive: MemoryArchive
    store: LogTokenStore
    name: str = "policy"

    async def ask(
        self,
        body: Any = HELLO,
        *,
        context: RolloutContext | None = None,
        route: Route = Route.CHAT,
        headers: Any = (),
    ) -> Reply:
        return await self.client.request(
            self.name, "POST", route.value, json=body, context=context, headers=headers
        )

    async def control(self, operation: str, **fields: Any) -> dict[str, Any]:
        body = {"checkpoint_id": "c1", "deadline_ts": self.clock.now_s() + 10, **fields}
        reply = await self.client.request(
            self.name,
            "POST",
            f"{CONTROL_PREFIX}/{operation}",
            json=body,
            headers=(("authorization", BEARER),),
            control=True,
        )
        value: Any = reply.raise_for_status().json()
        return value


SETTINGS: dict[str, object] = {
    "backend": "engine",
    "native_backend": True,
    "checkpoint_policy": True,
    "checkpoint_generation_cuts": True,
}


@asynccontextmanager
async def running(
    tmp_path: Path, archive: MemoryArchive | None = None, **settings: object
) -> AsyncIterator[Running]:
    """Policy server and engine, without sockets."""
    archive = archive or MemoryArchive()
    deployment = Deployment(
        checkpoint=CheckpointSettings(enabled=True, control_auth_token=Secret(TOKEN), root="/c"),
        state_dir=str(tmp_path),
        servers={
            "policy": ServerEntry(
                url="http://policy", kind=Kind.MODEL, settings=SETTINGS | settings
            ),
            "engine": ServerEntry(url="http://engine", kind=Kind.MODEL),
        },
    )
    directory = DeploymentDirectory(deployment)
    clock = FollowingClock()
    async with (
        open_network() as network,
        open_log_store(tmp_path / "tokens", randomness=HostRandomness()) as store,
    ):
        engine = EngineOverHttp(ScriptedBackend(store))
        ports = HostPorts(transport=network, archive=archive, wall_clock=clock)
        async with open_asgi(engine.app()) as engine_asgi:
            with network.serving("engine", engine_asgi):
                async with open_asgi(
                    policy_app, deployment=deployment, name="policy", ports=ports
                ) as policy_asgi:
                    with network.serving("policy", policy_asgi):
                        client = ServerClient(directory, network)
                        yield Running(client, policy_asgi, engine, clock, archive, store)


async def test_a_caller_of_a_stream_that_leaves_after_the_last_event_has_the_reply(
    tmp_path: Path,
) -> None:
    """I16: it need not wait for the end of the body, which says nothing."""
    count = 20
    body = json.dumps({**HELLO, "stream": True}).encode()
    async with running(tmp_path) as server, trio.open_nursery() as nursery:
        server.engine.backend.at_once = True
        for number in range(count):
            near, far = memory_stream_pair()
            nursery.start_soon(Connection(server.asgi, far, Shared(HttpLimits())).run)
            path = f"/ng-rollout/r{number}/v1/chat/completions"
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            await near.send_all(head.encode() + body)
            read = b""
            while b"data: [DONE]\n\n" not in read:
                read += await near.receive_some()
            await near.aclose()
        for number in range(count):
            reply = await server.client.request(
                "policy",
                "GET",
                f"{LEDGER_ROUTE}/r{number}",
                headers=(("authorization", BEARER),),
                context=None,
            )
            rows: Any = reply.raise_for_status().json()
            assert len(rows["rows"]) == 1


@pytest.mark.parametrize("route", [Route.CHAT, Route.RESPONSES])
async def test_a_rollout_gets_its_tokens(tmp_path: Path, route: Route) -> None:
    """POL-1, I25: on the message of a chat, on the last item of a response; nothing of ours besides."""
    async with running(tmp_path) as server:
        server.engine.backend.at_once = True
        body = HELLO if route is Route.CHAT else INPUT
        reply: Any = (await server.ask(body, context=R, route=route)).raise_for_status().json()
        carrier = reply["choices"][0]["message"] if route is Route.CHAT else reply["output"][-1]
        assert tuple(carrier["generation_token_ids"]) == uncut_tokens(body)
        assert len(carrier["generation_log_probs"]) == len(carrier["generation_token_ids"])
        assert carrier["prompt_token_ids"]
        assert "gymtrio" not in reply
        (sent,) = server.engine.requests
        assert json.loads(sent.body)["model"] == "policy"
        assert sent.context is None, "an engine does not know the rollout prefix (ID-5)"


async def test_a_call_on_nobodys_behalf_has_no_tokens(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        server.engine.backend.at_once = True
        reply: Any = (await server.ask()).raise_for_status().json()
        assert "generation_token_ids" not in reply["choices"][0]["message"]


async def test_models_are_listed(tmp_path: Path) -> None:
    async with running(tmp_path, model="tiny") as server:
        reply: Any = (await server.client.request("policy", "GET", "/v1/models")).json()
        assert [entry["id"] for entry in reply["data"]] == ["tiny"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ([], 422, "invalid_request"),
        ({**HELLO, "stream": "yes"}, 422, "invalid_request"),
        ({**HELLO, "n": 3}, 422, "invalid_request"),
    ],
)
async def test_what_is_refused_says_why(tmp_path: Path, body: Any, status: int, code: str) -> None:
    async with running(tmp_path) as server:
        reply = await server.ask(body, context=R)
        value: Any = reply.json()
        assert (reply.status, value["error"]["code"]) == (status, code)
        assert value["error"]["message"] == value["error"]["detail"]


async def test_a_message_is_a_chat_of_the_same_episode(tmp_path: Path) -> None:
    """POL-1: what its caller speaks makes no difference to ledger, tokens and errors."""
    async with running(tmp_path) as server:
        server.engine.backend.at_once = True
        asked = {**HELLO, "max_tokens": 20}
        reply: Any = (await server.ask(asked, context=R, route=Route.MESSAGES)).json()
        assert reply["type"] == "message"
        assert tuple(reply["generation_token_ids"]) == uncut_tokens(asked)
        (sent,) = server.engine.requests
        assert sent.path == Route.CHAT.value
        refused = await server.ask(HELLO, context=R, route=Route.MESSAGES)
        error: Any = refused.json()
        assert (refused.status, error["type"]) == (422, "error")
        assert error["error"]["message"].startswith("max_tokens")


@pytest.mark.parametrize("route", [Route.CHAT, Route.RESPONSES, Route.MESSAGES])
@pytest.mark.parametrize(
    "said",
    [{"choices": 7, "output": 7}, {"choices": "x", "output": "x"}, {"choices": [7], "output": [7]}],
)
async def test_an_engine_that_answers_something_else_is_told_of_in_the_callers_dialect(
    tmp_path: Path, route: Route, said: dict[str, object]
) -> None:
    """POL-1: 502 with JSON, never a 500, also where the reply is to be told as a stream."""
    asked = {**HELLO, **INPUT, "max_tokens": 5, "stream": True}
    async with running(tmp_path) as server:
        server.engine.answer = json_response(said)
        reply = await server.ask(asked, route=route)
        value: Any = reply.json()
        assert (reply.status, value["error"]["code"]) == (502, "backend_failed")
        assert (value.get("type") == "error") is (route is Route.MESSAGES)
        server.engine.answer = json_response({"error": {"message": "no"}}, 429)
        refused: Any = (await server.ask(asked, route=route)).json()
        assert refused["error"]["message"] == "no"
        assert (refused.get("type") == "error") is (route is Route.MESSAGES)


ODD_LOG_PROBS: dict[str, object] = {
    "nan": [-1.0] * 19 + [math.nan],
    "infinite": [-math.inf] + [-1.0] * 19,
    "beyond a double": [-(10**400)] + [-1.0] * 19,
    "null": [-1.0] * 19 + [None],
    "text": ["-1.0"] * 20,
    "true": [True] * 20,
    "too few": [-1.0] * 19,
    "too many": [-1.0] * 21,
    "none": [],
    "no list": {"0": -1.0},
    "nothing": None,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [Route.CHAT, Route.RESPONSES, Route.MESSAGES])
async def test_odd_log_probs_are_the_engines_fault(
    tmp_path: Path, route: Route, stream: bool
) -> None:
    """I25, CUT-7: 502 that says so, never a 500; no row of it is kept, and the next call is served."""
    asked = {**HELLO, **INPUT, "max_tokens": 20, "stream": stream}
    async with running(tmp_path) as server:
        server.engine.backend.at_once = True
        for odd, log_probs in ODD_LOG_PROBS.items():
            server.engine.carried = {LOG_PROBS: log_probs}
            reply = await server.ask(asked, context=R, route=route)
            value: Any = reply.json()
            assert (reply.status, value["error"]["code"]) == (502, "backend_failed"), odd
            assert "log" in value["error"]["message"], odd
        server.engine.carried = {}
        assert (await server.ask(asked, context=R, route=route)).status == 200
        rows: Any = await server.client.request(
            "policy", "GET", f"{LEDGER_ROUTE}/r", headers=(("authorization", BEARER),), context=None
        )
        assert len(rows.json()["rows"]) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [Route.CHAT, Route.RESPONSES])
async def test_odd_log_probs_that_nobody_needs_go_through(
    tmp_path: Path, route: Route, stream: bool
) -> None:
    """What an engine said is not judged where no token is kept: of calls on nobody's behalf, and of
    rollouts of a server that keeps none."""
    asked = {**HELLO, **INPUT, "stream": stream}
    entry: dict[str, object] = {"token": "a", "logprob": math.nan, "bytes": None}
    keeps_none = {
        "checkpoint_policy": False,
        "checkpoint_generation_cuts": False,
        "native_backend": False,
    }
    for settings, context in (({}, None), (keeps_none, None), (keeps_none, R)):
        async with running(tmp_path, **settings) as server:
            backend = server.engine.backend
            backend.native, backend.at_once = not settings, True
            for log_probs in ODD_LOG_PROBS.values():
                server.engine.carried = {LOG_PROBS: log_probs, "logprobs": {"content": [entry]}}
                reply = await server.ask(asked, context=context, route=route)
                assert reply.status == 200
                assert b"generation_log_probs" in reply.body


async def test_a_checkpoint_over_http_cuts_and_a_new_process_continues(
    tmp_path: Path,
) -> None:
    """POL-2, CUT-1, CUT-4, I2: held while prepared; after a crash the prefix comes from the disk."""
    async with running(tmp_path) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: server.ask(context=R))
            (live,) = await server.engine.backend.wait_live()
            live.emit(7)
            assert (await server.control("prepare"))["phase"] == "prepared"
            live.finish.set()
            scope = [{"rollout_id": "r", "attempt": 0}]
            committed = await server.control("commit", checkpoint_dir="d", episode_ids=scope)
            keys = committed["staging_keys"]
            assert committed["staging_keys_by_episode"] == {"r": keys}
            assert keys
            for key in keys:
                assert (await server.store.get(StagingKey(key))).capture_key == "r"
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        (cut,) = [r for r in server.engine.requests if r.path == CUT_ROUTE]
        assert cut.header("authorization") == BEARER
        archive = server.archive
    async with running(tmp_path, archive) as server:
        await server.control("restore", checkpoint_id="x1", checkpoint_dir="d", episode_ids=scope)
        await server.control("resume", checkpoint_id="x1")
        server.engine.backend.at_once = True
        reply: Any = (await server.ask(context=R1)).raise_for_status().json()
        message = reply["choices"][0]["message"]
        assert tuple(message["generation_token_ids"]) == uncut_tokens(HELLO)
        assert server.engine.backend.calls[-1].generated < 20
        assert (await server.ask(context=R)).status == 409


async def test_a_call_of_a_superseded_execution_does_not_take_the_cut(tmp_path: Path) -> None:
    """HARD-11, I14: it is refused before it claims anything; the current execution continues it."""
    async with running(tmp_path) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: server.ask(context=R))
            (live,) = await server.engine.backend.wait_live()
            live.emit(7)
            await server.control("prepare")
            scope = [{"rollout_id": "r", "attempt": 0}]
            await server.control("commit", checkpoint_dir="d", episode_ids=scope)
            nursery.cancel_scope.cancel()
        archive = server.archive
    async with running(tmp_path, archive) as server:
        await server.control(
            "restore",
            checkpoint_id="x1",
            checkpoint_dir="d",
            episode_ids=scope,
            execution_epoch="e2",
        )
        await server.control("resume", checkpoint_id="x1")
        server.engine.backend.at_once = True
        late = await server.ask(context=attrs.evolve(R1, epoch="e1"))
        refused: Any = late.json()
        assert (late.status, refused["error"]["code"]) == (409, "stale_attempt")
        reply = await server.ask(context=attrs.evolve(R1, epoch="e2"))
        assert reply.status == 200
        assert server.engine.backend.calls[-1].generated < 20


@pytest.mark.parametrize(
    ("answer", "status", "code", "message"),
    [
        (Response(400, b"<html>no</html>", content_type="text/html"), 400, None, "<html>no"),
        (json_response({"error": {"message": "too long"}}, 400), 400, None, "too long"),
        (json_response(["x"], 429), 429, None, "x"),
        (Response(502, b"<html>"), 502, "backend_failed", "answered 502"),
        (Response(200, b"<html>"), 502, "backend_failed", "not JSON"),
        (json_response([]), 502, "backend_failed", "not a JSON object"),
        (json_response({"choices": []}), 502, "backend_failed", "not a native one"),
        (json_response({"gymtrio": {}}), 502, "backend_failed", "missing"),
    ],
)
async def test_what_an_engine_answers_instead(
    tmp_path: Path, answer: Response, status: int, code: str | None, message: str
) -> None:
    """SRV-1: whatever it is, the caller gets JSON that says what happened."""
    async with running(tmp_path) as server:
        server.engine.answer = answer
        reply = await server.ask(context=R)
        value: Any = reply.json()
        assert reply.status == status
        assert value["error"].get("code") == code
        assert message in value["error"]["message"]


async def test_an_engine_that_does_not_say_what_it_is_may_be_used(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        server.engine.describes = False
        await server.control("prepare")
        committed = await server.control("commit", checkpoint_dir="d", episode_ids=[])
        assert committed["manifest"]["fields"] == {"engine": None}


@pytest.mark.parametrize("gives_tokens", [True, False])
async def test_token_capture_without_checkpoints_needs_the_tokens(
    tmp_path: Path, gives_tokens: bool
) -> None:
    """ID-4: a caller that trains on them is told when there are none."""
    settings = {
        "checkpoint_policy": False,
        "checkpoint_generation_cuts": False,
        "native_backend": False,
    }
    async with running(tmp_path, **settings) as server:
        backend = server.engine.backend
        backend.native, backend.gives_tokens, backend.at_once = False, gives_tokens, True
        reply = await server.ask(context=RolloutContext(episode("r"), capture_tokens=True))
        assert reply.status == (200 if gives_tokens else 502)


async def test_a_caller_that_leaves_ends_its_generation(tmp_path: Path) -> None:
    """SRV-3: through both servers."""
    async with running(tmp_path) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: server.ask(context=R))
            await server.engine.backend.wait_live()
            nursery.cancel_scope.cancel()
        while server.engine.backend.live:
            await trio.lowlevel.checkpoint()
        assert len(server.engine.backend.cancelled) == 1


async def test_a_server_without_checkpoint_policy_takes_no_part(tmp_path: Path) -> None:
    """POL-1, SET-1: a judge has no control routes, keeps nothing, and serves."""
    settings = {"checkpoint_policy": False, "checkpoint_generation_cuts": False}
    async with running(tmp_path, **settings) as server:
        server.engine.backend.at_once = True
        reply: Any = (await server.ask(context=R)).raise_for_status().json()
        assert reply["choices"][0]["message"]["generation_token_ids"]
        status = await server.client.request("policy", "GET", f"{CONTROL_PREFIX}/status")
        assert status.status == 404
        assert list((tmp_path / "tokens").iterdir()) == []


async def test_a_foreign_engine_is_completed_for_strict_clients(tmp_path: Path) -> None:
    """What engines leave out is filled in; what they said stays."""
    settings = {
        "native_backend": False,
        "checkpoint_generation_cuts": False,
        "backend": "http://engine/v1/",
        "backend_model": "meta/tiny",
        "backend_key": "sk-1",
    }
    async with running(tmp_path, **settings) as server:
        server.engine.backend.native = server.engine.backend.gives_tokens = False
        server.engine.backend.at_once = server.engine.bare = True
        reply: Any = (await server.ask(INPUT, route=Route.RESPONSES)).raise_for_status().json()
        missing = {"object", "created_at", "model", "tools", "tool_choice", "parallel_tool_calls"}
        assert missing <= reply.keys()
        assert reply["object"] == "response"
        (sent,) = server.engine.requests
        assert sent.header("authorization") == "Bearer sk-1"
        assert json.loads(sent.body)["model"] == "meta/tiny"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"backend": "nobody"}, "nobody"),
        ({"checkpoint_policy": False}, "needs checkpoint_policy"),
        ({"native_backend": False}, "needs native_backend"),
    ],
)
async def test_settings_that_do_not_go_together_fail_the_start(
    tmp_path: Path, settings: dict[str, object], why: str
) -> None:
    """SET-1."""
    with pytest.raises(SettingsError, match=why):
        async with running(tmp_path, **settings):
            pass


def test_settings_have_the_names_of_a_deployment_file() -> None:
    """SET-1: unknown keys are refused with the nearest name."""
    with pytest.raises(SettingsError, match="native_backend"):
        load_settings(ModelSettings, {"backend": "x", "native_backnd": True}, "settings")


async def test_the_openai_client_works_unmodified(tmp_path: Path) -> None:
    """POL-1: chat completions, responses and models, over real sockets."""
    async with running(tmp_path) as server:
        server.engine.backend.at_once = True
        async with (
            serve_on_sockets(_on_sockets(server.asgi)) as bind,
            openai.AsyncOpenAI(
                base_url=f"{bind.url}/ng-rollout/r/v1", api_key="none", max_retries=0
            ) as client,
        ):
            hello: Any = [{"role": "user", "content": "hello"}]
            chat = await client.chat.completions.create(model="policy", messages=hello)
            assert chat.choices[0].message.content
            extra = chat.choices[0].message.model_extra or {}
            assert tuple(extra["generation_token_ids"]) == uncut_tokens(HELLO)
            response = await client.responses.create(model="policy", input="hello")
            assert response.output_text
            assert response.tools == []
            models = await client.models.list()
            assert [model.id for model in models.data] == ["policy"]
            with pytest.raises(openai.UnprocessableEntityError, match="one choice"):
                await client.chat.completions.create(model="policy", messages=hello, n=2)


def _on_sockets(asgi: AsgiApp) -> AsgiApp:
    """Serve what is open already: its lifespan is that of the block that opened it."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await asgi(scope, receive, send)
            return
        for step in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{step}.complete"})

    return app
