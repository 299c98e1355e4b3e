"""Defines the metrics of an operator, under the names that dashboards read (docs/spec/operator.md §13).

Every label value of a bounded set is exported from the start, at 0. Gauges of what the agent knows are set from the
event loop each second, because scrapes are rendered in another thread. No label ever carries the name of an object.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from bigfleet.model.frames import ECHO_ROLLUP_REJECTED, Acknowledgement, DrainOutcome, RollUp
from bigfleet.operator.nodes.evictions import EvictionAnswer
from bigfleet.operator.ports import EndKind, SessionEnded

PREFIX: Final = "bigfleet_operator"
#: 1 ms × 2^0…15.
_BUCKETS_D: Final = tuple(0.001 * 2**n for n in range(16))
#: 10 ms × 2^0…15.
_BUCKETS_B: Final = tuple(0.01 * 2**n for n in range(16))
UPCOMING_PHASES: Final = ("Provisioning", "Launched", "Registered", "Ready", "Draining", "Drained", "Failed")
_WRITES: Final = ("create", "spec_update", "status_update", "delete")
_OUTCOMES: Final = ("success", "conflict", "error")
_CONDITIONS: Final = ("Phase", "Accepted", "Satisfied", "Shortfall")
_DRAIN_ENDS: Final = (
    *(outcome.name.lower() for outcome in DrainOutcome if outcome is not DrainOutcome.UNSPECIFIED),
    "withdrawn",
    "forced",
)
_BOOTSTRAP_OUTCOMES: Final = ("ok", "template_error", "token_error")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFigures:
    """What a leader knows at one moment. Totals count from the start of the process."""

    requests: int
    acknowledged: int
    invalid: int
    is_connected: bool
    frames_dropped_total: int
    bootstraps_dropped_total: int
    rollups_replaced_total: int
    recount_mismatches_total: int
    template_reload_errors_total: int
    #: UpcomingNodes by phase; phases without any may be absent.
    upcoming_phases: Mapping[str, int]
    available_capacities: int
    drains_running: int
    #: Writes of UpcomingNodes, AvailableCapacities and ties that wait or are under way.
    dispatch_inflight: int
    #: Machines that have been Configured for more than five minutes without a Node.
    nodes_unmatched: int


class OperatorMetrics:
    """The metrics of one operator process; listens to the parts of its agent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, **labels: tuple[str, ...]) -> Counter:
            made = Counter(f"{PREFIX}_{name}", text, tuple(labels), registry=registry)
            if len(labels) == 1:
                for value in next(iter(labels.values())):
                    made.labels(value)
            elif labels:
                first, second = labels.values()
                for one in first:
                    for other in second:
                        made.labels(one, other)
            return made

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", text, buckets=buckets, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", text, labels, registry=registry)

        self.leader = gauge("leader", "1 in the process that leads")
        self.rights_missing = gauge("rights_missing", "Rights that the process lacks, as last reviewed")
        self.rollup_duration = histogram("rollup_duration_seconds", "Time to build a roll-up", _BUCKETS_D)
        self._rollup_rows = gauge("rollup_rows", "Rows of the last roll-up")
        self._rollups = counter(
            "rollups_total", "Roll-ups by what became of them", result=("sent", "skipped_unsynced", "replaced")
        )
        self._acks = counter(
            "rollup_acks_total", "Answers of the shard to roll-ups", result=("accepted", "held", "rejected")
        )
        self._acknowledge = histogram(
            "acknowledge_duration_seconds", "From first sight of a generation until it is Acknowledged", _BUCKETS_B
        )
        self._acknowledged = counter("acknowledged_total", "CapacityRequests that became Acknowledged")
        self._condition_writes = counter(
            "condition_writes_total", "Writes of CapacityRequest status", type=_CONDITIONS, outcome=_OUTCOMES
        )
        self._reconnects = counter("session_reconnects_total", "Sessions that ended")
        self._replaced = counter("session_replaced_total", "Sessions that another operator of this cluster took over")
        self._upcoming_writes = counter(
            "upcoming_node_writes_total", "Writes of UpcomingNodes", op=_WRITES, outcome=_OUTCOMES
        )
        self._bootstraps = counter(
            "bootstrap_requests_total", "Bootstrap requests by outcome", outcome=(*_BOOTSTRAP_OUTCOMES, "dropped")
        )
        self._bootstrap_seconds = histogram("bootstrap_seconds", "Time to answer a bootstrap request", _BUCKETS_B)
        self._template_errors = counter("template_reload_errors_total", "Versions of the template not taken into use")
        self._drains = counter("drains_total", "Drains that ended, by outcome", outcome=_DRAIN_ENDS)
        self._drain_seconds = histogram("drain_seconds", "Time from the start of a drain to its end", _BUCKETS_B)
        self._evictions = counter(
            "evictions_total", "Evictions by answer", result=tuple(answer.value for answer in EvictionAnswer)
        )
        self._mismatches = counter("rollup_recount_mismatches_total", "Recounts that differed from the running sums")
        self._dropped = counter(
            "outbox_dropped_total", "Frames to the shard that were dropped because a queue was full"
        )
        self._requests = gauge("capacity_requests", "CapacityRequests by state", "state")
        self._connected = gauge("session_connected", "1 while the shard has answered this session's Hello")
        self._upcoming = gauge("upcoming_nodes", "UpcomingNodes by phase", "phase")
        self._hints = gauge("available_capacities", "AvailableCapacity objects")
        self._inflight = gauge("dispatch_inflight", "Writes of nodes and hints that wait or are under way")
        self._drains_inflight = gauge("drains_inflight", "Drains that have no result yet")
        self._unmatched = gauge("nodes_unmatched", "Machines Configured for more than five minutes without a Node")
        self._former: AgentFigures | None = None

    def sample(self, figures: AgentFigures) -> None:
        """Set the gauges, and add to the counters what has been counted since the last sample."""
        former, self._former = self._former, figures
        for name, counter in (
            ("recount_mismatches_total", self._mismatches),
            ("template_reload_errors_total", self._template_errors),
            ("frames_dropped_total", self._dropped),
            ("bootstraps_dropped_total", self._bootstraps.labels("dropped")),
            ("rollups_replaced_total", self._rollups.labels("replaced")),
        ):
            counter.inc(getattr(figures, name) - (getattr(former, name) if former is not None else 0))
        pending = figures.requests - figures.acknowledged - figures.invalid
        for state, number in (
            ("pending", pending),
            ("acknowledged", figures.acknowledged),
            ("invalid", figures.invalid),
        ):
            self._requests.labels(state).set(number)
        self._connected.set(figures.is_connected)
        for phase in UPCOMING_PHASES:
            self._upcoming.labels(phase).set(figures.upcoming_phases.get(phase, 0))
        self._hints.set(figures.available_capacities)
        self._inflight.set(figures.dispatch_inflight)
        self._drains_inflight.set(figures.drains_running)
        self._unmatched.set(figures.nodes_unmatched)

    # ---- roll-ups and session -----------------------------------------------------------------------------------

    def rolled_up(self, roll_up: RollUp | None) -> None:
        """Count a roll-up that was built, None for one that was not."""
        self._rollups.labels("skipped_unsynced" if roll_up is None else "sent").inc()
        if roll_up is not None:
            self._rollup_rows.set(len(roll_up.needs))

    def acknowledged(self, ack: Acknowledgement) -> None:
        """Count the shard's answer to a roll-up."""
        rejected = ack.echo == ECHO_ROLLUP_REJECTED
        self._acks.labels("rejected" if rejected else "held" if ack.held else "accepted").inc()

    def session_closed(self, ended: SessionEnded) -> None:
        """Count the end of a session, or of an attempt."""
        self._reconnects.inc()
        if ended.kind is EndKind.REPLACED:
            self._replaced.inc()

    # ---- objects ------------------------------------------------------------------------------------------------

    def phase_written(self, phase: str, seconds: float) -> None:
        """Count a phase that was written, and how long ago the generation was first seen."""
        if phase == "Acknowledged":
            self._acknowledged.inc()
            self._acknowledge.observe(seconds)

    def write_ended(self, written: str, outcome: str) -> None:
        """Count the write of a phase or condition."""
        self._condition_writes.labels(written, outcome).inc()

    def upcoming_node_written(self, operation: str, outcome: str) -> None:
        """Count the write of an UpcomingNode."""
        self._upcoming_writes.labels(operation, outcome).inc()

    # ---- bootstrap and drains -----------------------------------------------------------------------------------

    def on_bootstrap(self, outcome: str, seconds: float) -> None:
        """Count an answer to a bootstrap request."""
        self._bootstraps.labels(outcome).inc()
        self._bootstrap_seconds.observe(seconds)

    def drain_ended(self, outcome: str, seconds: float) -> None:
        """Count a drain that ended."""
        self._drains.labels(outcome).inc()
        self._drain_seconds.observe(seconds)

    def eviction(self, answer: EvictionAnswer) -> None:
        """Count the answer to an eviction."""
        self._evictions.labels(answer.value).inc()
