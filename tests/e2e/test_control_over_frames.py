"""A controller on the same host drives real processes without one HTTP request."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from gymtrio.checkpoint.coordination import open_coordination
from gymtrio.errors import TransportError
from gymtrio.ids import CheckpointId
from gymtrio.ports import HostClock, HostRandomness
from gymtrio.serving.control_frames import open_control_frames
from gymtrio.serving.deployment import parse_deployment
from gymtrio.serving.supervisor import open_deployment
from gymtrio.wire.control import ControlRequest

CHECKPOINT: Final = CheckpointId("c1")


class NoHttp:
    async def call(
        self, server: str, operation: str, request: ControlRequest | None, deadline: float
    ) -> object:
        raise TransportError(f"{server} has no socket file")


@pytest.mark.timeout(180)
async def test_a_checkpoint_over_frames_alone(tmp_path: Path) -> None:
    """WIRE-1, COORD-5"""
    root = tmp_path / "checkpoints"
    root.mkdir()
    deployment = parse_deployment(
        {
            "checkpoint": {
                "enabled": True,
                "control_auth_token": HostRandomness().hex(32),
                "root": str(root),
            },
            "servers": {
                "counter": {"app": "servers.resources.counter:app", "start_timeout_s": 60.0},
                "policy": {
                    "app": "servers.model.policy:app",
                    "start_timeout_s": 60.0,
                    "settings": {"backend": "http://127.0.0.1:9", "checkpoint_policy": True},
                },
            },
        }
    )
    async with open_deployment(deployment, run_dir=tmp_path / "run") as running:
        token = running.deployment.checkpoint.control_auth_token
        assert token is not None
        paths = {name: running.deployment.socket_path(name) for name in ("counter", "policy")}
        sockets = {name: path for name, path in paths.items() if path is not None}
        assert sockets.keys() == paths.keys()
        async with (
            open_control_frames(sockets, token, NoHttp(), nonce="n") as channel,
            open_coordination(
                list(sockets), channel, wall_clock=HostClock(), randomness=HostRandomness()
            ) as controller,
        ):
            async with controller.checkpoint(CHECKPOINT, str(root / "c1"), timeout_s=60) as held:
                await held.commit([])
                phases = {
                    server: status.phase for server, status in (await controller.status()).items()
                }
                assert phases == {"counter": "committed", "policy": "committed"}
            after = await controller.status()
            assert {status.phase for status in after.values()} == {"idle"}
