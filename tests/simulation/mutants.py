"""Named faults put into the real code: what the oracles must see, or they see nothing.

Each mutant patches one named place of the product for the time of a block. One that an oracle does not
catch any more has lost its oracle, its plan, or its place: all three are worth knowing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import attrs
import pytest
import trio

from gymtrio.checkpoint import dispatch
from gymtrio.checkpoint.control import Control
from gymtrio.checkpoint.directory_archive import DirectoryArchive
from gymtrio.checkpoint.held import HeldCheckpoint
from gymtrio.checkpoint.opened import OpenCheckpoint
from gymtrio.episodes.admission import Admission
from gymtrio.episodes.episode import Episode
from gymtrio.episodes.fences import Fences
from gymtrio.errors import CheckpointConflict
from gymtrio.ids import EpisodeId
from gymtrio.participants.agent.participant import AgentParticipant
from gymtrio.participants.deliveries import Deliveries
from gymtrio.participants.environment import EnvironmentParticipant
from gymtrio.participants.policy import exchange as policy_exchange
from gymtrio.participants.policy import participant as policy
from gymtrio.participants.policy.books import Books
from gymtrio.participants.policy.calls import PolicyReply
from gymtrio.participants.policy.gate import PolicyGate
from gymtrio.participants.resources import ResourcesParticipant
from gymtrio.participants.restored import Restored
from gymtrio.storage.folder import Folder
from gymtrio.storage.manifest_file import ManifestFile
from gymtrio.storage.part_file import PartFile
from gymtrio.wire.control import RetireReply
from tests.simulation.engine import Engine
from tests.simulation.tokens import TokenPort

Patch = Callable[[pytest.MonkeyPatch], None]

MUTANTS: Final[dict[str, Patch]] = {}


def mutant(name: str) -> Callable[[Patch], Patch]:
    def add(patch: Patch) -> Patch:
        MUTANTS[name] = patch
        return patch

    return add


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Run a block on faulty code."""
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name](patch)
        yield


def nothing(*_: object, **__: object) -> None:
    """In place of what does something."""


async def nothing_async(*_: object, **__: object) -> None:
    """In place of what waits."""


def patch_operation(patch: pytest.MonkeyPatch, name: str, serve: Any) -> None:
    """Replace what serves a control operation: the dispatcher holds it by itself."""
    patch.setitem(dispatch._OPERATIONS, name, serve)


# -- storage ---------------------------------------------------------------------------------


class _WithoutSync:
    def __init__(self, files: Any) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return nothing if name == "sync" else getattr(self._files, name)


@mutant("no file sync")
def _(patch: pytest.MonkeyPatch) -> None:
    real = PartFile.seal

    def seal(self: Any, end: bytes, record_count: int) -> Any:
        self._files = _WithoutSync(self._files)
        return real(self, end, record_count)

    patch.setattr(PartFile, "seal", seal)


@mutant("no directory sync")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Folder, "sync", nothing)


@mutant("no parent sync")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Folder, "sync_all", lambda self: self.sync())


@mutant("temporary file left")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ManifestFile, "_remove_temporary", nothing)


# -- fences and holds ------------------------------------------------------------------------


@mutant("no attempt mark")
def _(patch: pytest.MonkeyPatch) -> None:
    def supersede(self: Fences, episode_ids: Iterable[EpisodeId], epoch: str | None) -> None:
        for episode_id in episode_ids:
            self._executions[episode_id.rollout_id] = (episode_id.attempt + 1, epoch, False)

    patch.setattr(Fences, "refuse", nothing)
    patch.setattr(Fences, "supersede", supersede)


@mutant("no id fence")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Control, "_check_not_stale", nothing)


@mutant("late restore")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-8."""
    patch.setattr(Control, "_check_not_stale", nothing)
    for kind in (
        AgentParticipant,
        EnvironmentParticipant,
        ResourcesParticipant,
        policy.PolicyParticipant,
    ):
        patch.setattr(kind, "check_installable", nothing)


@mutant("no nonce")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-5."""

    def check_holder(self: OpenCheckpoint, request: Any) -> None:
        if request.checkpoint_id != self.checkpoint_id:
            raise CheckpointConflict("another id")

    patch.setattr(OpenCheckpoint, "check_holder", check_holder)


@mutant("any holder")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OpenCheckpoint, "check_holder", nothing)


@mutant("open at start")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-3."""
    real = Control.__init__

    def init(self: Any, participant: Any, **options: Any) -> None:
        real(self, participant, **options)
        participant.open()

    patch.setattr(Control, "__init__", init)


@mutant("any resume opens")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-6."""
    real = Control._resume_unopened

    def resume_unopened(self: Any, request: Any) -> Any:
        return real(self, attrs.evolve(request, start_afresh=True))

    patch.setattr(Control, "_resume_unopened", resume_unopened)


@mutant("anything while waiting for a restore")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-6."""
    patch.setattr(Control, "_check_not_awaiting", nothing)


# -- leases ----------------------------------------------------------------------------------


@mutant("lease forgotten")
def _(patch: pytest.MonkeyPatch) -> None:
    async def watch_lease(self: Any) -> None:
        await trio.sleep_forever()

    patch.setattr(Control, "watch_lease", watch_lease)


@mutant("renewal not checked before publishing")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-2."""

    async def prove_held(self: Any, *, margin_s: float = 1.0) -> float:
        return trio.current_time() + 1000.0

    patch.setattr(HeldCheckpoint, "prove_held", prove_held)


@mutant("lease counted from the reply")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-2."""

    async def prove_held(self: Any, *, margin_s: float = 1.0) -> float:
        await self._controller.renew(self.checkpoint_id, timeout_s=self._timeout_s)
        return float(trio.current_time() + self._timeout_s - margin_s)

    patch.setattr(HeldCheckpoint, "prove_held", prove_held)


# -- parking and delivering ------------------------------------------------------------------


@mutant("reply while prepared")
def _(patch: pytest.MonkeyPatch) -> None:
    async def leave(self: Any, ticket: Any, answer: Any) -> PolicyReply:
        self.tickets.leave(ticket)
        if ticket.row is not None:
            await self._keeper.deliver(ticket.model_call_id, ticket.row)

        def done(sent: bool) -> None:
            self._done(ticket, sent)

        return PolicyReply(status=answer.status, body=answer.body, done=done)

    patch.setattr(PolicyGate, "_hold", nothing_async)
    patch.setattr(PolicyGate, "_leave", leave)


@mutant("boundaries do not park")
def _(patch: pytest.MonkeyPatch) -> None:
    async def boundary(self: Any, state: Any) -> None:
        self._boundary = state
        self._unrecorded = False
        await trio.lowlevel.checkpoint_if_cancelled()

    patch.setattr(Episode, "boundary", boundary)


@mutant("wake without re-check of a new close")
def _(patch: pytest.MonkeyPatch) -> None:
    async def wait_open(self: Any) -> None:
        if self._closed:
            await self._park(None)

    patch.setattr(Admission, "wait_open", wait_open)


@mutant("a gap after admission")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-1."""
    real = Admission.enter

    async def enter(self: Any, episode_id: Any, **options: Any) -> None:
        await real(self, episode_id, **options)
        # As long as a look at a file takes: a retirement that finds nothing is over by then.
        await trio.sleep(0.01)

    patch.setattr(Admission, "enter", enter)


@mutant("replies in flight do not count")
def _(patch: pytest.MonkeyPatch) -> None:
    """I2."""

    def ended(self: Any, episode_id: Any, name: str, sent: Any = None) -> None:
        self._ended[name] = None, sent

    patch.setattr(Deliveries, "ended", ended)


@mutant("retire replies early")
def _(patch: pytest.MonkeyPatch) -> None:
    async def retire(self: Any, request: Any) -> RetireReply:
        self._participant.refuse(request.episode_ids)
        for episode_id in request.episode_ids:
            self._retirements.start(episode_id)
        return RetireReply(retired=tuple(e.capture_key for e in request.episode_ids))

    patch_operation(patch, "retire", retire)


# -- what is restored ------------------------------------------------------------------------


@mutant("claim twice")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Restored, "claim", Restored.peek)


@mutant("claim not given back")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Restored, "give_back", nothing)


@mutant("unclaimed state left out")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Restored, "__iter__", lambda self: iter(()))


@mutant("unclaimed cut left out")
def _(patch: pytest.MonkeyPatch) -> None:
    def restored_cut(self: Any, episode_id: Any) -> Any:
        claimed = (call.claimed for call in self._undelivered(episode_id))
        return next((cut for cut in claimed if cut is not None), None)

    patch.setattr(Books, "restored_cut", restored_cut)


@mutant("scope ignored")
def _(patch: pytest.MonkeyPatch) -> None:
    real = EnvironmentParticipant.export
    patch.setattr(EnvironmentParticipant, "export", lambda self, scope: real(self, None))


# -- commit ----------------------------------------------------------------------------------


@mutant("a failed commit is tried again")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-12."""
    real = Control.commit

    async def commit(self: Any, request: Any) -> Any:
        opened = self._open
        if opened is not None and opened.failed is not None:
            opened.failed = opened.commit = None
            opened.publication = type(opened.publication)()
        return await real(self, request)

    patch_operation(patch, "commit", commit)


# -- several processes -----------------------------------------------------------------------


@mutant("calls of a lost worker stay in")
def _(patch: pytest.MonkeyPatch) -> None:
    """HARD-7."""
    patch.setattr(Books, "lose", lambda self, owner: [])


@mutant("what a lost worker was sending counts as heard")
def _(patch: pytest.MonkeyPatch) -> None:
    """I16."""

    def lose(self: Any, owner: object) -> list[EpisodeId]:
        lost = [call for call in self._calls.values() if call.owner == owner]
        for call in lost:
            self.end(call.call_id, sent=True)
        return sorted({call.episode_id for call in lost})

    patch.setattr(Books, "lose", lose)


@mutant("parts of a stopped commit stay")
def _(patch: pytest.MonkeyPatch) -> None:
    """I22."""
    patch.setattr(DirectoryArchive, "remove_parts", nothing_async)


@mutant("an answered replacement runs again")
def _(patch: pytest.MonkeyPatch) -> None:
    """I5."""
    patch.setattr(Fences, "end", nothing)


# -- tokens ----------------------------------------------------------------------------------


@mutant("token doubled at the seam")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Engine._continue

    async def go_on(self: Any, store: Any, call: Any) -> None:
        await real(self, store, call)
        call.token_ids = (*call.token_ids, call.token_ids[-1])

    patch.setattr(Engine, "_continue", go_on)
    patch.setattr(policy_exchange, "_check_continued", nothing)


@mutant("newest version stamped")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "stamp", staticmethod(lambda own, of_prefix: own))
    patch.setattr(policy_exchange, "_check_continued", nothing)


@mutant("undelivered row exported")
def _(patch: pytest.MonkeyPatch) -> None:
    real = policy.PolicyParticipant._record_of

    def record_of(self: Any, episode_id: Any) -> Any:
        record = real(self, episode_id)
        rows = [
            ticket.row
            for ticket in self.gate.tickets
            if ticket.episode_id == episode_id and ticket.undelivered and ticket.row is not None
        ]
        return attrs.evolve(record, rows=(*record.rows, *rows), cut=None)

    patch.setattr(policy.PolicyParticipant, "_record_of", record_of)


@mutant("tokens not staged")
def _(patch: pytest.MonkeyPatch) -> None:
    real = TokenPort.put

    async def put(self: Any, records: Any) -> None:
        if self._process.name != "policy":
            await real(self, records)

    patch.setattr(TokenPort, "put", put)
