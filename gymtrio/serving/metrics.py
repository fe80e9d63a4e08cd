"""What a server tells Prometheus about itself (SRV-6).

Every server has a registry of its own: two in one process share nothing. What can be looked at (phase,
blockers, what waits) is looked at when somebody asks; what is over when somebody asks (requests,
operations) is counted here. Every label has a bounded set of values that the code or the deployment
fixes: no id, no path that a caller chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gymtrio.checkpoint.control import Control
from gymtrio.episodes.admission import Admission
from gymtrio.participants.policy.participant import NOT_CONTINUED_FIELD
from gymtrio.serving.client import Lane
from gymtrio.serving.pool import PoolStatistics
from gymtrio.wire.control import CONTROL_PREFIX, REQUESTS, Phase

HEALTH_PATH: Final = "/health"
READY_PATH: Final = "/ready"
METRICS_PATH: Final = "/metrics"
OWN_PATHS: Final = frozenset({HEALTH_PATH, READY_PATH, METRICS_PATH})
"""What every server serves, without a token."""

FALLBACK_ROUTE: Final = "fallback"
FRAMEWORK_ROUTE: Final = "framework"
NO_ROUTE: Final = "none"
"""Labels of routes whose paths a caller can choose."""

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

OPERATION_BUCKETS_S: Final = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""From an idle server's prepare to one that waits for a long tool call."""

_CUTS: Final = {"cut": "cut", "cut_failed": "failed", "cut_skipped": "skipped"}
"""Counts of a policy's report, and the outcomes that they are of."""


class CheckpointMetrics(Collector):
    """The metrics of one control plane, in whichever process it is."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._cuts = dict.fromkeys(_CUTS.values(), 0)
        self._cuts_of: str | None = None
        """The checkpoint whose cuts were counted last."""

    def committed(self) -> None:
        """Count the cuts of a commit, once per checkpoint, however often it is repeated."""
        now = self._control.status()
        if now.checkpoint_id is not None and now.checkpoint_id != self._cuts_of:
            self._cuts_of = now.checkpoint_id
            for name, outcome in _CUTS.items():
                self._cuts[outcome] += now.report.counts.get(name, 0)

    def render(self) -> bytes:
        """These alone, in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        status = self._control.status()
        phases = GaugeMetricFamily(
            "gymtrio_checkpoint_phase", "1 for the phase that it is in.", labels=["phase"]
        )
        for phase in Phase:
            phases.add_metric([phase.value], float(status.phase == phase.value))
        yield phases
        yield GaugeMetricFamily(
            "gymtrio_checkpoint_awaiting_restore",
            "1 while it was started to be restored and is not.",
            float(status.awaiting_restore),
        )
        yield GaugeMetricFamily(
            "gymtrio_checkpoint_blockers",
            "What is not at a safe point.",
            status.report.blocker_count,
        )
        yield GaugeMetricFamily(
            "gymtrio_retired_rollouts", "Rollouts with a fence.", status.retired_rollouts
        )
        kept = GaugeMetricFamily(
            "gymtrio_participant_objects",
            "What the participant has, by what it is: sessions, held replies and the like.",
            labels=["what"],
        )
        for what, count in sorted(status.report.counts.items()):
            kept.add_metric([what], count)
        yield kept
        cuts = CounterMetricFamily(
            "gymtrio_generation_cuts", "Generations at committed checkpoints.", labels=["outcome"]
        )
        for outcome, count in self._cuts.items():
            cuts.add_metric([outcome], count)
        yield cuts
        told = status.extra.get(NOT_CONTINUED_FIELD)
        if isinstance(told, dict):
            not_continued = CounterMetricFamily(
                "gymtrio_generation_cuts_not_continued",
                "Calls generated from their beginning although their episode had a restored cut.",
                labels=["reason"],
            )
            for reason, count in told.items():
                not_continued.add_metric([reason], count)
            yield not_continued


class ServerMetrics(Collector):
    """The metrics of one running server.

    Args:
        kind, instance: who it is.
        control, admission: of its participant; None: checkpointing is off.
        pool: what it holds; None: outgoing calls go another way.
        in_work: requests that handlers work on.
    """

    def __init__(
        self,
        *,
        kind: str,
        instance: str,
        control: Control | None = None,
        admission: Admission | None = None,
        pool: Callable[[Lane], PoolStatistics] | None = None,
        in_work: Sized = (),
    ) -> None:
        self._who = (kind, instance)
        self._checkpoint = None if control is None else CheckpointMetrics(control)
        self._admission = admission
        self._pool = pool
        self._in_work = in_work
        self._requests: dict[tuple[str, int], int] = {}
        """Since the start, by route and status."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._operations = Histogram(
            "gymtrio_checkpoint_operation_duration_seconds",
            "Control calls, from request to reply.",
            ["operation", "status"],
            buckets=OPERATION_BUCKETS_S,
            registry=self._registry,
        )

    # -- counting -----------------------------------------------------------------------------

    def request_ended(self, route: str, status: int) -> None:
        """Count an answered request.

        Args:
            route: one of the server's own routes, or what sort of route it was.
            status: as it was sent; 0: the caller left before.
        """
        counted = route, status
        self._requests[counted] = self._requests.get(counted, 0) + 1

    def _operation_ended(self, operation: str, status: int, took_s: float) -> None:
        known = operation if operation in REQUESTS or operation == "status" else "unknown"
        self._operations.labels(known, str(status)).observe(took_s)
        if self._checkpoint is not None and (known, status) == ("commit", 200):
            self._checkpoint.committed()

    def framework_ended(self, path: str, status: int, took_s: float) -> None:
        """Count a request that the framework served."""
        if path.startswith(f"{CONTROL_PREFIX}/"):
            self.request_ended("control", status)
            self._operation_ended(path.removeprefix(f"{CONTROL_PREFIX}/"), status, took_s)
        else:
            self.request_ended(path if path in OWN_PATHS else FRAMEWORK_ROUTE, status)

    # -- telling ------------------------------------------------------------------------------

    def render(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        kind, instance = self._who
        server = GaugeMetricFamily("gymtrio_server", "Who answers.", labels=["kind", "instance"])
        server.add_metric([kind, instance], 1)
        yield server
        yield GaugeMetricFamily(
            "gymtrio_requests_running", "Requests in work or parked.", len(self._in_work)
        )
        requests = CounterMetricFamily(
            "gymtrio_requests",
            "Requests answered; status 0: the caller left.",
            labels=["route", "status"],
        )
        for (route, status), count in sorted(self._requests.items()):
            requests.add_metric([route, str(status)], count)
        yield requests
        if self._pool is not None:
            yield from _pool(self._pool)
        if self._checkpoint is not None:
            yield from self._checkpoint.collect()
        if self._admission is not None:
            yield GaugeMetricFamily(
                "gymtrio_gate_waiting_requests",
                "Requests parked at the gate.",
                self._admission.waiting,
            )


def _pool(pool: Callable[[Lane], PoolStatistics]) -> Iterator[Metric]:
    calls = GaugeMetricFamily(
        "gymtrio_pool_calls", "Outgoing calls and connections.", labels=["lane", "state"]
    )
    waits = CounterMetricFamily(
        "gymtrio_pool_waits", "Outgoing calls that waited for a connection.", labels=["lane"]
    )
    waited = CounterMetricFamily(
        "gymtrio_pool_wait_seconds", "How long they waited.", labels=["lane"]
    )
    for lane in Lane:
        now = pool(lane)
        calls.add_metric([lane.value, "active"], now.active)
        calls.add_metric([lane.value, "waiting"], now.waiting)
        calls.add_metric([lane.value, "idle"], now.idle)
        waits.add_metric([lane.value], now.waits)
        waited.add_metric([lane.value], now.waited_s)
    yield from (calls, waits, waited)
