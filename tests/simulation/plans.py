"""What goes wrong in a run: a value that is written out, not a number that is looked up.

`random_plan` makes one of a seed. Its `repr` is a Python expression, so that a plan that found
something is pasted into a test and stays what it was when the generator changes.
"""

from __future__ import annotations

import random
from typing import Final

import attrs

from tests.simulation.disk import DiskFault
from tests.simulation.network import Mishap, NetworkFaults

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
    "restored all",
    "restored all",
    "checkpoint begun",
    "closed",
    "all prepared",
)
OPERATIONS: Final = ("prepare", "commit", "renew", "resume", "restore", "retire", "status")
MISHAPS: Final = ("request lost", "reply lost", "slow request", "slow reply", "twice")
CRASHES: Final = ("all", "all", "power", "trainer", "env", "policy", "agent", "tools")


PAUSED: Final = (
    "stop trainer",
    "stop trainer",
    "stop env",
    "stop policy",
    "stop agent",
    "stop tools",
)
PAUSES_S: Final = (0.3, 3.0, 20.0)
"""Shorter than a timeout, than a lease, and longer than either."""
JUMPS_S: Final = (20, -20, 300_000, -300_000)
"""As a time service sets a clock; and further than a deadline may be ahead."""
CUTS: Final = (
    "env>agent",
    "env>tools",
    "agent>policy",
    "agent>tools",
    "policy>engine",
    "trainer>env",
)
WORKER_FAULTS: Final = ("policy.0", "policy.0", "policy.1", "stop policy.0", "stop policy.1")
OTHERS: Final = ("second controller", "second controller", "eager controller", "stale client")


@attrs.frozen(kw_only=True)
class Fault:
    """Something that happens once: some task steps after an event."""

    what: str
    """`all`, `power`, `trainer`, the name of a server: killed, and started again by the supervisor;
    `policy.0`, `policy.1`: a worker, which its server replaces;
    `stop <process>`: nothing leaves it or reaches it for a while;
    `clock <seconds>`: the wall clock of all is set forward or back;
    `checkpoint`: the training program takes one;
    `cut <caller>><server>`: connections with a call under way are lost;
    `second controller`, `eager controller`, `stale client`, `twin <server>`: one appears."""
    after: str
    """The event that arms it; `start`: the first step."""
    steps: int
    for_s: float = 20.0
    """How long a stop lasts."""


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
    lease_grace_s: float = 8.0
    acks: bool = False
    """The training program acknowledges results (HARD-9)."""
    left_out: tuple[tuple[int, int], ...] = ()
    """Number of a checkpoint, from 1, and of a rollout that is not in its scope."""
    workers: int = 1
    """Of the policy server."""
    repeats_runs: bool = False
    """A `/run` whose connection was lost is sent again for the same attempt."""

    @property
    def undisturbed(self) -> bool:
        """Nobody is killed and no file operation fails."""
        return not self.faults and self.disk is None


def random_plan(seed: int) -> Plan:
    """Draw a plan; the same for the same seed, while this function stays as it is."""
    rng = random.Random(f"plan {seed}")
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3))):
        later = bool(faults) and rng.random() < 0.6
        after = rng.choice(LATER_TRIGGERS if later else TRIGGERS)
        steps = rng.randint(1, 4000 if after == "start" else rng.choice((40, 400)))
        faults.append(Fault(what=_what(rng), after=after, steps=steps, for_s=rng.choice(PAUSES_S)))
    checkpoints = rng.choice((1, 1, 2, 3))
    return Plan(
        seed=seed,
        rollouts=rng.randint(1, 4),
        checkpoint_at_s=tuple(sorted(round(rng.uniform(0.1, 3.0), 2) for _ in range(checkpoints))),
        faults=tuple(faults),
        network=_network(rng),
        disk=_disk(rng) if rng.random() < 0.3 else None,
        slow_disk_s=rng.choice((0.0, 0.0, 0.0, 0.0, 0.2, 1.0, 1.0, 4.0)),
        lease_grace_s=rng.choice((8.0, 8.0, 8.0, 0.5)),
        acks=rng.random() < 0.5,
        left_out=((2, 0),) if rng.random() < 0.1 else (),
    )


def with_workers(plan: Plan) -> Plan:
    """The same, with a policy server of two processes, of which some die alone or stand still."""
    rng = random.Random(f"workers {plan.seed}")
    faults = list(plan.faults)
    for _ in range(rng.choice((0, 1, 1, 2))):
        fault = Fault(
            what=rng.choice(WORKER_FAULTS),
            after=rng.choice(TRIGGERS),
            steps=rng.randint(1, 400),
            for_s=rng.choice(PAUSES_S),
        )
        faults.insert(rng.randint(0, len(faults)), fault)
    return attrs.evolve(plan, workers=2, faults=tuple(faults))


def _what(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(CRASHES)
    if kind < 0.75:
        return rng.choice(OTHERS)
    if kind < 0.87:
        return rng.choice(PAUSED)
    if kind < 0.93:
        return f"clock {rng.choice(JUMPS_S)}"
    return f"cut {rng.choice(CUTS)}"


def _network(rng: random.Random) -> NetworkFaults:
    mishaps: tuple[Mishap, ...] = ()
    if rng.random() < 0.3:
        mishaps = (
            Mishap(
                path=rng.choice(OPERATIONS),
                what=rng.choice(MISHAPS),
                first=rng.randint(1, 3),
                count=rng.choice((1, 1, 2)),
                for_s=rng.choice((0.0, 0.01, 2.0)),
            ),
        )
    if rng.random() < 0.1:
        mishaps = (Mishap(path="/run", what="slow reply", first=rng.randint(1, 3), for_s=3.0),)
    if rng.random() < 0.6:
        return NetworkFaults(mishaps=mishaps)
    return NetworkFaults(
        lost_request=0.03,
        lost_reply=0.03,
        duplicate=0.15,
        slow=rng.choice((0.0, 0.02)),
        data=rng.random() < 0.3,
        slow_reader=rng.choice((0.0, 0.2)),
        echo=rng.choice(((), ("retire",), ("retire", "prepare", "resume"))),
        mishaps=mishaps,
    )


def _disk(rng: random.Random) -> DiskFault:
    return DiskFault(
        at_operation=rng.choice((rng.randint(1, 20), rng.randint(20, 160))),
        after=rng.choice(("start", "start", "all prepared", "restoring")),
        error=rng.choice(("EIO", "ENOSPC", "POWER", "ROT")),
        operations=rng.choice((1, 1, 5)),
    )
