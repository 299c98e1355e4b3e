"""Deletes what a shard stores about a cluster: on request, or because nothing of the cluster is left.

docs/spec/shard.md §4.3 and §10.7. Without it, maps by cluster would grow with every cluster that ever reported. A
cluster with a session, demand, a machine, an action or a retirement is never deleted, however long it has been silent.
"""

from collections.abc import Mapping

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.shard.actuation.backoff import DemandBackoff
from bigfleet.shard.audit.log import Audit
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.outcomes import ActionRecord
from bigfleet.shard.ownership.retired_clusters import RetirementStore
from bigfleet.shard.sessions.cluster_retirement import ClusterRetirement
from bigfleet.shard.sessions.demand import Intake
from bigfleet.shard.sessions.registry import Sessions
from bigfleet.shard.status.cycle_publisher import CyclePublisher

#: Clusters that a shard remembers, of which each has a session, or has reported. Another one gets no session.
CLUSTERS_MAX = 10_000

_log = structlog.get_logger("bigfleet.shard.sessions.known_clusters")


class KnownClusters:
    """What a shard remembers by cluster. Cost: the clusters that have reported, once per timer cycle."""

    def __init__(
        self,
        *,
        store: RetirementStore,
        intake: Intake,
        last_rollups: dict[str, int],
        sessions: Sessions,
        inventory: Inventory,
        actions: Mapping[MachineId, ActionRecord],
        demand_backoff: DemandBackoff,
        publisher: CyclePublisher,
        metrics: ShardMetrics,
        clock: Clock,
        audit: Audit,
    ) -> None:
        """`last_rollups` holds when each cluster last reported, `actions` those that wait or run, by machine."""
        self.retirement = ClusterRetirement(
            store=store,
            intake=intake,
            sessions=sessions,
            inventory=inventory,
            actions=actions,
            metrics=metrics,
            clock=clock,
            audit=audit,
            demand_ended=publisher.demand_ended,
        )
        self._intake = intake
        self._last_rollups = last_rollups
        self._sessions = sessions
        self._inventory = inventory
        self._actions = actions
        self._demand_backoff = demand_backoff
        self._publisher = publisher
        self._metrics = metrics

    def has_room_for(self, cluster: str) -> bool:
        """Return whether the cluster may open a session: it is remembered, or there is room for another one."""
        if cluster in self._intake.reported or self._sessions.of(cluster) is not None:
            return True
        if len(self._intake.reported) + len(self._last_rollups) + len(self._sessions) < CLUSTERS_MAX:
            return True
        return len(self._intake.reported | self._last_rollups.keys() | self._sessions.clusters) < CLUSTERS_MAX

    def look(self) -> None:
        """End the retirements that are over and forget every cluster of which nothing is left."""
        self.retirement.look()
        known = self._intake.reported | self._last_rollups.keys()
        gone = known - self._intake.table.clusters - self._sessions.clusters - self._inventory.clusters
        gone -= self.retirement.records.keys()
        if gone:
            gone -= {record.action.cluster for record in self._actions.values()}
        for cluster in gone:
            self._intake.forget(cluster)
            self._last_rollups.pop(cluster, None)
            self._demand_backoff.forget(cluster)
            self._publisher.forget(cluster)
            self._metrics.rollup_quarantined.remove(cluster)
            self._metrics.rollups_rejected.remove(cluster)
        if gone:
            _log.info("cluster.forgotten", clusters=len(gone), first=min(gone))
