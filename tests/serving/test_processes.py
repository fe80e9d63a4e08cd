"""Waiting for processes and their groups."""

from __future__ import annotations

import os
import signal
import subprocess

import trio
from trio.testing import wait_all_tasks_blocked

from gymtrio.serving.processes import wait_exited, wait_group_ended


async def test_a_group_has_ended_when_its_last_process_has() -> None:
    """E2E-1, V2: whoever led it has ended before; until the last one has, a port may be taken."""
    leader = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $!"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdout is not None
    last = int(leader.stdout.readline())
    await wait_exited(leader)
    ended = trio.Event()

    async def wait() -> None:
        await wait_group_ended(leader.pid)
        ended.set()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            assert not ended.is_set()
            os.kill(last, signal.SIGKILL)
    assert ended.is_set()
    await wait_group_ended(leader.pid)
    leader.communicate()
