"""The policy model: OpenAI's routes in front of an inference engine, part of every checkpoint.

    settings: {backend: engine, native_backend: true, checkpoint_policy: true,
               checkpoint_generation_cuts: true}

Without `checkpoint_policy` it serves a judge or a simulator model.
"""

from __future__ import annotations

from gymtrio.serving.app import ServerApp
from gymtrio.serving.model_server import ModelSettings, open_policy_service
from gymtrio.wire.control import Kind

app = ServerApp(
    kind=Kind.MODEL,
    default_instance="policy",
    settings_class=ModelSettings,
    open_service=open_policy_service,
)
