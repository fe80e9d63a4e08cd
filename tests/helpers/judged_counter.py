"""The counter, whose verification asks a judge: whoever plays the judge decides when it is over.

settings: {judge: http://127.0.0.1:9000}
POST <judge>/judge {"session_id": str, "count": int}  ->  anything

`app` may verify again after a crash, `waiting_app` may not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import attrs

from gymtrio.serving.app import ServerApp
from gymtrio.serving.client import ServerClient
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.resources_server import SessionId, Verdict
from gymtrio.serving.resources_service import resources_service
from servers.resources.counter import Counter


@attrs.frozen(kw_only=True)
class JudgedSettings:
    judge: str


class JudgedCounter(Counter):
    def __init__(self, client: ServerClient, judge: str) -> None:
        super().__init__()
        self._client = client
        self._judge = judge

    async def verify(self, session_id: SessionId, task_data: Mapping[str, object]) -> Verdict:
        case = {"session_id": session_id, "count": self.states[session_id]}
        answer = await self._client.request(self._judge, "POST", "/judge", json=case, context=None)
        answer.raise_for_status()
        return await super().verify(session_id, task_data)


class WaitingCounter(JudgedCounter):
    checkpoint_verify = "wait"


def _app(counter: type[JudgedCounter]) -> ServerApp[JudgedSettings]:
    @asynccontextmanager
    async def open_service(host: ServiceHost[JudgedSettings]) -> AsyncIterator[Service]:
        yield resources_service(counter(host.client, host.settings.judge), host)

    return ServerApp(
        kind="resources",
        default_instance="counter",
        settings_class=JudgedSettings,
        open_service=open_service,
    )


app = _app(JudgedCounter)
waiting_app = _app(WaitingCounter)
