"""Publishes the effects of a cycle: hints, need statuses, gauges, stale clusters, missing joins.

docs/spec/shard.md §10.5 to §10.7, §11.2, §14. Work that grows with the fleet or with the short rows is computed off the
loop in `effects_of`; the loop only sends the results. This module does not change a decision, except that the machines
of the join gate are passed to the next one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.sold_out import sold_out_rows
from bigfleet.engine.decision import Action, ActionKind, Decision, RowResult
from bigfleet.engine.shortfalls import AGE_CLASSES, Ledger, age_class
from bigfleet.model.clock import Clock
from bigfleet.model.frames import CAPABILITY_NEED_STATUS, CAPABILITY_NODE_STATUS, NeedStatusUpdate, UnmetReason
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need, RowKey
from bigfleet.model.penalty import ORDINALS, bucket_label
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.inventory.machine_record import NumberedBinding, Picked
from bigfleet.shard.inventory.machine_shapes import FleetClasses, MachineRows, live_prices
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.sessions.node_joins import NodeJoins
from bigfleet.shard.sessions.registry import Session, Sessions
from bigfleet.shard.sessions.stale_clusters import StaleClusters
from bigfleet.shard.status.capacity_hints import CapacityHints, HintKey, HintOffers
from bigfleet.shard.status.latency import PhaseTimes, ProvisioningLatency
from bigfleet.shard.status.limit_status import LimitedDemand
from bigfleet.shard.status.need_status import (
    NeedStatusPublisher,
    UnmetRows,
    coming_needs,
    missing_machines,
    shortfall_counts,
    statuses,
)
from bigfleet.shard.status.views import ViewContext


@runtime_checkable
class _KnowsMachines(Protocol):
    """Actions whose machines can be had without making the actions."""

    def machines(self) -> Sequence[int]: ...

    def counts(self) -> Mapping[ActionKind, int]: ...


@runtime_checkable
class _KnowsClaims(Protocol):
    """Rows whose machines can be counted without making the rows."""

    def claims(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscribers:
    """The receivers of each effect, read on the loop before the work begins."""

    #: Each cluster's rows in force.
    demand: Mapping[str, Sequence[Need]]
    #: Interruption bucket of each row that was decided on, in list order.
    buckets: bytes
    #: The roll-up that was in force, of the clusters whose operators understand a verdict.
    judged: Mapping[str, int]
    #: What operators said of the rows that they refuse.
    refusal_texts: Mapping[RowKey, str]
    #: Machines of actions that are under way, and machines reserved for another shard.
    busy: Set[str]
    now_seconds: float
    #: What the cluster policy changed of the demand.
    limits: LimitedDemand = field(default_factory=LimitedDemand)


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleEffects:
    """What a decision means to those outside."""

    #: Machines that could not be given away after the decision, as rows of its snapshot.
    taken: MachineRows
    hints_changed: Set[HintKey]
    verdicts: Sequence[tuple[str, NeedStatusUpdate]]
    #: Machines that rows hold, and those that they lack, by interruption bucket.
    demand_machines: Mapping[int, int]
    #: Reported rows that are a shortfall, by reason and priority class.
    shortfall_rows: Mapping[tuple[UnmetReason, str], int]


def taken_rows(decision: Decision, context: ViewContext, busy: Iterable[str]) -> MachineRows:
    """Return the machines that a decision claims and those that are busy, as rows of its snapshot, in no order."""
    rows = context.snapshot.rows
    claimed = _claimed(decision.actions, rows)
    # Sorted, so that the same machines are the same rows whatever order the set has them in.
    others = sorted(row for row in (rows.get(MachineId(machine_id)) for machine_id in busy) if row is not None)
    return np.concatenate([claimed, np.array(others, np.int64), sold_out_rows(context.snapshot, context.options)])


def _claimed(actions: Sequence[Action], rows: Mapping[MachineId, int]) -> MachineRows:
    """Return the machines that Phase 1 takes; its actions come first."""
    kinds = (ActionKind.BOOTSTRAP, ActionKind.PROVISION)
    if isinstance(actions, _KnowsMachines):
        counts = actions.counts()
        return np.asarray(actions.machines()[: sum(counts[kind] for kind in kinds)], np.int64)
    return np.array([rows[action.machine_id] for action in actions if action.kind in kinds], np.int64)


def claimed_machines(rows: Sequence[RowResult], buckets: bytes) -> Counter[int]:
    """Return the machines that rows hold, by interruption bucket; `buckets` are those of the demand, row by row."""
    claims: Counter[int] = Counter()
    if not isinstance(rows, _KnowsClaims):
        for row in rows:
            claims[row.need.profile.interruption_bucket] += len(row.claimed)
        return claims
    places, held = rows.claims()
    # The weights are whole and far below 2**53, so that no sum is rounded.
    sums = np.bincount(np.frombuffer(buckets, np.uint8)[places], weights=held)
    claims.update({bucket: int(sums[bucket]) for bucket in np.flatnonzero(sums).tolist()})
    return claims


class CyclePublisher:
    """Publishes the effects of a shard's cycles, and stores what was published last."""

    def __init__(
        self,
        *,
        settings: ShardSettings,
        inventory: Inventory,
        sessions: Sessions,
        metrics: ShardMetrics,
        clock: Clock,
    ) -> None:
        self._inventory = inventory
        self._sessions = sessions
        self._metrics = metrics
        self._clock = clock
        #: Reasons and classes of shortfalls since the start; at most the product of both.
        self._seen_shortfalls: set[tuple[UnmetReason, str]] = set()
        self.joins = NodeJoins(gate=settings.join_gate, deadline_seconds=settings.join_deadline_seconds)
        self.silence = StaleClusters(
            alert_seconds=settings.cluster_silence_seconds,
            reclaim_after_seconds=settings.reclaim_without_session_seconds,
        )
        self._hints = CapacityHints(interval_seconds=settings.available_capacity_interval_seconds)
        self._verdicts = NeedStatusPublisher()
        self._latency = ProvisioningLatency(metrics.provisioning_latency.observe)
        self._phases = PhaseTimes(lambda state, seconds: metrics.phase_seconds[state].observe(seconds))
        #: Timestamp of the roll-up in force, by cluster.
        self._rollups: dict[str, int] = {}
        #: The same of all and only the clusters whose operators understand a verdict.
        self._judged: dict[str, int] = {}
        #: Used off the loop, by one cycle at a time.
        self._offers = HintOffers()
        self._classes = FleetClasses()
        self._unmet = UnmetRows()

    # ---- what happens between cycles ----------------------------------------------------------------------------

    def session_opened(self, session: Session) -> None:
        """A session opened: its operator hears everything."""
        session.opened_seconds = self._clock.monotonic_seconds()
        self.silence.session_opened(session.cluster)
        self._follow(session.cluster)
        self.frames_lost(session)

    def session_ended(self, session: Session) -> None:
        """A session ended, or was replaced by one to which everything is sent again."""
        self._hints.session_ended(session.cluster)
        self._verdicts.forget(session.cluster)
        self._follow(session.cluster)
        self.silence.session_ended(session.cluster, self._clock.monotonic_seconds())

    def awaited_sessions(self, retired: Set[str]) -> frozenset[str]:
        """Return the clusters whose excess machines wait for a session; `retired` ones wait for a shorter time."""
        return self.silence.awaited(self._clock.monotonic_seconds(), retired)

    def frames_lost(self, session: Session) -> None:
        """Frames to a session were dropped: send everything again."""
        self._hints.send_again(session.cluster)
        self._verdicts.forget(session.cluster)

    def rollup_accepted(self, cluster: str, rows: Sequence[Need], timestamp_unix_nanos: int) -> None:
        """A roll-up came into force."""
        self._rollups[cluster] = timestamp_unix_nanos
        self._follow(cluster)
        self._latency.demand_taken(cluster, rows, self._clock.monotonic_seconds())

    def rollup_repeated(self, cluster: str, timestamp_unix_nanos: int) -> None:
        """A roll-up said what the one in force says."""
        self._rollups[cluster] = timestamp_unix_nanos
        self._follow(cluster)
        self._latency.demand_repeated(cluster, self._clock.monotonic_seconds())

    def demand_ended(self, cluster: str) -> None:
        """A cluster's demand ended without a roll-up that says so: no verdict is due."""
        self._rollups.pop(cluster, None)
        self._verdicts.forget(cluster)
        self._follow(cluster)
        self._latency.demand_taken(cluster, (), self._clock.monotonic_seconds())

    def forget(self, cluster: str) -> None:
        """Forget a cluster that is gone: it has no session, no demand and no machine."""
        self.demand_ended(cluster)
        self._hints.session_ended(cluster)

    def _follow(self, cluster: str) -> None:
        """Take up what changed of a cluster's session or roll-up."""
        session, timestamp_unix_nanos = self._sessions.of(cluster), self._rollups.get(cluster)
        if session is None or timestamp_unix_nanos is None or not session.can(CAPABILITY_NEED_STATUS):
            self._judged.pop(cluster, None)
        else:
            self._judged[cluster] = timestamp_unix_nanos

    def machine_removed(self, machine_id: MachineId, cluster: ClusterId) -> None:
        self.joins.removed(machine_id, cluster)
        self._phases.removed(machine_id)

    def machine_changed(self, before: Machine | None, after: Machine) -> None:
        if before is None and not after.cluster:
            # Most of a first List: nothing here looks at a free machine that is new.
            return
        now_seconds = self._clock.monotonic_seconds()
        self.joins.changed(before, after, now_seconds)
        if before is not None:
            self._phases.changed(before, after, now_seconds)
            self._latency.changed(before, after, now_seconds)

    def machines_inserted(self, machine_ids: Sequence[MachineId], bindings: Picked[NumberedBinding]) -> None:
        """Follow machines that are new here, as `machine_changed` follows one."""
        self.joins.inserted(machine_ids, bindings, self._clock.monotonic_seconds())

    # ---- one cycle ----------------------------------------------------------------------------------------------

    def look(self, demanding: Set[str]) -> frozenset[str]:
        """Judge joins and silence as of now; return the machines that the engine must take for no supply.

        `demanding` names the clusters with demand.
        """
        now_seconds = self._clock.monotonic_seconds()
        unjoined = self.joins.judge(self._sessions, self._inventory.record_of, now_seconds=now_seconds)
        silent = self.silence.look(
            demanding, self._inventory.clusters, sessions=self._sessions, now_seconds=now_seconds
        )
        self._metrics.machines_unjoined.set(len(unjoined))
        self._metrics.clusters_silent.set(len(silent))
        return self.joins.for_engine()

    def validate(self) -> None:
        """Compare what is remembered of nodes and of latencies with its invariants. Raises InvariantBroken."""
        self.joins.validate()
        self._latency.validate()

    def has_joined(self, machine: Machine) -> bool:
        """Return whether a Configured machine's node was seen Ready; True where the operator says nothing of nodes."""
        session = self._sessions.of(machine.cluster)
        reports_nodes = self.joins.is_on and (session is None or session.can(CAPABILITY_NODE_STATUS))
        return self.joins.is_joined(machine) if reports_nodes else True

    def judged(self) -> dict[str, int]:
        """Return the roll-up in force of each cluster whose operator understands a verdict."""
        return dict(self._judged)

    def effects_of(
        self, decision: Decision, short: Sequence[RowResult], context: ViewContext, subscribers: Subscribers
    ) -> CycleEffects:
        """Work out what a decision means to those outside. It may run in any thread, for one caller at a time."""
        taken = taken_rows(decision, context, subscribers.busy)
        classes, fits = self._classes.of(context.snapshot, taken)
        changed = self._offers.update(subscribers.demand, classes, fits)
        unmet = self._unmet.of(short, context, fits)
        # A cluster that waits for its composition acquires nothing yet: what it lacks now says nothing.
        awaiting = context.options.awaiting_plan
        judged = {cluster: stamp for cluster, stamp in subscribers.judged.items() if cluster not in awaiting}
        rows_by_cluster = statuses(unmet, judged.keys(), subscribers.refusal_texts, context.row_ages)
        rows_by_cluster = subscribers.limits.statuses(rows_by_cluster, judged.keys())
        demand = claimed_machines(decision.rows, subscribers.buckets)
        if unmet:
            demand += missing_machines(unmet, live_prices(context.snapshot, classes), fits)
        is_over_pods = not isinstance(decision.rows, _KnowsClaims)
        coming = coming_needs(decision.rows, context.snapshot, judged.keys()) if is_over_pods else {}
        due = self._verdicts.due(
            rows_by_cluster,
            judged,
            coming_by_cluster=subscribers.limits.coming(coming),
            context=context,
            now_seconds=subscribers.now_seconds,
        )
        return CycleEffects(
            taken=taken,
            hints_changed=changed,
            verdicts=list(due),
            demand_machines=demand,
            shortfall_rows=shortfall_counts(unmet, context.row_ages),
        )

    def publish_hints(self, effects: CycleEffects) -> None:
        """Send the hints that are due."""
        now_seconds = self._clock.monotonic_seconds()
        self._hints.publish(effects.hints_changed, self._offers, self._sessions, now_seconds=now_seconds)

    def publish_need_status(self, effects: CycleEffects) -> None:
        """Send the verdicts that are due, to sessions that still stand and have room; the others hear it later."""
        now_seconds = self._clock.monotonic_seconds()
        for cluster, update in effects.verdicts:
            session = self._sessions.of(cluster)
            if session is not None and session.can(CAPABILITY_NEED_STATUS) and not session.outbox.is_full:
                session.outbox.put(update)
                self._verdicts.sent(cluster, update, now_seconds)

    def show(self, effects: CycleEffects, ledger: Ledger, *, demand_rows: int) -> None:
        """Set the gauges of demand and shortfall."""
        metrics = self._metrics
        metrics.demand_rows.set(demand_rows)
        metrics.shortfalls.set(len(ledger))
        for ordinal in ORDINALS:
            metrics.demand_machines.labels(bucket_label(ordinal)).set(effects.demand_machines.get(ordinal, 0))
        aged: Counter[str] = Counter()
        for age_cycles, shortfalls in Counter(shortfall.age_cycles for shortfall in ledger.values()).items():
            aged[age_class(age_cycles)] += shortfalls
        for age in AGE_CLASSES:
            metrics.shortfalls_aged.labels(age).set(aged[age])
        self._seen_shortfalls.update(effects.shortfall_rows)
        for reason, priority in self._seen_shortfalls:
            rows = effects.shortfall_rows.get((reason, priority), 0)
            metrics.shortfall_rows.labels(reason.label, priority).set(rows)
