"""The harness itself: one seed is one run, and the dead have no effect."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import trio

from tests.simulation.plans import random_plan, with_workers
from tests.simulation.processes import Process, ProcessDied
from tests.simulation.scheduler import Steps, run_seeded
from tests.simulation.world import run

SEEDS = (19, 58)
"""With crashes, stops, lost, slow and doubled calls, other controllers, disks that fail."""


def traces_of_a_fresh_process(hash_seed: int, *more: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.repeat", "--trace", *more, *map(str, SEEDS)],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout, done.stderr
    return done.stdout.splitlines()


def test_one_seed_is_one_run_whatever_the_process() -> None:
    """E2E-4: step count, schedule and history are equal in two processes and in this one."""
    here = [f"{seed} {run(random_plan(seed)).trace}" for seed in SEEDS]
    assert traces_of_a_fresh_process(1) == here
    assert traces_of_a_fresh_process(77) == here


def test_one_seed_is_one_run_of_several_processes_too() -> None:
    """E2E-4, WRK-1."""
    here = [f"{seed} {run(with_workers(random_plan(seed))).trace}" for seed in SEEDS]
    assert traces_of_a_fresh_process(1, "--workers") == here


def test_another_seed_is_another_run() -> None:
    assert run(random_plan(3)).trace != run(random_plan(4)).trace


def test_a_killed_process_does_nothing_any_more() -> None:
    """Not in `finally` blocks, not behind shields; and it is gone at once."""
    done: list[str] = []

    async def main(process: Process) -> None:
        try:
            await trio.sleep(5)
        finally:
            with trio.CancelScope(shield=True):
                try:
                    await trio.sleep(1000)
                finally:
                    process.check()
                    done.append("a ghost acted")

    async def world() -> float:
        async with trio.open_nursery() as nursery:
            process = Process("server", 1)
            await nursery.start(process.live, main)
            await trio.sleep(1)
            process.kill()
            with pytest.raises(ProcessDied):
                process.spawn(trio.sleep, 1, name="late")
            await process.bury()
            assert process.panic is None
        return trio.current_time()

    assert run_seeded(1, world, Steps()) < 2
    assert not done


def test_a_process_that_fails_by_itself_is_told_apart() -> None:
    async def main(process: Process) -> None:
        raise ValueError("a fault of its own")

    async def world() -> BaseException | None:
        async with trio.open_nursery() as nursery:
            process = Process("server", 1)
            await nursery.start(process.live, main)
            await process.ended.wait()
        return process.panic

    panic = run_seeded(1, world, Steps())
    assert panic is not None
    assert "a fault of its own" in repr(panic)
