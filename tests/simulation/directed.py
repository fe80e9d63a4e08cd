"""Plans aimed at one rule each, by name; `test_mutants.py` says which mutant each of them must show."""

from __future__ import annotations

from typing import Final

from tests.simulation.disk import DiskFault
from tests.simulation.network import Mishap, NetworkFaults
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
    "closed again in the instant of opening": Plan(
        seed=14,
        rollouts=4,
        checkpoint_at_s=(0.5, 0.9, 1.3),
        faults=(Fault(what="eager controller", after="checkpoint begun", steps=1),),
    ),
    "calls come again in the instant of a retirement": Plan(
        seed=18,
        rollouts=4,
        checkpoint_at_s=(),
        faults=(
            Fault(what="agent", after="start", steps=700),
            Fault(what="cut trainer>env", after="result", steps=50),
        ),
        network=NetworkFaults(echo=("retire",)),
    ),
    "rollouts are given up in the middle": Plan(
        seed=16,
        rollouts=4,
        checkpoint_at_s=(),
        faults=(
            Fault(what="cut trainer>env", after="start", steps=700),
            Fault(what="cut trainer>env", after="retire at agent", steps=600),
            Fault(what="cut agent>policy", after="retire at agent", steps=600),
        ),
    ),
    "callers that read slowly": Plan(
        seed=17,
        rollouts=4,
        checkpoint_at_s=(),
        faults=(
            Fault(what="checkpoint", after="leaving policy/v1/responses", steps=1),
            Fault(what="checkpoint", after="leaving tools/increment_counter", steps=1),
            Fault(what="all", after="published", steps=5),
            Fault(what="checkpoint", after="leaving agent/v1/agent_sessions/close", steps=1),
            Fault(what="checkpoint", after="leaving env/run", steps=1),
        ),
        network=NetworkFaults(slow_reader=1.0, until_s=60.0),
    ),
    "a result is on its way, to be acknowledged": Plan(
        seed=19,
        rollouts=2,
        checkpoint_at_s=(2.2,),
        faults=(ALL,),
        network=NetworkFaults(
            mishaps=(Mishap(path="/run", what="slow reply", first=1, count=2, for_s=4.0),),
        ),
        acks=True,
    ),
    "a result is on its way": Plan(
        seed=19,
        rollouts=2,
        checkpoint_at_s=(2.2,),
        network=NetworkFaults(
            mishaps=(Mishap(path="/run", what="slow reply", first=1, count=2, for_s=4.0),),
        ),
    ),
    "a rollout is left out of a checkpoint": Plan(
        seed=20,
        rollouts=3,
        checkpoint_at_s=(0.9, 1.6),
        faults=(ALL, Fault(what="all", after="published", steps=60)),
        left_out=((1, 0), (2, 1)),
    ),
    "a commit fails and its report is lost": Plan(
        seed=21,
        rollouts=2,
        checkpoint_at_s=(0.9, 1.5),
        network=NetworkFaults(
            mishaps=(Mishap(path="commit", what="reply lost", count=4),),
        ),
        disk=DiskFault(after="all prepared", at_operation=12, error="EIO"),
    ),
    "a proof of the lease that comes late": Plan(
        seed=22,
        rollouts=2,
        checkpoint_at_s=(0.9,),
        faults=(Fault(what="stop trainer", after="hold proven", steps=1, for_s=3.0),),
        network=NetworkFaults(
            mishaps=(
                Mishap(path="renew", what="slow reply", for_s=4.0),
                Mishap(path="renew", what="request lost", first=2, count=99),
            ),
        ),
        lease_grace_s=0.5,
    ),
    "a second incarnation beside the first": Plan(
        seed=23,
        rollouts=2,
        checkpoint_at_s=(0.9,),
        faults=tuple(
            Fault(what=f"twin {server}", after="checkpoint begun" if n == 0 else "closed", steps=9)
            for n, server in enumerate(("env", "tools"))
        ),
    ),
    "calls of an earlier restore of the same checkpoint": Plan(
        seed=24,
        rollouts=3,
        checkpoint_at_s=(0.9,),
        faults=(
            ALL,
            Fault(what="all", after="restored all", steps=700),
            Fault(what="stale client", after="restored all", steps=5),
        ),
    ),
    "commits that take longer than they may": Plan(
        seed=25, rollouts=3, checkpoint_at_s=(0.9, 1.5), slow_disk_s=4.0
    ),
    "commits of several processes that take longer than they may": Plan(
        seed=25, rollouts=3, checkpoint_at_s=(0.9, 1.5), slow_disk_s=4.0, workers=2
    ),
    "workers die with calls": Plan(
        seed=4,
        rollouts=4,
        checkpoint_at_s=(0.9,),
        faults=(
            ALL,
            Fault(what="policy.0", after="data policy/v1/responses", steps=40),
            Fault(what="policy.1", after="data policy/v1/responses", steps=40),
            Fault(what="checkpoint", after="worker lost", steps=5),
        ),
        workers=2,
    ),
    "workers die while they answer": Plan(
        seed=5,
        rollouts=4,
        checkpoint_at_s=(),
        faults=(
            Fault(what="policy.0", after="leaving policy/v1/responses", steps=1),
            Fault(what="checkpoint", after="worker lost", steps=1),
            Fault(what="policy.1", after="leaving policy/v1/responses", steps=1),
            Fault(what="checkpoint", after="worker lost", steps=1),
        ),
        network=NetworkFaults(slow_reader=1.0, until_s=60.0),
        workers=2,
    ),
    "a worker stands still while a checkpoint is open": Plan(
        seed=26,
        rollouts=3,
        checkpoint_at_s=(0.6, 0.9, 1.5),
        faults=(
            Fault(what="stop policy.1", after="checkpoint begun", steps=20, for_s=20.0),
            Fault(what="stop policy.0", after="all prepared", steps=5, for_s=3.0),
            Fault(what="all", after="published", steps=30),
        ),
        workers=2,
    ),
    "runs come again in the instant of a retirement after a restore": Plan(
        seed=1,
        rollouts=3,
        checkpoint_at_s=(0.9,),
        faults=(ALL, Fault(what="cut agent>policy", after="restored all", steps=60)),
        network=NetworkFaults(echo=("retire",), until_s=60.0),
    ),
    "a policy server is replaced": Plan(
        seed=120,
        rollouts=1,
        checkpoint_at_s=(0.88, 1.6, 2.4),
        faults=(Fault(what="policy", after="checkpoint begun", steps=10),),
    ),
    "a model call comes twice": Plan(
        seed=26,
        rollouts=2,
        checkpoint_at_s=(0.65, 1.1),
        faults=(ALL,),
        network=NetworkFaults(
            mishaps=(
                Mishap(path="/v1/responses", target="policy", what="twice", count=9, for_s=0.1),
            ),
            until_s=60.0,
        ),
    ),
    "bits change in a published checkpoint": Plan(
        seed=27,
        rollouts=3,
        checkpoint_at_s=(0.5, 1.2),
        faults=(
            Fault(what="power", after="published", steps=1),
            Fault(what="all", after="published", steps=60),
        ),
        disk=DiskFault(after="killed", at_operation=1, error="ROT", operations=2),
    ),
    "the wall clock is set": Plan(
        seed=28,
        rollouts=3,
        checkpoint_at_s=(0.5, 1.0, 1.5, 2.0),
        faults=(
            Fault(what="clock 20", after="checkpoint begun", steps=60),
            Fault(what="clock -20", after="all prepared", steps=10),
            Fault(what="clock 300000", after="checkpoint begun", steps=30),
            Fault(what="clock -300000", after="all committed", steps=5),
        ),
    ),
    "an episode starts over from its input": Plan(
        seed=29,
        rollouts=3,
        checkpoint_at_s=(0.9,),
        faults=(
            Fault(what="cut env>agent", after="all prepared", steps=2),
            ALL,
        ),
    ),
    "a model call is lost while a checkpoint is open": Plan(
        seed=30,
        rollouts=3,
        checkpoint_at_s=(0.9,),
        faults=(
            Fault(what="cut agent>policy", after="all prepared", steps=2),
            ALL,
        ),
    ),
    "a lease ends while manifests are published": Plan(
        seed=32,
        rollouts=2,
        checkpoint_at_s=(0.9,),
        faults=(Fault(what="stop trainer", after="commit at env", steps=1, for_s=20.0),),
        slow_disk_s=4.0,
        lease_grace_s=0.5,
    ),
}
