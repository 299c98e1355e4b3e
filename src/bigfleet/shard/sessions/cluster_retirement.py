"""Retires clusters: their demand becomes empty, and their machines are reclaimed on the normal path.

docs/spec/shard.md §4.3. While a cluster is retired its roll-ups are refused, and it counts as a cluster that has
reported an empty one. A retirement takes effect only when it is committed. This module reclaims no machine: decisions
and safety limits do that as for any demand that ended.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import structlog

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.states import MachineState
from bigfleet.shard.audit.log import Audit
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.outcomes import ActionRecord
from bigfleet.shard.ownership.ownership_file import OwnershipNotWritten
from bigfleet.shard.ownership.retired_clusters import RETIRED_CLUSTERS_MAX, RetiredCluster, RetirementStore
from bigfleet.shard.sessions.demand import Intake
from bigfleet.shard.sessions.registry import Sessions

HOLD_SECONDS_DEFAULT = 7 * 86_400
HOLD_SECONDS_MAX = 30 * 86_400

_log = structlog.get_logger("bigfleet.shard.sessions.cluster_retirement")


class RefusalReason(Enum):
    """Why a cluster was not retired or not admitted again."""

    UNKNOWN = "unknown"
    CONNECTED = "connected"
    FULL = "full"
    NOT_WRITTEN = "not_written"


class RetirementRefused(Exception):
    """A change that was rejected; the text gives the reason and the remedy."""

    def __init__(self, reason: RefusalReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class LikeMachines:
    """Machines of one cluster that are alike."""

    state: MachineState
    instance_type: str
    machines: int
    price_usd_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRemains:
    """What is left of a cluster at one moment."""

    machines: Sequence[LikeMachines]
    rows: int
    is_connected: bool
    #: Actions for the cluster that wait or run.
    actions: int


class ClusterRetirement:
    """The retired clusters of one shard. Touched by its loop alone."""

    def __init__(
        self,
        *,
        store: RetirementStore,
        intake: Intake,
        sessions: Sessions,
        inventory: Inventory,
        actions: Mapping[MachineId, ActionRecord],
        metrics: ShardMetrics,
        clock: Clock,
        audit: Audit,
        demand_ended: Callable[[str], None],
    ) -> None:
        """Have the demand of every recorded cluster empty. `actions` are those that wait or run, by machine.

        `demand_ended` is called with each cluster whose demand became empty.
        """
        self._store = store
        self._intake = intake
        self._sessions = sessions
        self._inventory = inventory
        self._actions = actions
        self._metrics = metrics
        self._clock = clock
        self._audit = audit
        self._demand_ended = demand_ended
        for cluster in store.records:
            self._end_demand(cluster)
        self._show()

    @property
    def records(self) -> Mapping[ClusterId, RetiredCluster]:
        """The clusters that are retired."""
        return self._store.records

    def record_of(self, cluster: str) -> RetiredCluster | None:
        """Return the record of a cluster, None when it is not retired."""
        return self._store.records.get(ClusterId(cluster))

    def refusal_of(self, cluster: str) -> str:
        """Return why a roll-up of the cluster is refused, "" for a cluster that is not retired."""
        record = self._store.records.get(ClusterId(cluster))
        if record is None:
            return ""
        owner = f" by {record.owner}" if record.owner else ""
        return (
            f"cluster {cluster} is retired{owner}: its demand is not taken and its machines are reclaimed; "
            f"bigfleet cluster readmit {cluster} admits it again"
        )

    def remains_of(self, cluster: str) -> ClusterRemains:
        """Return what is left of a cluster. Raises RetirementRefused for one that the shard does not know."""
        if not self._is_known(cluster):
            text = (
                f"cluster {cluster!r} is unknown: it has no session, no demand and no machines here; bigfleet get "
                "clusters lists those that the shard knows, a coordinator which shard a cluster is bound to"
            )
            raise RetirementRefused(RefusalReason.UNKNOWN, text)
        alike: dict[tuple[MachineState, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for machine_id in self._inventory.bound_to(cluster):
            record = self._inventory.record_of(machine_id)
            if record is not None:
                key = record.state, record.instance_type
                number, price = alike[key]
                alike[key] = number + 1, price + record.facts.price_usd_per_hour
        return ClusterRemains(
            machines=[
                LikeMachines(state=state, instance_type=kind, machines=number, price_usd_per_hour=price)
                for (state, kind), (number, price) in sorted(alike.items())
            ],
            rows=len(self._intake.table.rows_of(cluster)),
            is_connected=self._sessions.of(cluster) is not None,
            actions=self._actions_for(cluster),
        )

    def check(self, cluster: str, *, force: bool) -> None:
        """Return when the cluster may be retired. Raises RetirementRefused."""
        if not self._is_known(cluster):
            self.remains_of(cluster)
        if ClusterId(cluster) in self._store.records:
            return
        if self._sessions.of(cluster) is not None and not force:
            text = (
                f"the operator of cluster {cluster} is connected; stop it first, or use --force: its roll-ups are then "
                "refused, and it still drains the nodes of the cluster"
            )
            raise RetirementRefused(RefusalReason.CONNECTED, text)
        if len(self._store.records) >= RETIRED_CLUSTERS_MAX:
            text = f"{RETIRED_CLUSTERS_MAX} clusters are retired already; wait until some records end, or readmit some"
            raise RetirementRefused(RefusalReason.FULL, text)

    def retire(self, cluster: str, *, owner: str, reason: str, force: bool, hold_seconds: int) -> RetiredCluster:
        """Empty the demand of a cluster from now on; of one that is retired, move the end of its hold back.

        `hold_seconds` is at least how long the record lasts. Raises RetirementRefused.
        """
        self.check(cluster, force=force)
        now_unix_nanos = self._clock.unix_nanos()
        until_unix_nanos = now_unix_nanos + hold_seconds * NANOS_PER_SECOND
        known = self._store.records.get(ClusterId(cluster))
        if known is not None:
            record = replace(known, until_unix_nanos=max(known.until_unix_nanos, until_unix_nanos))
        else:
            record = RetiredCluster(
                cluster=ClusterId(cluster),
                since_unix_nanos=now_unix_nanos,
                until_unix_nanos=until_unix_nanos,
                owner=owner,
                reason=reason,
            )
        self._write(lambda: self._store.put(record))
        machines = self._inventory.count_bound_to(cluster)
        _log.warning("cluster.retired", cluster=cluster, machines=machines, owner=owner, reason=reason, forced=force)
        self._note("ClusterRetire", record, caller=owner, reason=reason, message=f"machines left: {machines}")
        if known is None:
            self._end_demand(cluster)
        self._show()
        return record

    def readmit(self, cluster: str, *, owner: str) -> RetiredCluster:
        """Delete the record of a cluster, whose next roll-up is taken. Raises RetirementRefused."""
        record = self._store.records.get(ClusterId(cluster))
        if record is None:
            raise RetirementRefused(RefusalReason.UNKNOWN, f"cluster {cluster!r} is not retired")
        machines = self._inventory.count_bound_to(cluster)
        self._end(record)
        _log.warning("cluster.readmitted", cluster=cluster, machines=machines, owner=owner)
        self._note("ClusterReadmit", record, caller=owner, reason="", message=f"machines left: {machines}")
        return record

    def look(self) -> None:
        """End the records of clusters of which nothing is left; called once per timer cycle."""
        now_unix_nanos = self._clock.unix_nanos()
        for cluster, record in self._store.records.items():
            is_over = now_unix_nanos >= record.until_unix_nanos and self._sessions.of(cluster) is None
            if not is_over or cluster in self._inventory.clusters or self._actions_for(cluster):
                continue
            try:
                self._end(record)
            except RetirementRefused as error:
                advice = "retried in the next timer cycle"
                _log.error("cluster.retirement_not_ended", cluster=cluster, error=str(error), advice=advice)
                continue
            _log.info("cluster.retirement_ended", cluster=cluster)
            self._note("ClusterRetireEnd", record, caller="", reason="shard.hold_ended", message="")
        self._show()

    def _is_known(self, cluster: str) -> bool:
        return (
            ClusterId(cluster) in self._store.records
            or cluster in self._intake.reported
            or cluster in self._inventory.clusters
            or self._sessions.of(cluster) is not None
        )

    def _actions_for(self, cluster: str) -> int:
        """Return how many actions for a cluster wait or run. Cost: the actions."""
        return sum(record.action.cluster == cluster for record in self._actions.values())

    def _end_demand(self, cluster: str) -> None:
        self._intake.end_demand(cluster, now_unix_nanos=self._clock.unix_nanos())
        self._demand_ended(cluster)

    def _end(self, record: RetiredCluster) -> None:
        self._write(lambda: self._store.remove(record.cluster))
        # The cluster is as one that has not reported since the process started: nothing of it is reclaimed.
        self._intake.forget(record.cluster)
        self._show()

    def _write(self, change: Callable[[], None]) -> None:
        try:
            change()
        except OwnershipNotWritten as error:
            raise RetirementRefused(RefusalReason.NOT_WRITTEN, f"nothing was changed: {error}") from error

    def _note(self, kind: str, record: RetiredCluster, *, caller: str, reason: str, message: str) -> None:
        self._audit.note_change(
            kind=kind,
            cluster=record.cluster,
            reason=reason,
            owner=caller,
            message=message,
            at_unix_nanos=self._clock.unix_nanos(),
        )

    def _show(self) -> None:
        left = sum(self._inventory.count_bound_to(cluster) for cluster in self._store.records)
        self._metrics.retired_clusters.set(len(self._store.records))
        self._metrics.retired_cluster_machines.set(left)
