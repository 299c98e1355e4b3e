"""Defines the metrics of a shard, under the names that dashboards read (docs/spec/shard.md §14).

Every value of a single label is exported from the start, at 0; combinations of labels once they occur, apart from those
that alerts compare with. No label ever carries a machine id.
"""

from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from bigfleet.engine.decision import ActionKind
from bigfleet.engine.shortfalls import AGE_CLASSES
from bigfleet.exchange.course import ExchangeEnd
from bigfleet.exchange.values import BlockReason, WaitReason
from bigfleet.model.frames import DrainOutcome, UnmetReason
from bigfleet.model.instructions import KIND_LABELS, InstructionOutcome
from bigfleet.model.machine import InvariantFault
from bigfleet.model.ownership import RowKind
from bigfleet.model.penalty import ORDINALS, bucket_label
from bigfleet.model.states import TRANSITIONAL_STATES, CapacityType, MachineState
from bigfleet.shard.inventory.fleet_queries import machines_by_kind
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.inventory.record_checks import LIMITS
from bigfleet.shard.outcomes import REDRIVE_LABEL, ActionOutcome
from bigfleet.shard.sessions.demand import RollUpOutcome

_PREFIX = "bigfleet_shard"
#: Of proposals that are ready, and of those that are not.
EXCHANGE_SAVINGS = ("promised", "waiting", "ended", "realised")
#: See `bigfleet.shard.exchange.forecasts`.
EXCHANGE_FORECASTS = ("not_known", "fits", "would_not_fit")
EXCHANGE_WAITS = ("nothing", *(reason.value for reason in WaitReason))
EXCHANGE_OUTCOMES = ("searched", "unchanged", "failed")
#: Why a row can be short, all that a gauge may say.
UNMET_REASONS = tuple(reason for reason in UnmetReason if reason is not UnmetReason.UNSPECIFIED)
#: 1 ms × 2^0…13.
_BUCKETS_A = tuple(0.001 * 2**n for n in range(14))
#: 10 ms × 2^0…15.
_BUCKETS_B = tuple(0.01 * 2**n for n in range(16))
#: Why a frame of an operator was dropped: of a kind unknown here, or about a machine that is not its cluster's.
DROPPED_FRAME_KINDS = ("unknown", "drain_result", "node_status")
#: What a roll-up is counted as that a newer one of its session replaced unread.
SUPERSEDED = "superseded"
#: Limits under which something is shed: roll-ups that wait because their cluster reported too many rows, or because
#: others are read first; pauses in reading a session; sessions ended before their first frame; sessions of a peer whose
#: frames could not be read; sessions of one cluster more than a shard remembers.
SHED_LIMITS = ("rollup_rows", "reading_turn", "session_bytes", "first_frames", "malformed_frames", "clusters")
#: 10 ms × 2^0…19.
_BUCKETS_C = tuple(0.01 * 2**n for n in range(20))
#: 2 ms × 2^0…12; each bucket of the phases is seven series.
_BUCKETS_D = tuple(0.002 * 2**n for n in range(13))
#: 10 ms × 2^0…14: no call of a provider takes longer, and each method and code has series for each bucket.
_BUCKETS_E = tuple(0.01 * 2**n for n in range(15))
#: Settings of the cluster policy that limit demand.
DEMAND_LIMITS = ("priority", "penalty", "rows", "machines", "dollars")
#: `snapread` ends when the demand is folded, `phase1` to `phase3` are those of the engine.
PHASES = ("reconcile", "snapread", "phase1", "phase2", "phase3", "emit", "execute")
#: How a report can end; `redirected` counts each time that a follower named the leader.
REPORT_OUTCOMES = ("ok", "redirected", "error", "stale_term", "rejected")
#: What a coordinator can instruct, and what this version does not know.
INSTRUCTION_KINDS = (*KIND_LABELS.values(), "unknown")


class _Makers(NamedTuple):
    """Make metrics of one registry, under the prefix of the shard."""

    counter: Callable[..., Counter]
    gauge: Callable[..., Gauge]
    histogram: Callable[..., Histogram]


def _makers(registry: CollectorRegistry) -> _Makers:
    def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, tuple(labels), registry=registry)

    def gauge(name: str, text: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(f"{_PREFIX}_{name}", text, tuple(labels), registry=registry)

    def histogram(name: str, text: str, buckets: tuple[float, ...], labels: Iterable[str] = ()) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}", text, tuple(labels), buckets=buckets, registry=registry)

    return _Makers(counter, gauge, histogram)


class ShardMetrics:
    """Counters and gauges of one shard process, on the registry that is handed in."""

    def __init__(self, registry: CollectorRegistry, inventory: Inventory) -> None:
        counter, gauge, histogram = _makers(registry)
        self.cycle_duration = histogram("cycle_duration_seconds", "One cycle", _BUCKETS_A)
        self.cycle_phase = histogram("cycle_phase_duration_seconds", "One phase of a cycle", _BUCKETS_D, ["phase"])
        self.cycle_failures = counter("cycle_failures_total", "Cycles that ended in an error")
        self.cycle_last_success = gauge("cycle_last_success_timestamp_seconds", "When a cycle last finished")
        self.engine_divergences = counter(
            "engine_divergences_total", "Decisions that failed, or that a full pass found to be another answer"
        )
        self.plans = counter("plans_total", "Target compositions that were asked for", ["outcome"])
        self.clusters_awaiting_plan = gauge(
            "clusters_awaiting_plan", "Clusters that take no new machines until their target composition is there"
        )
        self.reconciles = counter("reconcile_total", "Reconciles", ["mode", "outcome"])
        self.observed_jumps = counter("observed_jumps_total", "Observed transitions outside the table", ["from", "to"])
        self.binding_conflicts = counter("binding_conflicts_total", "Machines that the provider had bound otherwise")
        self.metadata_errors = counter("metadata_decode_errors_total", "Metadata keys that could not be read")
        self.removals_braked = gauge("removals_braked", "Machines whose removal, or loss of binding, is held back")
        self.bindings_lost = gauge("bindings_lost", "Machines held because they lost their binding without a drain")
        self.machines_rejected = counter("machines_rejected_total", "Provider records refused", ["reason"])
        self.machines_held = gauge("machines_held", "Machines that this shard set to Failed")
        self.demand_rows = gauge("demand_rows", "Rows of demand in force")
        self.demand_machines = gauge(
            "demand_machines", "Machines that rows hold, and those that they lack", ["interruption_penalty_bucket"]
        )
        self.shortfalls = gauge("shortfalls", "Entries of the shortfall ledger")
        self.shortfalls_aged = gauge("shortfalls_aged", "Entries of the shortfall ledger by age in cycles", ["bucket"])
        self.shortfall_rows = gauge("shortfall_rows", "Reported rows that are a shortfall", ["reason", "class"])
        self.machines_unjoined = gauge("machines_unjoined", "Configured machines whose node never became Ready")
        self.clusters_silent = gauge("clusters_silent", "Clusters that have been without a session for too long")
        self.retired_clusters = gauge("retired_clusters", "Clusters that are retired")
        self.retired_cluster_machines = gauge("retired_cluster_machines", "Machines of retired clusters that are left")
        self.rollups = counter("rollups_total", "Roll-ups received", ["result"])
        self.rollups_rejected = counter("rollups_rejected_total", "Roll-ups refused as malformed", ["cluster"])
        self.shed = counter(
            "shed_total", "Roll-ups, frames and sessions that waited or were refused under a limit", ["limit"]
        )
        self.rollup_quarantined = gauge("rollup_quarantined", "1 while the cluster's roll-up is held", ["cluster"])
        self.active_sessions = gauge("active_sessions", "Connected operators")
        self.session_lifecycle = counter("session_lifecycle_total", "Sessions that came and went", ["event"])
        self.session_identity_rejected = counter("session_identity_rejected_total", "Sessions refused for who they are")
        self.session_frames_dropped = counter(
            "session_frames_dropped_total", "Operators' frames that concerned no machine of the cluster", ["kind"]
        )
        self.outbox_frames = gauge("outbox_frames", "Frames that wait for one operator, the most of any")
        self.outbox_dropped = counter("outbox_dropped_total", "Frames dropped for lack of room")
        self.provider_rpc = histogram("provider_rpc_seconds", "Provider calls", _BUCKETS_E, ["method", "code"])
        self.cluster_policy_reads = counter("cluster_policy_reads_total", "Reads of --cluster-policy", ["result"])
        self.demand_limited_rows = gauge(
            "demand_limited_rows", "Rows that the cluster policy changed, cut or left out", ["limit"]
        )
        self.insecure = gauge("insecure", "1 while other hosts can call this process without TLS")
        self.epoch = gauge("epoch", "The epoch of this process")
        self._count_actions(registry)
        self._count_exchanges(registry)
        self._count_ownership(registry)
        registry.register(_InventoryCollector(inventory))
        self._export_zeros()

    def _count_actions(self, registry: CollectorRegistry) -> None:
        """Make the metrics of actions, from the decision to their end."""
        counter, gauge, histogram = _makers(registry)
        self.actions = counter("actions_total", "Actions enqueued for execution", ["kind"])
        self.outcomes = counter("action_execute_outcomes_total", "How actions ended", ["kind", "outcome"])
        self.actions_deferred = counter("actions_deferred_total", "Actions put off by the action limit")
        self.actions_dropped = counter("actions_dropped_total", "Actions dropped because the queue was full")
        self.actions_deduped = counter("actions_deduped_total", "Actions already in flight or moot")
        self.actions_refused = counter(
            "actions_refused_total", "Actions of rows in back-off, and preemptions of rows that are held"
        )
        self.actions_limited = counter("actions_limited_total", "Actions refused by limits of the cluster policy")
        self.actions_suppressed = counter("actions_suppressed_total", "Actions suppressed by the pause", ["kind"])
        self.actions_dry_run = counter("actions_dryrun_total", "Actions reported by a dry run", ["kind"])
        self.actuation_paused = gauge("actuation_paused", "1 while actuation is paused")
        self.queue_depth = gauge("action_queue_depth", "Actions that wait for a worker")
        self.inflight = gauge("execute_inflight", "Actions that hold a worker slot")
        self.waiting = gauge("execute_waiting", "Actions that wait for an operator", ["for"])
        self.stockouts = counter("stockouts_total", "Back-offs of capacity pools that were out of stock")
        text = "Capacity pools that clusters leave alone because bootstraps failed, summed over clusters"
        self.pools_withheld = gauge("capacity_pools_withheld", text)
        self.pools_sold_out = gauge("capacity_pools_sold_out", "Capacity pools that are out of stock")
        self.machines_set_aside = gauge(
            "machines_set_aside", "Machines that are not bound for now because repeated Configures left them Idle"
        )
        self.preemptions_vain = counter("preemptions_vain_total", "Rounds of preemption whose machines went elsewhere")
        self.preemption_held_rows = gauge("preemption_held_rows", "Rows that preempt nothing for now, safety limit 7")
        self.reclaims_capped = counter("reclaims_capped_total", "Reclaims dropped by the cap")
        self.reclaim_waiting_for_replacement_machines = gauge(
            "reclaim_waiting_for_replacement_machines",
            "Excess machines that serve until machines that are being created or bound do",
        )
        self.reclaim_delayed_machines = gauge(
            "reclaim_delayed_machines", "Excess machines that wait for the end of the reclaim delay"
        )
        self.reclaim_held_machines = gauge(
            "reclaim_held_machines", "Machines that are not reclaimed because their pods would not fit on other nodes"
        )
        self.reclaim_after = gauge("reclaim_after_seconds", "How long a machine is excess before it is reclaimed")
        self.idle_releases = counter("idle_releases_total", "Machines that reached Speculative")
        self.phase_seconds = {
            MachineState.CONFIGURING: histogram("configure_phase_seconds", "Configuring to Configured", _BUCKETS_B),
            MachineState.DRAINING: histogram("drain_phase_seconds", "Draining to Idle", _BUCKETS_B),
            MachineState.CREATING: histogram("create_phase_seconds", "Creating to Idle", _BUCKETS_B),
        }
        self.provisioning_latency = histogram(
            "provisioning_latency_seconds", "From a need's first sight to a machine that serves it", _BUCKETS_C
        )
        self.request_bootstrap = histogram("request_bootstrap_seconds", "Round trip of a bootstrap request", _BUCKETS_B)
        self.drains_without_session = counter("drains_without_session_total", "Drains without an operator to ask")
        self.drain_results = counter("drain_results_total", "Results of drains", ["outcome"])
        self.redrives = counter("redrives_total", "Transitions that did not end and were driven again", ["kind"])
        self.machines_stuck = gauge("machines_stuck", "Machines whose transition does not end", ["state"])
        self.audit_write_errors = counter("audit_write_errors_total", "Audit records that could not be written")
        self.fenced = counter("fenced_total", "Calls refused because a newer process of this shard exists")

    def _count_exchanges(self, registry: CollectorRegistry) -> None:
        """Make the metrics of exchanges of machines for cheaper ones."""
        counter, gauge, _histogram = _makers(registry)
        self.exchange_saving = gauge("exchange_saving_usd_per_hour", "What exchanges save, dollars an hour", ["saving"])
        self.exchange_proposals = gauge("exchange_proposals", "Proposed exchanges", ["waits_for"])
        self.exchange_blocked = gauge(
            "exchange_blocked_clusters", "Clusters of which nothing is exchanged for now", ["reason"]
        )
        self.exchange_searches = counter("exchange_searches_total", "Clusters looked at for exchanges", ["outcome"])
        self.exchange_forecasts = counter(
            "exchange_forecasts_total", "Answers of operators about exchanges that may begin", ["outcome"]
        )
        self.exchanges_under_way = gauge("exchanges_under_way", "Exchanges that are carried out")
        self.exchanges_ended = counter("exchanges_ended_total", "Exchanges that ended", ["end"])
        for saving in EXCHANGE_SAVINGS:
            self.exchange_saving.labels(saving)
        for waits_for in EXCHANGE_WAITS:
            self.exchange_proposals.labels(waits_for)
        for reason in BlockReason:
            self.exchange_blocked.labels(reason.value)
        for end in ExchangeEnd:
            self.exchanges_ended.labels(end.value)
        for forecast in EXCHANGE_FORECASTS:
            self.exchange_forecasts.labels(forecast)
        for outcome in EXCHANGE_OUTCOMES:
            self.exchange_searches.labels(outcome)

    def _count_ownership(self, registry: CollectorRegistry) -> None:
        """Make the metrics of the coordinator, and of machines that went from shard to shard."""
        counter, gauge, _histogram = _makers(registry)
        self.machines_reserved = gauge("machines_reserved", "Machines that are reserved for other shards")
        self.ownership_machines = gauge(
            "ownership_machines", "Machines that moved, and those shown that are another shard's", ["relation"]
        )
        self.reports = counter("reports_total", "Reports to the coordinator", ["outcome"])
        self.report_last_success = gauge(
            "report_last_success_timestamp_seconds", "When a leader last acknowledged a report"
        )
        self.instructions = counter("instructions_total", "Instructions of a coordinator", ["kind", "outcome"])
        for relation in (*(kind.value for kind in RowKind), "foreign"):
            self.ownership_machines.labels(relation)
        for outcome in REPORT_OUTCOMES:
            self.reports.labels(outcome)
        for kind in INSTRUCTION_KINDS:
            # An alert asks for its increase, which begins with a zero.
            self.instructions.labels(kind, InstructionOutcome.FAILED.value)

    def _export_zeros(self) -> None:
        for phase in PHASES:
            self.cycle_phase.labels(phase)
        for mode in ("full", "delta"):
            for outcome in ("ok", "error", "braked"):
                self.reconciles.labels(mode, outcome)
        for limit in DEMAND_LIMITS:
            self.demand_limited_rows.labels(limit)
        for read in ("ok", "refused"):
            self.cluster_policy_reads.labels(read)
        for outcome in ("made", "too_large", "failed", "tightened", "not_tightened"):
            self.plans.labels(outcome)
        for kind in ActionKind:
            self.actions.labels(kind.label)
            self.redrives.labels(kind.label)
        for label in (*(kind.label for kind in ActionKind), REDRIVE_LABEL):
            self.actions_suppressed.labels(label)
            self.actions_dry_run.labels(label)
            # An alert compares failures with successes, also if there is none.
            self.outcomes.labels(label, ActionOutcome.SUCCESS.value)
        for state in sorted(TRANSITIONAL_STATES):
            self.machines_stuck.labels(state.label)
        for ordinal in ORDINALS:
            self.demand_machines.labels(bucket_label(ordinal))
        for age in AGE_CLASSES:
            self.shortfalls_aged.labels(age)
        for result in (*(outcome.value for outcome in RollUpOutcome), SUPERSEDED):
            self.rollups.labels(result)
        for ended in DrainOutcome:
            self.drain_results.labels(ended.name.lower())
        for reason in (*(fault.value for fault in InvariantFault), LIMITS):
            self.machines_rejected.labels(reason)
        for event in ("installed", "removed", "replaced", "overflowed", "unresponsive"):
            self.session_lifecycle.labels(event)
        for frame_kind in DROPPED_FRAME_KINDS:
            self.session_frames_dropped.labels(frame_kind)
        for shed_limit in SHED_LIMITS:
            self.shed.labels(shed_limit)
        for waited_for in ("blob", "drain"):
            self.waiting.labels(waited_for)


class _InventoryCollector(Collector):
    """Counts machines at each scrape, instead of at every transition."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return `inventory_machines`, every combination of state and known capacity type included."""
        family = GaugeMetricFamily(
            f"{_PREFIX}_inventory_machines",
            "Machines known",
            labels=["state", "capacity_type", "interruption_penalty_bucket"],
        )
        counts: dict[tuple[str, str, str], int] = {}
        for state, capacity_type in product(MachineState, CapacityType):
            if state and capacity_type:
                counts[(state.label, capacity_type.label, bucket_label(ORDINALS[0]))] = 0
        # Scrapes are rendered in another thread: only what is immutable may be read here, as of the last cycle.
        for kind, number in machines_by_kind(self._inventory.latest_snapshot).items():
            state, capacity_type, bucket = kind
            counts[(state.label, capacity_type.label, bucket_label(bucket))] = number
        for labels, number in counts.items():
            family.add_metric(labels, number)
        yield family
