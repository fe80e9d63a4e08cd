"""The work of one commit: export once, write manifest-last, free what need not stay (CTL-13)."""

from __future__ import annotations

import logging

import trio

from gymtrio.checkpoint.archive import Archive
from gymtrio.checkpoint.opened import OpenCheckpoint
from gymtrio.checkpoint.participant import Participant
from gymtrio.checkpoint.phases import Step
from gymtrio.errors import CheckpointError, DirectoryRefused, GymtrioError
from gymtrio.ids import CaptureKey, keys_of
from gymtrio.limits import STOP_S_MAX
from gymtrio.wire.control import CommitReply, CommitRequest, Phase

LOG = logging.getLogger(__name__)


async def commit_once(
    participant: Participant,
    archive: Archive,
    opened: OpenCheckpoint,
    request: CommitRequest,
    incarnation: str,
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
        opened.nothing_begun()
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
        opened.nothing_begun()
        raise
    except CheckpointError as error:
        opened.failed = error
        raise
    # A resume may cut this short, or it may fail: what is left stays restored, and the next commit
    # decides again. What is published is whole without.
    try:
        await participant.release(participant.unclaimed_outside(scope))
    except GymtrioError as error:
        LOG.warning("checkpoint %s: not all is freed: %s", opened.checkpoint_id, error)
    if request.stop:
        await _free_outside(participant, export.episode_ids)
    if not opened.ended.is_set():
        opened.advance(Step.COMMIT)
    LOG.info("checkpoint %s: committed %d", opened.checkpoint_id, len(export.episode_ids))
    return CommitReply(
        phase=Phase.COMMITTED.value,
        manifest=manifest,
        episode_ids=export.episode_ids,
        incarnation=incarnation,
        extra=export.reply_fields,
    )


async def _free_outside(participant: Participant, episode_ids: tuple[CaptureKey, ...]) -> None:
    """What is left is whoever runs the sandbox's to find: the checkpoint does not depend on it."""
    with trio.move_on_after(STOP_S_MAX) as scope:
        try:
            await participant.free_outside(episode_ids)
        except GymtrioError as error:
            LOG.warning("%s: something may be left outside: %s", participant.instance, error)
    if scope.cancelled_caught:
        LOG.warning("%s: something may be left outside", participant.instance)
