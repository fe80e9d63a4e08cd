"""Many episodes that live in an environment's participant, and the bare tasks they are compared with.

Each episode works in wait steps: a checkpoint waits for the one that it is in, then it parks at its
boundary. Steps end when the bench says so, a slice at a time, since the steps of thousands do not end
in one instant.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import attrs
import trio

from gymtrio.episodes.episode import Episode, StepMode
from gymtrio.errors import StaleAttempt
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.participants.environment import EnvironmentParticipant

STEPS_ENDED_AT_ONCE: Final = 100
"""Steps that end in one pass of the loop."""

_DIGEST: Final = "0" * 64
_TEXT: Final = 'The quick brown fox jumps over the lazy dog, says it is "done" and goes on. '
_MESSAGE_BYTES: Final = 500


def episode_ids(count: int) -> list[EpisodeId]:
    return [EpisodeId(RolloutId(f"rollout-{number:06}")) for number in range(count)]


@attrs.frozen
class Conversation:
    """What one episode has to continue from: messages with token ids, as a rollout has them."""

    messages: list[dict[str, Any]]

    @classmethod
    def of_size(cls, number: int, state_bytes: int) -> Conversation:
        """Make one whose state is about so many bytes of JSON."""
        messages: list[dict[str, Any]] = []
        size = 0
        while size < state_bytes - 100:
            text_bytes = min(_MESSAGE_BYTES, state_bytes - size) * 3 // 5
            text = f"{number}/{len(messages)} " + _TEXT * (text_bytes // len(_TEXT) + 1)
            tokens = [(number * 31 + place * 97) % 50_000 for place in range(text_bytes // 20)]
            message = {
                "role": "assistant" if len(messages) % 2 else "user",
                "name": None,
                "content": [{"type": "input_text", "text": text[:text_bytes]}],
                "token_ids": tokens,
                "logprob": -0.125 * len(messages),
            }
            messages.append(message)
            size += text_bytes + 100 + 6 * len(tokens)
        return cls(messages)

    def state(self) -> dict[str, Any]:
        """What its boundary records; called at export only."""
        return {"messages": self.messages, "turn": len(self.messages), "done": False}


class Passing:
    """Counts tasks that come by, and tells when all have."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._passed = 0
        self.all_passed = trio.Event()
        """Of this time round; take it before the first comes by."""

    def note(self) -> None:
        self._passed += 1
        if self._passed == self._count:
            self._passed = 0
            self.all_passed.set()
            self.all_passed = trio.Event()


class EndingSteps:
    """What the steps of many episodes wait for."""

    def __init__(self) -> None:
        self._working = trio.lowlevel.ParkingLot()

    async def work(self) -> None:
        await self._working.park()

    async def end(self) -> None:
        """End every step that is under way, a slice in each pass of the loop."""
        while self._working:
            self._working.unpark(count=STEPS_ENDED_AT_ONCE)
            await trio.lowlevel.checkpoint()


class LiveEpisodes:
    """Episodes in a participant: in a step, or parked at the boundary after it.

    Args:
        conversations: None: they are replacements, and continue from their restored boundary.
    """

    def __init__(
        self,
        participant: EnvironmentParticipant,
        ids: Sequence[EpisodeId],
        conversations: Sequence[Conversation] | None,
    ) -> None:
        self.participant = participant
        self.ids = ids
        self.conversations = conversations
        self.steps = EndingSteps()
        self.gone_on = Passing(len(ids))
        """They come by whenever they leave a boundary."""
        self._exported = 0
        self._announced_at = 0
        self._announced = trio.Event()

    def exported(self, count: int) -> trio.Event:
        """What is set when so many more states have been made for a commit."""
        self._announced_at = self._exported + count
        self._announced = trio.Event()
        return self._announced

    def _export(self, conversation: Conversation) -> dict[str, Any]:
        self._exported += 1
        if self._exported == self._announced_at:
            self._announced.set()
        return conversation.state()

    async def start(self, nursery: trio.Nursery) -> None:
        """Start them all; on return each is in its first step."""
        all_passed = self.gone_on.all_passed
        for number, episode_id in enumerate(self.ids):
            nursery.start_soon(self._run, number, episode_id)
            if number % STEPS_ENDED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        await all_passed.wait()

    async def _run(self, number: int, episode_id: EpisodeId) -> None:
        with suppress(StaleAttempt):
            await self.participant.run_episode(episode_id, _DIGEST, partial(self._body, number))

    async def _body(self, number: int, episode: Episode) -> None:
        if self.conversations is None:
            state: Any = episode.continuation
            conversation = Conversation(state["messages"])
        else:
            conversation = self.conversations[number]
        while True:
            await episode.boundary(partial(self._export, conversation))
            self.gone_on.note()
            await episode.step(self.steps.work, mode=StepMode.WAIT, doing="working")


class BareTasks:
    """As many tasks as there are episodes, which do nothing but wait in the same two places."""

    def __init__(self, count: int) -> None:
        self.steps = EndingSteps()
        self.parked = trio.lowlevel.ParkingLot()
        self.passing = Passing(count)
        self._count = count

    async def start(self, nursery: trio.Nursery) -> None:
        all_passed = self.passing.all_passed
        for number in range(self._count):
            nursery.start_soon(self._body)
            if number % STEPS_ENDED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        await all_passed.wait()

    async def _body(self) -> None:
        while True:
            self.passing.note()
            await self.steps.work()
            self.passing.note()
            await self.parked.park()
