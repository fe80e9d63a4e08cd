"""Rollouts that play on through whatever happens, and an engine with an order of its own."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Protocol

import attrs
import trio

from gymtrio.ids import EpisodeId
from gymtrio.participants.policy.calls import PolicyCall
from gymtrio.participants.policy.records import PolicyRecord
from tests.helpers.scripted_backend import ScriptedBackend
from tests.participants.policy.harness import Caller, chat, text_of, tokens_of, uncut_tokens

TURNS = 4
ROLLOUTS = 8


class Callable(Protocol):
    """Whoever calls can be made of."""

    def begin(self, episode_id: EpisodeId, call: PolicyCall, *, take: bool) -> Caller: ...


@attrs.define
class Storm:
    """What the outside saw."""

    chance: random.Random
    prepared: bool = False
    delivered: dict[EpisodeId, list[str]] = attrs.Factory(lambda: defaultdict(list))
    """The texts that reached each episode, in order."""
    answered_while_prepared: int = 0
    committed: dict[str, tuple[dict[EpisodeId, int], dict[str, PolicyRecord]]] = attrs.Factory(dict)
    """Directory to how much had been delivered, and what was written."""

    def pause(self) -> float:
        return self.chance.choice([0, 0, 1, 1, 2, 5])


async def one_rollout(policy: Callable, storm: Storm, e: EpisodeId, texts: list[str]) -> None:
    """Play the turns that are left; a call that is lost or left is made again."""
    while len(texts) < 2 * TURNS:
        texts_sent = [*texts, f"{e.rollout_id} turn {len(texts)}"]
        caller = policy.begin(e, chat(*texts_sent), take=False)
        with trio.move_on_after(storm.chance.choice([3, 30, 30])):
            await caller.ended.wait()
        if caller.reply is None:
            caller.leave()
            await caller.ended.wait()
        if caller.reply is None:
            continue
        storm.answered_while_prepared += storm.prepared
        await trio.sleep(storm.chance.choice([0, 0, 1]))
        caller.reply.done(True)
        assert tokens_of(caller.reply) == uncut_tokens(chat(*texts_sent).body)
        texts[:] = [*texts_sent, text_of(caller.reply)]
        storm.delivered[e].append(text_of(caller.reply))


async def engine(backend: ScriptedBackend, storm: Storm) -> None:
    """Give tokens to whoever is there, in an order of its own."""
    while True:
        await trio.sleep(1)
        for live in list(backend.live):
            live.emit(min(storm.chance.randrange(6), 20 - len(live.token_ids)))
            if len(live.token_ids) == 20:
                live.finish.set()
