"""What must hold of a control plane whatever the model of the protocol says.

Kept from what was heard and seen before: a reply is a promise, and every later look at the server is
held to it. Nothing here knows how an answer comes about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from tests.helpers.protocol_model import UNDO_AGAIN_S, Attempt, Call
from tests.helpers.protocol_run import ProtocolRun, episode_of

View: TypeAlias = dict[str, Any]

REFUSED: Final = ("checkpoint_conflict", "stale_checkpoint", "stale_attempt", "invalid_request")
"""Whoever hears one of these has changed nothing."""

HOLDS_A_LEASE_BACK: Final = frozenset({"publishing", "installing", "releasing"})
"""Behind these doors is what an expired lease waits for."""


class Invariants:
    """
    Args:
        calls: every call so far, by number; grows.
        stubborn: see `DooredParticipant`.
    """

    def __init__(self, run: ProtocolRun, calls: Sequence[Call], *, stubborn: bool) -> None:
        self._run = run
        self._calls = calls
        self._stubborn = stubborn
        self._before: View = run.view()
        self._heard: set[int] = set()
        self._fenced: dict[str, set[str]] = {}
        """Resumed ids, and the directories that held a part of that id when it was resumed."""
        self._held_back_at = 0.0
        """When a door was last seen that an expired lease waits for."""
        self._retired: dict[str, int] = {}
        self._superseded: dict[str, int] = {}
        self._forgotten: set[str] = set()
        """Rollouts that were forgotten in this step."""
        self._forgotten_during: set[tuple[str, str]] = set()
        """Rollouts, with the restore that was open then: a recorded reply promises them no more."""

    def check(self, now: float, view: View) -> None:
        """Look at the server when it has come to rest.

        Args:
            view: `ProtocolRun.view`.

        Raises:
            AssertionError: naming the invariant.
        """
        self._listen(view)
        self._check_fences(view)
        self._check_attempts(view)
        self._check_what_only_grows(view)
        self._check_the_hold(view)
        self._check_liveness(now, view)
        self._check_nothing_is_left(view)
        self._before = view

    def refusals_change_nothing(self, before: View) -> None:
        """I13, of a call that came alone."""
        after: View = self._run.view()
        answer = after["answers"].get(len(self._calls) - 1)
        if answer in REFUSED:
            assert {**after, "answers": 0} == {**before, "answers": 0}, "I13"

    # -- what was promised --------------------------------------------------------------------

    def _listen(self, view: View) -> None:
        """Take in the replies of this step; those that lift a promise last, whatever the order was."""
        self._forgotten.clear()
        fresh = view["answers"].keys() - self._heard
        for number in sorted(fresh, key=lambda n: self._calls[n].operation == "forget"):
            if isinstance(view["answers"][number], tuple):
                self._promise(self._calls[number], view)
        self._heard |= fresh

    def _promise(self, call: Call, view: View) -> None:
        match call.operation:
            case "resume":
                held = _holding(call.checkpoint_id, view)
                self._fenced.setdefault(call.checkpoint_id, held)
            case "retire":
                _raise(self._retired, call.scope or ())
            case "restore":
                kept = [
                    attempt
                    for attempt in call.scope or ()
                    if (call.checkpoint_id, attempt[0]) not in self._forgotten_during
                ]
                _raise(self._superseded, kept)
            case "forget":
                for rollout in call.rollouts:
                    self._forgotten.add(rollout)
                    self._forgotten_during.add((view["open"], rollout))
                    self._retired.pop(rollout, None)
                    self._superseded.pop(rollout, None)
            case "commit":
                checkpoint_id, records = view["published"][call.directory]
                assert checkpoint_id == call.checkpoint_id, "I20"
                if call.scope is not None:
                    assert {attempt for attempt, _ in records} <= set(call.scope), "I19"

    def _check_fences(self, view: View) -> None:
        for checkpoint_id, directories in self._fenced.items():
            assert view["open"] != checkpoint_id, "I12"
            assert _holding(checkpoint_id, view) == directories, "I12, I31"

    def _check_attempts(self, view: View) -> None:
        for rollout, number in {*view["running"], *view["parked"], *view["restored"]}:
            assert number > self._retired.get(rollout, -1), "I10"
        for rollout, number in self._superseded.items():
            assert view["marks"].get(rollout, -1) >= number, "I11"
        fences = self._run.participant.admission.fences
        for rollout, number in (self._retired | self._superseded).items():
            assert fences.is_stale(episode_of((rollout, number))), "I10, I11"
        cancels = self._run.participant.cancels
        for episode_id in self._run.participant.stopping:
            assert episode_id in cancels, "CTL-12"

    # -- from one look to the next ------------------------------------------------------------

    def _check_what_only_grows(self, view: View) -> None:
        before = self._before
        for directory, part in before["published"].items():
            assert view["published"][directory] == part, "I22"
        for rollout, number in before["marks"].items():
            if rollout not in self._forgotten:
                assert view["marks"].get(rollout, -1) >= number, "CTL-5"
        for number, answer in before["answers"].items():
            assert view["answers"][number] == answer

    def _check_the_hold(self, view: View) -> None:
        before = self._before
        if view["open"] is None or view["open"] != before["open"]:
            return
        assert view["lease"] >= before["lease"], "CTL-11"
        # Closed all the time: nobody came in, and what had parked has stayed.
        entered = {n for n, what in view["arrivals"].items() if what == "entered"}
        assert entered <= before["arrivals"].keys(), "I2, CTL-18"
        assert view["running"] <= before["running"], "I2"
        if view["phase"] in ("prepared", "committed") and view["phase"] == before["phase"]:
            assert not view["running"], "I2"
            assert view["parked"].items() <= before["parked"].items(), "I15"

    # -- at rest ------------------------------------------------------------------------------

    def _check_liveness(self, now: float, view: View) -> None:
        assert view["closed"] is (view["open"] is not None or view["awaiting"]), "I29"
        if not view["closed"]:
            assert self._run.participant.admission.waiting == 0, "I29"
        for number, deadline in self._run.deadlines.items():
            assert number in view["answers"] or deadline > now, "I29, CTL-8"
        if HOLDS_A_LEASE_BACK & self._run.shut:
            self._held_back_at = now
        elif view["open"] is not None:
            # A restore is taken back, which may fail the first time; all else ends at once.
            is_restore = view["phase"] in ("idle", "restored")
            over_s = now - max(view["lease"], self._held_back_at)
            assert over_s < (2 * UNDO_AGAIN_S if is_restore else 0.0), "I30"

    def _check_nothing_is_left(self, view: View) -> None:
        if view["open"] is None:
            left = {name for name in view["jobs"] if not name.startswith("retire")}
            # A stubborn export only reads, so the gate does not wait for it.
            assert left <= ({"commit"} if self._stubborn else set()), "I31"


def _raise(marks: dict[str, int], attempts: Iterable[Attempt]) -> None:
    for rollout, number in attempts:
        marks[rollout] = max(number, marks.get(rollout, -1))


def _holding(checkpoint_id: str, view: View) -> set[str]:
    return {where for where, (owner, _) in view["published"].items() if owner == checkpoint_id}
