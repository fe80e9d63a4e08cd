"""Waiting for processes that this one has started."""

from __future__ import annotations

import os
import signal
import subprocess

import trio


async def wait_exited(process: subprocess.Popen[bytes]) -> None:
    """Return when a process has ended; it is not reaped. Cancelled: it goes on."""
    await _wait_readable(os.pidfd_open(process.pid))


async def wait_group_ended(group: int) -> None:
    """Return when no process of a group runs any more.

    Args:
        group: its number. The process that leads it is not reaped yet, so that nobody else has the
            number.

    Cancelled: they go on.
    """
    for name in os.listdir("/proc"):
        if name.isdecimal() and _runs_in(group, name):
            try:
                pidfd = os.pidfd_open(int(name))
            except ProcessLookupError:
                continue
            if _runs_in(group, name):
                await _wait_readable(pidfd)
            else:
                # Somebody else has the number by now.
                os.close(pidfd)


async def _wait_readable(pidfd: int) -> None:
    """Wait for the end of a process, and close the descriptor."""
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        trio.lowlevel.notify_closing(pidfd)
        os.close(pidfd)


def _runs_in(group: int, pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of the program before it may have spaces and parentheses.
            state, _, number, *_ = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return int(number) == group and state not in (b"Z", b"X")


def describe_end(returncode: int) -> str:
    """How a process ended, for people."""
    if returncode < 0:
        return f"signal {signal.Signals(-returncode).name}"
    return f"status {returncode}"
