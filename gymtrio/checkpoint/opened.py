"""Everything that belongs to one open checkpoint, so that resume drops it in one assignment."""

from __future__ import annotations

from typing import TypeAlias

import attrs
import trio

from gymtrio.checkpoint.jobs import Job
from gymtrio.checkpoint.phases import Step, advance
from gymtrio.episodes.fences import Fences
from gymtrio.errors import CheckpointConflict, CheckpointError, StaleAttempt
from gymtrio.ids import CheckpointId, EpisodeId, keys_of
from gymtrio.limits import BLOCKERS_LISTED_MAX
from gymtrio.storage.publication import Publication
from gymtrio.wire.control import (
    CommitReply,
    CommitRequest,
    ControlRequest,
    Phase,
    RestoreReply,
    RestoreRequest,
)

AnyJob: TypeAlias = Job[None] | Job[CommitReply] | Job[RestoreReply]

Arguments = tuple[object, ...]
"""What must be equal for a repeated call to be the same call; scope order does not matter
(CTL-6)."""


def commit_arguments(request: CommitRequest) -> Arguments:
    scope = None if request.episode_ids is None else keys_of(request.episode_ids)
    return (request.checkpoint_dir, scope, request.stop)


def restore_arguments(request: RestoreRequest) -> Arguments:
    return (request.checkpoint_dir, keys_of(request.episode_ids), request.execution_epoch)


def check_replacements(request: RestoreRequest, fences: Fences) -> None:
    """
    Raises:
        StaleAttempt: a replacement was retired before: it would be installed and never be served.
    """
    refused = fences.next_stale(request.episode_ids)
    if refused:
        named = ", ".join(e.next_attempt().capture_key for e in refused[:BLOCKERS_LISTED_MAX])
        raise StaleAttempt(f"{named}: retired before it could continue, and not forgotten")


@attrs.define(eq=False, kw_only=True)
class OpenCheckpoint:
    """A participant's side of the checkpoint that holds it."""

    checkpoint_id: CheckpointId
    nonce: str | None
    """The controller's; whoever sends another one does not hold this (HARD-5)."""
    lease_expires: float
    """On trio's clock; only ever raised (CTL-11)."""
    phase: Phase = Phase.IDLE
    resumed: bool = False
    """It is over, but for an install that has not ended yet."""
    arguments: Arguments | None = None
    """Of the commit or restore that was begun."""
    settle: Job[None] | None = None
    commit: Job[CommitReply] | None = None
    restore: Job[RestoreReply] | None = None
    undo: Job[None] | None = None
    """Takes back what the restore installed; ends the checkpoint itself."""
    taken_back: bool = False
    """Only its undo ends it, whatever comes."""
    awaited: bool = False
    """The server waited to be restored when this began."""
    scope: tuple[EpisodeId, ...] = ()
    """What the restore installs the next attempts of."""
    failed: CheckpointError | None = None
    """A write or sync reported an error: the commit stays failed (HARD-12)."""
    publication: Publication = attrs.field(factory=Publication)
    ended: trio.Event = attrs.field(factory=trio.Event)

    def advance(self, step: Step) -> None:
        self.phase = advance(self.phase, step)

    def check_holder(self, request: ControlRequest) -> None:
        """
        Raises:
            CheckpointConflict: another checkpoint holds, or another controller holds this one.
        """
        if request.checkpoint_id != self.checkpoint_id:
            raise CheckpointConflict(
                f"{request.checkpoint_id} was asked for while {self.checkpoint_id} is open"
            )
        if request.controller_nonce != self.nonce:
            raise CheckpointConflict(f"{self.checkpoint_id} is held by another controller")

    def check_arguments(self, arguments: Arguments) -> None:
        """
        Raises:
            CheckpointConflict: the operation was begun with other arguments.
        """
        if self.arguments is not None and self.arguments != arguments:
            raise CheckpointConflict(
                f"{self.checkpoint_id} was begun with another directory, scope or epoch"
            )

    def nothing_begun(self) -> None:
        """A commit was refused before it began: a later one may ask again, with other arguments."""
        self.commit = self.arguments = None
        self.publication = Publication()

    def renew(self, lease_expires: float) -> None:
        self.lease_expires = max(self.lease_expires, lease_expires)

    def jobs(self) -> list[AnyJob]:
        return [job for job in (self.settle, self.commit, self.restore) if job is not None]

    def stop_jobs(self) -> None:
        """Ask all of them to end, and see to it that nothing is published any more."""
        self.publication.stop()
        for job in self.jobs():
            job.cancel()

    @property
    def installing(self) -> bool:
        return self.restore is not None and not self.restore.ended

    async def installed(self) -> None:
        """Wait until nothing of the restore runs any more."""
        assert self.restore is not None
        await self.restore.wait_ended()
