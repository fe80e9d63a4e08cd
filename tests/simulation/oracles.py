"""The invariants of the protocol, checked from outside: by what passed on the network, what is on disk,
what the token store holds and what the backend computed. Nothing here looks into a server.

Each check names the invariant it is of. A violation ends nothing: all of a run are collected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Set
from typing import Any, Final

import attrs
import trio

from gymtrio.ids import RolloutId, parse_capture_key
from gymtrio.ports import WallClock
from tests.simulation.engine import Engine, answer_tokens, conversation, log_probs_of
from tests.simulation.history import History
from tests.simulation.lineage import Lineage
from tests.simulation.network import Exchange
from tests.simulation.processes import Process
from tests.simulation.servers import LEASE_GRACE_S, PARTICIPANTS

ANSWERED: Final = {
    "env": ("/run",),
    "agent": ("/v1/responses",),
    "policy": ("/v1/responses",),
    "tools": ("/increment_counter", "/get_counter_value"),
}
"""Replies that nobody may hear of while a checkpoint is prepared (I2)."""
CLOSING: Final = ("/close_session", "/v1/agent_sessions/close")
"""Idempotent; freeing what is gone already is no service to a stale attempt."""
PROMPT_S: Final = 0.1
"""Status and resume are answered within this (CTL-10, CTL-15)."""


@attrs.define(eq=False)
class Hold:
    checkpoint_id: str
    nonce: str | None
    until: float
    """When its lease ends, by what the server has accepted."""
    prepared: bool = False


@attrs.define(eq=False)
class Seen:
    """What is known of one incarnation of a server."""

    awaiting: bool
    """Started to recover, and neither restored nor opened."""
    hold: Hold | None = None
    resuming: set[str] = attrs.field(factory=set)
    """Checkpoint ids of which a resume was delivered."""
    ended: dict[str, float] = attrs.field(factory=dict)
    """Checkpoint id to when its resume was answered."""
    fences: dict[RolloutId, int] = attrs.field(factory=dict)
    """By the replies to retire and restore."""
    seeded: set[str] = attrs.field(factory=set)
    failed: set[str] = attrs.field(factory=set)
    """Checkpoint ids of which a commit failed."""
    committed: set[str] = attrs.field(factory=set)
    """Checkpoint ids of which a commit was answered."""


class Oracles:
    """Implements `tests.simulation.network.Tap`."""

    def __init__(
        self, history: History, engine: Engine, wall_clock: WallClock, *, lossy: bool
    ) -> None:
        self.violations: list[str] = []
        self.failed = trio.Event()
        self.lossy = lossy
        """Replies to episodes' calls may be lost on their way."""
        self.lineage = Lineage(engine, self)
        self.keeps_lineage = False
        """Check ledgers across a policy server that died alone, too: see `test_known_holes`."""
        self.disk_wait_s = 0.0
        """Longest that a disk call may take: a publication that has begun is waited for."""
        self._history = history
        self._engine = engine
        self._wall_clock = wall_clock
        self._seen: dict[Process, Seen] = {}
        self._open_control: dict[int, Exchange] = {}
        self._answered_to_agent: dict[str, set[str]] = {}
        """Capture key to the conversations whose answer its agent has heard."""
        self._done_before: dict[str, set[str]] = {}
        """Capture key to the conversations that were answered before its restored boundary."""
        self._of_checkpoint: dict[str, dict[RolloutId, tuple[str, set[str], bool]]] = {}
        """What was done before each published checkpoint: replacement key, conversations, activated."""
        self._restored_keys: set[str] = set()
        """Attempts of which the environment has a restored boundary."""
        self._activated: set[str] = set()
        self._seeded_before: set[str] = set()

    def fail(self, invariant: str, what: str) -> None:
        text = f"{invariant}: {what}"
        if text not in self.violations:
            self.violations.append(text)
            self.failed.set()
            self._history.note("VIOLATION", text)

    # -- processes ----------------------------------------------------------------------------

    def started(self, process: Process, *, recover: bool) -> None:
        self._seen[process] = Seen(awaiting=recover)
        if process.name == "policy" and not self.keeps_lineage:
            self.lineage.fresh()

    def seen(self, process: Process) -> Seen | None:
        return self._seen.get(process)

    def live(self) -> dict[str, Seen]:
        return {p.name: seen for p, seen in self._seen.items() if p.alive}

    def _hold(self, seen: Seen) -> Hold | None:
        if seen.hold is not None and trio.current_time() >= seen.hold.until - 1e-6:
            self._history.sometimes["a lease expired"] += 1
            seen.hold = None
        return seen.hold

    # -- the tap ------------------------------------------------------------------------------

    def sent(self, exchange: Exchange) -> None:
        seen = self._seen.get(exchange.source)
        if seen is None:
            return
        if exchange.target.name == "engine":
            if exchange.path == "/v1/responses":
                self.lineage.generation_begins(exchange)
            return
        path = exchange.path
        if path not in CLOSING and self._refused(seen, exchange.key):
            self.fail("I10", f"{exchange.source} calls {path} for {exchange.key}, retired")
        hold = self._hold(seen)
        if hold is not None and hold.prepared and hold.checkpoint_id not in seen.resuming:
            self.fail("I2", f"{exchange.source} calls {exchange.path} while it is prepared")

    @staticmethod
    def _refused(seen: Seen, key: str | None) -> bool:
        if key is None:
            return False
        episode_id = parse_capture_key(key)
        return episode_id.attempt <= seen.fences.get(episode_id.rollout_id, -1)

    def lost(self, exchange: Exchange) -> None:
        self._open_control.pop(exchange.number, None)

    def delivered(self, exchange: Exchange) -> None:
        seen = self._seen.get(exchange.target)
        if seen is None:
            return
        if exchange.operation is not None:
            self._open_control[exchange.number] = exchange
            self._control_delivered(exchange, seen)
        elif exchange.target.name == "policy" and exchange.key is not None:
            said = conversation(exchange.json()["input"])
            if said in self._done_before.get(exchange.key, ()):
                self.fail("I5", f"{exchange.key}: a model call before its boundary is made again")
        elif exchange.path == "/seed_session" and exchange.key in self._seeded_before:
            self.fail("I5", f"{exchange.key} is seeded again after its activation had begun")
        elif exchange.target.name == "agent" and exchange.path == "/v1/responses":
            self._activated.add(str(exchange.key))
        if exchange.operation is None:
            self._history.note(f"data {exchange.target.name}{exchange.path}", exchange.key)

    def replied(self, exchange: Exchange) -> None:
        seen = self._seen.get(exchange.target)
        if seen is None:
            return
        self._open_control.pop(exchange.number, None)
        if exchange.operation is not None:
            self._prompt(exchange)
            if exchange.status == 200:
                self._control_replied(exchange, seen)
            elif exchange.operation == "commit" and exchange.status == 422:
                seen.failed.add(exchange.json()["checkpoint_id"])
            detail = f"{exchange.number} {exchange.operation} {exchange.status} {exchange.target}"
            self._history.note("control", detail)
        elif 200 <= exchange.status < 300:
            self._served(exchange, seen)

    def received(self, exchange: Exchange) -> None:
        ends = (exchange.source.name, exchange.target.name)
        if ends == ("agent", "policy") and exchange.status == 200 and exchange.key is not None:
            said = conversation(exchange.json()["input"])
            self._answered_to_agent.setdefault(exchange.key, set()).add(said)

    # -- data ---------------------------------------------------------------------------------

    def _served(self, exchange: Exchange, seen: Seen) -> None:
        server, path = exchange.target.name, exchange.path
        hold = self._hold(seen)
        if (
            hold is not None
            and hold.prepared
            and hold.checkpoint_id not in seen.resuming
            and path in ANSWERED[server]
        ):
            self.fail("I2", f"{exchange.target} answered {path} of {exchange.key} while prepared")
        if seen.awaiting:
            self.fail("I11", f"{exchange.target} served {path} while it waits to be restored")
        if path not in CLOSING and self._refused(seen, exchange.key):
            self.fail("I10", f"{exchange.target} served {path} of {exchange.key}, refused")
        if path == "/seed_session":
            seen.seeded.add(str(exchange.key))
        if server == "policy" and path == "/v1/responses":
            self._check_answer(exchange)
            self.lineage.answered(exchange)

    def _check_answer(self, exchange: Exchange) -> None:
        body, reply = exchange.json(), exchange.reply_json()
        said = conversation(body["input"])
        item = reply["output"][-1]
        wanted = answer_tokens(said)
        if tuple(item["generation_token_ids"]) != wanted:
            self.fail("I26", f"{exchange.key}: token ids differ from the uncut run")
        if tuple(item["generation_log_probs"]) != log_probs_of(wanted):
            self.fail("I25", f"{exchange.key}: log-probs are not those of the tokens")

    # -- control ------------------------------------------------------------------------------

    def _prompt(self, exchange: Exchange) -> None:
        took = trio.current_time() - exchange.delivered_at
        operation = exchange.operation
        if operation == "status" and took > PROMPT_S:
            self.fail("I29", f"{exchange.target} answered status after {took:.2f} s")
        # Publishing is one call that was begun, and the two syncs that finish it.
        if operation == "resume" and took > PROMPT_S + 6 * self.disk_wait_s:
            self.fail("I29", f"{exchange.target} answered resume after {took:.2f} s")
        if operation == "prepare":
            late = min(took, self._wall_clock.now_s() - exchange.json()["deadline_ts"])
            if late > PROMPT_S:
                self.fail("I29", f"{exchange.target} answered prepare {late:.2f} s late")

    def unanswered(self) -> None:
        """At the end: control calls that a live server never answered."""
        for exchange in self._open_control.values():
            if exchange.target.alive and trio.current_time() - exchange.delivered_at > 1.0:
                self.fail("I29", f"never answered: {exchange}")

    def _control_delivered(self, exchange: Exchange, seen: Seen) -> None:
        if exchange.operation == "resume":
            seen.resuming.add(exchange.json()["checkpoint_id"])

    def _control_replied(self, exchange: Exchange, seen: Seen) -> None:
        request: Any = exchange.json()
        reply: Any = exchange.reply_json()
        operation = exchange.operation
        opens = operation in ("prepare", "commit", "renew", "restore")
        if opens and not (operation == "prepare" and reply["phase"] == "idle"):
            self._held(exchange, seen, request)
        if operation == "prepare" and reply["phase"] in ("prepared", "committed"):
            if seen.hold is not None and request["checkpoint_id"] not in seen.resuming:
                seen.hold.prepared = True
        elif operation == "commit":
            seen.committed.add(request["checkpoint_id"])
            if request["checkpoint_id"] in seen.failed:
                self.fail("HARD-12", f"{exchange.target}: a commit that failed has succeeded")
        elif operation == "restore":
            self._restored(exchange, seen, request)
        elif operation == "resume":
            seen.ended.setdefault(request["checkpoint_id"], trio.current_time())
            if seen.hold is not None and seen.hold.checkpoint_id == request["checkpoint_id"]:
                seen.hold = None
            if request.get("start_afresh"):
                seen.awaiting = False
        elif operation == "retire":
            for episode in request["episode_ids"]:
                self._fence(seen, episode)
        elif operation == "forget":
            for rollout in request["rollout_ids"]:
                seen.fences.pop(rollout, None)

    def _held(self, exchange: Exchange, seen: Seen, request: Any) -> None:
        """A server accepted an operation of an open checkpoint."""
        name, nonce = request["checkpoint_id"], request.get("controller_nonce")
        ended = seen.ended.get(name, math.inf)
        if exchange.delivered_at > ended:
            self.fail("I12", f"{exchange.target}: {exchange.operation} of {name} after its resume")
            return
        if seen.awaiting and exchange.operation != "restore":
            self.fail(
                "HARD-6", f"{exchange.target}: {exchange.operation} while it waits for a restore"
            )
        if name in seen.resuming:
            return
        hold = self._hold(seen)
        if hold is not None and (hold.checkpoint_id, hold.nonce) != (name, nonce):
            self.fail(
                "I13",
                f"{exchange.target}: {exchange.operation} of {name} accepted from another "
                f"controller while {hold.checkpoint_id} is open",
            )
        ahead_s = request["deadline_ts"] - self._wall_clock.now_s()
        until = trio.current_time() + ahead_s + LEASE_GRACE_S
        if hold is None:
            seen.hold = Hold(name, nonce, until)
            if exchange.operation == "prepare":
                self._history.note("closed", f"{name} {exchange.target}")
        else:
            hold.until = max(hold.until, until)

    def _restored(self, exchange: Exchange, seen: Seen, request: Any) -> None:
        if request["checkpoint_id"] in seen.ended:
            return
        seen.awaiting = False
        for episode in request["episode_ids"]:
            self._fence(seen, episode)
        self._history.note("restored", exchange.target)

    @staticmethod
    def _fence(seen: Seen, episode: Any) -> None:
        rollout, attempt = episode["rollout_id"], episode["attempt"]
        seen.fences[rollout] = max(attempt, seen.fences.get(rollout, -1))

    # -- publications -------------------------------------------------------------------------

    def published(self, publication: Any, nonce: str) -> None:
        """A controller says so now; called in the instant of it."""
        name = publication.checkpoint_id
        live = self.live()
        for server in PARTICIPANTS:
            if server not in live or name not in live[server].committed:
                # It died since, which nobody can know; its part is durable.
                continue
            hold = self._hold(live[server])
            if hold is None or (hold.checkpoint_id, hold.nonce) != (name, nonce):
                self.fail("HARD-2", f"{name} was published while {server} did not hold it")
        keys = {episode_id.capture_key for episode_id in publication.scope}
        env = publication.commits["env"]
        for server, commit in publication.commits.items():
            if not keys.issuperset(commit.episode_ids):
                self.fail("I19", f"{name}: {server} exported what is not in the scope")
        in_flight = self._replies_in_flight()
        for key in sorted(keys):
            began = key in self._restored_keys or ("tools" in live and key in live["tools"].seeded)
            if began and key not in env.episode_ids:
                if key in in_flight:
                    self._history.sometimes["a reply in flight at prepare"] += 1
                else:
                    self.fail("I1", f"{name}: {key} neither replied nor exported")
        self._not_again(publication)

    def _replies_in_flight(self) -> set[str]:
        """Episodes whose `/run` was answered and whose controller has not heard of it (HARD-9)."""
        return self._history_in_flight() if self._history_in_flight is not None else set()

    _history_in_flight: Callable[[], set[str]] | None = None

    def watch_replies(self, in_flight: Callable[[], set[str]]) -> None:
        self._history_in_flight = in_flight

    def _not_again(self, publication: Any) -> None:
        """Note what a restore of this checkpoint must not repeat (I5)."""
        whole = set(publication.commits["env"].episode_ids)
        whole &= set(publication.commits["agent"].episode_ids)
        noted = self._of_checkpoint.setdefault(publication.checkpoint_id, {})
        for episode_id in publication.scope:
            key = episode_id.capture_key
            if key in whole:
                heard = self._answered_to_agent.get(key, set())
                done = heard | self._done_before.get(key, set())
                begun = key in self._activated or key in self._seeded_before
                noted[episode_id.rollout_id] = (episode_id.next_attempt().capture_key, done, begun)

    def start_over(self, publication: Any, keys: Set[str]) -> None:
        """These episodes are in the checkpoint without a boundary: all of it may be done again."""
        noted = self._of_checkpoint.get(publication.checkpoint_id, {})
        for episode_id in publication.scope:
            if episode_id.capture_key in keys and episode_id.rollout_id in noted:
                noted[episode_id.rollout_id] = (
                    episode_id.next_attempt().capture_key,
                    set(),
                    False,
                )

    def restored(self, publication: Any) -> None:
        """The controller has restored this checkpoint: attempts after it begin anew."""
        rollouts = {episode_id.rollout_id for episode_id in publication.scope}
        for known in (self._answered_to_agent, self._done_before):
            for key in [k for k in known if parse_capture_key(k).rollout_id in rollouts]:
                del known[key]
        for keys in (self._activated, self._seeded_before):
            keys -= {k for k in keys if parse_capture_key(k).rollout_id in rollouts}
        self._restored_keys = {
            episode_id.next_attempt().capture_key
            for episode_id in publication.scope
            if episode_id.capture_key in publication.commits["env"].episode_ids
        }
        self.lineage.restored(publication)
        for key, done, begun in self._of_checkpoint[publication.checkpoint_id].values():
            self._done_before[key] = set(done)
            if begun:
                self._seeded_before.add(key)

    def started_afresh(self) -> None:
        self._restored_keys.clear()
        self.lineage.fresh()

    # -- the end ------------------------------------------------------------------------------

    def result(self, rollout: RolloutId, result: Any, task: Any) -> None:
        """A rollout has its result (I3, I4): as if nothing had ever gone wrong."""
        count = task["initial_count"]
        wanted = []
        for amount in map(int, task["responses_create_params"]["input"].split()[1:]):
            count += amount
            wanted.append({"success": True})
        wanted.append({"count": count})
        output = result["response"]["output"]
        got = [i["output"] for i in output if i["type"] == "function_call_output"]
        plain = [_loaded(text) for text in got]
        if result["reward"] != 1.0 or plain != wanted:
            self.fail("I3", f"{rollout}: reward {result['reward']}, tools said {plain}")

    def tokens(self, records: dict[Any, Any]) -> None:
        """What the token store holds (I25)."""
        self.lineage.stamps(records)
        for record in records.values():
            if record.log_probs != log_probs_of(record.token_ids):
                self.fail("I25", f"{record.staging_key}: log-probs do not fit the tokens")

    def idle(self, server: str, status: Any) -> None:
        """Long after everybody has left (I29, I30, I34)."""
        if status.phase != "idle" or status.awaiting_restore:
            self.fail("I30", f"{server} is {status.phase} a lease after everybody left")
        left = {name: count for name, count in status.report.counts.items() if count}
        if self.lossy:
            # A call that closes a session may have been lost; what it left has its own expiry.
            left = {name: n for name, n in left.items() if name not in ("sessions", "ended")}
        if left:
            self.fail("I34", f"{server} still has {left}")


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
