"""Servers for RL rollouts that survive a crash, and the controller that checkpoints them."""

from __future__ import annotations

from gymtrio.checkpoint.coordination import Controller
from gymtrio.checkpoint.held import HeldCheckpoint
from gymtrio.checkpoint.members import (
    CoordinationError,
    Failed,
    LeaseNotProven,
    NoPolicyModel,
    NotPrepared,
    Prepared,
    Replaced,
)
from gymtrio.errors import GymtrioError
from gymtrio.ids import CaptureKey, CheckpointId, EpisodeId, RolloutId
from gymtrio.serving.controller import open_controller
from gymtrio.serving.deployment import Deployment, load_deployment
from gymtrio.serving.supervisor import RunningDeployment, open_deployment

__all__ = [
    "CaptureKey",
    "CheckpointId",
    "Controller",
    "CoordinationError",
    "Deployment",
    "EpisodeId",
    "Failed",
    "GymtrioError",
    "HeldCheckpoint",
    "LeaseNotProven",
    "NoPolicyModel",
    "NotPrepared",
    "Prepared",
    "Replaced",
    "RolloutId",
    "RunningDeployment",
    "load_deployment",
    "open_controller",
    "open_deployment",
]
