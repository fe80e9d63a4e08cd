"""The work of one restore: verify the whole file, install the scope (CTL-14)."""

from __future__ import annotations

import logging

import trio

from gymtrio.checkpoint.archive import Archive
from gymtrio.checkpoint.opened import OpenCheckpoint
from gymtrio.checkpoint.participant import Participant
from gymtrio.checkpoint.phases import Step
from gymtrio.errors import CheckpointError
from gymtrio.ids import CaptureKey
from gymtrio.storage.slices import ITEMS_AT_ONCE, LoopSlice
from gymtrio.wire.control import Phase, RestoreReply, RestoreRequest

LOG = logging.getLogger(__name__)


async def restore_once(
    participant: Participant,
    archive: Archive,
    opened: OpenCheckpoint,
    request: RestoreRequest,
    incarnation: str,
) -> RestoreReply:
    """Run as a job of the owner, once per restore. It is restored in the instant of the return.

    Raises:
        GymtrioError: nothing is installed.

    Cancelled: nothing is installed.
    """
    restored: list[CaptureKey] = []
    # Thousands are named (STO-5).
    slice_ = LoopSlice()
    for episode_id in request.episode_ids:
        restored.append(episode_id.next_attempt().capture_key)
        if not len(restored) % ITEMS_AT_ONCE:
            await slice_.turn()
    restored.sort()
    await trio.lowlevel.checkpoint()
    loaded = await archive.read(
        request.checkpoint_dir,
        kind=participant.kind,
        instance=participant.instance,
        scope={e.capture_key: e for e in request.episode_ids},
    )
    if opened.resumed:
        raise CheckpointError("a resume came before the restore")
    participant.check_installable()
    await participant.install(
        loaded.records, request.episode_ids, execution_epoch=request.execution_epoch
    )
    opened.advance(Step.RESTORE)
    LOG.info("checkpoint %s: restored %d", opened.checkpoint_id, len(restored))
    return RestoreReply(
        phase=Phase.RESTORED.value,
        source_checkpoint_id=loaded.checkpoint_id,
        restored=tuple(restored),
        incarnation=incarnation,
    )
