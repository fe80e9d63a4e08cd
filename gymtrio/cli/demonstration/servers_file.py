"""The demo's deployment: every server a process of its own, every port a free one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import servers.agent
from gymtrio.cli.demonstration.tasks import TASKSETS
from gymtrio.ports import HostRandomness
from gymtrio.serving.deployment import Deployment, parse_deployment

ENVIRONMENT: Final = "environment"
POLICY: Final = "policy"
TOKEN_STORE: Final = "tokens"
CHECKPOINTS: Final = "checkpoints"
STATE: Final = "state"
_PREAMBLES: Final = Path(servers.agent.__path__[0]) / "data" / "preambles"


def demo_deployment(
    directory: Path, checkpoints: Path, *, seed: int, policy_workers: int
) -> Deployment:
    """Describe the servers.

    Args:
        directory: for their state.
        checkpoints: the root below which checkpoints are written; exists.
        seed: of the sampling; the same seed samples the same tokens in every attempt.
        policy_workers: processes that serve the policy model.
    """
    described = {
        "checkpoint": {
            "enabled": True,
            "control_auth_token": HostRandomness().hex(32),
            "root": str(checkpoints),
        },
        "state_dir": str(directory / STATE),
        "servers": {
            "engine": {
                "app": "servers.model.embedded_engine:app",
                "start_timeout_s": 120.0,
                "settings": {
                    "parallel_calls": 8,
                    "cached_sequences": 4,
                    "context_tokens": 1280,
                    "describe_tools": False,
                    "token_store": TOKEN_STORE,
                },
            },
            POLICY: {
                "app": "servers.model.policy:app",
                "start_timeout_s": 60.0,
                "settings": {
                    "backend": "engine",
                    "native_backend": True,
                    "checkpoint_policy": True,
                    "checkpoint_generation_cuts": True,
                    "token_store": TOKEN_STORE,
                    "num_workers": policy_workers,
                },
            },
            "agent": {
                "app": "servers.agent.simple_agent:app",
                "start_timeout_s": 60.0,
                "settings": {
                    "model": POLICY,
                    "max_steps": 6,
                    "preambles": {name: str(_PREAMBLES / f"{name}.jsonl") for name in TASKSETS},
                    "sampling": {"temperature": 0.6, "max_output_tokens": 32, "seed": seed},
                },
            },
            ENVIRONMENT: {
                "app": "servers.environment.single_agent_turn:app",
                "start_timeout_s": 60.0,
                "settings": {
                    "tasksets": {
                        "counter": {"resources": "counter", "agent": "agent"},
                        "blackjack": {"resources": "blackjack", "agent": "agent"},
                    }
                },
            },
            "counter": {"app": "servers.resources.counter:app", "start_timeout_s": 60.0},
            "blackjack": {
                "app": "servers.resources.gymnasium_bridge:app",
                "start_timeout_s": 60.0,
                "settings": {"environments": {"Blackjack-v1": {}}},
            },
        },
    }
    return parse_deployment(described, where="the demo's deployment")
