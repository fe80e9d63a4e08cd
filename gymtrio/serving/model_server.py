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
from gymtrio.capture.log_store import LogTokenStore, open_log_store
from gymtrio.capture.replies import Route
from gymtrio.errors import InvalidRequest, PeerRefused, Refusal, SettingsError, TransportError
from gymtrio.participants.policy.calls import BackendReply, Policy, PolicyCall
from gymtrio.participants.policy.participant import PolicyParticipant
from gymtrio.participants.policy.plain import PlainPolicy
from gymtrio.serving.client import Reply, ServerClient
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.http import Handler, HeadersLike, Request, Response, json_response
from gymtrio.serving.ledger_route import add_ledger_route
from gymtrio.serving.openai_shapes import complete_reply
from gymtrio.settings import Secret
from gymtrio.strict import structure, unstructure
from gymtrio.wire.native import ADMISSION_HEADER

TOKEN_STORE_DEFAULT: Final = "tokens"
_ERROR_SHOWN_CHARACTERS_MAX: Final = 500


@attrs.frozen(kw_only=True)
class ModelSettings:
    """Settings of a policy model server."""

    backend: str
    """The engine: a server of the deployment, or a base URL; a `/v1` at its end may be given."""
    native_backend: bool = False
    """It cuts and continues generations (`gymtrio/capture/DESIGN.md`)."""
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
    backend = HttpBackend(host.client, settings, control_token=host.control_token)
    if not (settings.checkpoint_policy and host.checkpoint.enabled):
        policy = PlainPolicy(backend, host.randomness)
        yield Service(routes=policy_routes(policy, settings.model))
        return
    async with open_token_store(host, settings.token_store) as store:
        participant = PolicyParticipant(
            host.instance,
            backend=backend,
            token_store=store,
            randomness=host.randomness,
            generation_cuts=settings.checkpoint_generation_cuts,
        )
        assert host.control_token is not None, "checked when the deployment was read"
        yield Service(
            routes=policy_routes(participant, settings.model),
            participant=participant,
            add_routes=partial(
                add_ledger_route, participant=participant, is_token=host.control_token.matches
            ),
        )


def _check(settings: ModelSettings) -> None:
    if settings.checkpoint_generation_cuts and not settings.checkpoint_policy:
        raise SettingsError("checkpoint_generation_cuts needs checkpoint_policy")
    if settings.checkpoint_generation_cuts and not settings.native_backend:
        raise SettingsError(
            "checkpoint_generation_cuts needs native_backend: generations of other engines are "
            "not cut yet"
        )


def policy_routes(policy: Policy, model: str) -> dict[tuple[str, str], Handler]:
    """The routes of a policy model (POL-1)."""
    routes: dict[tuple[str, str], Handler] = {
        ("POST", route.value): partial(_answer, policy, route, model) for route in Route
    }
    return routes | {("GET", "/v1/models"): partial(_list_models, model)}


async def _answer(policy: Policy, route: Route, model: str, request: Request) -> Response:
    try:
        return await _serve(policy, route, model, request)
    except Refusal as refusal:
        # OpenAI's clients show `message` and nothing else of an error.
        error = refusal.body()["error"] | {"message": refusal.detail, "type": refusal.code}
        headers = (("retry-after", "1"),) if refusal.status == 503 else ()
        return json_response({"error": error}, refusal.status, headers)


async def _serve(policy: Policy, route: Route, model: str, request: Request) -> Response:
    """Serve one call; from the reply to the answer there is no suspension (POL-2)."""
    body = request.json()
    if not isinstance(body, dict):
        raise InvalidRequest("the body of a model call is a JSON object")
    context = request.context
    reply = await policy.call(
        None if context is None else context.episode_id,
        PolicyCall(
            route=route,
            body=body,
            capture_tokens=context is not None and context.capture_tokens,
            refuse_when_closed=request.header(ADMISSION_HEADER) == "refuse",
            epoch=request.epoch,
        ),
    )
    answer: Response | None = None
    try:
        if reply.status == 200:
            complete_reply(route, body, reply.body, model)
        answer = json_response(reply.body, reply.status, on_done=reply.done)
    finally:
        if answer is None:
            reply.done(False)
    return answer


async def _list_models(model: str, request: Request) -> Response:
    entry = {"id": model, "object": "model", "created": 0, "owned_by": "gymtrio"}
    return json_response({"object": "list", "data": [entry]})


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
