"""Runs the operator of a scenario's cluster, whose nodes join and leave with their hosts.

It reports what the cluster sees of its nodes, and must never take a node for Ready because a shard says so.
"""

from collections.abc import Iterable
from typing import Any, Final

from bigfleet.model.clock import Clock
from bigfleet.model.frames import NodeStateUpdate, NodeStatus
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.session import SessionSettings
from bigfleet.planner.problem import SchedulerOrder
from bigfleet.sim.kernel.streams import seeded
from bigfleet.sim.pods.cluster_pods import PodCluster
from bigfleet.sim.pods.evictions import Cause, Eviction
from bigfleet.sim.pods.pod_operator import PodOperator

#: How long evicted pods take to leave a node.
EVICTION_SECONDS: Final = 0.5
ROLLUP_GAP_SECONDS: Final = 0.05


class ClusterOperator(PodOperator):
    """One cluster with its session."""

    def __init__(
        self,
        *,
        cluster: ClusterId,
        clock: Clock,
        rollup_interval_seconds: float,
        order: SchedulerOrder = SchedulerOrder.LEAST_ALLOCATED,
        **given: Any,
    ) -> None:
        #: Pods that lost their node, oldest first.
        self.evictions: list[Eviction] = []
        pods = PodCluster(
            cluster,
            lambda add, remove: self.apply(add=add, remove=remove),
            on_evicted=self.evictions.append,
            clock=clock,
            draws=seeded(f"arrival {cluster}"),
            order=order,
        )
        settings = SessionSettings(
            rollup_interval_seconds=rollup_interval_seconds, rollup_gap_seconds=ROLLUP_GAP_SECONDS
        )
        super().__init__(pods, cluster=cluster, clock=clock, settings=settings, **given)

    # ---- what happens in the cluster -----------------------------------------------------------------------------

    def node_joined(self, machine: Machine) -> None:
        """A machine has become a Ready node here."""
        self.pods.join(machine)
        self.client.node_changed(self._status_of(machine.id, _node_name(machine.id)))

    def node_left(self, machine_id: str, *, is_lost: bool) -> None:
        """A node is gone, with everything that was on it."""
        self.pods.leave(machine_id, Cause.LOST if is_lost else Cause.UNANSWERED)
        gone = NodeStatus(
            machine_id=machine_id, node_name="", ready=False, observed_unix_nanos=self._clock.unix_nanos()
        )
        self.client.node_changed(gone)

    # ---- what the session asks -----------------------------------------------------------------------------------

    def node_state(self, update: NodeStateUpdate) -> None:
        """Nothing depends on it: nodes join and leave by themselves."""

    def node_statuses(self) -> Iterable[NodeStatus]:
        """Return the status of every node, by machine."""
        return [self._status_of(machine_id, _node_name(machine_id)) for machine_id in sorted(self.pods.nodes)]

    def drain_ended(self, drain: DrainRecord, *, withdrawn: bool) -> None:
        """Stop draining; after a withdrawal pods may come back."""
        super().drain_ended(drain, withdrawn=withdrawn)
        if withdrawn:
            self.pods.uncordon(drain.machine_id)

    def _has_node(self, machine_id: str) -> bool:
        return machine_id in self.pods.nodes

    def _dwell_seconds(self) -> float:
        return EVICTION_SECONDS


def _node_name(machine_id: str) -> str:
    return f"node-{machine_id}"
