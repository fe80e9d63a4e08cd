"""`gymtrio coordinate deployment.yaml SERVER`: coordinate workers that somebody else starts.

    gymtrio coordinate deployment.yaml policy &          prints GYMTRIO_COORDINATOR=<socket>
    hypercorn -k trio -w 2 servers.model.policy:app      with that variable set

`gymtrio up` does all of it by itself, and replaces workers that die.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import trio

from gymtrio.cli.command import Command
from gymtrio.errors import SettingsError
from gymtrio.serving.coordinator import open_coordinator
from gymtrio.serving.deployment import (
    DEPLOYMENT_VARIABLE,
    SERVER_VARIABLE,
    Deployment,
    load_deployment,
)
from gymtrio.serving.logs import configure_logging
from gymtrio.serving.workers import COORDINATOR_VARIABLE


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("deployment", type=Path, help="the deployment file (YAML)")
    parser.add_argument(
        "server", help="which server of it; its num_workers says how many to expect"
    )
    parser.add_argument("--socket", type=Path, help="where to listen; default: a private place")


def _run(arguments: argparse.Namespace) -> int:
    configure_logging(arguments.server)
    deployment = load_deployment(arguments.deployment)
    trio.run(
        _until_signal,
        arguments.deployment.absolute(),
        deployment,
        arguments.server,
        arguments.socket,
    )
    return 0


async def _until_signal(file: Path, deployment: Deployment, server: str, path: Path | None) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with open_coordinator(deployment, server, path=path) as coordinator:
            if coordinator is None:
                raise SettingsError(
                    f"servers.{server} takes no part in checkpoints: its workers need no coordinator"
                )
            for variable, value in (
                (DEPLOYMENT_VARIABLE, file),
                (SERVER_VARIABLE, server),
                (COORDINATOR_VARIABLE, coordinator.socket),
            ):
                print(f"{variable}={value}", flush=True)
            await anext(signals)


COMMANDS = (
    Command(
        name="coordinate",
        help="coordinate the workers of a policy server that are started by other means",
        run=_run,
        add_arguments=_add_arguments,
    ),
)
