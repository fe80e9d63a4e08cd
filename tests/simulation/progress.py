"""What each episode has done, and what must not be done again: I1, I5, I6, I7.

Before a publication everything that was answered is noted by attempt; after a restore the replacement
attempt begins with what was noted of the checkpointed one.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any, Final

import attrs

from gymtrio.ids import RolloutId, parse_capture_key
from tests.simulation.engine import conversation
from tests.simulation.network import Exchange

if TYPE_CHECKING:
    from tests.simulation.oracles import Oracles

EFFECTS: Final = ("/increment_counter", "/get_counter_value")
"""Calls of wait steps: no rollout asks twice for the same in its life. A verify is declared replay."""
Effect = tuple[str, int | None]


@attrs.define(eq=False)
class Done:
    """What one attempt has done, and its forerunners before the boundary it continues from."""

    heard: set[str] = attrs.field(factory=set)
    """Conversations whose answer its agent has."""
    before: set[str] = attrs.field(factory=set)
    """Those of them that were answered before its restored boundary."""
    effects: set[Effect] = attrs.field(factory=set)
    """Those that succeeded."""
    activated: bool = False
    """Its agent was activated, so that its seeds are over."""
    restored_activated: bool = False


@attrs.define(eq=False)
class Progress:
    oracles: Oracles
    of_attempt: dict[str, Done] = attrs.field(factory=dict)
    """By capture key."""
    of_checkpoint: dict[str, dict[RolloutId, tuple[str, Done]]] = attrs.field(factory=dict)
    """By checkpoint: the replacement's key and with what it begins."""
    heard_before: dict[str, dict[str, set[str]]] = attrs.field(factory=dict)
    """By checkpoint: what each attempt had heard when its agent was closed. What is on its way then
    is heard while the step is held, and asked for again after a crash."""
    restored_keys: set[str] = attrs.field(factory=set)
    """Attempts of which the environment has a restored boundary."""

    def _of(self, key: str) -> Done:
        return self.of_attempt.setdefault(key, Done())

    # -- calls --------------------------------------------------------------------------------

    def delivered(self, exchange: Exchange) -> None:
        key, server, path = exchange.key, exchange.target.name, exchange.path
        if key is None:
            return
        done = self._of(key)
        # What others send again is refused, or not; that is for the fences' oracle.
        ours = exchange.source.name in ("env", "agent")
        if server == "policy" and ours:
            if conversation(exchange.json()["input"]) in done.before:
                self.oracles.fail("I5", f"{key}: a model call before its boundary is made again")
        elif path == "/seed_session" and done.restored_activated and ours:
            self.oracles.fail("I5", f"{key} is seeded again after its activation had begun")
        elif server == "agent" and path == "/v1/responses":
            done.activated = True
        elif (
            server == "tools"
            and path in EFFECTS
            and _effect(exchange) in done.effects
            # Not a repetition of what was asked for once.
            and ours
            and not exchange.duplicate
        ):
            self.oracles.fail("I6", f"{key}: {path} is asked for again, and is no replay")

    def served(self, exchange: Exchange) -> None:
        """Answered 2xx."""
        if exchange.target.name == "tools" and exchange.path in EFFECTS and exchange.key:
            self._of(exchange.key).effects.add(_effect(exchange))

    def received(self, exchange: Exchange) -> None:
        ends = (exchange.source.name, exchange.target.name)
        if ends == ("agent", "policy") and exchange.status == 200 and exchange.key is not None:
            self._of(exchange.key).heard.add(conversation(exchange.json()["input"]))

    def agent_closes(self, checkpoint_id: str) -> None:
        known = {key: set(done.heard) for key, done in self.of_attempt.items()}
        self.heard_before.setdefault(checkpoint_id, known)

    # -- publications -------------------------------------------------------------------------

    def published(
        self, publication: Any, seeded: Set[str], unheard: Set[str], heard: Set[str]
    ) -> None:
        """
        Args:
            seeded: attempts that have a session in the resources server that lives now.
            unheard: attempts that were answered and whose controller does not know (HARD-9).
            heard: those whose controller does, though perhaps only since they were not exported.
        """
        name = publication.checkpoint_id
        env = publication.commits["env"]
        keys = {episode_id.capture_key for episode_id in publication.scope}
        # One that failed meanwhile was given up by name (I7).
        attempts = publication.attempts
        for key in sorted(
            e.capture_key for e in publication.scope if attempts[e.rollout_id] == e.attempt
        ):
            began = key in self.restored_keys or key in seeded
            if key in unheard:
                self.oracles.sometimes("a reply in flight at a publication")
            elif began and key not in env.episode_ids and key not in heard:
                self.oracles.fail("I1", f"{name}: {key} neither replied nor exported")
        for key in self.restored_keys - keys:
            # Left out, and nobody's any more unless it had begun: all of it may be done again.
            self.of_attempt.pop(key, None)
            self.oracles.lineage.restored_cuts.pop(key, None)
        whole = set(env.episode_ids) & set(publication.commits["agent"].episode_ids)
        noted = self.of_checkpoint.setdefault(name, {})
        for episode_id in publication.scope:
            if episode_id.capture_key in whole:
                done = self._of(episode_id.capture_key)
                heard = self.heard_before[name].get(episode_id.capture_key, set())
                before = heard | done.before
                activated = done.activated or done.restored_activated
                noted[episode_id.rollout_id] = (
                    episode_id.next_attempt().capture_key,
                    Done(before=before, effects=set(done.effects), restored_activated=activated),
                )
            elif episode_id.capture_key in env.episode_ids:
                # Before its first activation, or after its last.
                done = self._of(episode_id.capture_key)
                noted[episode_id.rollout_id] = (
                    episode_id.next_attempt().capture_key,
                    Done(before=set(done.before), effects=set(done.effects)),
                )

    def start_over(self, publication: Any, keys: Set[str]) -> None:
        """These episodes are in the checkpoint without a boundary: all of it may be done again."""
        noted = self.of_checkpoint.get(publication.checkpoint_id, {})
        for episode_id in publication.scope:
            if episode_id.capture_key in keys and episode_id.rollout_id in noted:
                key = episode_id.next_attempt().capture_key
                noted[episode_id.rollout_id] = (key, Done())

    def restored(self, publication: Any) -> None:
        """The controller has restored this checkpoint: attempts after it begin anew."""
        rollouts = {episode_id.rollout_id for episode_id in publication.scope}
        for key in [k for k in self.of_attempt if parse_capture_key(k).rollout_id in rollouts]:
            del self.of_attempt[key]
        self.restored_keys = {
            episode_id.next_attempt().capture_key
            for episode_id in publication.scope
            if episode_id.capture_key in publication.commits["env"].episode_ids
        }
        for key, done in self.of_checkpoint[publication.checkpoint_id].values():
            self.of_attempt[key] = attrs.evolve(
                done, before=set(done.before), effects=set(done.effects)
            )

    def fresh(self) -> None:
        self.restored_keys.clear()


def _effect(exchange: Exchange) -> Effect:
    return exchange.path, exchange.json().get("count")
