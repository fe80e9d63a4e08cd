"""A native engine as a server process: tokens are hashes of what came before, and a test sets the pace.

settings: {token_store: tokens}
POST /pace {"at_once": bool, "emit": int, "finish": bool}  ->  {"live": int, "calls": int}
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs

from gymtrio.capture.cuts import CUT_ROUTE, ENGINE_ROUTE, CutInventory
from gymtrio.capture.replies import Route
from gymtrio.serving.app import ServerApp
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.http import Handler, Request, Response, json_response
from gymtrio.serving.model_server import open_token_store
from gymtrio.strict import structure, unstructure
from gymtrio.wire.control import Kind
from tests.helpers.scripted_backend import ScriptedBackend


@attrs.frozen(kw_only=True)
class HashEngineSettings:
    token_store: str | None = None


class NativeEngine:
    """A scripted backend as handlers of HTTP requests."""

    def __init__(self, backend: ScriptedBackend) -> None:
        self._backend = backend
        self.routes: dict[tuple[str, str], Handler] = {
            ("POST", Route.CHAT.value): self.generate,
            ("POST", Route.RESPONSES.value): self.generate,
            ("POST", CUT_ROUTE): self.cut,
            ("GET", ENGINE_ROUTE): self.describe,
            ("POST", "/pace"): self.pace,
        }

    async def generate(self, request: Request) -> Response:
        body = request.json()
        assert isinstance(body, dict)
        call_id = request.header("idempotency-key")
        reply = await self._backend.generate(Route(request.path), body, call_id=call_id)
        return json_response(reply.body, reply.status)

    async def cut(self, request: Request) -> Response:
        inventory = structure(CutInventory, request.json())
        return json_response(unstructure(await self._backend.cut(inventory, deadline=0)))

    async def describe(self, request: Request) -> Response:
        return json_response(unstructure(await self._backend.describe(deadline=0)))

    async def pace(self, request: Request) -> Response:
        asked = request.json()
        assert isinstance(asked, dict)
        self._backend.at_once = bool(asked.get("at_once", self._backend.at_once))
        for live in list(self._backend.live):
            live.emit(int(asked.get("emit", 0)))
            if asked.get("finish"):
                live.finish.set()
        return json_response({"live": len(self._backend.live), "calls": len(self._backend.calls)})


@asynccontextmanager
async def open_service(host: ServiceHost[HashEngineSettings]) -> AsyncIterator[Service]:
    async with open_token_store(host, host.settings.token_store) as store:
        yield Service(routes=NativeEngine(ScriptedBackend(store)).routes)


app = ServerApp(
    kind=Kind.MODEL,
    default_instance="engine",
    settings_class=HashEngineSettings,
    open_service=open_service,
)
