"""Further named faults: of retirement, claims, scope, storage, and the rules that simulation forced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import trio

from gymtrio.checkpoint import held
from gymtrio.checkpoint.control import Control
from gymtrio.checkpoint.incarnations import Incarnations
from gymtrio.checkpoint.opened import OpenCheckpoint
from gymtrio.episodes.episode import Episode, StepMode
from gymtrio.episodes.fences import Fences
from gymtrio.participants.agent.sessions import AgentSessions
from gymtrio.participants.policy.books import Books
from gymtrio.participants.policy.tickets import Tickets, TicketState
from gymtrio.participants.resources.keeper import Keeper
from gymtrio.participants.results import Results
from gymtrio.storage import incarnation
from gymtrio.storage.manifest_file import ManifestFile
from gymtrio.storage.part_file import PartFile
from gymtrio.storage.publication import Publication
from gymtrio.wire.control import RetireReply
from tests.simulation.mutants import mutant, nothing, nothing_async, patch_operation
from tests.simulation.trainer import Trainer

# -- retirement and replies ------------------------------------------------------------------


@mutant("mark after stop")
def _(patch: pytest.MonkeyPatch) -> None:
    """CTL-5."""

    async def retire(self: Any, request: Any) -> RetireReply:
        with pytest.MonkeyPatch.context() as unmarked:
            unmarked.setattr(Fences, "refuse", nothing)
            self._participant.refuse(request.episode_ids)
        jobs = [self._retirements.start(episode_id) for episode_id in request.episode_ids]
        for job in jobs:
            await job.wait(self._deadline(request))
        for episode_id in request.episode_ids:
            self._participant.admission.fences.refuse(episode_id)
        return RetireReply(retired=tuple(e.capture_key for e in request.episode_ids))

    patch_operation(patch, "retire", retire)


@mutant("policy replies in flight do not count")
def _(patch: pytest.MonkeyPatch) -> None:
    """POL-2."""

    def leave(self: Any, ticket: Any) -> None:
        ticket.state = TicketState.LEAVING
        ticket.since = trio.current_time()
        self.leaving += 1

    patch.setattr(Tickets, "leave", leave)


@mutant("a result is dropped before it is acknowledged")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-9."""

    def sent(self: Any, result: Any, delivered: bool) -> None:
        if delivered and self._is_kept(result):
            self._drop(result)

    patch.setattr(Results, "sent", sent)


@mutant("a tool call as a replay step")
def _(patch: pytest.MonkeyPatch) -> None:
    """STEP-3, I6."""
    real = Episode.step

    async def step(self: Any, work: Any, *, mode: Any, doing: str, **options: Any) -> Any:
        if doing.startswith("tool "):
            mode = StepMode.REPLAY
        return await real(self, work, mode=mode, doing=doing, **options)

    patch.setattr(Episode, "step", step)


@mutant("the first cut instead of the latest")
def _(patch: pytest.MonkeyPatch) -> None:
    """CUT-3, I28."""

    def latest_undelivered(self: Any, episode_id: Any) -> Any:
        return min(self._undelivered(episode_id), key=lambda call: call.ordinal, default=None)

    patch.setattr(Books, "latest_undelivered", latest_undelivered)


@mutant("what starts over keeps its restored sessions")
def _(patch: pytest.MonkeyPatch) -> None:
    """STEP-4, I34."""
    patch.setattr(Keeper, "let_go_left_over", nothing)
    patch.setattr(AgentSessions, "_free_left_over", nothing_async)


# -- resume ----------------------------------------------------------------------------------


@mutant("resume does not wait for what it stops")
def _(patch: pytest.MonkeyPatch) -> None:
    """CTL-9, I31."""
    patch.setattr(Control, "_wait_stopped", nothing_async)


@mutant("resume leaves the write going on")
def _(patch: pytest.MonkeyPatch) -> None:
    """CTL-10, I31."""
    patch.setattr(OpenCheckpoint, "stop_jobs", nothing)
    patch.setattr(Publication, "stop", lambda self: True)
    patch.setattr(Control, "_wait_stopped", nothing_async)


# -- who is who ------------------------------------------------------------------------------


@mutant("the controller does not read the status")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-4."""
    patch.setattr(Trainer, "_recover", nothing_async)


@mutant("no incarnation lock")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-10."""
    patch.setattr(incarnation._Lock, "take", nothing)


@mutant("epochs are not compared")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-11."""
    patch.setattr(Fences, "check_execution", nothing)


@mutant("a replaced server goes unnoticed")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-13."""
    patch.setattr(Incarnations, "check", nothing)
    patch.setattr(held, "check_unchanged", nothing)


# -- storage ---------------------------------------------------------------------------------


class _Withholding:
    """Files whose renamings are noted and not done."""

    def __init__(self, files: Any, late: list[Sequence[str]]) -> None:
        self._files = files
        self._late = late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def rename(self, directory: int, old: str, new: str) -> None:
        self._late.append((old, new))


@mutant("manifest before parts")
def _(patch: pytest.MonkeyPatch) -> None:
    late: defaultdict[str, list[Sequence[str]]] = defaultdict(list)
    seal, publish = PartFile.seal, ManifestFile.publish

    def withheld(self: Any, end: bytes, record_count: int) -> Any:
        self._files = _Withholding(self._files, late[str(self._folder.place)])
        return seal(self, end, record_count)

    def published(self: Any) -> Any:
        found = publish(self)
        for old, new in late.pop(str(self._folder.place), ()):
            self._files.rename(self._folder.descriptor, old, new)
        return found

    patch.setattr(PartFile, "seal", withheld)
    patch.setattr(ManifestFile, "publish", published)
