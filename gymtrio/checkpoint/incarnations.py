"""Which process each participant is, as a controller last saw it (HARD-13).

A process that is replaced by one without a past has lost whatever it held: a checkpoint that it takes
part in would lack that, and look whole. So a controller goes on with a process that it does not know
only when it has restored it, or when its program says that nothing is missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gymtrio.checkpoint.members import Failed, Replaced


class Told(Protocol):
    """A reply that tells who answers."""

    @property
    def incarnation(self) -> str | None: ...


class Incarnations:
    """What one controller knows. A server that does not tell is not watched."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def know(self, server: str, incarnation: str | None) -> None:
        """From now on this is the process that the controller counts on."""
        if incarnation is not None:
            self._known[server] = incarnation

    def check(self, server: str, incarnation: str | None) -> None:
        """
        Raises:
            Replaced: it is another process than the one that is counted on.
        """
        known = self._known.get(server)
        if None not in (known, incarnation) and known != incarnation:
            raise Replaced(server, str(known), str(incarnation))


def check_unchanged(
    operation: str, before: Mapping[str, str | None], replies: Mapping[str, Told]
) -> None:
    """Compare the replies of one hold with those of its prepare.

    Raises:
        Failed: naming every server that another process answers for.
    """
    failures = {}
    for server, reply in replies.items():
        was, is_now = before.get(server), reply.incarnation
        if was is not None and is_now is not None and was != is_now:
            failures[server] = Replaced(server, was, is_now)
    if failures:
        raise Failed(operation, failures) from next(iter(failures.values()))
