"""What must hold of a control plane whatever the model of the protocol says.

Kept from replies that were heard: each is a promise, and every later look at the server is held to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from tests.helpers.protocol_model import Attempt, Call
from tests.helpers.protocol_run import ProtocolRun, episode_of

View: TypeAlias = dict[str, Any]


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
        self._heard: set[int] = set()
        self._fenced: dict[str, set[str]] = {}
        """Resumed ids, and the directories that held a part of that id when it was resumed."""
        self._retired: dict[str, int] = {}
        self._superseded: dict[str, int] = {}
        self._forgotten: set[tuple[str, str]] = set()
        """Rollouts, with the restore that was open then: a recorded reply promises them no more."""

    def check(self, now: float, view: View) -> None:
        """Look at the server when it has come to rest.

        Raises:
            AssertionError: naming the invariant.
        """
        self._listen(view)
        self._check_fences(view)
        self._check_attempts(view)
        self._check_liveness(now, view)
        self._check_nothing_is_left(view)

    def refusals_change_nothing(self, before: View) -> None:
        """I13, of a call that came alone."""
        after: View = self._run.view()
        answer = after["answers"].get(len(self._calls) - 1)
        if answer in ("checkpoint_conflict", "stale_checkpoint", "invalid_request"):
            assert {**after, "answers": 0} == {**before, "answers": 0}, "I13"

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
            # Once for each time that it was started.
            assert cancels.count(episode_id) >= 1, "CTL-12"

    def _check_liveness(self, now: float, view: View) -> None:
        assert view["closed"] is (view["open"] is not None or view["awaiting"]), "I29"
        if not view["closed"]:
            assert self._run.participant.admission.waiting == 0, "I29"
        for number, call in enumerate(self._calls):
            assert number in view["answers"] or call.deadline > now, "I29, CTL-8"
        if view["open"] is not None and now >= view["lease"]:
            assert {"publishing", "installing", "releasing"} & self._run.shut, "I30"

    def _check_nothing_is_left(self, view: View) -> None:
        if view["open"] is None:
            left = {name for name in view["jobs"] if not name.startswith("retire")}
            # A stubborn export only reads, so the gate does not wait for it.
            assert left <= ({"commit"} if self._stubborn else set()), "I31"

    def _listen(self, view: View) -> None:
        """Take in the replies of this step; those that lift a promise last, whatever the order was."""
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
                    a for a in call.scope or () if (call.checkpoint_id, a[0]) not in self._forgotten
                ]
                _raise(self._superseded, kept)
            case "forget":
                for rollout in call.rollouts:
                    self._forgotten.add((view["open"], rollout))
                    self._retired.pop(rollout, None)
                    self._superseded.pop(rollout, None)
            case "commit":
                checkpoint_id, records = view["published"][call.directory]
                assert checkpoint_id == call.checkpoint_id, "I20"
                if call.scope is not None:
                    assert {attempt for attempt, _ in records} <= set(call.scope), "I19"


def _raise(marks: dict[str, int], attempts: Iterable[Attempt]) -> None:
    for rollout, number in attempts:
        marks[rollout] = max(number, marks.get(rollout, -1))


def _holding(checkpoint_id: str, view: View) -> set[str]:
    return {where for where, (owner, _) in view["published"].items() if owner == checkpoint_id}
