"""The embedded inference engine: a small instruct model on the CPU behind the OpenAI APIs.

    servers:
      engine:
        app: servers.model.embedded_engine:app
        start_timeout_s: 60
        settings: {parallel_calls: 8, context_tokens: 2048}

It takes no part in checkpoints itself. To policy servers it is a native backend: it makes generations
in flight durable in the deployment's token store and continues them exactly
(`gymtrio/capture/DESIGN.md`); the routes for that are served where there is a control token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import attrs

from gymtrio.capture.cuts import EngineDescription
from gymtrio.capture.rounds import Cutter
from gymtrio.capture.tokens import TokenStore
from gymtrio.serving.app import ServerApp
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.model_server import open_token_store
from gymtrio.wire.control import Kind
from servers.model.embedded.engine import Engine, open_engine
from servers.model.embedded.settings import EngineSettings
from servers.model.engine_api.prompts import Prompting
from servers.model.engine_native.backend import NativeBackend
from servers.model.engine_native.control_routes import engine_control
from servers.model.engine_routes import EngineService


def _not_negative(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 0:
        raise ValueError(f"{attribute.name} must not be negative, got {value}")


@attrs.frozen(kw_only=True)
class EmbeddedEngineSettings(EngineSettings):
    """Settings of the embedded engine; those of its size are the base class's."""

    model_name: str = "smollm2-135m-instruct"
    """What replies call the model; requests may name any."""
    policy_version: int = attrs.field(default=0, validator=_not_negative)
    """Of the weights; stamped on what is generated."""
    default_system: str | None = None
    """The system turn of a conversation that has none; None: it stays without."""
    describe_tools: bool = True
    """Tell the model of a request's tools in the system turn. False: the conversation shows by examples
    how they are called, which this model follows better and which costs less of the context."""
    token_store: str | None = None
    """Directory of the token store, shared with the policy servers; relative to the deployment's state
    directory. None: `tokens` there."""


@asynccontextmanager
async def open_embedded_engine(
    host: ServiceHost[EmbeddedEngineSettings],
) -> AsyncIterator[Service]:
    """Load the model and serve it; an `open_service` of `gymtrio.serving.app.ServerApp`.

    Raises:
        HostError: package, weights or memory are missing; the message says what to do.
        TokenStoreFailed: the token store's directory cannot be made or read.
    """
    settings = host.settings
    async with AsyncExitStack() as stack:
        store: TokenStore | None = None
        if host.control_token is not None:
            store = await stack.enter_async_context(open_token_store(host, settings.token_store))
        engine = await stack.enter_async_context(open_engine(settings))
        description = describe_engine(engine, settings)
        native = NativeBackend(engine, description=description, store=store)
        served = EngineService(
            engine,
            native,
            Prompting(
                vocabulary=engine.vocabulary,
                context_tokens=engine.context_tokens,
                default_system=settings.default_system,
                describe_tools=settings.describe_tools,
            ),
            description=description,
            nursery=host.nursery,
            randomness=host.randomness,
            wall_clock=host.wall_clock,
        )
        if host.control_token is None or store is None:
            yield Service(routes=served.routes())
            return
        cutter = Cutter(
            native.capture,
            store,
            observe=native.observe,
            engine_digest=description.digest,
            randomness=host.randomness,
        )
        blueprint = engine_control(
            is_token=host.control_token.matches, cut=cutter.cut, description=description
        )
        yield Service(
            routes=served.routes(), add_routes=lambda app: app.register_blueprint(blueprint)
        )


def describe_engine(engine: Engine, settings: EmbeddedEngineSettings) -> EngineDescription:
    fingerprint: dict[str, object] = dict(engine.fingerprint)
    text = json.dumps(fingerprint, sort_keys=True, separators=(",", ":"))
    return EngineDescription(
        model=settings.model_name,
        policy_version=settings.policy_version,
        fingerprint=fingerprint,
        digest=hashlib.sha256(text.encode("ascii")).hexdigest(),
    )


app = ServerApp(
    kind=Kind.MODEL,
    default_instance="engine",
    settings_class=EmbeddedEngineSettings,
    open_service=open_embedded_engine,
)
