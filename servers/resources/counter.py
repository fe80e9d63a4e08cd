"""A counter per session: the smallest server whose state a checkpoint must carry.

The tools, the tasks and what verify compares are those of the public example
`example_session_state_mgmt`. Incrementing twice is not incrementing once, so whatever is lost or
repeated shows in the count.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import attrs

from gymtrio.errors import InvalidCheckpointState
from gymtrio.serving.app import ServerApp
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.resources_server import (
    NoSettings,
    SessionId,
    SessionServer,
    Verdict,
    read_task,
    tool,
)
from gymtrio.serving.resources_service import resources_service


@attrs.frozen
class CounterTask:
    initial_count: int


@attrs.frozen
class CounterGoal:
    expected_count: int


@attrs.frozen
class Increment:
    count: int


class Counter(SessionServer[int]):
    checkpoint_verify = "replay"
    """It only compares."""

    async def begin(self, task_data: Mapping[str, object]) -> int:
        return read_task(CounterTask, task_data).initial_count

    @tool
    async def increment_counter(self, session_id: SessionId, arguments: Increment) -> object:
        self.states[session_id] += arguments.count
        return {"success": True}

    @tool
    async def get_counter_value(self, session_id: SessionId) -> object:
        return {"count": self.states[session_id]}

    async def verify(self, session_id: SessionId, task_data: Mapping[str, object]) -> Verdict:
        goal = read_task(CounterGoal, task_data)
        count = self.states[session_id]
        return {"reward": float(count == goal.expected_count), "final_count": count}

    def load_state(self, dumped: object) -> int:
        if type(dumped) is not int:
            raise InvalidCheckpointState(f"a count is an integer, not {type(dumped).__name__}")
        return dumped


@asynccontextmanager
async def open_counter(host: ServiceHost[NoSettings]) -> AsyncIterator[Service]:
    yield resources_service(Counter(), host)


app = ServerApp(
    kind="resources",
    default_instance="counter",
    settings_class=NoSettings,
    open_service=open_counter,
)
