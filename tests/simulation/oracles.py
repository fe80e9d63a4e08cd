"""The invariants of the protocol, checked from outside: by what passed on the network, what is on disk,
what the token store holds and what the backend computed. Nothing here looks into a server.

Each check names the invariant it is of. A violation ends nothing: all of a run are collected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Final

import trio

from gymtrio.capture.cuts import CUT_ROUTE
from gymtrio.ids import EpisodeId, RolloutId, parse_capture_key
from gymtrio.ports import WallClock
from tests.simulation.engine import Engine, answer_tokens, conversation, log_probs_of
from tests.simulation.history import History
from tests.simulation.lineage import Lineage
from tests.simulation.network import Exchange
from tests.simulation.plans import Plan
from tests.simulation.processes import CURRENT, Process
from tests.simulation.progress import Progress
from tests.simulation.seen import Hold, Seen
from tests.simulation.servers import PARTICIPANTS

ANSWERED: Final = {
    "env": ("/run",),
    "agent": ("/v1/responses",),
    "policy": ("/v1/responses",),
    "tools": ("/increment_counter", "/get_counter_value"),
}
"""Replies that nobody may hear of while a checkpoint is prepared (I2)."""
CLOSING: Final = ("/close_session", "/v1/agent_sessions/close", "/run/ack")
"""Idempotent; freeing what is gone already is no service to a stale attempt."""
PROMPT_S: Final = 0.1
"""Status and resume are answered within this (CTL-10, CTL-15)."""
LONG_S: Final = 10.0
"""A call that closes a session is not waited for as long."""
SEEDING: Final = ("/seed_session", "/v1/agent_sessions")
"""What was asked for before a retirement was answered may be answered after it: the session is gone."""
JOBS: Final = ("settle", "commit", "restore", "undo")
"""Tasks of a participant's owner that are of one checkpoint (CTL-9)."""


class Oracles:
    """Implements `tests.simulation.network.Tap`."""

    def __init__(self, history: History, engine: Engine, wall_clock: WallClock, plan: Plan) -> None:
        self.violations: list[str] = []
        self.failed = trio.Event()
        lost = any(m.path.startswith("/") and "lost" in m.what for m in plan.network.mishaps)
        whats = {fault.what for fault in plan.faults}
        waits = any(f.what == "stop tools" and f.for_s >= LONG_S for f in plan.faults)
        forgets = {"stale client", "tools"} <= whats
        self.leaves_sessions = plan.network.data or lost or waits or forgets
        """A call that closes a session may be lost, or wait for too long; or a stale client finds a
        server that has forgotten what it refused."""
        self.lossy = (
            plan.network.data or lost or any(f.what.startswith("cut ") for f in plan.faults)
        )
        """Replies to episodes' calls may be lost on their way."""
        self.workers_died = False
        """One of several processes of a server died alone."""
        self.lineage = Lineage(engine, self)
        self.progress = Progress(self)
        self.disk_wait_s = 0.0
        """Longest that a disk call may take: a publication that has begun is waited for."""
        self._history = history
        self._engine = engine
        self._wall_clock = wall_clock
        self._seen: dict[Process, Seen] = {}
        self._open_control: dict[int, Exchange] = {}
        self._lease_grace_s = plan.lease_grace_s
        self._acks = plan.acks

    def fail(self, invariant: str, what: str) -> None:
        text = f"{invariant}: {what}"
        if text not in self.violations:
            self.violations.append(text)
            self.failed.set()
            self._history.note("VIOLATION", text)

    def sometimes(self, what: str) -> None:
        self._history.sometimes[what] += 1

    # -- processes ----------------------------------------------------------------------------

    def started(self, process: Process, *, recover: bool) -> None:
        self._seen[process] = Seen(awaiting=recover)

    def seen(self, process: Process) -> Seen | None:
        return self._seen.get(process)

    def live(self) -> dict[str, Seen]:
        return {p.name: seen for p, seen in self._seen.items() if p.alive}

    def _hold(self, seen: Seen) -> Hold | None:
        """The hold that a server has for certain."""
        hold = self._possible_hold(seen)
        if hold is not None and trio.current_time() >= hold.until - 1e-6:
            return None
        return hold

    def _possible_hold(self, seen: Seen) -> Hold | None:
        hold = seen.hold
        if hold is None:
            return None
        now = trio.current_time()
        if now >= hold.until - 1e-6 and not hold.expired:
            hold.expired = True
            self.sometimes("a lease expired")
        if now >= hold.until_latest - 1e-6:
            seen.lapsed.add(hold.checkpoint_id)
            seen.hold = None
        return seen.hold

    def published_by(self, server: str, name: str) -> None:
        """A manifest of this server can be seen from now on."""
        seen = self.live().get(server)
        if seen is not None:
            self._possible_hold(seen)
            if name in seen.lapsed:
                self.sometimes("a lease expired during publishing")

    def clock_jumped(self) -> None:
        """A deadline that is under way is what its server made of it, before or after."""
        for exchange in self._open_control.values():
            self._read_deadline(exchange)

    def _read_deadline(self, exchange: Exchange) -> None:
        body = exchange.json()
        if body is not None:
            until = trio.current_time() + body["deadline_ts"] - self._wall_clock.now_s()
            earliest, latest = exchange.until
            if math.isinf(earliest):
                earliest = latest = until
            exchange.until = min(earliest, until), max(latest, until)

    def logged(self, text: str) -> None:
        """What a participant's owner logs while it serves a request."""
        process = CURRENT.get()
        seen = None if process is None else self._seen.get(process)
        if seen is not None and text.endswith(": admission closed"):
            seen.closed_at = trio.current_time()
        elif seen is not None and text.endswith(": resumed"):
            seen.closed_at = -math.inf

    # -- the tap ------------------------------------------------------------------------------

    def sent(self, exchange: Exchange) -> None:
        seen = self._seen.get(exchange.source)
        if seen is None:
            return
        if exchange.target.name == "engine":
            self._asked_engine(exchange, seen)
            return
        path = exchange.path
        if (path not in CLOSING or exchange.key in seen.stopped) and seen.refuses(exchange.key):
            self.fail("I10", f"{exchange.source} calls {path} for {exchange.key}, retired")
        if path not in CLOSING:
            seen.last_call = trio.current_time(), path
            if seen.closed_at == trio.current_time():
                self.fail("I2", f"{exchange.source} calls {path} in the instant after it closed")
        hold = self._hold(seen)
        if hold is None or hold.checkpoint_id in seen.resuming:
            return
        if hold.prepared:
            self.fail("I2", f"{exchange.source} calls {path} while it is prepared")

    def _asked_engine(self, exchange: Exchange, seen: Seen) -> None:
        if exchange.path == "/v1/responses":
            self.lineage.generation_begins(exchange)
        elif exchange.path == CUT_ROUTE:
            name = exchange.json()["checkpoint_id"]
            if name in seen.ended:
                self.fail("I31", f"{exchange.source}: a cut is asked for {name} after its resume")

    def lost(self, exchange: Exchange) -> None:
        opened = self._open_control.pop(exchange.number, None)
        seen = self._seen.get(exchange.target)
        if opened is not None and seen is not None and opened.json() is not None:
            seen.unsure.add(opened.json()["checkpoint_id"])

    def delivered(self, exchange: Exchange) -> None:
        seen = self._seen.get(exchange.target)
        if seen is None:
            return
        exchange.refused = seen.refuses(exchange.key)
        if exchange.operation is None:
            self.progress.delivered(exchange)
            self._history.note(f"data {exchange.target.name}{exchange.path}", exchange.key)
            return
        self._open_control[exchange.number] = exchange
        self._read_deadline(exchange)
        self._history.note(f"{exchange.operation} at {exchange.target.name}", exchange.number)
        if exchange.operation == "resume":
            seen.resuming.add(exchange.json()["checkpoint_id"])
        elif exchange.operation == "prepare" and exchange.target.name == "agent":
            self.progress.agent_closes(exchange.json()["checkpoint_id"])

    def leaving(self, process: Process, path: str) -> None:
        self._history.note(f"leaving {process.name}{path}")

    def replied(self, exchange: Exchange) -> None:
        seen = self._seen.get(exchange.target)
        if seen is None:
            return
        self._open_control.pop(exchange.number, None)
        if exchange.status == 500:
            self.fail(
                "panic", f"{exchange.target} answered {exchange.path} with a fault of its own"
            )
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
        self.progress.received(exchange)

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
        late = path in SEEDING and not exchange.refused
        if path not in CLOSING and not late and seen.refuses(exchange.key):
            self.fail("I10", f"{exchange.target} served {path} of {exchange.key}, refused")
        if exchange.dead and path not in CLOSING and exchange.key is not None:
            episode_id = parse_capture_key(exchange.key)
            if seen.replacements.get(episode_id.rollout_id) == episode_id.attempt:
                what = f"served {path} of {exchange.key}, of an execution before its restore"
                self.fail("I11", f"{exchange.target} {what}")
        if path == "/seed_session":
            seen.seeded.add(str(exchange.key))
        self.progress.served(exchange)
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
        served_by = exchange.worker or exchange.target
        if max(served_by.stopped_until, exchange.target.stopped_until) >= exchange.delivered_at:
            return
        took = trio.current_time() - exchange.delivered_at
        operation = exchange.operation
        if operation == "status" and took > PROMPT_S:
            self.fail("I29", f"{exchange.target} answered status after {took:.2f} s")
        # Publishing is one call that was begun, and the two syncs that finish it.
        if operation == "resume" and took > PROMPT_S + 6 * self.disk_wait_s:
            self.fail("I29", f"{exchange.target} answered resume after {took:.2f} s")
        if operation == "prepare":
            late = min(took, trio.current_time() - exchange.until[1])
            if late > PROMPT_S:
                self.fail("I29", f"{exchange.target} answered prepare {late:.2f} s late")

    def unanswered(self) -> None:
        """At the end: control calls that a live server never answered."""
        for exchange in self._open_control.values():
            served_by = exchange.worker or exchange.target
            if served_by.alive and trio.current_time() - exchange.delivered_at > 1.0:
                self.fail("I29", f"never answered: {exchange}")

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
            if exchange.target.name == "policy":
                self.lineage.committed(request["checkpoint_id"])
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
            self._check_stopped(exchange, request["checkpoint_id"])
        elif operation == "retire":
            for episode in request["episode_ids"]:
                seen.refuse(episode["rollout_id"], episode["attempt"])
            self._check_retired(exchange, seen, request["episode_ids"])
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
        until, until_latest = (each + self._lease_grace_s for each in exchange.until)
        if hold is None:
            seen.hold = Hold(name, nonce, until, until_latest)
            if exchange.operation == "prepare":
                self._history.note("closed", f"{name} {exchange.target}")
                # It closed when it heard of it, and nobody begins anything from then on (STEP-2).
                called_at, path = seen.last_call
                if called_at > exchange.delivered_at:
                    self.fail("I2", f"{exchange.target} called {path} after {name} had closed it")
        else:
            hold.until = max(hold.until, until)
            hold.until_latest = max(hold.until_latest, until_latest)

    def _check_stopped(self, exchange: Exchange, name: str) -> None:
        """A resume was answered: nothing of the checkpoint runs or appears any more (I31)."""
        target = exchange.target
        if self._seen[target].hold is None and self._asked_to_open(target) <= {name}:
            running = sorted(task for task in target.tasks() if task in JOBS)
            if running:
                self.fail("I31", f"{target}: {', '.join(running)} runs after {name} was resumed")
        if self.on_resumed is not None:
            self.on_resumed(target.name, name)

    def _asked_to_open(self, target: Process) -> set[str]:
        """Checkpoint ids that a server may hold although it has not said so."""
        return self._seen[target].unsure | {
            e.json()["checkpoint_id"]
            for e in self._open_control.values()
            if e.target is target and e.operation in ("prepare", "restore")
        }

    def _check_retired(self, exchange: Exchange, seen: Seen, episodes: Any) -> None:
        """A retirement was answered: nothing of these attempts runs any more (I10)."""
        for episode in episodes:
            attempts = range(episode["attempt"] + 1)
            keys = {EpisodeId(episode["rollout_id"], n).capture_key for n in attempts}
            if seen.hold is None and not self._asked_to_open(exchange.target):
                seen.stopped |= keys
            if exchange.target.name == "policy":
                for call in self._engine.live.values():
                    if call.extension.capture_key in keys:
                        what = f"still generates for {call.extension.capture_key}, retired"
                        self.fail("I10", f"the backend {what}")

    def _restored(self, exchange: Exchange, seen: Seen, request: Any) -> None:
        if request["checkpoint_id"] in seen.ended:
            return
        seen.awaiting = False
        for episode in request["episode_ids"]:
            seen.refuse(episode["rollout_id"], episode["attempt"])
            seen.replacements[RolloutId(episode["rollout_id"])] = episode["attempt"] + 1
        if self.on_restored is not None:
            directory = request["checkpoint_dir"]
            self.on_restored(exchange.target.name, directory, exchange.delivered_at)
        self._history.note("restored", exchange.target)

    on_resumed: Callable[[str, str], None] | None = None
    """Told which server was resumed from which checkpoint."""
    on_restored: Callable[[str, str, float], None] | None = None
    """Told which server was restored from which directory, and when it was asked to."""

    # -- publications -------------------------------------------------------------------------

    def published(self, publication: Any, nonce: str) -> None:
        """A controller says so now; called in the instant of it."""
        name = publication.checkpoint_id
        live = self.live()
        for server in PARTICIPANTS:
            if server not in live or name not in live[server].committed:
                # It died since, which nobody can know; its part is durable.
                continue
            hold = self._possible_hold(live[server])
            if hold is None or (hold.checkpoint_id, hold.nonce) != (name, nonce):
                self.fail("HARD-2", f"{name} was published while {server} did not hold it")
        keys = {episode_id.capture_key for episode_id in publication.scope}
        for server, commit in publication.commits.items():
            if not keys.issuperset(commit.episode_ids):
                self.fail("I19", f"{name}: {server} exported what is not in the scope")
        seeded = live["tools"].seeded if "tools" in live else set()
        unheard = set() if self._acks or self._unheard is None else self._unheard()
        heard = set() if self._heard is None else self._heard()
        self.progress.published(publication, seeded, unheard, heard)

    _unheard: Callable[[], set[str]] | None = None
    _heard: Callable[[], set[str]] | None = None

    def watch_replies(self, unheard: Callable[[], set[str]], heard: Callable[[], set[str]]) -> None:
        """Who was answered and does not know it. Of controllers that acknowledge no answer is lost
        so; that of others is gone when it was handed over (HARD-9). And who does know it by now."""
        self._unheard, self._heard = unheard, heard

    def restored(self, publication: Any) -> None:
        """The controller has restored this checkpoint: attempts after it begin anew."""
        self.progress.restored(publication)
        self.lineage.restored(publication)

    def started_afresh(self) -> None:
        self.progress.fresh()
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
        if self.leaves_sessions:
            # What a lost close has left has its own expiry.
            left = {name: n for name, n in left.items() if name not in ("sessions", "ended")}
        if left:
            self.fail("I34", f"{server} still has {left}")


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
