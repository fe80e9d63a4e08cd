"""A real server of every kind, with a request that it takes: what peers of all sorts are tried on.

A server reads its deployment from the environment, as in a process of its own; what it calls is not
there. While a checkpoint is open its request waits at the gate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

from gymtrio.serving.app import ServerApp
from gymtrio.serving.client import Reply, ServerClient
from gymtrio.serving.deployment import DEPLOYMENT_VARIABLE, SERVER_VARIABLE
from gymtrio.serving.launch import load_app
from gymtrio.wire.control import CONTROL_PREFIX, Kind
from tests.helpers.malformed import Valid

TOKEN: Final = "0123456789abcdef-token"
AUTHORIZATION: Final = ("authorization", f"Bearer {TOKEN}")
NOBODY: Final = "http://127.0.0.1:1"

_EPISODE: Final = {"rollout_id": "r", "attempt": 0}
_TASK_ID: Final = {"taskset": "t", "task_id": "1"}


@attrs.frozen(kw_only=True)
class Sort:
    """One kind of server."""

    kind: Kind
    app: str
    path: str
    body: dict[str, Any]
    settings: dict[str, Any] = attrs.field(factory=dict)
    calls: dict[str, str] = attrs.field(factory=dict)
    """Name to kind of the servers that it would call."""
    waiting: tuple[str, dict[str, Any]] | None = None
    """What waits at a closed gate, with the cookies of an answered request; None: the request does."""

    @property
    def valid(self) -> Valid:
        return Valid(path=self.path.encode(), body=json.dumps(self.body).encode())

    def deployment(self, directory: Path, **checkpoint: Any) -> dict[str, Any]:
        """Of this server, with checkpointing on; what it keeps is below `directory`."""
        (directory / "checkpoints").mkdir(exist_ok=True)
        block = {"enabled": True, "control_auth_token": TOKEN, "root": "checkpoints", **checkpoint}
        entry = {"app": self.app, "kind": self.kind.value, "settings": self.settings}
        others = {name: {"url": NOBODY, "kind": kind} for name, kind in self.calls.items()}
        return {"checkpoint": block, "state_dir": "state", "servers": {"peer": entry, **others}}

    def make_app(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> ServerApp[Any]:
        """The application of its module, which will find its deployment when it is started."""
        file = directory / "deployment.json"
        file.write_text(json.dumps(self.deployment(directory)))
        monkeypatch.setenv(DEPLOYMENT_VARIABLE, str(file))
        monkeypatch.setenv(SERVER_VARIABLE, "peer")
        app = load_app(self.app)
        assert isinstance(app, ServerApp)
        return app


SORTS: Final[dict[str, Sort]] = {
    sort.kind.value: sort
    for sort in (
        Sort(
            kind=Kind.ENVIRONMENT,
            app="servers.environment.single_agent_turn:app",
            path="/run",
            body={
                "episode_id": _EPISODE,
                "task": {
                    "task_id": _TASK_ID,
                    "task_input": {"responses_create_params": {"input": "x"}},
                },
            },
            settings={"default": {"resources": "counter", "agent": "agent"}},
            calls={"counter": "resources", "agent": "agent"},
        ),
        Sort(
            kind=Kind.AGENT,
            app="servers.agent.simple_agent:app",
            path="/v1/agent_sessions",
            body={"agent_session_id": "s", "episode_id": _EPISODE, "task_id": _TASK_ID},
            settings={"model": "policy"},
            calls={"policy": "model"},
        ),
        Sort(
            kind=Kind.MODEL,
            app="servers.model.policy:app",
            path="/ng-rollout/r-a0/v1/responses",
            body={"input": "x"},
            settings={"backend": "engine", "checkpoint_policy": True},
            calls={"engine": "model"},
        ),
        Sort(
            kind=Kind.RESOURCES,
            app="servers.resources.counter:app",
            path="/seed_session",
            body={
                "resources_session_id": "s",
                "episode_id": _EPISODE,
                "task_id": _TASK_ID,
                "task_data": {"initial_count": 1},
            },
            waiting=("/increment_counter", {"count": 1}),
        ),
    )
}


async def control(client: ServerClient, operation: str, **fields: Any) -> Any:
    """A control call that must succeed."""
    body = {"checkpoint_id": "c1", "deadline_ts": time.time() + 60, **fields}
    reply = await client.request(
        "peer",
        "POST",
        f"{CONTROL_PREFIX}/{operation}",
        json=body,
        headers=[AUTHORIZATION],
        context=None,
        control=True,
    )
    return reply.raise_for_status().json()


async def open_waiting(client: ServerClient, sort: Sort) -> Callable[[], Awaitable[Reply]]:
    """Prepare the request that waits when the gate is closed; call what this gives then."""
    path, body, cookies = sort.path, sort.body, {}
    if sort.waiting is not None:
        opened = await client.request("peer", "POST", path, json=body, context=None)
        cookies = opened.raise_for_status().cookies()
        path, body = sort.waiting

    async def wait() -> Reply:
        return await client.request("peer", "POST", path, json=body, cookies=cookies, context=None)

    return wait
