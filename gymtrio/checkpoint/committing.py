"""The work of one commit: export once, write manifest-last, free what was left out (CTL-13)."""

from __future__ import annotations

import logging

from gymtrio.checkpoint.archive import Archive
from gymtrio.checkpoint.opened import OpenCheckpoint
from gymtrio.checkpoint.participant import Participant
from gymtrio.checkpoint.phases import Step
from gymtrio.errors import CheckpointError, DirectoryRefused, GymtrioError
from gymtrio.ids import keys_of
from gymtrio.wire.control import CommitReply, CommitRequest, Phase

LOG = logging.getLogger(__name__)


async def commit_once(
    participant: Participant, archive: Archive, opened: OpenCheckpoint, request: CommitRequest
) -> CommitReply:
    """Run as a job of the owner, at most once per checkpoint unless nothing was begun.

    Raises:
        GymtrioError: the export failed or the directory was refused: nothing was begun, and a later
            commit may ask again, also with other arguments.
        CheckpointError: a write or sync failed; it stays failed for this id (HARD-12).

    Cancelled: nothing is published; or, after publication has begun, everything is done.
    """
    scope = None if request.episode_ids is None else keys_of(request.episode_ids)
    try:
        export = await participant.export(scope)
    except GymtrioError:
        opened.commit = opened.arguments = None
        raise
    try:
        manifest = await archive.write(
            request.checkpoint_dir,
            kind=participant.kind,
            instance=participant.instance,
            checkpoint_id=opened.checkpoint_id,
            export=export,
            publication=opened.publication,
        )
    except DirectoryRefused:
        opened.commit = opened.arguments = None
        raise
    except CheckpointError as error:
        opened.failed = error
        raise
    # A resume may cut this short: what is left stays restored, and the next commit decides again.
    await participant.release(participant.unclaimed_outside(scope))
    if not opened.ended.is_set():
        opened.advance(Step.COMMIT)
    LOG.info("checkpoint %s: committed %d", opened.checkpoint_id, len(export.episode_ids))
    return CommitReply(
        phase=Phase.COMMITTED.value,
        manifest=manifest,
        episode_ids=export.episode_ids,
        extra=export.reply_fields,
    )
