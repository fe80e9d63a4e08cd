"""What a policy server is asked, what it answers, and what it needs of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs

from gymtrio.capture.cuts import CutInventory, CutReceipt, EngineDescription
from gymtrio.capture.replies import Route
from gymtrio.errors import InvalidRequest, Refusal
from gymtrio.ids import EpisodeId


@attrs.frozen(kw_only=True)
class PolicyCall:
    """One call of the policy model."""

    route: Route
    body: dict[str, object]
    """As the caller sent it; not changed."""
    capture_tokens: bool = False
    """The caller needs the token ids: a reply without them is an error (ID-4)."""
    refuse_when_closed: bool = False
    """The caller would rather be refused than wait at the gate (CTL-18)."""
    epoch: str | None = None
    """Which execution of its attempt the caller belongs to, if it says so (HARD-11)."""


@attrs.frozen(kw_only=True)
class PolicyReply:
    """An answer that may leave now."""

    status: int
    body: dict[str, object]
    refusal: Refusal | None = None
    """Why there is no result; it leaves as a result does, and not while a checkpoint is open (I2)."""
    done: Callable[[bool], None]
    """Call it exactly once: True after the last byte was handed to the caller's connection, False when
    the caller left before. Until then the reply counts as leaving, which a checkpoint waits for."""


@attrs.frozen(kw_only=True)
class BackendReply:
    """What a backend answered, of whatever status."""

    status: int
    body: dict[str, object]
    evidence: bool = True
    """Of a native backend: the reply has its extension. False: it could not be cut, and has none."""


class Backend(Protocol):
    """An inference engine. `gymtrio/capture/DESIGN.md` is the contract of a native one."""

    @property
    def native(self) -> bool:
        """It understands the extensions and the cut route."""
        ...

    async def generate(
        self, route: Route, body: dict[str, object], *, call_id: str | None
    ) -> BackendReply:
        """Make one call.

        Args:
            body: not changed.
            call_id: makes the call recognisable should it have to be sent twice.

        Raises:
            TransportError: no whole reply came.

        Cancelled: the backend is told, and stops generating.
        """
        ...

    async def cut(self, inventory: CutInventory, *, deadline: float) -> CutReceipt:
        """Ask a native backend for a round of cuts, over connections reserved for control.

        Args:
            deadline: on trio's clock.

        Raises:
            TransportError, PeerRefused: there is no receipt.
            MalformedValue: what came is not one.
        """
        ...

    async def describe(self, *, deadline: float) -> EngineDescription | None:
        """Ask what results depend on; None: the backend does not say.

        Raises:
            TransportError, PeerRefused, MalformedValue
        """
        ...


class Policy(Protocol):
    """Serves calls of the policy model, with or without taking part in checkpoints."""

    async def call(self, episode_id: EpisodeId | None, call: PolicyCall) -> PolicyReply:
        """Make one call.

        Args:
            episode_id: on whose behalf; None: on nobody's.

        Raises:
            Refusal: the typed answer that the caller gets, where it may have it at once.

        Cancelled: nothing is left of the call, at the backend either.
        """
        ...


def check_call(call: PolicyCall, *, for_rollout: bool) -> None:
    """Refuse what this server cannot do, before anything is done.

    Raises:
        InvalidRequest: several choices for a rollout: a conversation goes on from one.
    """
    if for_rollout and call.body.get("n") not in (None, 1):
        raise InvalidRequest("n: a call of a rollout has one choice")
