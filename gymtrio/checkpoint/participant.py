"""What the control plane asks of a server: the seam between the phases and the four kinds.

Everything that decides is synchronous, so that it is one instant; what may be slow is async and is
owned by the control plane as a joinable job. No method waits for the controller.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence, Sequence
from typing import Protocol

import attrs

from gymtrio.episodes.admission import Admission
from gymtrio.episodes.signal import Signal
from gymtrio.ids import CaptureKey, CheckpointId, EpisodeId, RolloutId
from gymtrio.storage.records import Identity, Record
from gymtrio.storage.writer import WrittenPart
from gymtrio.wire.control import Kind, Report


class WriteElsewhere(Protocol):
    """Writes parts of a checkpoint in other processes."""

    async def __call__(self, checkpoint_dir: str, identity: Identity) -> Sequence[WrittenPart]:
        """
        Args:
            checkpoint_dir: as the controller named it; each process checks it for itself.

        Returns:
            Durable parts, which the caller must publish or remove.

        Raises:
            CheckpointError: one could not be written; none remains.

        Cancelled: none remains, but for what a process holds that does not answer.
        """
        ...


@attrs.frozen(kw_only=True)
class Export:
    """What a participant hands over at commit.

    The records may be made lazily while they are written: nothing they are made of changes before
    resume, and resume stops the writing first.
    """

    records: Iterable[Record | None]
    """In order of capture key; one per episode at most. None: the next one takes longer, and the loop
    may turn."""
    episode_ids: tuple[CaptureKey, ...]
    """Everything that is in the checkpoint, sorted; also episodes that need no record."""
    manifest_fields: dict[str, object] = attrs.field(factory=dict)
    """JSON for the manifest, such as an engine's fingerprint."""
    reply_fields: dict[str, object] = attrs.field(factory=dict)
    """JSON that the commit reply adds, such as `staging_keys`."""
    section: str | None = None
    """Of the records here, where other processes write parts of their own."""
    write_elsewhere: WriteElsewhere | None = None
    """Has other processes write their parts, in other sections (STO-6)."""


@attrs.frozen(kw_only=True)
class Settling:
    """What a close may still do on the way to readiness."""

    checkpoint_id: CheckpointId
    deadline: float
    """Of the prepare that started it, on trio's clock."""


class Participant(Protocol):
    """The part of a server that owns checkpointable state."""

    instance: str
    admission: Admission
    changed: Signal
    """Rung when `ready` may have become true."""

    @property
    def kind(self) -> Kind: ...

    def ready(self) -> bool:
        """Whether everything live is at a safe point; O(1)."""
        ...

    def report(self) -> Report:
        """Readiness with blockers named, at most 100."""
        ...

    def status_fields(self) -> dict[str, object]:
        """What the kind adds to `status`."""
        ...

    def close(self) -> None:
        """One instant: close admission, note what is in flight, cancel what a close cancels."""
        ...

    def open(self) -> None:
        """One instant: open admission and let everything go on."""
        ...

    async def settle(self, settling: Settling) -> None:
        """Work on the way to readiness that needs awaiting, such as a round of generation cuts.

        A prepare is not ready before it ended. It bounds itself well within the deadline.
        """
        ...

    async def export(self, scope: frozenset[CaptureKey] | None) -> Export:
        """Collect what a checkpoint needs; called while prepared and ready.

        Args:
            scope: what the controller named; None: everything.

        Raises:
            InvalidRequest: this kind needs an explicit scope.
            InvalidCheckpointState: state that cannot be exported; the detail names the episode.
        """
        ...

    def unclaimed_outside(self, scope: frozenset[CaptureKey] | None) -> list[EpisodeId]:
        """Restored episodes that nobody claimed and that the commit's scope leaves out."""
        ...

    async def release(self, episode_ids: Sequence[EpisodeId]) -> None:
        """Free restored, unclaimed state, leaving no refusal behind (CTL-13).

        Raises:
            GymtrioError: some could not be freed, and stays restored.
        """
        ...

    async def free_outside(self, episode_ids: Sequence[CaptureKey]) -> None:
        """The deployment ends: free what the exported state of these holds outside the process.

        Called when their state is durable, at a commit with `stop` (CTL-13). A restore begins from
        that state: whatever it needs stays.

        Raises:
            GymtrioError: it is logged, and the commit stands.
        """
        ...

    def check_installable(self) -> None:
        """
        Raises:
            InvalidPhase: live state is in the way; the detail says what.
        """
        ...

    async def install(
        self,
        records: MutableSequence[Record],
        scope: Sequence[EpisodeId],
        *,
        execution_epoch: str | None = None,
    ) -> None:
        """Install the scope under the next attempts, all of it or nothing.

        The fences up to the checkpointed attempts rise in the same instant as the state appears, and
        the epoch of their next attempts is recorded in it.

        Args:
            records: those of the scope, verified, by capture key. Given away: taken out as they are
                read, so that their bytes are not held beside what is made of them.
            scope: the attempts as they were checkpointed, also those without a record.
            execution_epoch: of this restore, see `RestoreRequest`.

        Raises:
            InvalidCheckpointState: a record that does not hold what it must; nothing is installed.

        Cancelled: nothing is installed.
        """
        ...

    def refuse(self, episode_ids: Sequence[EpisodeId]) -> None:
        """One instant: raise the fences, wake those at the gate, begin to stop what runs."""
        ...

    async def retire(self, episode_id: EpisodeId) -> None:
        """Wait until nothing of this attempt and the earlier ones runs, and free their state.

        `refuse` came before. Called once per attempt at a time; later calls join.
        """
        ...

    def still_running(self, rollout_ids: Sequence[RolloutId]) -> list[EpisodeId]:
        """Attempts of these rollouts of which something runs or is in use here, refused or not; what is
        restored and unclaimed is not (CTL-12)."""
        ...

    def forget(self, rollout_ids: Sequence[RolloutId]) -> None:
        """One instant: drop everything kept of rollouts of which nothing can arrive any more."""
        ...

    async def run(self) -> None:
        """Background work of the participant, in the owner's nursery; ends when cancelled."""
        ...
