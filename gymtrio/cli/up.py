"""`gymtrio up deployment.yaml`: run every server of a deployment until told to stop."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Final

import attrs
import trio

from gymtrio.cli.command import Command
from gymtrio.errors import SettingsError
from gymtrio.serving.deployment import Deployment, load_deployment
from gymtrio.serving.logs import configure_logging
from gymtrio.serving.supervisor import RunningDeployment, open_deployment

RUN_DIR_DEFAULT: Final = Path(".gymtrio")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("deployment", type=Path, help="the deployment file (YAML)")
    parser.add_argument(
        "--recover",
        action="store_true",
        help="start every server closed, to be opened by the resume that follows a restore",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        help=f"for logs; default: {RUN_DIR_DEFAULT}/<name of the file>",
    )


def _run(arguments: argparse.Namespace) -> int:
    configure_logging("up")
    deployment = load_deployment(arguments.deployment)
    if arguments.recover:
        if not deployment.checkpoint.enabled:
            raise SettingsError(f"{arguments.deployment}: --recover needs checkpoint.enabled")
        recover = attrs.evolve(deployment.checkpoint, recover=True)
        deployment = attrs.evolve(deployment, checkpoint=recover)
    run_dir = arguments.run_dir or RUN_DIR_DEFAULT / arguments.deployment.stem
    trio.run(_until_signal, deployment, run_dir)
    return 0


async def _until_signal(deployment: Deployment, run_dir: Path) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_at, signals, nursery.cancel_scope)
            async with open_deployment(deployment, run_dir=run_dir) as running:
                print_servers(running)
                took_s = trio.current_time() - began
                print(f"ready after {took_s:.1f} s, logs in {running.run_dir / 'logs'}", flush=True)
                await trio.sleep_forever()


async def _stop_at(signals: object, scope: trio.CancelScope) -> None:
    async for _ in signals:  # type: ignore[attr-defined]
        scope.cancel()


def print_servers(running: RunningDeployment) -> None:
    """One line per server: name, kind, URL."""
    width = max((len(name) for name in running.urls), default=0)
    for name, url in running.urls.items():
        kind = running.deployment.entry(name).known_kind
        print(f"{name:<{width}}  {kind.value if kind else '':<11}  {url}", flush=True)


COMMANDS = (
    Command(
        name="up",
        help="run every server of a deployment file",
        run=_run,
        add_arguments=_add_arguments,
    ),
)
