"""`gymtrio demo`: watch real LLM rollouts survive `kill -9`."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import trio

from gymtrio.cli.command import Command
from gymtrio.errors import HostError, SettingsError

ROLLOUTS_MAX: Final = 64
POLICY_WORKERS_MAX: Final = 8
_NEEDED: Final = {"rich": "rich", "gymnasium": "gymnasium", "cyllama": "cyllama", "numpy": "numpy"}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rollouts", type=int, default=8, help="how many (default: %(default)s)")
    parser.add_argument(
        "--kill-at",
        type=int,
        metavar="CALLS",
        help="take the checkpoint after this many model calls in all (default: half of them)",
    )
    parser.add_argument(
        "--seed", type=int, default=7, help="of the sampling (default: %(default)s)"
    )
    parser.add_argument(
        "--policy-workers",
        type=int,
        default=2,
        metavar="N",
        help="processes that serve the policy model (default: %(default)s)",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIRECTORY",
        help="leave logs, tokens and the checkpoint in this new directory",
    )


def _run(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.rollouts <= ROLLOUTS_MAX:
        raise SettingsError(f"--rollouts {arguments.rollouts}: expected 1..{ROLLOUTS_MAX}")
    if arguments.kill_at is not None and arguments.kill_at < 1:
        raise SettingsError(f"--kill-at {arguments.kill_at}: expected 1 or more")
    if not 1 <= arguments.policy_workers <= POLICY_WORKERS_MAX:
        raise SettingsError(
            f"--policy-workers {arguments.policy_workers}: expected 1..{POLICY_WORKERS_MAX}"
        )
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise HostError(f"the demo needs {', '.join(missing)}: pip install 'gymtrio[demo]'")
    logging.basicConfig(level=logging.ERROR)
    with _directory(arguments.keep) as directory:
        return _show(arguments, directory)


def _show(arguments: argparse.Namespace, directory: Path) -> int:
    # Imported here: what it needs comes with the extra `demo`.
    from rich.console import Console  # noqa: PLC0415

    from gymtrio.cli.demonstration.display import (  # noqa: PLC0415
        Screen,
        legend,
        rollout_table,
        times_told,
    )
    from gymtrio.cli.demonstration.scenario import Scenario  # noqa: PLC0415

    console = Console()
    with Screen(console) as screen:
        scenario = Scenario(
            directory=directory,
            rollouts=arguments.rollouts,
            seed=arguments.seed,
            kill_at=arguments.kill_at,
            watcher=screen,
            policy_workers=arguments.policy_workers,
        )
        outcome = trio.run(scenario.run)
    console.print(rollout_table(outcome))
    console.print(legend(), style="dim", highlight=False)
    console.print(times_told(outcome), highlight=False)
    if arguments.keep is not None:
        console.print(f"logs, tokens and the checkpoint are in {directory}", highlight=False)
    if outcome.equal:
        console.print("every rollout is the same as if nothing had happened", style="bold green")
        return 0
    console.print("a rollout DIFFERS from the undisturbed run", style="bold red")
    return 1


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        made = Path(tempfile.mkdtemp(prefix="gymtrio-demo-"))
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return
    try:
        keep.mkdir(parents=True)
    except OSError as error:
        raise SettingsError(f"--keep {keep}: {error.strerror}") from None
    yield keep.resolve()


COMMANDS = (
    Command(
        name="demo",
        help="run real rollouts, kill every server, continue them, and compare",
        run=_run,
        add_arguments=_add_arguments,
    ),
)
