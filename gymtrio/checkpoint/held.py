"""A checkpoint that every participant holds, as the controller's program sees it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Protocol

import trio

from gymtrio.checkpoint.incarnations import check_unchanged
from gymtrio.checkpoint.members import Failed, LeaseNotProven, Prepared
from gymtrio.ids import CheckpointId, EpisodeId
from gymtrio.wire.control import CommitReply, RenewReply

LOG = logging.getLogger(__name__)


class Holder(Protocol):
    """What a held checkpoint needs of its controller."""

    async def commit(
        self,
        checkpoint_id: CheckpointId,
        directory: str,
        episode_ids: Iterable[EpisodeId],
        *,
        timeout_s: float,
        stop: bool = False,
    ) -> dict[str, CommitReply]: ...

    async def renew(
        self, checkpoint_id: CheckpointId, *, timeout_s: float
    ) -> Mapping[str, RenewReply]: ...


class HeldCheckpoint:
    """A checkpoint that every participant holds; made by `Controller.checkpoint`."""

    def __init__(
        self,
        controller: Holder,
        checkpoint_id: CheckpointId,
        directory: str,
        timeout_s: float,
        prepared: Prepared,
    ) -> None:
        self.checkpoint_id = checkpoint_id
        self.directory = directory
        self.prepared = prepared
        self._controller = controller
        self._timeout_s = timeout_s

    async def commit(
        self,
        episode_ids: Iterable[EpisodeId],
        *,
        timeout_s: float | None = None,
        stop: bool = False,
    ) -> dict[str, CommitReply]:
        """See `Controller.commit`.

        Raises:
            Failed: also when another process has answered than has prepared (HARD-13).
        """
        replies = await self._controller.commit(
            self.checkpoint_id,
            self.directory,
            episode_ids,
            timeout_s=timeout_s or self._timeout_s,
            stop=stop,
        )
        check_unchanged("commit", self.prepared.incarnations, replies)
        return replies

    async def prove_held(self, *, margin_s: float = 1.0) -> float:
        """Prove that every participant still holds, so that publishing is safe (HARD-2).

        A lease counts from when the renewal was sent, and lasts as long as the participant says that it
        does: a deadline is wall clock time, and clocks of two hosts differ. Call it after the last
        commit reply; publish while trio's clock is before the returned time.

        Returns:
            Until when the hold is proven, on trio's clock.

        Raises:
            LeaseNotProven: a participant let go or was replaced, or the answer came too late.
        """
        sent_at = trio.current_time()
        try:
            replies = await self._controller.renew(self.checkpoint_id, timeout_s=self._timeout_s)
            check_unchanged("renew", self.prepared.incarnations, replies)
        except Failed as failed:
            raise LeaseNotProven(str(failed)) from failed
        told = {name: r.lease_s for name, r in replies.items() if r.lease_s is not None}
        held_s, where = min([(self._timeout_s, "all"), *((s, name) for name, s in told.items())])
        proven_until = sent_at + held_s - margin_s
        if trio.current_time() >= proven_until:
            took_s = trio.current_time() - sent_at
            raise LeaseNotProven(
                f"{self.checkpoint_id}: the renewal was answered too late, after {took_s:.3f} s: "
                f"the lease of {where} lasts {held_s:.3f} s, less a margin of {margin_s:g} s"
            )
        return proven_until

    async def keep_renewing(self, interval_s: float) -> None:
        """Renew until cancelled; a renewal that fails is told and tried again."""
        while True:
            await trio.sleep(interval_s)
            try:
                await self._controller.renew(self.checkpoint_id, timeout_s=self._timeout_s)
            except Failed as failed:
                LOG.warning("%s: %s", self.checkpoint_id, failed)
