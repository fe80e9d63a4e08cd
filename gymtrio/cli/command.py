"""What a command is."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import attrs


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """For commands that take none."""


@attrs.frozen(kw_only=True)
class Command:
    """One command of `gymtrio`; a module of `gymtrio.cli` lists its own in `COMMANDS`."""

    name: str
    """`up`, or with the group it belongs to: `checkpoint show`."""
    help: str
    run: Callable[[argparse.Namespace], int]
    """Does the work and returns the exit status. A `GymtrioError` is told in one line, status 1."""
    add_arguments: Callable[[argparse.ArgumentParser], None] = no_arguments
