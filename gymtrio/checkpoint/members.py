"""The participants of a deployment as a controller reaches them, and what can go wrong there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import attrs
import trio

from gymtrio.errors import GymtrioError
from gymtrio.wire.control import ControlRequest, Kind, Report

A = TypeVar("A")


class ControlChannel(Protocol):
    """Carries one control call over reserved connections (COORD-5)."""

    async def call(
        self, server: str, operation: str, request: ControlRequest | None, deadline: float
    ) -> object:
        """Send a request (None: `status`) and give the reply as plain data.

        Args:
            deadline: on trio's clock; past it the call is given up.

        Raises:
            PeerRefused: the server answered with an error; `status` 404: not a participant.
            TransportError: it could not be reached, or did not answer by the deadline.
        """
        ...


class CoordinationError(GymtrioError):
    """Base of what goes wrong with a deployment as a whole."""


class NoPolicyModel(CoordinationError):
    """No configured server is a policy model participant (COORD-4)."""


class NotPrepared(CoordinationError):
    """Prepare missed its deadline; everything was resumed. Says what blocked (CTL-7)."""

    def __init__(self, checkpoint_id: str, blocking: Mapping[str, Report]) -> None:
        self.blocking = dict(blocking)
        lines = []
        for server, report in blocking.items():
            named = [f"{d.blocker} ({d.doing}, {d.since_s:.1f} s)" for d in report.details]
            named = named or list(report.blockers)
            more = report.blocker_count - len(named)
            lines.append(
                f"{server}: {', '.join(named)}" + (f" and {more} more" if more > 0 else "")
            )
        super().__init__(f"{checkpoint_id} is not prepared: " + ("; ".join(lines) or "resumed"))


class Failed(CoordinationError):
    """An operation failed at some participants; the first failure is the cause."""

    def __init__(self, operation: str, failures: Mapping[str, GymtrioError]) -> None:
        self.failures = dict(failures)
        told = "; ".join(f"{server}: {error}" for server, error in failures.items())
        super().__init__(f"{operation} failed at {told}")


class Replaced(CoordinationError):
    """A participant is another process than the controller counts on, without that one's past.

    Retire what lived there, then `Controller.accept_replaced`; or restore (HARD-13).
    """

    def __init__(self, server: str, known: str, found: str) -> None:
        self.server = server
        self.known = known
        self.found = found
        super().__init__(f"{server} was replaced: {found} answers where {known} was")


class LeaseNotProven(CoordinationError):
    """Not every participant confirmed its hold in time: the checkpoint must not be published."""


@attrs.frozen
class Member:
    """One participant of the deployment."""

    server: str
    """Its name in the deployment."""
    kind: Kind
    instance: str


@attrs.frozen
class Prepared:
    """Outcome of a staged prepare."""

    ready: bool
    reports: dict[str, Report]
    """By server, of the stages that were asked."""
    incarnations: dict[str, str | None] = attrs.field(factory=dict)
    """By server: who has prepared."""

    @property
    def blocking(self) -> dict[str, Report]:
        return {server: report for server, report in self.reports.items() if not report.ready}


async def everywhere(
    operation: str,
    members: Sequence[Member],
    act: Callable[[Member], Awaitable[A]],
) -> dict[str, A]:
    """Do the same at all members at once, all of them to the end.

    Raises:
        Failed: with every failure, the first as its cause.
    """
    answers: dict[str, A] = {}
    failures: dict[str, GymtrioError] = {}

    async def one(member: Member) -> None:
        try:
            answers[member.server] = await act(member)
        except GymtrioError as error:
            failures[member.server] = error

    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(one, member)
    if failures:
        raise Failed(operation, failures) from next(iter(failures.values()))
    return {member.server: answers[member.server] for member in members}
