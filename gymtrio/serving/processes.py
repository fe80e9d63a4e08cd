"""Waiting for processes that this one has started."""

from __future__ import annotations

import os
import signal
import subprocess

import trio


async def wait_exited(process: subprocess.Popen[bytes]) -> None:
    """Return when a process has ended; it is not reaped. Cancelled: it goes on."""
    pidfd = os.pidfd_open(process.pid)
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        trio.lowlevel.notify_closing(pidfd)
        os.close(pidfd)


def describe_end(returncode: int) -> str:
    """How a process ended, for people."""
    if returncode < 0:
        return f"signal {signal.Signals(-returncode).name}"
    return f"status {returncode}"
