"""What a worker and the coordinator of a policy server say to each other, over one channel.

    worker to coordinator     call  enter     Entry -> EnterReply        answered in line (see below)
                              call  deliver   Delivery                   in line
                              call  report    WorkerReport               in line
                              post  end       CallEnd
                              call  rows      capture key -> LedgerRows
                              call  control   head: operation, body and reply: JSON
                              call  metrics   reply: of the control plane, Prometheus' text
    coordinator to worker     post  state     GateState                  also the first message
                              post  refuse    Episodes
                              post  forget    Rollouts
                              call  settle    SettleOrder -> Settled
                              call  survey    Survey -> Surveyed
                              call  write     WriteOrder -> PartWritten
                              call  discard   WriteOrder

All of it travels in the control lane, which keeps its order. So:

- K1 What the coordinator answers in line is queued before whatever it says later: a worker that hears
  of a close has heard every admission that was decided before it (WRK-4).
- K2 A worker's reports come after its `end` posts: who counts as not blocking has told everything.
- K3 Generations only rise: a report of an older one is dropped (WRK-6).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeVar

import attrs

from gymtrio.capture.cuts import EngineDescription
from gymtrio.capture.ledger import LedgerRow
from gymtrio.capture.tokens import StagingKey
from gymtrio.errors import (
    REFUSALS,
    CheckpointError,
    CoordinatorUnavailable,
    GymtrioError,
    PeerRefused,
    TransportError,
)
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId, parse_capture_key
from gymtrio.participants.policy.keeper import Entered
from gymtrio.storage.manifest import Part
from gymtrio.storage.records import Identity
from gymtrio.strict import MalformedValue
from gymtrio.wire.bounds import ChannelLimits
from gymtrio.wire.channel import Channel
from gymtrio.wire.codec import pack, unpack
from gymtrio.wire.control import BlockerDetail

CONTROL_KIND: Final = "control"
METRICS_KIND: Final = "metrics"
COORDINATOR_ROLE: Final = "policy-coordinator"
WORKER_ROLE: Final = "policy-worker"

LINK_LIMITS: Final = ChannelLimits(
    frame_bytes_max=2**21, body_inline_bytes_max=2**20, head_bytes_max=2**18
)
"""An entry must come in one frame to be answered in line."""

CHAIN_ENTRIES_MAX: Final = 8_192
"""Turns of a conversation that are looked through for the parent of a call: they fit into one frame."""

NAMED_AT_ONCE_MAX: Final = 500
"""Episodes or calls of one message: packed or read within a slice of the loop."""

LEDGER_SECTION: Final = "ledger"
CUTS_SECTION: Final = "cuts"

T = TypeVar("T")
M = TypeVar("M")


@attrs.frozen(kw_only=True)
class EnterReply:
    entered: Entered | None
    """None: the gate is closed."""


@attrs.frozen(kw_only=True)
class Delivery:
    """A reply begins to leave."""

    call_id: str
    row: LedgerRow


@attrs.frozen(kw_only=True)
class CallEnd:
    call_id: str
    sent: bool


@attrs.frozen(kw_only=True)
class WorkerReport:
    """How a closed worker stands: counters only, and at most 100 blockers by name."""

    generation: int
    seq: int
    """Rises with every report of a worker."""
    blocking: int
    inflight: int
    leaving: int
    details: tuple[BlockerDetail, ...] = ()


@attrs.frozen(kw_only=True)
class LedgerRows:
    rows: tuple[LedgerRow, ...]


@attrs.frozen(kw_only=True)
class GateState:
    generation: int
    """Rises with every close."""
    closed: bool
    not_ready: str | None
    """Why the server accepts no work yet; None: it does."""


@attrs.frozen(kw_only=True)
class Episodes:
    """By capture key: thousands are read in a fraction of the time that objects would take."""

    keys: tuple[str, ...]

    @classmethod
    def of(cls, episode_ids: Iterable[EpisodeId]) -> Episodes:
        return cls(keys=tuple(episode_id.capture_key for episode_id in episode_ids))

    @property
    def episode_ids(self) -> list[EpisodeId]:
        """
        Raises:
            InvalidRolloutId: one is none.
        """
        return [parse_capture_key(key) for key in self.keys]


@attrs.frozen(kw_only=True)
class Rollouts:
    rollout_ids: tuple[RolloutId, ...]


@attrs.frozen(kw_only=True)
class SettleOrder:
    checkpoint_id: CheckpointId
    remaining_s: float
    """Until the deadline of the prepare; the clocks of two processes do not compare."""


@attrs.frozen(kw_only=True)
class Settled:
    """What came of a worker's round."""

    engine: EngineDescription | None
    cut: int
    cut_failed: int
    cut_skipped: int


@attrs.frozen(kw_only=True)
class Survey:
    """Which of these calls has a cut? Those are what a following write writes."""

    begins: bool
    """The first message of a commit: what was asked before is dropped."""
    calls: dict[str, str]
    """Call id to the capture key of the episode whose latest undelivered call it is."""


@attrs.frozen(kw_only=True)
class Surveyed:
    cuts: dict[str, tuple[StagingKey, ...]]
    """Call id to what its cut refers to."""


@attrs.frozen(kw_only=True)
class WriteOrder:
    checkpoint_dir: str
    kind: str
    instance: str
    checkpoint_id: CheckpointId

    @property
    def identity(self) -> Identity:
        return Identity(kind=self.kind, instance=self.instance, checkpoint_id=self.checkpoint_id)


@attrs.frozen(kw_only=True)
class PartWritten:
    part: Part


def in_slices(items: Iterable[T]) -> Iterator[tuple[T, ...]]:
    """Cut what is named into messages."""
    iterator = iter(items)
    while some := tuple(islice(iterator, NAMED_AT_ONCE_MAX)):
        yield some


async def ask(
    channel: Channel, kind: str, message: object, reply: type[M], *, deadline: float | None = None
) -> M:
    """Make one call of the table.

    Raises: see `request`; CoordinatorUnavailable also: a message is none.
    """
    try:
        return unpack(reply, await request(channel, kind, pack(message), deadline=deadline))
    except MalformedValue as error:
        raise CoordinatorUnavailable(f"{channel.peer.name}: {error}") from error


async def request(
    channel: Channel, kind: str, body: bytes, *, head: bytes = b"", deadline: float | None = None
) -> bytes:
    """Have a call answered, its body as it is.

    Raises:
        Refusal: what the other side refused with.
        CoordinatorUnavailable: it did not answer.
    """
    try:
        reply = await channel.request(kind, body, head=head, control=True, deadline=deadline)
    except PeerRefused as error:
        raise REFUSALS.get(error.code or "", CheckpointError)(error.detail) from error
    except TransportError as error:
        raise CoordinatorUnavailable(f"{channel.peer.name}: {error}") from error
    return reply.body


def read(cls: type[M], body: bytes | None) -> M:
    """Read a message of the table.

    Raises:
        MalformedValue: it is none.
    """
    if body is None:
        raise MalformedValue("", "too large to come in one frame")
    return unpack(cls, body)


@attrs.frozen(kw_only=True)
class Nothing:
    """Where only the answer counts."""


DONE: Final = pack(Nothing())


def tell(channel: Channel, kind: str, message: object) -> bool:
    """Post a message; False: the channel has ended, or takes no more."""
    return not tell_all([channel], kind, [message])


def tell_all(channels: Sequence[Channel], kind: str, messages: Iterable[object]) -> list[Channel]:
    """Post messages to several; gives those that did not take them."""
    failed: list[Channel] = []
    for message in messages:
        body = pack(message)
        for channel in channels:
            try:
                channel.post(kind, body)
            except GymtrioError:
                failed.append(channel)
    return failed
