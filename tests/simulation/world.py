"""One simulated run: a deployment, a training program, a supervisor, and what the plan does to them."""

from __future__ import annotations

import gc
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import attrs
import trio

from gymtrio.checkpoint import control
from gymtrio.checkpoint.coordination import open_coordination
from gymtrio.errors import HostError, SettingsError
from gymtrio.ids import RolloutId
from gymtrio.serving.client import ServerClient
from gymtrio.serving.controlchannel import HttpControlChannel
from gymtrio.serving.deployment import DeploymentDirectory
from gymtrio.settings import Secret
from tests.helpers.clocks import FollowingClock
from tests.simulation.checkpoints import Checkpoints
from tests.simulation.disk import Machine
from tests.simulation.engine import Engine, engine_app
from tests.simulation.history import History
from tests.simulation.network import SimulatedNetwork
from tests.simulation.oracles import Oracles
from tests.simulation.others import Others
from tests.simulation.plans import Fault, Plan
from tests.simulation.processes import Process, Processes
from tests.simulation.scheduler import Steps, run_seeded
from tests.simulation.servers import (
    CONTROL_TOKEN,
    PARTICIPANTS,
    Surroundings,
    app_of,
    make_deployment,
    serve,
)
from tests.simulation.tokens import TokenPort, TokenShelf
from tests.simulation.trainer import (
    CHECKPOINT_TIMEOUT_S,
    Journal,
    RestartNeeded,
    Trainer,
    task_of,
)
from tests.simulation.workers import serve_with_workers

BUDGET_S: Final = 900.0
"""Virtual time in which everything must be finished: faults end long before (I29)."""
TRAINING: Final = "trainer"
RESTARTS_MAX: Final = 30
"""More than any plan has faults."""
TWIN_ENDS_S: Final = 5.0


@attrs.frozen
class Outcome:
    """What came of a run."""

    violations: list[str]
    steps: int
    schedule: int
    """Checksum of which task ran when."""
    history: int
    """Checksum of what was seen."""
    lines: list[str]
    sometimes: Counter[str]
    virtual_s: float
    results: dict[RolloutId, Any]

    @property
    def trace(self) -> str:
        return f"{self.steps} {self.schedule:08x} {self.history:08x}"


class World:
    """
    Args:
        to_first_violation: stop there: what follows may go in circles.
    """

    def __init__(self, plan: Plan, steps: Steps, *, to_first_violation: bool = False) -> None:
        self.plan = plan
        self._to_first_violation = to_first_violation
        self.history = History()
        self.journal = Journal()
        self.engine = Engine()
        self._steps = steps
        self._rng = random.Random(f"world {plan.seed}")
        self._faults = list(plan.faults)
        self._armed_at: int | None = None
        self._todo: list[str] = []
        self._something_to_do = trio.Event()
        self._finished = trio.Event()
        self._recovering = False
        self._dead_before = 0
        """Calls with lower numbers belong to executions that ended in a crash of everything."""
        self._restarts = 0
        self.trainer: Trainer | None = None
        self.virtual_s = 0.0

    # -- the run ------------------------------------------------------------------------------

    async def run(self) -> None:
        clock = FollowingClock()
        self.oracles = Oracles(self.history, self.engine, clock, self.plan)
        self.history.listen(self._observe)
        self._steps.hook = self._before_step
        # Without it a server that everything waits for would show as a hang of the test.
        with trio.move_on_after(BUDGET_S) as budget:
            async with trio.open_nursery() as nursery:
                self._build(nursery, clock)
                await self._start_engine()
                await self._start_servers(recover=False)
                self._next_fault()
                self._observe("start")
                await self._start_trainer()
                nursery.start_soon(self._supervise, name="supervisor")
                if self._to_first_violation:
                    nursery.start_soon(self._end_at_violation, name="end at violation")
                await self._finished.wait()
                self._faults.clear()
                self._armed_at = None
                if not (self._to_first_violation and self.oracles.violations):
                    await self._audit()
                self._kill_everything()
                for process in self.processes.all():
                    await process.bury()
                nursery.cancel_scope.cancel()
        self.virtual_s = trio.current_time()
        if budget.cancelled_caught:
            self.oracles.fail("I29", f"not finished after {BUDGET_S:g} s: {self._stuck()}")
        self._final_checks()

    async def _end_at_violation(self) -> None:
        await self.oracles.failed.wait()
        self._finished.set()

    def _build(self, nursery: trio.Nursery, clock: FollowingClock) -> None:
        seed = self.plan.seed
        self.processes = Processes(nursery)
        network = SimulatedNetwork(
            nursery, random.Random(f"network {seed}"), self.plan.network, self.oracles
        )
        self.oracles.watch_replies(
            lambda: self._answered(received=False), lambda: self._answered(received=True)
        )
        machine = Machine(
            random.Random(f"disk {seed}"),
            fault=self.plan.disk,
            slow_s=self.plan.slow_disk_s,
            power_failed=lambda: self._crash_all(power=True),
        )
        self.oracles.disk_wait_s = max(machine.waits_s)
        self.around = Surroundings(
            seed=seed,
            lease_grace_s=self.plan.lease_grace_s,
            wall_clock=clock,
            network=network,
            machine=machine,
            shelf=TokenShelf(random.Random(f"tokens {seed}")),
        )
        self.checkpoints = Checkpoints(machine, self.around.shelf, self.oracles)
        machine.after_operation = self.checkpoints.operated
        self.oracles.on_resumed = self.checkpoints.resumed
        self.oracles.on_restored = self.checkpoints.restored
        self._clock = clock
        self.others = Others(
            around=self.around,
            journal=self.journal,
            history=self.history,
            is_dead=lambda exchange: exchange.number < self._dead_before,
        )

    def _stuck(self) -> str:
        return "; ".join(self.history.lines[-6:])[:600]

    # -- processes ----------------------------------------------------------------------------

    async def _start_engine(self) -> None:
        async def main(process: Process) -> None:
            store = TokenPort(self.around.shelf, process)
            await serve(process, engine_app(self.engine, store), self.around, recover=False)

        await self.processes.start("engine", main)

    async def _start_server(self, name: str, *, recover: bool) -> None:
        async def main(process: Process) -> None:
            try:
                await self._serve(process, recover=recover)
            except* (HostError, SettingsError) as group:
                # A disk that fails may keep a server from starting; then it is started again.
                process.check()
                self.history.note("not started", f"{process} {group.exceptions[0]}")
                self.history.sometimes["a server could not start"] += 1
                self._ask(name)
                process.kill()

        process = await self.processes.start(name, main)
        self.oracles.started(process, recover=recover)
        self.history.note("server started", process)

    async def _serve(self, process: Process, *, recover: bool) -> None:
        if process.name != "policy" or self.plan.workers == 1:
            await serve(process, app_of(process, self.around), self.around, recover=recover)
            return
        await serve_with_workers(
            process,
            self.around,
            self.processes,
            count=self.plan.workers,
            recover=recover,
            on_lost=self._worker_lost,
        )

    def _worker_lost(self, worker: Process) -> None:
        self.oracles.workers_died = True
        self.history.note("worker lost", worker)
        self.history.sometimes["a worker was lost"] += 1

    async def _start_servers(self, *, recover: bool) -> None:
        for name in PARTICIPANTS:
            await self._start_server(name, recover=recover)

    async def _start_trainer(self) -> None:
        async def main(process: Process) -> None:
            self.trainer = trainer = Trainer(
                process,
                self.around,
                self.journal,
                self.history,
                self.plan,
            )
            trainer.on_publish = self._published
            trainer.on_restore = self.oracles.restored
            try:
                await trainer.run()
            except RestartNeeded as error:
                self.history.note("restart needed", error)
                self._crash_all(power=False)
                return
            self._finished.set()

        await self.processes.start(TRAINING, main)

    def _published(self, publication: Any, nonce: str) -> None:
        self.oracles.published(publication, nonce)
        self.checkpoints.published(publication)
        self.history.sometimes["published"] += 1
        # New weights: what is generated from here on is of a newer policy.
        self.engine.policy_version += 1

    def _kill_everything(self) -> None:
        for process in self.processes.all():
            process.kill()

    # -- faults -------------------------------------------------------------------------------

    def _next_fault(self) -> None:
        self._armed_at = None
        self._waiting = self._faults.pop(0) if self._faults else None

    def _observe(self, event: str) -> None:
        self.around.machine.observe(event)
        waiting = self._waiting
        if waiting is not None and self._armed_at is None and event == waiting.after:
            self._armed_at = self._steps.count + waiting.steps
        if event in ("restored all", "started afresh"):
            self._recovering = False
        if event == "started afresh":
            self.oracles.started_afresh()

    _waiting: Fault | None = None

    def _before_step(self, number: int) -> None:
        """Between two task steps: any await point of any task."""
        if self._armed_at is None or number < self._armed_at:
            return
        assert self._waiting is not None
        fault = self._waiting
        what = fault.what
        self._next_fault()
        if self._finished.is_set():
            return
        self.history.note("fault", what)
        self.history.sometimes[f"fault: {what.partition(' ')[0]}"] += 1
        if what in ("all", "power"):
            self._crash_all(power=what == "power")
        elif what in (*PARTICIPANTS, TRAINING):
            self._crash(what)
        elif what.startswith("policy."):
            if self.processes.kill(what) is not None:
                self.history.note("killed", what)
        else:
            self._disturb(fault)

    def _disturb(self, fault: Fault) -> None:
        what, _, which = fault.what.partition(" ")
        if what == "stop":
            process = self.processes.get(which)
            if process is not None:
                process.stopped_until = trio.current_time() + fault.for_s
        elif what == "checkpoint":
            if self.trainer is not None and self.processes.get(TRAINING) is not None:
                self.trainer.checkpoint_now()
        elif what == "clock":
            self.oracles.clock_jumped()
            self._clock.jump(float(which))
            self.oracles.clock_jumped()
        elif what == "cut":
            source, _, target = which.partition(">")
            self.around.network.cut(source, target)
        else:
            self._ask(fault.what)

    def _ask(self, what: str) -> None:
        self._todo.append(what)
        self._something_to_do.set()

    def _crash(self, name: str) -> None:
        if self.processes.kill(name) is not None:
            self.history.note("killed", name)
            self._ask(name)

    def _crash_all(self, *, power: bool) -> None:
        self._restarts += 1
        if self._restarts > RESTARTS_MAX:
            self.oracles.fail("I29", f"{RESTARTS_MAX} restarts, and no end")
            self._finished.set()
        if self._recovering:
            self.history.sometimes["a crash before the restore was over"] += 1
        elif self.oracles.lineage.unclaimed():
            self.history.sometimes["a crash while a restored cut was unclaimed"] += 1
        self._recovering = True
        self._dead_before = len(self.around.network.exchanges)
        for name in (TRAINING, "trainer2", *PARTICIPANTS):
            self.processes.kill(name)
        self.history.note("killed", "all")
        self._ask("power" if power else "all")

    async def _supervise(self) -> None:
        while True:
            await self._something_to_do.wait()
            self._something_to_do = trio.Event()
            await trio.sleep(0.05 + self._rng.randrange(5) * 0.1)
            # One restart of everything covers what died alone meanwhile.
            while self._todo:
                todo, self._todo = self._todo, []
                await self._perform(todo)

    async def _perform(self, todo: list[str]) -> None:
        if "all" in todo or "power" in todo:
            for name in (TRAINING, "trainer2", *PARTICIPANTS):
                self.processes.kill(name)
            for process in self.processes.all():
                if process.name != "engine" and not process.alive:
                    await process.bury()
            if "power" in todo:
                self.around.machine.lose_power()
            self.checkpoints.after_crash(power="power" in todo)
            await self._start_servers(recover=True)
            await self._start_trainer()
        for what in dict.fromkeys(todo):
            if what == TRAINING and self.processes.get(TRAINING) is None:
                await trio.sleep(self._rng.choice((0.0, 0.0, 20.0)))
                if not self._todo and self.processes.get(TRAINING) is None:
                    await self._start_trainer()
            elif what in PARTICIPANTS and self.processes.get(what) is None:
                await self._start_server(what, recover=self._recovering)
            elif what == "second controller":
                await self.processes.start("trainer2", self.others.second_controller)
            elif what == "eager controller":
                await self.processes.start("trainer2", self.others.eager_controller)
            elif what == "stale client":
                await self.processes.start("stale", self.others.stale_client)
            elif what.startswith("twin "):
                await self._start_twin(what.removeprefix("twin "))

    async def _start_twin(self, name: str) -> None:
        """A second incarnation beside the live one: it must see that, and end (HARD-10)."""

        async def main(process: Process) -> None:
            try:
                await serve(process, app_of(process, self.around), self.around, recover=False)
            except* HostError:
                self.history.sometimes["a twin was refused"] += 1

        twin = await self.processes.start_twin(name, main)
        if twin is not None:
            with trio.move_on_after(TWIN_ENDS_S):
                await twin.ended.wait()
            if not twin.ended.is_set():
                self.oracles.fail("HARD-10", f"{twin} runs beside another {name}")
                await twin.bury()

    # -- the end ------------------------------------------------------------------------------

    def _answered(self, *, received: bool) -> set[str]:
        """Episodes whose `/run` was answered, to somebody who has heard of it, or has not."""
        return {
            str(e.key)
            for e in self.around.network.exchanges
            if e.path == "/run" and e.replied_at is not None and e.received is received
        }

    async def _audit(self) -> None:
        """Wait until every lease is over, and ask the servers what is left."""
        for name in ("trainer2", "stale"):
            self.processes.kill(name)
        await trio.sleep(self.plan.lease_grace_s + CHECKPOINT_TIMEOUT_S + 35.0)

        async def main(process: Process) -> None:
            deployment = make_deployment(recover=False)
            port = self.around.network.port(process)
            client = ServerClient(DeploymentDirectory(deployment), port, deployment.client)
            async with open_coordination(
                list(PARTICIPANTS),
                HttpControlChannel(client, Secret(CONTROL_TOKEN)),
                wall_clock=self.around.wall_clock,
                randomness=self.around.randomness(process),
            ) as controller:
                for server, status in (await controller.status()).items():
                    self.oracles.idle(server, status)

        auditor = await self.processes.start("auditor", main)
        await auditor.ended.wait()
        self.oracles.unanswered()
        continued = sum(extension.continuation is not None for extension, _ in self.engine.begun)
        self.history.sometimes["a cut was continued"] += continued

    def _final_checks(self) -> None:
        for name, error in self.processes.died():
            self.oracles.fail("panic", f"{name}: {error!r}")
        for number in range(self.plan.rollouts):
            rollout = RolloutId(f"r{number}")
            result = self.journal.results.get(rollout)
            if result is None:
                self.oracles.fail("I7", f"{rollout} never finished")
                continue
            self.oracles.result(rollout, result, task_of(rollout))
        self.oracles.tokens(self.around.shelf.records)
        self.checkpoints.at_end(undisturbed=self.plan.undisturbed)


def run(plan: Plan, *, to_first_violation: bool = False) -> Outcome:
    """Run a plan."""
    gc.collect()
    steps = Steps()
    made = World(plan, steps, to_first_violation=to_first_violation)
    with _listening(lambda text: made.oracles.logged(text)):
        run_seeded(plan.seed, made.run, steps)
    return Outcome(
        violations=made.oracles.violations,
        steps=steps.count,
        schedule=steps.checksum,
        history=made.history.checksum(),
        lines=made.history.lines,
        sometimes=made.history.sometimes,
        virtual_s=made.virtual_s,
        results=made.journal.results,
    )


class _Handler(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


@contextmanager
def _listening(tell: Callable[[str], None]) -> Iterator[None]:
    """Hear what owners of participants log, and keep all other logs silent."""
    heard = logging.getLogger(control.__name__)
    silent = [heard, logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    levels = [(logger, logger.level, logger.propagate) for logger in silent]
    handler = _Handler(tell)
    for logger, _, _ in levels:
        logger.setLevel(logging.CRITICAL + 1)
    heard.setLevel(logging.INFO)
    heard.propagate = False
    heard.addHandler(handler)
    try:
        yield
    finally:
        heard.removeHandler(handler)
        for logger, level, propagate in levels:
            logger.setLevel(level)
            logger.propagate = propagate
