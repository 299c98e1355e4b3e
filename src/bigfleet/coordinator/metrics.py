"""Exports the metrics of a coordinator's replica to Prometheus (docs/spec/coordinator.md §11).

Counters and histograms are stored here, every label from the start; gauges are computed from immutable values at each
scrape. This module does not decide anything.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bigfleet.coordinator.delivery import InstructionEntry, State
from bigfleet.coordinator.transfers import RebalancePlan, Skip, Tier, Transfer
from bigfleet.model.instructions import KIND_LABELS, Instruction
from bigfleet.model.ownership import OwnershipVersion

_PREFIX = "bigfleet_coordinator"
#: Histogram A of docs/spec/shard.md §14: 1 ms × 2^0…13.
_BUCKETS_A = tuple(0.001 * 2**n for n in range(14))
KINDS = tuple(KIND_LABELS.values())
REPORT_OUTCOMES = ("ok", "out_of_order", "superseded", "refused")
STORE_OPERATIONS = ("load", "commit", "is_leader", "raise_term")


def kind_of(instruction: Instruction) -> str:
    """Return the label of an instruction's kind."""
    assert instruction.payload is not None, "a coordinator makes no instruction of an unknown kind"
    return KIND_LABELS[type(instruction.payload)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the gauges show; a replica that does not lead shows zeros."""

    is_leader: bool = False
    term: int = 0
    shards: int = 0
    shards_alive: int = 0
    clusters: int = 0
    cluster_conflicts: int = 0
    domains: int = 0
    domains_releasing: int = 0
    ownership_overlap: int = 0
    machines_unadopted: int = 0
    oldest_unadopted_seconds: float = 0.0
    #: By registered shard.
    pending: Mapping[str, int] = field(default_factory=dict)
    #: By kind, every kind.
    surfaced: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))


_GAUGES: Mapping[str, tuple[str, Callable[[Figures], float]]] = {
    "raft_term": ("The term, 0 while this replica does not lead", lambda f: f.term),
    "leader": ("1 while this replica leads", lambda f: f.is_leader),
    "shards": ("Registered shards", lambda f: f.shards),
    "shards_alive": ("Shards that reported within three report cycles", lambda f: f.shards_alive),
    "clusters": ("Bound clusters", lambda f: f.clusters),
    "cluster_conflicts": ("Clusters that more than one shard serves", lambda f: f.cluster_conflicts),
    "domains": ("Domains that have a shard", lambda f: f.domains),
    "domains_releasing": ("Domains that their shard has yet to leave", lambda f: f.domains_releasing),
    "ownership_overlap": ("Shards excluded from rebalancing as they may own the same", lambda f: f.ownership_overlap),
    "machines_unadopted": ("Machines released and not yet adopted", lambda f: f.machines_unadopted),
    "oldest_unadopted_seconds": ("How long the oldest of those has had no owner", lambda f: f.oldest_unadopted_seconds),
}


class _FiguresCollector(Collector):
    """Asks for the figures at each scrape."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        figures = self._figures()
        for name, (text, value) in _GAUGES.items():
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=float(value(figures)))
        pending = GaugeMetricFamily(
            f"{_PREFIX}_pending_instructions", "Instructions not yet answered", labels=["shard"]
        )
        for shard, count in sorted(figures.pending.items()):
            pending.add_metric([shard], count)
        yield pending
        text = "Instructions that were abandoned or keep failing"
        surfaced = GaugeMetricFamily(f"{_PREFIX}_instructions_surfaced", text, labels=["kind"])
        for kind, count in sorted(figures.surfaced.items()):
            surfaced.add_metric([kind], count)
        yield surfaced


class CoordinatorMetrics:
    """The metrics of one replica, on the registry that is handed in."""

    def __init__(self, registry: CollectorRegistry, figures: Callable[[], Figures] = Figures) -> None:
        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"{_PREFIX}_{name}", text, tuple(labels), registry=registry)

        def histogram(name: str, text: str, labels: Iterable[str] = ()) -> Histogram:
            return Histogram(f"{_PREFIX}_{name}", text, tuple(labels), buckets=_BUCKETS_A, registry=registry)

        self.applied = counter("apply_total", "Writes to the store", ["outcome"])
        self.store_seconds = histogram("store_seconds", "Calls of the store", ["op"])
        self.instructions = counter("instructions_total", "Instructions by how they ended", ["kind", "state"])
        self.reports = counter("reports_total", "Reports of shards", ["outcome"])
        self.term_raised = counter("term_raised_total", "Terms raised above one that a shard had seen")
        self.pass_seconds = histogram("rebalance_pass_seconds", "One rebalancing pass")
        self.moves = counter("rebalance_moves_total", "Instructions to donors", ["tier"])
        self.machines = counter("rebalance_machines_total", "Machines that those are about", ["tier"])
        self.skipped = counter("rebalance_skipped_total", "Shortfalls that a pass gave nothing, by reason", ["reason"])
        self.snapshot_last_success = Gauge(
            f"{_PREFIX}_snapshot_last_success_timestamp_seconds", "When the last export ended well", registry=registry
        )
        self.insecure = Gauge(
            f"{_PREFIX}_insecure", "1 while other hosts can call this process without TLS", registry=registry
        )
        registry.register(_FiguresCollector(figures))
        #: Final entries that were counted and are still listed.
        self._counted: set[tuple[str, OwnershipVersion]] = set()
        self._export_zeros()

    def _export_zeros(self) -> None:
        """Show every series of a closed set from the start, so that a first event is a rise."""
        for outcome in ("success", "error", "fsm_error"):
            self.applied.labels(outcome)
        for operation in STORE_OPERATIONS:
            self.store_seconds.labels(operation)
        for kind in KINDS:
            for state in State:
                if state.is_final:
                    self.instructions.labels(kind, state.value)
        for outcome in REPORT_OUTCOMES:
            self.reports.labels(outcome)
        for tier in Tier:
            self.moves.labels(tier.value)
            self.machines.labels(tier.value)
        for reason in Skip:
            self.skipped.labels(reason.label)

    def report(self, outcome: str) -> None:
        """Count a report."""
        self.reports.labels(outcome).inc()

    def ended(self, entries: Iterable[InstructionEntry]) -> None:
        """Count each final entry of a ledger once; what is listed no more is forgotten."""
        final = {(entry.to, entry.instruction.version): entry for entry in entries if entry.state.is_final}
        for key in final.keys() - self._counted:
            entry = final[key]
            self.instructions.labels(kind_of(entry.instruction), entry.state.value).inc()
        self._counted = set(final)

    def passed(self, plan: RebalancePlan, seconds: float) -> None:
        """Count a pass, and the shortfalls that it gave nothing."""
        self.pass_seconds.observe(seconds)
        for reason, count in plan.skips().items():
            self.skipped.labels(reason.label).inc(count)

    def moved(self, moves: Iterable[Transfer]) -> None:
        """Count what was enqueued."""
        for move in moves:
            self.moves.labels(move.tier.value).inc()
            self.machines.labels(move.tier.value).inc(move.count)
