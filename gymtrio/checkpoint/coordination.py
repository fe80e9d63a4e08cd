"""The controller's side: drives all participants of a deployment as one (COORD).

Order matters. A prepare goes environment, model, agent, resources, stage by stage: environments
stop starting work; the model closes before the agents, so that agents that wait for a model count
as parked; resources come last, since agents call them. A resume goes the other way, and through
failures. What changes nothing that others rely on goes everywhere at once.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Final, TypeVar

import trio

from gymtrio.background import open_background
from gymtrio.checkpoint.held import HeldCheckpoint
from gymtrio.checkpoint.incarnations import Incarnations
from gymtrio.checkpoint.members import (
    ControlChannel,
    Failed,
    Member,
    NoPolicyModel,
    NotPrepared,
    Prepared,
    Replaced,
    everywhere,
)
from gymtrio.errors import GymtrioError, PeerRefused, TransportError
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId, is_safe_id
from gymtrio.limits import (
    CLEANUP_S_MAX,
    CONTROL_REPLY_S_MAX,
    CONTROL_RETRY_DELAY_S,
    DISCOVERY_TRIES_MAX,
    ID_CHARACTERS_MAX,
    RENEW_INTERVAL_S_MAX,
    RESUME_S_MIN,
    STAGE_PATIENCE_S,
)
from gymtrio.ports import Randomness, WallClock
from gymtrio.strict import MalformedValue
from gymtrio.wire.control import (
    REPLIES,
    CommitReply,
    CommitRequest,
    ControlRequest,
    ForgetReply,
    ForgetRequest,
    Kind,
    Phase,
    PrepareReply,
    PrepareRequest,
    RenewReply,
    RenewRequest,
    Report,
    RestoreReply,
    RestoreRequest,
    ResumeReply,
    ResumeRequest,
    RetireReply,
    RetireRequest,
    StatusReply,
    reply_from_plain,
)

LOG = logging.getLogger(__name__)

PREPARE_ORDER: Final = (Kind.ENVIRONMENT, Kind.MODEL, Kind.AGENT, Kind.RESOURCES)
RETIRE_ORDER: Final = ((Kind.ENVIRONMENT,), (Kind.AGENT,), (Kind.MODEL, Kind.RESOURCES))
"""Callers first, so that nothing calls what is being stopped."""

Q = TypeVar("Q", bound=ControlRequest)
R = TypeVar(
    "R", PrepareReply, RenewReply, CommitReply, RestoreReply, ResumeReply, RetireReply, ForgetReply
)


@asynccontextmanager
async def open_coordination(
    servers: Sequence[str],
    channel: ControlChannel,
    *,
    wall_clock: WallClock,
    randomness: Randomness,
    discovery_timeout_s: float = 60.0,
) -> AsyncIterator[Controller]:
    """Discover the participants among these servers.

    Raises:
        Failed: a server could not be reached, which must not pass for absence.
        NoPolicyModel: there is none.
    """
    members: list[Member] = []
    incarnations = Incarnations()
    failures: dict[str, GymtrioError] = {}
    deadline = trio.current_time() + discovery_timeout_s

    async def ask(server: str) -> None:
        try:
            status = await _status_or_absent(channel, server, deadline)
            if status is not None:
                members.append(Member(server, _kind_of(status), status.instance))
                incarnations.know(server, status.incarnation)
        except GymtrioError as error:
            failures[server] = error

    async with trio.open_nursery() as nursery:
        for server in servers:
            nursery.start_soon(ask, server)
    if failures:
        raise Failed("discovery", failures)
    if not any(member.kind is Kind.MODEL for member in members):
        raise NoPolicyModel(
            f"no policy model participant among {', '.join(servers)}: is checkpointing enabled, "
            "and checkpoint_policy set?"
        )
    members.sort(key=lambda member: (PREPARE_ORDER.index(member.kind), member.server))
    yield Controller(
        tuple(members),
        channel,
        wall_clock=wall_clock,
        nonce=randomness.hex(16),
        incarnations=incarnations,
    )


def _kind_of(status: StatusReply) -> Kind:
    try:
        return Kind(status.kind)
    except ValueError:
        known = ", ".join(repr(kind.value) for kind in Kind)
        raise MalformedValue("kind", f"expected one of {known}, got {status.kind!r}") from None


async def _status_or_absent(
    channel: ControlChannel, server: str, deadline: float
) -> StatusReply | None:
    for attempt in range(DISCOVERY_TRIES_MAX):
        try:
            return reply_from_plain(
                StatusReply, await channel.call(server, "status", None, deadline)
            )
        except PeerRefused as refused:
            if refused.status == 404:
                return None
            raise
        except TransportError:
            if attempt + 1 == DISCOVERY_TRIES_MAX:
                raise
            await trio.sleep(CONTROL_RETRY_DELAY_S)
    raise AssertionError("unreachable")


class Controller:
    """Drives checkpoints of one deployment; made by `open_coordination`.

    Every call is bounded by its timeout and safe to repeat with the same id (COORD-6).
    """

    def __init__(
        self,
        members: tuple[Member, ...],
        channel: ControlChannel,
        *,
        wall_clock: WallClock,
        nonce: str,
        incarnations: Incarnations,
    ) -> None:
        self.members = members
        self.nonce = nonce
        """Tells this controller from another that uses the same checkpoint id (HARD-5)."""
        self._channel = channel
        self._wall_clock = wall_clock
        self._incarnations = incarnations
        self._restores = count(1)

    def restricted_to(self, members: tuple[Member, ...]) -> Controller:
        """The same controller for some of the members, to look into what depends on which."""
        some = Controller(
            members,
            self._channel,
            wall_clock=self._wall_clock,
            nonce=self.nonce,
            incarnations=self._incarnations,
        )
        # No two restores of one controller may have the same hold or epoch.
        some._restores = self._restores
        return some

    # -- one operation over many participants -------------------------------------------------

    async def status(self, *, timeout_s: float = 10.0) -> dict[str, StatusReply]:
        """What every participant says of itself, by server; a restarting controller asks first."""
        deadline = trio.current_time() + timeout_s

        async def ask(member: Member) -> StatusReply:
            plain = await self._channel.call(member.server, "status", None, deadline)
            return reply_from_plain(StatusReply, plain)

        return await everywhere("status", self.members, ask)

    async def prepare(self, checkpoint_id: CheckpointId, *, timeout_s: float) -> Prepared:
        """Close and wait, stage by stage; stops at the first stage that is not ready (COORD-2).

        Raises:
            Failed: a participant refused, could not be reached, or is `Replaced`. Nothing is resumed
                here.
        """
        deadline = trio.current_time() + timeout_s
        request = self._request(PrepareRequest, checkpoint_id, timeout_s)
        reports: dict[str, Report] = {}
        incarnations: dict[str, str | None] = {}
        for kind in PREPARE_ORDER:
            stage = [member for member in self.members if member.kind is kind]
            replies = await self._send("prepare", stage, request, deadline, PrepareReply)
            reports |= {server: reply.report for server, reply in replies.items()}
            incarnations |= {server: reply.incarnation for server, reply in replies.items()}
            # Asked again, one that has prepared says so, also when it has lost a worker since.
            if not all(
                reply.phase == Phase.PREPARED.value and reply.report.ready
                for reply in replies.values()
            ):
                return Prepared(False, reports, incarnations)
        return Prepared(True, reports, incarnations)

    async def commit(
        self,
        checkpoint_id: CheckpointId,
        directory: str,
        episode_ids: Iterable[EpisodeId],
        *,
        timeout_s: float,
        stop: bool = False,
    ) -> dict[str, CommitReply]:
        """Write every participant's part at once.

        Raises:
            Failed: at least one did not commit; the checkpoint is not whole.

        Durable: after return, every part of every participant.
        """
        request = self._request(
            CommitRequest,
            checkpoint_id,
            timeout_s,
            checkpoint_dir=directory,
            episode_ids=tuple(episode_ids),
            stop=stop,
        )
        deadline = trio.current_time() + timeout_s
        return await self._send("commit", self.members, request, deadline, CommitReply)

    async def renew(
        self, checkpoint_id: CheckpointId, *, timeout_s: float
    ) -> dict[str, RenewReply]:
        """Extend every lease.

        Raises:
            Failed: at least one participant does not hold the checkpoint any more, or is `Replaced`.
        """
        request = self._request(RenewRequest, checkpoint_id, timeout_s)
        deadline = trio.current_time() + timeout_s
        return await self._send("renew", self.members, request, deadline, RenewReply)

    async def resume(self, checkpoint_id: CheckpointId, *, timeout_s: float) -> None:
        """Let everything go on, callees first, through failures (COORD-2).

        Raises:
            Failed: at the end, naming every participant that did not resume.
        """
        request = self._request(ResumeRequest, checkpoint_id, timeout_s)
        await self._resume_with(request, timeout_s)

    async def start_afresh(self, given_up: Iterable[EpisodeId], *, timeout_s: float) -> None:
        """Open servers that wait to be restored, without restoring anything (HARD-3).

        They know of no attempt that ran before, so they cannot refuse what is not named here. What is
        named is refused from the instant of opening, and retired at servers that were open (I11).

        Args:
            given_up: the last attempt of every rollout that was begun and is not finished; what is
                run from now on are later ones. Empty: nothing ever ran.

        Raises:
            Failed: naming who has not opened, or not retired; the same call may be made again.
        """
        name = CheckpointId(f"afresh-{self.nonce[:16]}")
        attempts = tuple(given_up)
        request = self._request(
            ResumeRequest, name, timeout_s, start_afresh=True, episode_ids=attempts
        )
        deadline = trio.current_time() + timeout_s
        opened = await self._resume_with(request, timeout_s)
        if attempts:
            await self.retire(name, attempts, timeout_s=deadline - trio.current_time())
        for server, reply in opened.items():
            self._incarnations.know(server, reply.incarnation)

    def accept_replaced(self, replaced: Replaced) -> None:
        """Count on a server that has lost its past, from now on (HARD-13).

        Retire the rollouts that lived there first: whatever they had there is missing in every
        checkpoint, and nobody will tell again.
        """
        self._incarnations.know(replaced.server, replaced.found)

    async def _resume_with(
        self, request: ResumeRequest, timeout_s: float
    ) -> dict[str, ResumeReply]:
        order = [(kind,) for kind in reversed(PREPARE_ORDER)]
        return await self._through_failures("resume", order, request, timeout_s, ResumeReply)

    async def restore(
        self,
        checkpoint_id: CheckpointId,
        directory: str,
        episode_ids: Iterable[EpisodeId],
        *,
        timeout_s: float,
    ) -> dict[str, RestoreReply]:
        """Restore the scope everywhere, then let it go on: all of it or nothing (COORD-3).

        Each restore issues an epoch of its own, so that what an earlier restore of the same checkpoint
        has still under way is refused everywhere (HARD-11).

        Args:
            checkpoint_id: names the checkpoint; the hold gets an id of its own, so that the same
                checkpoint can be restored any number of times.
            episode_ids: the attempts as they were checkpointed.

        Raises:
            Failed: `operation` "restore": nothing was restored, and what some had installed is
                undone: they are as before, so the same checkpoint can be restored again. "resume":
                everything was restored, and the servers named have not opened, or have undone it when
                their lease ended; the others go on. The cause is the first failure.

        Cancelled: before everything is restored, nothing is; later, like a failed resume.
        """
        scope = tuple(episode_ids)
        number = next(self._restores)
        hold = _restore_hold(checkpoint_id, f"{self.nonce[:12]}-{number}")
        request = self._request(
            RestoreRequest,
            hold,
            timeout_s,
            checkpoint_dir=directory,
            episode_ids=scope,
            execution_epoch=f"{self.nonce}-{number}",
        )
        deadline = trio.current_time() + timeout_s
        try:
            replies = await self._send("restore", self.members, request, deadline, RestoreReply)
        except BaseException:
            await self._resume_quietly(hold, timeout_s, undo_restore=True)
            raise
        for server, reply in replies.items():
            self._incarnations.know(server, reply.incarnation)
        await self.resume(hold, timeout_s=max(RESUME_S_MIN, deadline - trio.current_time()))
        return replies

    async def retire(
        self, checkpoint_id: CheckpointId, episode_ids: Iterable[EpisodeId], *, timeout_s: float
    ) -> None:
        """Give attempts up, callers first; on return nothing of them runs anywhere.

        Raises:
            Failed: naming who could not; the others have retired.
        """
        request = self._request(
            RetireRequest, checkpoint_id, timeout_s, episode_ids=tuple(episode_ids)
        )
        await self._callers_first("retire", request, timeout_s, RetireReply)

    async def forget(
        self, checkpoint_id: CheckpointId, rollout_ids: Iterable[RolloutId], *, timeout_s: float
    ) -> None:
        """Drop the refusals of rollouts that are finished for good, callers first."""
        request = self._request(
            ForgetRequest, checkpoint_id, timeout_s, rollout_ids=tuple(rollout_ids)
        )
        await self._callers_first("forget", request, timeout_s, ForgetReply)

    async def _callers_first(
        self, operation: str, request: ControlRequest, timeout_s: float, cls: type[R]
    ) -> None:
        await self._through_failures(operation, RETIRE_ORDER, request, timeout_s, cls)

    async def _through_failures(
        self,
        operation: str,
        order: Sequence[tuple[Kind, ...]],
        request: ControlRequest,
        timeout_s: float,
        cls: type[R],
    ) -> dict[str, R]:
        """Do it stage by stage, without letting one member that is away hold up the others.

        What has not answered within `STAGE_PATIENCE_S` of the beginning is still asked until the
        deadline, but the stages after it do not wait for it: the order saves waiting, no more.

        Raises:
            Failed: at the end, with every failure.
        """
        replies: dict[str, R] = {}
        failures: dict[str, GymtrioError] = {}
        deadline = trio.current_time() + timeout_s
        patience_ends = trio.current_time() + STAGE_PATIENCE_S

        async def ask(stage: Sequence[Member], answered: trio.Event) -> None:
            try:
                replies.update(await self._send(operation, stage, request, deadline, cls))
            except Failed as failed:
                failures.update(failed.failures)
            answered.set()

        async with trio.open_nursery() as nursery:
            for kinds in order:
                stage = [member for member in self.members if member.kind in kinds]
                answered = trio.Event()
                nursery.start_soon(ask, stage, answered)
                with trio.move_on_at(patience_ends):
                    await answered.wait()
        if failures:
            raise Failed(operation, failures) from next(iter(failures.values()))
        return replies

    # -- the whole of a checkpoint ------------------------------------------------------------

    @asynccontextmanager
    async def checkpoint(
        self,
        checkpoint_id: CheckpointId,
        directory: str,
        *,
        timeout_s: float,
        renew_every_s: float | None = None,
    ) -> AsyncIterator[HeldCheckpoint]:
        """Prepare, hold, and resume on every exit (COORD-1).

        Args:
            timeout_s: of the prepare, and of each later call that gives none of its own.
            renew_every_s: default: a third of the timeout, at most 10 s.

        Raises:
            NotPrepared: something blocked until the deadline; everything was resumed.
            Failed: a participant refused or could not be reached; everything was resumed.

        Cancelled: everything is resumed, shielded, with a deadline.
        """
        interval_s = renew_every_s or min(timeout_s / 3, RENEW_INTERVAL_S_MAX)
        try:
            prepared = await self.prepare(checkpoint_id, timeout_s=timeout_s)
            if not prepared.ready:
                raise NotPrepared(checkpoint_id, prepared.blocking)
            held = HeldCheckpoint(self, checkpoint_id, directory, timeout_s, prepared)
            async with open_background() as nursery:
                nursery.start_soon(held.keep_renewing, interval_s)
                yield held
        except BaseException:
            # What the body raised is what its caller is told.
            await self._resume_quietly(checkpoint_id, timeout_s)
            raise
        bound_s = max(RESUME_S_MIN, timeout_s)
        with trio.fail_after(bound_s + CLEANUP_S_MAX, shield=True):
            await self.resume(checkpoint_id, timeout_s=bound_s)

    async def _resume_quietly(
        self, checkpoint_id: CheckpointId, timeout_s: float, *, undo_restore: bool = False
    ) -> None:
        """Resume on the way out of a failure: shielded, bounded by its deadline, only logged."""
        bound_s = max(RESUME_S_MIN, timeout_s)
        request = self._request(ResumeRequest, checkpoint_id, bound_s, undo_restore=undo_restore)
        try:
            with trio.fail_after(bound_s + CLEANUP_S_MAX, shield=True):
                await self._resume_with(request, bound_s)
        except Failed as failed:
            LOG.warning("%s: %s", checkpoint_id, failed)

    # -- shared -------------------------------------------------------------------------------

    def _request(
        self, cls: Callable[..., Q], checkpoint_id: CheckpointId, timeout_s: float, **fields: object
    ) -> Q:
        return cls(
            checkpoint_id=checkpoint_id,
            deadline_ts=self._wall_clock.now_s() + timeout_s,
            controller_nonce=self.nonce,
            **fields,
        )

    async def _send(
        self,
        operation: str,
        members: Sequence[Member],
        request: ControlRequest,
        deadline: float,
        cls: type[R],
    ) -> dict[str, R]:
        async def send(member: Member) -> R:
            return await self._call(member, operation, request, deadline, cls)

        return await everywhere(operation, members, send)

    async def _call(
        self,
        member: Member,
        operation: str,
        request: ControlRequest,
        deadline: float,
        cls: type[R],
    ) -> R:
        """Send one call, again after a lost connection: the same id makes that safe (COORD-6).

        Raises:
            Replaced: what is to be published would lack what another process held.
        """
        assert REPLIES[operation] is cls
        while True:
            try:
                # The server ends by the deadline; its answer is on its way then.
                plain = await self._channel.call(
                    member.server, operation, request, deadline + CONTROL_REPLY_S_MAX
                )
                break
            except TransportError:
                if trio.current_time() + CONTROL_RETRY_DELAY_S >= deadline:
                    raise
                await trio.sleep(CONTROL_RETRY_DELAY_S)
        reply = reply_from_plain(cls, plain)
        if isinstance(reply, PrepareReply | RenewReply | CommitReply):
            self._incarnations.check(member.server, reply.incarnation)
        return reply


def _restore_hold(checkpoint_id: CheckpointId, nonce: str) -> CheckpointId:
    suffix = f".restore-{nonce}"
    hold = checkpoint_id[: ID_CHARACTERS_MAX - len(suffix)] + suffix
    assert is_safe_id(hold)
    return CheckpointId(hold)
