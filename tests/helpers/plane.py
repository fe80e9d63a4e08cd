"""A control plane under test: the real `Control` over a scripted participant, on virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from gymtrio.checkpoint.archive import Archive
from gymtrio.checkpoint.control import Control, open_control
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId
from gymtrio.wire.control import (
    CommitReply,
    CommitRequest,
    ForgetReply,
    ForgetRequest,
    PrepareReply,
    PrepareRequest,
    RenewReply,
    RenewRequest,
    RestoreReply,
    RestoreRequest,
    ResumeReply,
    ResumeRequest,
    RetireReply,
    RetireRequest,
)
from tests.helpers.clocks import FollowingClock
from tests.helpers.memory_archive import MemoryArchive
from tests.helpers.scripted_participant import ScriptedParticipant

GRACE_S: Final = 600.0


def episode(name: str, attempt: int = 0) -> EpisodeId:
    return EpisodeId(RolloutId(name), attempt)


class Plane:
    """Speaks to a `Control` as a controller does, with short names and a timeout for a deadline."""

    def __init__(
        self,
        control: Control,
        participant: ScriptedParticipant,
        archive: Any,
        clock: FollowingClock,
    ) -> None:
        self.control = control
        self.participant = participant
        self.archive = archive
        self.clock = clock

    def _base(self, checkpoint_id: str, timeout_s: float, nonce: str | None) -> dict[str, Any]:
        return {
            "checkpoint_id": CheckpointId(checkpoint_id),
            "deadline_ts": self.clock.now_s() + timeout_s,
            "controller_nonce": nonce,
        }

    @property
    def phase(self) -> str:
        return self.control.status().phase

    async def prepare(
        self, name: str = "c1", timeout_s: float = 10, nonce: str | None = None
    ) -> PrepareReply:
        return await self.control.prepare(PrepareRequest(**self._base(name, timeout_s, nonce)))

    async def renew(
        self, name: str = "c1", timeout_s: float = 10, nonce: str | None = None
    ) -> RenewReply:
        return await self.control.renew(RenewRequest(**self._base(name, timeout_s, nonce)))

    async def commit(
        self,
        name: str = "c1",
        episodes: tuple[EpisodeId, ...] | None = None,
        directory: str = "d",
        timeout_s: float = 10,
        nonce: str | None = None,
        stop: bool = False,
    ) -> CommitReply:
        return await self.control.commit(
            CommitRequest(
                **self._base(name, timeout_s, nonce),
                checkpoint_dir=directory,
                episode_ids=episodes,
                stop=stop,
            )
        )

    async def restore(
        self,
        *episodes: EpisodeId,
        name: str = "x1",
        directory: str = "d",
        timeout_s: float = 10,
        nonce: str | None = None,
        epoch: str | None = None,
    ) -> RestoreReply:
        return await self.control.restore(
            RestoreRequest(
                **self._base(name, timeout_s, nonce),
                checkpoint_dir=directory,
                episode_ids=episodes,
                execution_epoch=epoch,
            )
        )

    async def resume(
        self,
        name: str = "c1",
        timeout_s: float = 10,
        nonce: str | None = None,
        start_afresh: bool = False,
        undo_restore: bool = False,
        given_up: tuple[EpisodeId, ...] = (),
    ) -> ResumeReply:
        return await self.control.resume(
            ResumeRequest(
                **self._base(name, timeout_s, nonce),
                start_afresh=start_afresh,
                episode_ids=given_up,
                undo_restore=undo_restore,
            )
        )

    async def retire(
        self, *episodes: EpisodeId, name: str = "c1", timeout_s: float = 10
    ) -> RetireReply:
        return await self.control.retire(
            RetireRequest(**self._base(name, timeout_s, None), episode_ids=episodes)
        )

    async def forget(self, *names: str, name: str = "c1", timeout_s: float = 10) -> ForgetReply:
        return await self.control.forget(
            ForgetRequest(**self._base(name, timeout_s, None), rollout_ids=names)
        )


@asynccontextmanager
async def open_plane(
    *, archive: Archive | None = None, recover: bool = False
) -> AsyncIterator[Plane]:
    """Run a control plane for as long as the block runs."""
    participant = ScriptedParticipant()
    archive = archive or MemoryArchive()
    clock = FollowingClock()
    async with open_control(
        participant,
        archive=archive,
        wall_clock=clock,
        lease_grace_s=GRACE_S,
        recover=recover,
    ) as control:
        yield Plane(control, participant, archive, clock)
