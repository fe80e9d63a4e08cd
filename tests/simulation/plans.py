"""What goes wrong in a run: a value that is written out, not a number that is looked up.

`random_plan` makes one of a seed. Its `repr` is a Python expression, so that a plan that found
something is pasted into a test and stays what it was when the generator changes.
"""

from __future__ import annotations

import random
from typing import Final

import attrs

from tests.simulation.disk import DiskFault
from tests.simulation.network import NetworkFaults

TRIGGERS: Final = (
    "start",
    "checkpoint begun",
    "closed",
    "all prepared",
    "all committed",
    "published",
)
LATER_TRIGGERS: Final = (
    "restoring",
    "restoring",
    "restored",
    "restored",
    "restored all",
    "checkpoint begun",
    "closed",
    "all prepared",
)
CRASHES: Final = ("all", "all", "power", "trainer", "env", "policy", "agent", "tools")


@attrs.frozen(kw_only=True)
class Fault:
    """Something that happens once: some task steps after an event."""

    what: str
    """`all`, `power`, `trainer`, the name of a server: killed, and started again by the supervisor;
    `second controller`, `stale client`: one appears; `stop trainer`: it stands still for 20 s."""
    after: str
    """The event that arms it; `start`: the first step."""
    steps: int


@attrs.frozen(kw_only=True)
class Plan:
    seed: int
    """Of the schedule, of delays and of every choice that is not written here."""
    rollouts: int = 3
    checkpoint_at_s: tuple[float, ...] = (1.0,)
    faults: tuple[Fault, ...] = ()
    network: NetworkFaults = attrs.field(factory=NetworkFaults)
    disk: DiskFault | None = None
    slow_disk_s: float = 0.0


def random_plan(seed: int) -> Plan:
    """Draw a plan; the same for the same seed, while this function stays as it is."""
    rng = random.Random(f"plan {seed}")
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3))):
        later = bool(faults) and rng.random() < 0.6
        after = rng.choice(LATER_TRIGGERS if later else TRIGGERS)
        what = rng.choice(CRASHES)
        if rng.random() < 0.25:
            what = rng.choice(("second controller", "stale client", "stop trainer"))
        steps = rng.randint(1, 4000 if after == "start" else rng.choice((40, 400)))
        faults.append(Fault(what=what, after=after, steps=steps))
    network = NetworkFaults()
    if rng.random() < 0.4:
        network = NetworkFaults(
            lost_request=0.03,
            lost_reply=0.03,
            duplicate=0.15,
            slow=rng.choice((0.0, 0.02)),
            data=rng.random() < 0.3,
        )
    disk = None
    if rng.random() < 0.25:
        disk = DiskFault(
            at_operation=rng.randint(20, 160),
            error=rng.choice(("EIO", "ENOSPC", "POWER")),
            operations=rng.choice((1, 1, 5)),
        )
    return Plan(
        seed=seed,
        rollouts=rng.randint(1, 4),
        checkpoint_at_s=tuple(
            sorted(round(rng.uniform(0.1, 3.0), 2) for _ in range(rng.randint(1, 3)))
        ),
        faults=tuple(faults),
        network=network,
        disk=disk,
        slow_disk_s=rng.choice((0.0, 0.0, 0.0, 0.2, 1.0)),
    )
