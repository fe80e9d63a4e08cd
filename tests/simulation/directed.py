"""Plans aimed at one rule each, by name; `test_mutants.py` says which mutant each of them must show."""

from __future__ import annotations

from typing import Final

from tests.simulation.disk import DiskFault
from tests.simulation.network import NetworkFaults
from tests.simulation.plans import Fault, Plan

SLOW: Final = NetworkFaults(slow=0.7, from_s=1.45, until_s=60.0)
DOUBLED: Final = NetworkFaults(duplicate=0.8, until_s=60.0)
ALL: Final = Fault(what="all", after="published", steps=30)
POWER: Final = Fault(what="power", after="published", steps=10)

DIRECTED: Final[dict[str, Plan]] = {
    "power is lost after a publication": Plan(
        seed=2, rollouts=2, checkpoint_at_s=(0.9,), faults=(POWER,)
    ),
    "nothing is left over": Plan(seed=2, rollouts=2, checkpoint_at_s=(0.9,)),
    "crash and continue": Plan(seed=1, rollouts=4, checkpoint_at_s=(0.9,), faults=(ALL,)),
    "crash and continue later": Plan(
        seed=5, rollouts=4, checkpoint_at_s=(0.5, 1.1, 1.6), faults=(ALL, ALL, ALL)
    ),
    "crash before anything was claimed": Plan(
        seed=1,
        rollouts=4,
        checkpoint_at_s=(0.0, 0.9),
        faults=(ALL, Fault(what="all", after="published", steps=200), ALL),
    ),
    "a checkpoint right after the restore": Plan(
        seed=4, rollouts=4, checkpoint_at_s=(0.25, 0.6), faults=(ALL, ALL)
    ),
    "stale requests during a slow restore": Plan(
        seed=3,
        rollouts=3,
        checkpoint_at_s=(0.9,),
        faults=(ALL, Fault(what="stale client", after="killed", steps=1)),
        network=SLOW,
    ),
    "a second controller while the first is down": Plan(
        seed=3,
        rollouts=3,
        checkpoint_at_s=(0.9,),
        faults=(
            ALL,
            Fault(what="second controller", after="killed", steps=1),
            Fault(what="trainer", after="restoring", steps=1),
            Fault(what="stale client", after="killed", steps=1),
        ),
    ),
    "stale requests after the restore": Plan(
        seed=6,
        rollouts=3,
        checkpoint_at_s=(0.9,),
        faults=(ALL, Fault(what="stale client", after="restored all", steps=5)),
    ),
    "two controllers": Plan(
        seed=7,
        rollouts=2,
        checkpoint_at_s=(0.6, 0.9, 1.2),
        faults=(Fault(what="second controller", after="checkpoint begun", steps=60),),
    ),
    "every control call twice": Plan(
        seed=8, rollouts=3, checkpoint_at_s=(0.5, 1.0, 1.5), faults=(ALL,), network=DOUBLED
    ),
    "the controller stands still before it renews": Plan(
        seed=9,
        rollouts=2,
        checkpoint_at_s=(0.9,),
        faults=(Fault(what="stop trainer", after="all prepared", steps=70),),
    ),
    "the controller stands still while it renews": Plan(
        seed=9,
        rollouts=2,
        checkpoint_at_s=(0.9,),
        faults=(Fault(what="stop trainer", after="all committed", steps=1),),
    ),
    "the controller is killed": Plan(
        seed=9,
        rollouts=2,
        checkpoint_at_s=(0.9,),
        faults=(Fault(what="trainer", after="all prepared", steps=5),),
    ),
    "a disk error whose report is lost": Plan(
        seed=10,
        rollouts=2,
        checkpoint_at_s=(0.5, 0.9, 1.3),
        network=NetworkFaults(lost_reply=0.4),
        disk=DiskFault(at_operation=60, error="EIO", operations=3),
    ),
    "an agent dies and its rollouts are given up": Plan(
        seed=11,
        rollouts=4,
        checkpoint_at_s=(0.9,),
        faults=(Fault(what="agent", after="checkpoint begun", steps=20),),
    ),
    "checkpoints one after the other": Plan(
        seed=12, rollouts=4, checkpoint_at_s=(0.3, 0.35, 0.4, 0.45, 0.5, 0.9, 0.95, 1.0, 1.05, 1.1)
    ),
    "the training program dies with rollouts under way": Plan(
        seed=13,
        rollouts=4,
        checkpoint_at_s=(0.4, 1.5),
        faults=(Fault(what="trainer", after="published", steps=200),),
    ),
    "a second controller with the same id": Plan(
        seed=13,
        rollouts=2,
        checkpoint_at_s=(0.48, 1.7),
        faults=(
            Fault(what="second controller", after="checkpoint begun", steps=40),
            Fault(what="trainer", after="checkpoint begun", steps=266),
        ),
        network=NetworkFaults(
            lost_request=0.03,
            lost_reply=0.03,
            duplicate=0.15,
            slow=0.0,
            data=True,
            from_s=0.0,
            until_s=30.0,
        ),
        disk=DiskFault(at_operation=90, error="POWER", operations=1),
        slow_disk_s=1.0,
    ),
    "answers that come while it is prepared": Plan(
        seed=6,
        rollouts=1,
        checkpoint_at_s=(0.49, 1.83),
        faults=(Fault(what="tools", after="all committed", steps=341),),
        network=NetworkFaults(
            lost_request=0.0,
            lost_reply=0.0,
            duplicate=0.0,
            slow=0.0,
            data=False,
            from_s=0.0,
            until_s=30.0,
        ),
        disk=None,
        slow_disk_s=0.0,
    ),
}
