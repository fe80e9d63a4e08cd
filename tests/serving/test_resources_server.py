"""What authors of resources servers are given: routes, cookies, tools, a part in checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.context import AsgiApp, Message, Receive, Scope, Send
from gymtrio.errors import InvalidRequest, SettingsError
from gymtrio.serving import resources_service
from gymtrio.serving.app import ServerApp
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.resources_server import (
    NoSettings,
    ResourcesServer,
    SessionId,
    SessionServer,
    Verdict,
    read_task,
    tool,
)
from gymtrio.serving.resources_service import resources_service as wire
from gymtrio.wire.native import VERIFY_HEADER
from tests.helpers.memory_archive import Door, MemoryArchive
from tests.helpers.plane import episode
from tests.helpers.resources_server import open_resources_server

R0, R1, Q0 = episode("r"), episode("r", 1), episode("q")


@attrs.frozen
class NotesTask:
    title: str
    pages: int = 1


@attrs.frozen
class Note:
    text: str


class Notes(SessionServer[list[str]]):
    """Keeps a list of notes per session."""

    def __init__(self) -> None:
        super().__init__()
        self.seeding = Door()
        self.writing = Door()
        self.retiring = Door()
        self.verified = 0

    async def begin(self, task_data: Mapping[str, object]) -> list[str]:
        task = read_task(NotesTask, task_data)
        await self.seeding.pass_through()
        return [task.title]

    @tool
    async def write(self, session_id: SessionId, arguments: Note) -> object:
        notes = self.states[session_id]
        await self.writing.pass_through()
        if not arguments.text:
            raise InvalidRequest("a note has to say something")
        notes.append(arguments.text)
        return {"pages": len(notes)}

    @tool
    async def read(self, session_id: SessionId) -> object:
        return self.states[session_id]

    async def verify(self, session_id: SessionId, task_data: Mapping[str, object]) -> Verdict:
        self.verified += 1
        notes = self.states[session_id]
        return {"reward": float(len(notes)), "pages": len(notes)}

    async def retire_session_state(self, session_id: SessionId) -> None:
        await self.retiring.pass_through()
        await super().retire_session_state(session_id)


class Weather(ResourcesServer):
    checkpoint_mode = "stateless"

    @tool
    async def forecast(self, session_id: SessionId) -> object:
        return {"sky": "blue", "session": session_id}


class Arena(ResourcesServer):
    """Of the reset and step kind; nothing declared: restart-only."""

    @tool
    async def reset(self, session_id: SessionId) -> object:
        self.checkpoint_session_started(SessionId("arena-1"))
        return {}

    @tool
    async def leave(self, session_id: SessionId) -> object:
        self.checkpoint_session_ended(SessionId("arena-1"))
        return {}


def app_of(server: ResourcesServer) -> ServerApp[NoSettings]:
    @asynccontextmanager
    async def open_service(host: ServiceHost[NoSettings]) -> AsyncIterator[Service]:
        yield wire(server, host)

    return ServerApp(
        kind="resources",
        default_instance="notes",
        settings_class=NoSettings,
        open_service=open_service,
    )


ROW = {"responses_create_params": {"input": "x"}, "title": "diary", "pages": 2}


# -- callers of the one-call protocol ---------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [True, False])
async def test_a_row_is_seeded_used_and_verified_by_cookie(checkpointing: bool) -> None:
    """RES-3, RES-6: the verify answers the row's own fields and what it found; then it is over."""
    server = Notes()
    async with open_resources_server(app_of(server), checkpointing=checkpointing) as client:
        assert await client.json("/seed_session", ROW, episode_id=R0) == {}
        assert await client.json("/write", {"text": "a"}) == {"pages": 2}
        assert await client.json("/read", {}) == ["diary", "a"]
        body = {**ROW, "response": {"id": "x", "output": []}}
        reply = await client.json("/verify", body, episode_id=R0)
        assert reply == {**body, "reward": 2.0}
        assert list(reply) == [*body, "reward"]
        await wait_all_tasks_blocked()
        assert server.states == {}


async def test_every_seed_of_a_row_begins_a_session() -> None:
    """RES-6: also for who keeps one cookie jar over several rows."""
    server = Notes()
    async with open_resources_server(app_of(server)) as client:
        await client.json("/seed_session", ROW, episode_id=R0)
        await client.json("/write", {"text": "a"})
        await client.json("/seed_session", ROW, episode_id=Q0)
        assert await client.json("/read") == ["diary"]
        assert len(server.states) == 2


async def test_the_cookie_is_set_anew_by_every_reply() -> None:
    """RES-6: some clients keep only what the last reply set; the name is the server's own."""
    async with open_resources_server(app_of(Notes())) as client:
        seed = await client.call("/seed_session", ROW, R0)
        write = await client.call("/write", {"text": ""})
        assert write.status == 422
        assert list(seed.cookies()) == ["session-peer"]
        assert write.cookies() == seed.cookies()


async def test_a_seed_without_a_rollout_is_refused_when_checkpointing_is_on() -> None:
    """ID-7: it could be neither recorded nor retired."""
    async with open_resources_server(app_of(Notes())) as client:
        reply = await client.call("/seed_session", ROW)
        assert (reply.status, reply.json()["error"]["code"]) == (400, "rollout_id_required")


# -- native callers ---------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [True, False])
async def test_a_native_session_is_named_by_its_caller(checkpointing: bool) -> None:
    """RES-3: seeding twice is seeding once, closing twice is 200 twice."""
    server = Notes()
    async with open_resources_server(app_of(server), checkpointing=checkpointing) as client:
        for _ in range(2):
            reply = await client.seed("s1", R0, title="diary")
            assert reply.json()["resources_session_id"] == "s1"
        assert server.states == {"s1": ["diary"]}
        await client.json("/write", {"text": "a"}, episode_id=R0)
        assert server.states == {"s1": ["diary", "a"]}
        for _ in range(2):
            reply = await client.close("s1", R0)
            assert (reply.status, reply.json()) == (200, {"resources_session_id": "s1"})
        assert server.states == {}


@pytest.mark.parametrize("checkpointing", [True, False])
async def test_a_close_that_overtakes_its_seed_keeps_it_from_beginning(
    checkpointing: bool,
) -> None:
    """RES-3: before the seed came, and while it is at work. Another attempt may have the id."""
    server = Notes()
    async with open_resources_server(app_of(server), checkpointing=checkpointing) as client:
        await client.close("s1", R0)
        reply = await client.call("/seed_session", _native("s1", "r"), R0)
        assert (reply.status, reply.json()["error"]["code"]) == (409, "session_conflict")
        server.seeding.shut()
        statuses = []
        async with trio.open_nursery() as nursery:

            async def seed() -> None:
                statuses.append((await client.call("/seed_session", _native("s2", "r"), R0)).status)

            nursery.start_soon(seed)
            await server.seeding.reached.wait()
            close = await client.close("s2", R0)
            assert close.status == 200
            server.seeding.let_go()
        assert statuses == [409]
        assert server.states == {}
        await client.seed("s1", R1, title="diary")


def _native(session_id: str, rollout: str, **task_data: Any) -> dict[str, Any]:
    return {
        "resources_session_id": session_id,
        "episode_id": {"rollout_id": rollout},
        "task_id": {"taskset": "t", "task_id": "1"},
        "task_data": {"title": "diary", **task_data},
    }


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (_native("s", "q"), "episode_id: q is not r, which the path names"),
        (_native("", "r"), "resources_session_id is empty"),
        (_native("s" * 129, "r"), "at most 128 printable characters"),
        (_native("a\n", "r"), "printable"),
        ({**_native("s", "r"), "extra": 1}, "extra: unknown key"),
        (_native("s", "r", title=3), "title: expected str, got 3"),
        ([], "expected a JSON object"),
    ],
)
async def test_a_seed_that_is_not_one_is_refused(body: Any, detail: str) -> None:
    """SRV-5: 422, the field is named."""
    server = Notes()
    async with open_resources_server(app_of(server)) as client:
        reply = await client.call("/seed_session", body, R0)
        assert (reply.status, reply.json()["error"]["code"]) == (422, "invalid_request")
        assert detail in reply.json()["error"]["detail"]
        await wait_all_tasks_blocked()
        assert (await client.control("status"))["report"]["counts"]["sessions"] == 0


# -- tools ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        ("/write", {"text": 3}, "text: expected str, got 3"),
        ("/write", {}, "text: missing"),
        ("/write", {"text": "a", "page": 1}, "page: unknown key; known: text"),
        ("/write", {"text": ""}, "a note has to say something"),
        ("/read", {"page": 1}, "read takes no arguments, got page"),
        ("/raed", {}, "no tool named 'raed'; did you mean 'read'?"),
    ],
)
async def test_a_wrong_call_is_told_to_the_model(path: str, body: Any, detail: str) -> None:
    """RES-3: one status for what a model can do better; the session is as it was."""
    async with open_resources_server(app_of(Notes())) as client:
        await client.seed("s1", R0, title="diary")
        reply = await client.call(path, body, R0)
        assert reply.status == 422
        assert reply.json()["error"]["code"] == "invalid_request"
        assert detail in reply.json()["error"]["detail"]
        assert await client.json("/read", episode_id=R0) == ["diary"]


async def test_without_a_session_there_is_nothing_to_use() -> None:
    """RES-6, I36: no cookie, a forged one, or that of a session that was closed; 404 at once."""
    async with open_resources_server(app_of(Notes())) as client:
        for cookie in (None, "x", '"s1"'):
            client.cookies = {} if cookie is None else {"session-peer": cookie}
            for path in ("/read", "/verify", "/nothing", "/close_session"):
                reply = await client.call(path, {}, R0)
                assert (reply.status, reply.json()["error"]["code"]) == (404, "not_found")
        await client.seed("s1", R0, title="diary")
        await client.close("s1", R0)
        reply = await client.call("/read", {}, R0)
        assert (reply.status, reply.json()["error"]["code"]) == (404, "not_found")


async def test_a_stateless_server_needs_no_session() -> None:
    """RES-1."""
    async with open_resources_server(app_of(Weather())) as client:
        assert await client.json("/forecast") == {"sky": "blue", "session": ""}
        await client.seed("s1", R0)
        assert (await client.json("/forecast", episode_id=R0))["session"] == "s1"
        reply = await client.call("/verify", {}, R0)
        assert reply.status == 404


# -- checkpoints ------------------------------------------------------------------------------


async def test_an_old_cookie_works_after_crash_and_restore() -> None:
    """RES-6, RES-1 (scenario 1): the state, too, and a call before the resume waits for it."""
    archive = MemoryArchive()
    async with open_resources_server(app_of(Notes()), archive=archive) as client:
        await client.seed("s1", R0, title="diary")
        await client.json("/write", {"text": "a"}, episode_id=R0)
        assert await client.checkpoint() == ["r"]
        cookies = client.cookies
    server = Notes()
    async with open_resources_server(app_of(server), archive=archive, recover=True) as client:
        client.cookies = dict(cookies)
        replies = []
        async with trio.open_nursery() as nursery:

            async def early() -> None:
                replies.append(await client.json("/write", {"text": "b"}))

            nursery.start_soon(early)
            await wait_all_tasks_blocked()
            await client.restore(R0)
            assert replies == []
            await client.control("resume", "x1")
        assert replies == [{"pages": 3}]
        assert await client.json("/read", episode_id=R1) == ["diary", "a", "b"]
        assert client.cookies == cookies
        stale = await client.call("/read", {}, R0)
        assert (stale.status, stale.json()["error"]["code"]) == (409, "stale_attempt")


async def test_without_the_restore_the_old_cookie_finds_nothing() -> None:
    """RES-6: the control of the test before."""
    async with open_resources_server(app_of(Notes())) as client:
        await client.seed("s1", R0, title="diary")
        cookies = client.cookies
    async with open_resources_server(app_of(Notes())) as client:
        client.cookies = dict(cookies)
        assert (await client.call("/read", {}, R1)).status == 404


@pytest.mark.parametrize(("declared", "told"), [("replay", "replay"), ("wait", "wait")])
async def test_the_verify_mode_is_told_on_every_seed_reply_and_in_status(
    declared: str, told: str
) -> None:
    """RES-4 (scenario 9): and not at all when checkpointing is off."""

    class Declared(Notes):
        checkpoint_verify = declared

    async with open_resources_server(app_of(Declared())) as client:
        for reply in (
            await client.seed("s1", R0, title="diary"),
            await client.seed("s1", R0, title="diary"),
            await client.call("/seed_session", ROW, R0),
        ):
            assert reply.header(VERIFY_HEADER) == told
        status = await client.control("status")
        assert (status["verify"], status["mode"]) == (told, "exported")
    async with open_resources_server(app_of(Declared()), checkpointing=False) as client:
        assert (await client.seed("s1", R0, title="diary")).header(VERIFY_HEADER) is None


def test_a_server_that_declares_nothing_fails_closed() -> None:
    """RES-1, RES-4."""
    assert ResourcesServer.checkpoint_mode == "restart_only"
    assert ResourcesServer.checkpoint_verify == "wait"


async def test_a_wrong_call_is_answered_after_the_resume_like_a_right_one() -> None:
    """I2, RES-5: an error is a reply, too. Who will not wait says so."""
    async with open_resources_server(app_of(Notes())) as client:
        await client.seed("s1", R0, title="diary")
        await client.checkpoint()
        replies = []
        async with trio.open_nursery() as nursery:

            async def call(path: str, body: object) -> None:
                replies.append((await client.call(path, body, R0)).status)

            for path, body in (("/write", {"text": 1}), ("/raed", {}), ("/read", {})):
                nursery.start_soon(call, path, body)
            await wait_all_tasks_blocked()
            assert replies == []
            refused = await client.call("/read", {}, R0, headers=[("x-ng-admission", "refuse")])
            assert (refused.status, refused.json()["error"]["code"]) == (409, "admission_closed")
            await client.control("resume")
        assert sorted(replies) == [200, 422, 422]


async def test_a_request_is_in_flight_until_its_reply_has_left() -> None:
    """I2: a caller whose connection is slow holds the checkpoint; one that is gone does not."""
    connection = Door()

    def slowly(asgi: AsgiApp) -> AsgiApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_slowly(message: Message) -> None:
                if scope["path"] == "/read":
                    await connection.pass_through()
                await send(message)

            await asgi(scope, receive, send_slowly)

        return app

    async with open_resources_server(app_of(Notes()), around=slowly) as client:
        await client.seed("s1", R0, title="diary")
        for leaves in (False, True):
            connection.shut()
            with trio.CancelScope() as caller:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.call, "/read", {})
                    await connection.reached.wait()
                    report = (await client.control("status"))["report"]
                    assert report["blockers"] == ["r"]
                    assert report["details"][0]["doing"] == "reply to read"
                    if leaves:
                        caller.cancel()
                    connection.let_go()
            await wait_all_tasks_blocked()
            assert (await client.control("status"))["report"]["ready"]


async def test_a_caller_that_leaves_a_seed_leaves_nothing() -> None:
    """SRV-3: its handler is cancelled, and what it may have made is freed."""
    server = Notes()
    async with open_resources_server(app_of(server)) as client:
        server.seeding.shut()
        with trio.move_on_after(5) as scope:
            async with trio.open_nursery() as nursery:

                async def leave() -> None:
                    await server.seeding.reached.wait()
                    scope.cancel()

                nursery.start_soon(leave)
                await client.seed("s1", R0, title="diary")
        await wait_all_tasks_blocked()
        report = (await client.control("status"))["report"]
        assert (report["counts"]["inflight"], report["counts"]["sessions"]) == (0, 0)
        assert await client.checkpoint() == []


async def test_sessions_of_a_reset_and_step_server_are_told_by_it(
    autojump_clock: MockClock,
) -> None:
    """RES-3 (scenario 6), RES-1: nothing declared is restart-only; who ends, does not block."""
    async with open_resources_server(app_of(Arena())) as client:
        await client.json("/seed_session", {}, episode_id=R0)
        assert (await client.json("/reset", episode_id=R0)) == {}
        await client.call("/close_session", {}, R0)
        report = (await client.control("prepare"))["report"]
        assert (report["ready"], report["blockers"]) == (False, ["r"])
        await client.control("resume")
        await client.json("/leave", episode_id=R0)
        await client.json("/leave", episode_id=R0)
        await client.control("prepare", "c2")
        assert (await client.control("status"))["phase"] == "prepared"


async def test_an_explicit_start_needs_a_rollout() -> None:
    """ID-7: nobody could retire it otherwise; without checkpointing nobody has to."""
    async with open_resources_server(app_of(Arena())) as client:
        await client.seed("s1", R0)
        reply = await client.call("/reset", {})
        assert (reply.status, reply.json()["error"]["code"]) == (400, "rollout_id_required")
    async with open_resources_server(app_of(Arena()), checkpointing=False) as client:
        await client.seed("s1", R0)
        assert (await client.call("/reset", {})).status == 200
        assert (await client.call("/leave", {})).status == 200


async def test_without_checkpointing_nothing_takes_part() -> None:
    """SET-1 (scenario 16 of the environment): no participant, no control routes."""
    server = Notes()
    async with open_resources_server(app_of(server), checkpointing=False) as client:
        assert server.participant is None
        reply = await client.client.request("peer", "GET", "/ng-control/v1/checkpoint/status")
        assert reply.status == 404


async def test_a_failed_close_is_told_and_can_be_repeated() -> None:
    """RES-3: not recorded as closed."""
    server = Notes()
    async with open_resources_server(app_of(server)) as client:
        await client.seed("s1", R0, title="diary")

        async def fail(session_id: SessionId) -> None:
            raise OSError("the sandbox does not answer")

        working = server.retire_session_state
        server.retire_session_state = fail
        assert (await client.close("s1", R0)).status == 500
        report = (await client.control("status"))["report"]
        assert report["counts"]["sessions"] == 1
        server.retire_session_state = working
        assert (await client.close("s1", R0)).status == 200


# -- what a server declares -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("checkpoint_mode", "stateles", "checkpoint_mode is 'stateles'; did you mean 'stateless'"),
        ("checkpoint_verify", "reply", "checkpoint_verify is 'reply'; did you mean 'replay'"),
        ("checkpoint_mode", "exported", "lacks async export_session_states"),
    ],
)
async def test_a_wrong_declaration_fails_at_start(attribute: str, value: str, message: str) -> None:
    """RES-1, RES-4."""
    server = Weather()
    setattr(server, attribute, value)
    with pytest.raises(SettingsError, match=message):
        async with open_resources_server(app_of(server)):
            pass


async def test_a_tool_that_is_named_like_a_route_fails_at_start() -> None:
    class Judge(Weather):
        @tool
        async def health(self, session_id: SessionId) -> object:
            return {}

    with pytest.raises(SettingsError, match="Judge has tools named health"):
        async with open_resources_server(app_of(Judge())):
            pass


def test_a_tool_takes_one_object_of_arguments() -> None:
    class Loose(ResourcesServer):
        @tool
        async def add(self, session_id: SessionId, a: int, b: int) -> object:
            return a + b

    with pytest.raises(TypeError, match="add takes a session id and at most one argument"):
        Loose().tools()


async def test_the_memory_of_closed_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """SRV-5: the oldest is forgotten first."""
    monkeypatch.setattr(resources_service, "CLOSED_SESSIONS_REMEMBERED_MAX", 3)
    async with open_resources_server(app_of(Notes())) as client:
        for number in range(4):
            await client.close(f"s{number}", R0)
        await client.seed("s0", R0, title="diary")
        assert (await client.call("/seed_session", _native("s1", "r"), R0)).status == 409


# -- executions -------------------------------------------------------------------------------


async def test_a_superseded_execution_reaches_no_session(autojump_clock: MockClock) -> None:
    """HARD-11: neither with the prefix, nor by URL and cookie alone; its close closes nothing."""
    archive = MemoryArchive()
    async with open_resources_server(app_of(Notes()), archive=archive) as caller:
        await caller.seed("s", R0, title="one")
        await caller.checkpoint()
    async with open_resources_server(app_of(Notes()), archive=archive) as after:
        after.cookies |= caller.cookies
        await after.control(
            "restore",
            "x1",
            checkpoint_dir="/c/c1",
            episode_ids=[{"rollout_id": "r", "attempt": 0}],
            execution_epoch="e2",
        )
        await after.control("resume", "x1")
        old = [("x-ng-epoch", "e1")]
        for context in (R1, None):
            late = await after.call("/write", {"text": "late"}, context, headers=old)
            refused: Any = late.json()
            assert (late.status, refused["error"]["code"]) == (409, "stale_attempt")
        request = {"resources_session_id": "s", "episode_id": {"rollout_id": "r", "attempt": 1}}
        closed = await after.call("/close_session", request, R1, headers=old)
        assert closed.status == 200
        assert await after.json("/read", episode_id=R1) == ["one"]
        assert await after.json("/read", episode_id=R1, headers=[("x-ng-epoch", "e2")]) == ["one"]


async def test_a_replay_safe_request_of_a_superseded_execution_does_not_pass_either(
    autojump_clock: MockClock,
) -> None:
    """HARD-11, RES-5: a seed is admitted while a checkpoint is open, but not of an old execution."""
    archive = MemoryArchive()
    async with open_resources_server(app_of(Notes()), archive=archive) as caller:
        await caller.seed("s", R0, title="one")
        await caller.checkpoint()
    async with open_resources_server(app_of(Notes()), archive=archive) as after:
        await after.control(
            "restore",
            "x1",
            checkpoint_dir="/c/c1",
            episode_ids=[{"rollout_id": "r", "attempt": 0}],
            execution_epoch="e2",
        )
        await after.control("resume", "x1")
        assert (await after.control("prepare", "c2"))["phase"] == "prepared"
        late = await after.call(
            "/seed_session", {"title": "two"}, R1, headers=[("x-ng-epoch", "e1")]
        )
        assert late.status == 409
