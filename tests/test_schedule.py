"""The seeded schedule leans on two private names of trio; this fails when they change."""

from __future__ import annotations

import random

import trio
from trio._core import _run


def _order_of_twenty_tasks(seed: str) -> list[int]:
    ran: list[int] = []

    async def task(number: int) -> None:
        for _ in range(3):
            await trio.lowlevel.checkpoint()
            ran.append(number)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(task, number)

    _run._r.seed(seed)
    trio.run(main)
    return ran


def test_trio_still_has_the_names_that_order_its_tasks() -> None:
    assert type(_run._r) is random.Random
    assert _run._ALLOW_DETERMINISTIC_SCHEDULING is True


def test_one_seed_gives_one_order_and_another_seed_another() -> None:
    first = _order_of_twenty_tasks("1")
    assert _order_of_twenty_tasks("1") == first
    assert _order_of_twenty_tasks("2") != first
