"""Work in flight without a boundary."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gymtrio.episodes.signal import Signal
from gymtrio.episodes.tickets import Tickets
from gymtrio.ids import EpisodeId, RolloutId
from tests.helpers.gated import begin


def episode(name: str, attempt: int = 0) -> EpisodeId:
    return EpisodeId(RolloutId(name), attempt)


async def test_a_ticket_blocks_until_it_is_given_back_once(autojump_clock: MockClock) -> None:
    """STEP-6: counted in O(1), and listed by name and since when."""
    tickets = Tickets(Signal())
    ticket = tickets.take(episode("r"), "seeding")
    await trio.sleep(3)
    with tickets.take(episode("r", 1), "closing"):
        assert len(tickets) == 2
        listed = [
            (b.episode_id, b.doing, trio.current_time() - b.since) for b in tickets.blockers()
        ]
        assert listed == [(episode("r"), "seeding", 3), (episode("r", 1), "closing", 0)]
    ticket.give_back()
    ticket.give_back()
    assert len(tickets) == 0
    assert tickets.of([RolloutId("r")]) == []


async def test_waiting_for_an_attempt_is_waiting_for_it_and_the_earlier_ones(
    autojump_clock: MockClock,
) -> None:
    """CTL-12: a later attempt of the rollout is not waited for."""
    tickets = Tickets(Signal())
    first, second = tickets.take(episode("r"), "x"), tickets.take(episode("r", 1), "x")
    tickets.take(episode("r", 2), "x")
    async with trio.open_nursery() as nursery:
        waited = await begin(nursery, lambda: tickets.wait_up_to(episode("r", 1)))
        first.give_back()
        await wait_all_tasks_blocked()
        assert waited == []
        second.give_back()
        await wait_all_tasks_blocked()
        assert waited == [None]


async def test_giving_a_ticket_back_rings_the_bell(autojump_clock: MockClock) -> None:
    """CTL-7: a waiting prepare looks again."""
    changed = Signal()
    tickets = Tickets(changed)
    ticket = tickets.take(episode("r"), "x")
    async with trio.open_nursery() as nursery:
        rung = await begin(nursery, changed.wait)
        ticket.give_back()
        await wait_all_tasks_blocked()
        assert rung == [None]
