"""Serves a policy model over HTTP: OpenAI's routes in front of an inference engine.

The engine is reached by HTTP as well (`HttpBackend`). With `checkpoint_policy` the server takes part in
checkpoints (`gymtrio.participants.policy`); without, calls go through and nothing is kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs

from gymtrio.capture.cuts import (
    CUT_ROUTE,
    ENGINE_ROUTE,
    CutInventory,
    CutReceipt,
    EngineDescription,
)
from gymtrio.capture.ledger import LedgerRow
from gymtrio.capture.log_store import LogTokenStore, open_log_store
from gymtrio.capture.replies import Route
from gymtrio.capture.tokens import TokenStore
from gymtrio.errors import PeerRefused, SettingsError, TransportError
from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.calls import Backend, BackendReply
from gymtrio.participants.policy.participant import PolicyParticipant
from gymtrio.participants.policy.plain import PlainPolicy
from gymtrio.participants.policy.worker import PolicyWorker
from gymtrio.serving.client import Reply, ServerClient
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.http import HeadersLike
from gymtrio.serving.ledger_route import add_ledger_route
from gymtrio.serving.policy_routes import policy_routes
from gymtrio.serving.policy_worker import (
    WorkerPlace,
    forward_control,
    linked,
    metrics_of_coordinator,
    part_writer,
    reach,
)
from gymtrio.serving.stock.backend import StockBackend
from gymtrio.serving.stock.calls import EngineCalls
from gymtrio.serving.stock.engines import StockApi, StockEngine
from gymtrio.serving.stock.llama_cpp import LlamaCppEngine
from gymtrio.serving.stock.outputs import ToolCallFormat
from gymtrio.serving.stock.vllm import VllmEngine
from gymtrio.serving.workers import COORDINATOR_VARIABLE, some_workers
from gymtrio.settings import Secret
from gymtrio.strict import structure, unstructure

TOKEN_STORE_DEFAULT: Final = "tokens"
_ERROR_SHOWN_CHARACTERS_MAX: Final = 500


@attrs.frozen(kw_only=True)
class ModelSettings:
    """Settings of a policy model server."""

    backend: str
    """The engine: a server of the deployment, or a base URL; a `/v1` at its end may be given."""
    native_backend: bool = False
    """It cuts and continues generations (`gymtrio/capture/DESIGN.md`)."""
    stock_backend: StockApi | None = None
    """The API of an engine that does not, whose generations are cut from here (`stock/DESIGN.md`)."""
    policy_version: int = 0
    """Of the weights of a stock backend, which does not tell."""
    tool_calls: ToolCallFormat = ToolCallFormat.HERMES
    """How the model behind a stock backend writes tool calls."""
    backend_model: str | None = None
    """What the engine calls the model; None: calls keep the name that the caller gave."""
    backend_key: Secret | None = None
    """Sent to the engine as a bearer token."""
    model: str = "policy"
    """What this server calls the model, and what a call without a name means."""
    checkpoint_policy: bool = False
    """Take part in checkpoints. For the policy only: judges and simulators do not (POL-1)."""
    checkpoint_generation_cuts: bool = False
    """Make generations in flight durable at a checkpoint (CUT)."""
    num_workers: int = attrs.field(default=1, validator=some_workers)
    """Processes that serve it. With more than one, the process that `gymtrio up` starts serves no calls
    and coordinates them (`DESIGN.md`)."""
    token_store: str | None = None
    """Directory of the token store, which a native engine shares; relative to the deployment's state
    directory. None: `tokens` there."""


def token_store_directory(host: ServiceHost[Any], setting: str | None) -> Path:
    """Where a server keeps its token store: the same for every server that is told the same."""
    return host.state_dir.parent / (setting or TOKEN_STORE_DEFAULT)


@asynccontextmanager
async def open_token_store(
    host: ServiceHost[Any], setting: str | None
) -> AsyncIterator[LogTokenStore]:
    """Open the embedded token store of a deployment.

    Raises:
        TokenStoreFailed: its directory cannot be made or read.
    """
    directory = token_store_directory(host, setting)
    async with open_log_store(directory, randomness=host.randomness) as store:
        yield store


@asynccontextmanager
async def open_policy_service(host: ServiceHost[ModelSettings]) -> AsyncIterator[Service]:
    """Serve a policy model; an `open_service` of `gymtrio.serving.app.ServerApp`.

    Raises:
        SettingsError: settings that do not go together, or an engine that is not in the deployment.
    """
    settings = host.settings
    _check(settings)
    host.client.url_of(_without_version(settings.backend))
    backend: Backend = HttpBackend(host.client, settings, control_token=host.control_token)
    if not (settings.checkpoint_policy and host.checkpoint.enabled):
        policy = PlainPolicy(backend, host.randomness)
        yield Service(routes=policy_routes(policy, settings.model))
        return
    async with open_token_store(host, settings.token_store) as store:
        backend = _cutting(host, backend, store)
        if settings.num_workers > 1:
            async with _open_worker(host, backend, store) as service:
                yield service
            return
        participant = PolicyParticipant(
            host.instance,
            backend=backend,
            token_store=store,
            randomness=host.randomness,
            generation_cuts=settings.checkpoint_generation_cuts,
        )
        assert host.control_token is not None, "checked when the deployment was read"

        async def rows_of(episode_id: EpisodeId) -> tuple[LedgerRow, ...]:
            return participant.rows(episode_id)

        yield Service(
            routes=policy_routes(participant, settings.model),
            participant=participant,
            add_routes=partial(
                add_ledger_route, rows_of=rows_of, is_token=host.control_token.matches
            ),
        )


@asynccontextmanager
async def _open_worker(
    host: ServiceHost[ModelSettings], backend: Backend, store: TokenStore
) -> AsyncIterator[Service]:
    """Serve as one of several workers.

    Raises:
        SettingsError: nobody coordinates them.
    """
    settings = host.settings
    place = WorkerPlace.of_environment()
    if place is None:
        raise SettingsError(
            f"num_workers is {settings.num_workers}, and there is no coordinator: start the server "
            f"with `gymtrio up`, or run `gymtrio coordinate` and set {COORDINATOR_VARIABLE}"
        )
    worker = PolicyWorker(
        host.instance,
        backend=backend,
        token_store=store,
        randomness=host.randomness,
        generation_cuts=settings.checkpoint_generation_cuts,
        part_writer=part_writer(host),
    )
    stream = await reach(place)
    async with linked(worker, stream, name=place.name, instance=place.instance):
        yield worker_service(worker, host)


def worker_service(worker: PolicyWorker, host: ServiceHost[ModelSettings]) -> Service:
    """What a worker answers, while it is linked."""
    assert host.control_token is not None, "checked when the deployment was read"
    return Service(
        routes=policy_routes(worker, host.settings.model),
        gate=worker.admission,
        add_routes=partial(
            add_ledger_route, rows_of=worker.link.rows, is_token=host.control_token.matches
        ),
        control_elsewhere=partial(forward_control, worker, host.wall_clock),
        not_ready=worker.not_ready,
        more_metrics=partial(metrics_of_coordinator, worker),
    )


def _check(settings: ModelSettings) -> None:
    if settings.checkpoint_generation_cuts and not settings.checkpoint_policy:
        raise SettingsError("checkpoint_generation_cuts needs checkpoint_policy")
    if settings.native_backend and settings.stock_backend is not None:
        raise SettingsError("native_backend and stock_backend: an engine is one or the other")
    cuts = settings.native_backend or settings.stock_backend is not None
    if settings.checkpoint_generation_cuts and not cuts:
        raise SettingsError(
            "checkpoint_generation_cuts needs native_backend, or stock_backend with the engine's API: "
            + ", ".join(api.value for api in StockApi)
        )


def _cutting(host: ServiceHost[ModelSettings], backend: Backend, store: TokenStore) -> Backend:
    """A backend that can be cut, if it is a stock one that is to be."""
    settings = host.settings
    if settings.stock_backend is None or not settings.checkpoint_generation_cuts:
        return backend
    calls = EngineCalls(
        host.client, _without_version(settings.backend), _bearer(settings.backend_key)
    )
    return StockBackend(
        _stock_engine(settings.stock_backend, calls, model=settings.backend_model),
        backend,
        store,
        policy_version=settings.policy_version,
        tool_calls=settings.tool_calls,
        randomness=host.randomness,
        wall_clock=host.wall_clock,
    )


def _stock_engine(api: StockApi, calls: EngineCalls, *, model: str | None) -> StockEngine:
    if api is StockApi.LLAMA_CPP:
        return LlamaCppEngine(calls)
    return VllmEngine(calls, model=model)


class HttpBackend:
    """An engine behind HTTP. Implements `gymtrio.participants.policy.calls.Backend`.

    Args:
        control_token: of the deployment; what a native engine asks for on its control routes.
    """

    def __init__(
        self, client: ServerClient, settings: ModelSettings, *, control_token: Secret | None
    ) -> None:
        self._client = client
        self._settings = settings
        self._server = _without_version(settings.backend)
        self._control_token = control_token

    @property
    def native(self) -> bool:
        return self._settings.native_backend

    async def generate(
        self, route: Route, body: dict[str, object], *, call_id: str | None
    ) -> BackendReply:
        settings = self._settings
        model = settings.backend_model or body.get("model") or settings.model
        reply = await self._client.request(
            self._server,
            "POST",
            route.value,
            json=body | {"model": model},
            headers=_bearer(settings.backend_key),
            # An engine does not know the rollout prefix; a native one is told by the extension.
            context=None,
            idempotency_key=call_id,
        )
        return BackendReply(status=reply.status, body=_object_of(reply))

    async def cut(self, inventory: CutInventory, *, deadline: float) -> CutReceipt:
        reply = await self._client.request(
            self._server,
            "POST",
            CUT_ROUTE,
            json=unstructure(inventory),
            headers=_bearer(self._control_token),
            context=None,
            control=True,
            deadline=deadline,
        )
        return structure(CutReceipt, reply.raise_for_status().json())

    async def describe(self, *, deadline: float) -> EngineDescription | None:
        if not self.native:
            return None
        reply = await self._client.request(
            self._server,
            "GET",
            ENGINE_ROUTE,
            headers=_bearer(self._control_token),
            context=None,
            control=True,
            deadline=deadline,
        )
        try:
            return structure(EngineDescription, reply.raise_for_status().json())
        except PeerRefused as error:
            if error.status == 404:
                return None
            raise


def _object_of(reply: Reply) -> dict[str, object]:
    """
    Raises:
        TransportError: a success that is not a JSON object.
    """
    try:
        value = reply.json()
    except TransportError:
        if reply.status == 200:
            raise
        value = None
    if isinstance(value, dict):
        return value
    if reply.status == 200:
        raise TransportError(f"{reply.where}: the reply is not a JSON object")
    text = reply.body[:_ERROR_SHOWN_CHARACTERS_MAX].decode("utf-8", "replace")
    return {"error": {"message": text, "type": "backend_error"}}


def _without_version(backend: str) -> str:
    """Base URLs of engines are often given with the version that our paths have already."""
    return backend.rstrip("/").removesuffix("/v1") if "://" in backend else backend


def _bearer(token: Secret | None) -> HeadersLike:
    return () if token is None else ((b"authorization", f"Bearer {token.reveal()}".encode()),)
