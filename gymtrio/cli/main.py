"""`gymtrio COMMAND ...`: finds the commands of this package and runs one."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Sequence

import gymtrio.cli
from gymtrio.cli.command import Command
from gymtrio.errors import GymtrioError


def find_commands() -> list[Command]:
    """The commands of every module of `gymtrio.cli`, in order of name.

    A module that defines `COMMANDS` is all that it takes to add one; it should import what is heavy
    only when it runs.
    """
    found: list[Command] = []
    for module in pkgutil.iter_modules(gymtrio.cli.__path__, "gymtrio.cli."):
        if not module.name.endswith("__main__"):
            found += getattr(importlib.import_module(module.name), "COMMANDS", ())
    return sorted(found, key=lambda command: command.name)


def build_parser(commands: Iterable[Command]) -> argparse.ArgumentParser:
    """One subparser per command; `checkpoint show` lies below a subparser `checkpoint`."""
    parser = argparse.ArgumentParser(
        prog="gymtrio", description="Servers for RL rollouts that survive a crash."
    )
    top = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    groups: dict[str, argparse._SubParsersAction[argparse.ArgumentParser]] = {}
    for command in commands:
        group, _, name = command.name.rpartition(" ")
        if group and group not in groups:
            below = top.add_parser(group, help=f"commands about a {group}")
            groups[group] = below.add_subparsers(metavar="COMMAND", required=True)
        place = groups[group] if group else top
        made = place.add_parser(name, help=command.help, description=command.help)
        command.add_arguments(made)
        made.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name."""
    given = build_parser(find_commands()).parse_args(arguments)
    try:
        status: int = given.run(given)
    except* BrokenPipeError:
        # Whoever read the output, such as `head`, has enough of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except* GymtrioError as errors:
        print(f"gymtrio: {_first(errors)}", file=sys.stderr)
        status = 1
    return status


def _first(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors
